"""Opens an engine for a model folder: which device and number format, which kit, and a first step to prove that it works.

The one place where CPU and GPU meet. Does not know how either runs a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hortus.config import RoseConfig
from hortus.cores import usable_cores
from hortus.errors import RequestError, StartError
from hortus.folder import ModelFolder, token_id
from hortus.metrics import Metrics
from hortus.rose.attention import Attention, Bias, Heads
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.attention.unseen import Unseen
from hortus.rose.cpu import BATCH_TOKENS, CpuEngine
from hortus.rose.kernels import linear, twin
from hortus.rose.kernels.compiled import few
from hortus.rose.modelcfg import EmbeddingNetwork, build_network, read_spec
from hortus.rose.models import AttendedFactory, Family, Kit, Spec
from hortus.rose.openmp import give_up_workers
from hortus.types import Engine, ModelInfo, TokenBatch

if TYPE_CHECKING:
    from hortus.rose.gpu import GpuEngine

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


WITH_BIAS = "it adds a bias to attention scores, which no fused backend here does"


def open_engine(
    folder: ModelFolder, config: RoseConfig, metrics: Metrics | None = None, *, most_tokens: int = 0
) -> Engine:
    """The folder's model, loaded and proved by steps. Takes seconds. Raises StartError, which says what to change.

    most_tokens: of the batches that it will be given; 0: as it advises.
    """
    device, dtype, family, spec = _chosen(folder, config)
    torch.set_num_threads(config.threads or usable_cores())
    unseen = _unseen(folder, config.kind)
    kit, attention = _kit(config, device, dtype, unseen, biased_scores=getattr(spec, "scores", None) is not None)
    try:
        with torch.inference_mode():
            network = build_network(
                folder, family, spec, kit, device=device, dtype=dtype, load_format=config.load_format, kind=config.kind
            )
    except torch.OutOfMemoryError as e:
        raise StartError(
            f"{folder.name}: its weights do not fit the GPU's memory in {_in_words(config.dtype, dtype)}; free some, or take "
            f"a narrower --dtype, a smaller model or --device cpu: {e}"
        ) from e
    network.unseen = unseen
    network.longest_matters = any(getattr(a, "longest_matters", False) for a in attention)
    network.capturable = _capturable(attention, config)
    info = _info(folder, spec, network, _in_words(config.dtype, dtype), device, attention)
    engine = _engine(network, info, config, metrics, device)
    prove(engine, most_tokens)
    give_up_workers()
    return engine


def check_engine(folder: ModelFolder, config: RoseConfig) -> ModelInfo:
    """What open_engine would give or refuse, without reading weights: their names, shapes and formats are enough. StartError."""
    device, dtype, family, spec = _chosen(folder, config)
    kit, attention = _kit(config, device, dtype, _unseen(folder, config.kind))
    # Products are not run, so they are made the plain way.
    kit = replace(kit, ops=twin, linear=linear.plain, added=None, few=None, attended=None)
    meta = torch.device("meta")
    network = build_network(
        folder, family, spec, kit, device=meta, dtype=dtype, load_format=config.load_format, kind=config.kind
    )
    _capturable(attention, config)
    return _info(folder, spec, network, _in_words(config.dtype, dtype), device, attention)


def _chosen(folder: ModelFolder, config: RoseConfig) -> tuple[torch.device, torch.dtype, Family, Spec]:
    """What the flags and config.json come to; StartError where they do not go together."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if config.dtype == "fp8" and (why := refused_fp8(device)) is not None:
        raise StartError(f"--dtype fp8 needs a GPU of capability 9.0 (Hopper) or later: {why}")
    family, spec = read_spec(folder.config)
    for name, why in family.refused_dtypes:
        if dtype == _DTYPES[name]:
            raise StartError(f"--dtype {name} cannot be used with model_type {spec.model_type}: {why}")
    if config.attention not in ("auto", "twin") and device.type == "cpu":
        raise StartError(f"--attention {config.attention} needs a GPU; on the CPU there is only twin")
    if config.warm is not None and device.type == "cpu":
        raise StartError(f"--warm {config.warm} captures CUDA graphs and needs a GPU; leave it out on the CPU")
    return device, dtype, family, spec


def _capturable(attention: list[Attention], config: RoseConfig) -> bool:
    """Whether steps may be captured in graphs; StartError where --warm asks for what cannot be."""
    able = not any(isinstance(a, TwinAttention) for a in attention)
    if config.warm is not None and not able:
        raise StartError(
            f"--warm {config.warm} captures CUDA graphs, which this model has none of ({WITH_BIAS}); leave it out"
        )
    return able


def _info(
    folder: ModelFolder,
    spec: Spec,
    network: EmbeddingNetwork,
    dtype: str,
    device: torch.device,
    attention: list[Attention],
) -> ModelInfo:
    return ModelInfo(
        name=folder.name,
        revision=folder.revision,
        family=spec.model_type,
        width=network.width,
        max_tokens=folder.max_tokens,
        vocab_size=spec.vocab,
        normalize=network.head.normalize,
        kind=network.head.kind,
        labels=network.head.labels,
        pooling=network.head.pooling,
        dtype=dtype,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        attention=_described(attention, device),
        parameters=network.parameters,
        batch_tokens=BATCH_TOKENS,
    )


def pick_device(wanted: str) -> torch.device:
    """--device -> a device."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise StartError(
            "--device cuda: this machine has no CUDA device that PyTorch "
            f"{torch.__version__} can use; use --device cpu, or install a PyTorch built for CUDA and check nvidia-smi"
        )
    if not there or wanted == "cpu":
        return torch.device("cpu")
    if (count := torch.cuda.device_count()) > 1:
        log.info("using one of %d GPUs; `hortus serve --replicas %d` uses them all", count, count)
    return torch.device("cuda")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """--dtype -> a dtype; auto: float32 on the CPU, bfloat16 on a GPU. fp8: that of all but the layers' products."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if wanted == "fp8" else _DTYPES[wanted]


def refused_fp8(device: torch.device) -> str | None:
    """Why --dtype fp8 cannot run there, and what can; None: it can."""
    if device.type == "cpu":
        return "this is the CPU; use --dtype float32"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use --dtype bfloat16"
    return None


def _in_words(wanted: str, dtype: torch.dtype) -> str:
    """ModelInfo.dtype: replicas and parts of a corpus must not mix two of them."""
    return wanted if wanted == "fp8" else str(dtype).removeprefix("torch.")


def _unseen(folder: ModelFolder, kind: str) -> Unseen | None:
    """What hides the tokens that fill a query up, for a late-interaction model that does so."""
    expansion = folder.late.expansion if folder.late is not None and kind in ("auto", "tokens") else None
    if expansion is None or expansion.attend:
        return None
    if (token := token_id(folder.transformer, expansion.token)) is None:
        raise StartError(
            f"{folder.transformer / 'tokenizer.json'}: has no token {expansion.token!r} to expand queries by"
        )
    return Unseen(token)


def _kit(
    config: RoseConfig,
    device: torch.device,
    dtype: torch.dtype,
    unseen: Unseen | None = None,
    *,
    biased_scores: bool = False,
) -> tuple[Kit, list[Attention]]:
    """What the device gives a trunk, and the attention backends made through it."""
    made: list[Attention] = []

    def open_twin(heads: Heads, bias: Bias | None = None) -> Attention:
        made.append(TwinAttention(heads, bias))
        return made[-1] if unseen is None else unseen.around(made[-1], heads, bias)

    if device.type == "cpu":
        short = few if dtype == torch.float32 and unseen is None else None
        return Kit(ops=twin, linear=linear.swapped, attention=open_twin, few=short), made
    from hortus.rose.attention.pick import open_attention
    from hortus.rose.kernels import biased, fused

    limit = config.graph_max_tokens if config.cuda_graphs else 0

    def open_gpu(heads: Heads, bias: Bias | None = None) -> Attention:
        if bias is None:
            made.append(open_attention(config.attention, heads, device=device, dtype=dtype, graph_max_tokens=limit))
        elif config.attention in ("auto", "twin"):
            made.append(TwinAttention(heads, bias))
        else:
            raise StartError(f"--attention {config.attention} cannot run this model ({WITH_BIAS}); use auto or twin")
        return made[-1] if unseen is None else unseen.around(made[-1], heads, bias)

    by_library = config.products == "library"
    if config.dtype == "fp8":
        from hortus.rose.kernels import fp8

        fp8.prove(device)
        return Kit(ops=fp8, linear=fp8.library if by_library else fp8.linear, attention=open_gpu), made
    if by_library:
        return Kit(ops=fused, linear=linear.library, attention=open_gpu), made
    if biased_scores or unseen is not None:  # no graphs, and to call quack takes Python longer than the product
        return Kit(ops=fused, linear=linear.plain, attention=open_gpu), made
    # It has an attention of its own, so not where another is asked for.
    joined: AttendedFactory | None = None
    if config.attention == "auto":
        from hortus.rose.kernels.attend import attended as joined
    return Kit(ops=fused, linear=biased.linear, added=biased.added, attention=open_gpu, attended=joined), made


def _described(attention: list[Attention], device: torch.device) -> str:
    """One line for a person."""
    if device.type == "cpu":
        return "twin: plain PyTorch, the CPU's only one"
    if attention and isinstance(attention[0], TwinAttention):
        log.info("attention: twin, and no CUDA graphs: %s", WITH_BIAS)
        return f"twin: plain PyTorch, no CUDA graphs: {WITH_BIAS}"
    describe: Callable[[], str] = getattr(attention[0], "describe", lambda: "none") if attention else lambda: "none"
    return describe()


def _engine(
    network: EmbeddingNetwork, info: ModelInfo, config: RoseConfig, metrics: Metrics | None, device: torch.device
) -> CpuEngine | GpuEngine:
    if device.type == "cpu":
        return CpuEngine(network, info, metrics)
    from hortus.rose.gpu import GpuEngine

    return GpuEngine(network, info, config, metrics)


def prove(engine: CpuEngine | GpuEngine, most_tokens: int = 0) -> None:
    """Run three sequences and look at the rows, then steps of all sizes: a model that cannot give numbers must not start."""
    info = engine.info
    lengths = [min(n, info.max_tokens) for n in (1, 16, 5)]
    batch = TokenBatch.of([[i % info.vocab_size for i in range(1, n + 1)] for n in lengths])
    try:
        rows = engine.step(batch).result()
        if not isinstance(engine, CpuEngine):
            engine.rehearse(most_tokens)
    except RequestError as e:
        engine.close()
        raise StartError(f"{info.name}: the first step failed: {e}") from e
    if rows.shape != (3, info.width) or not np.isfinite(rows).all():
        engine.close()
        raise StartError(
            f"{info.name}: the first step gave NaN or infinite values in {info.dtype}; the weights may be damaged, or "
            "the format too narrow for them: try --dtype float32"
        )
