"""Targets in this process: Hortus' engine, sentence-transformers, transformers eager and compiled. One call at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hortus.bench.pace import KEPT, Closed, Load, Plan
from hortus.bench.targets import Setting, Spec, Target, timed_calls
from hortus.bench.texts import Inputs
from hortus.config import RoseConfig
from hortus.cores import usable_cores
from hortus.errors import StartError
from hortus.folder import ModelFolder
from hortus.ivy.assemble import Truncate
from hortus.ivy.outputs import finish
from hortus.ivy.split import split
from hortus.ivy.tokenize import Tokenizer
from hortus.metrics import Metrics
from hortus.rose.engine import open_engine, pick_device, pick_dtype
from hortus.types import Engine, Float32, TokenBatch


class InProcess:
    """A Target from one function."""

    served = False
    elsewhere: str | None = None

    def __init__(
        self, name: str, about: str, run: Callable[[Inputs], Float32], close: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.about, self.opened_s, self.in_format = name, about, 0.0, True
        self._run, self._close = run, close

    def vectors(self, inputs: Inputs) -> Float32:
        return self._run(inputs)

    def load(self, requests: Sequence[Inputs], plan: Plan) -> Load:
        assert isinstance(plan, Closed), "in process there is one client, who waits"
        cpu = time.process_time()
        kept: dict[int, Float32] = {}

        def call(number: int) -> None:
            rows = self._run(requests[number])
            if number < KEPT:
                kept[number] = rows

        ms, seconds = timed_calls([partial(call, number) for number in range(len(requests))], plan.seconds)
        return Load(np.array(ms), seconds, target_cpu_s=time.process_time() - cpu, answers=(*kept.items(),))

    def rows(self, answer: Any) -> Float32:
        return np.asarray(answer, np.float32)

    def close(self) -> None:
        self._close()


def make(spec: Spec, setting: Setting) -> Target:
    """One of the kinds that run here. StartError, or ModuleNotFoundError for a library that is missing."""
    torch.set_num_threads(setting.threads or usable_cores())
    if spec.kind == "engine":
        engine = open_engine(setting.folder, _rose(setting), Metrics())
        return InProcess(spec.name, "ids to rows", lambda x: engine.step(x.ids).result(), engine.close)
    if spec.kind == "hortus":
        ours = Ours(setting.folder, _rose(setting))
        return InProcess(spec.name, "texts to vectors", lambda x: ours.embed(x.texts), ours.engine.close)
    if spec.kind == "sentence-transformers":
        model = sentence_transformer(setting)
        about = f"texts to vectors, {_attention(model[0].auto_model)}"
        target = InProcess(spec.name, about, lambda x: _encode(model, x))
        target.in_format = setting.dtype != "fp8"
        return target
    compiled = spec.kind == "transformers-compile"
    peer = transformer(setting)
    about = f"ids to vectors, {_attention(peer)}" + (", compiled" if compiled else "")
    target = InProcess(spec.name, about, transformers_run(setting, peer, compiled=compiled))
    target.in_format = setting.dtype != "fp8"
    return target


def reference(setting: Setting) -> Target:
    """The truth for the check: sentence-transformers in float32, or transformers in float32 where that is not installed."""
    exact = Setting(folder=setting.folder, dtype="float32", threads=setting.threads)
    try:
        return make(Spec("reference", "sentence-transformers", ""), exact)
    except ModuleNotFoundError:
        return make(Spec("reference", "transformers", ""), exact)


def _rose(setting: Setting) -> RoseConfig:
    return RoseConfig(threads=setting.threads, dtype=setting.dtype, attention=setting.attention)


class Ours:
    """Text to vectors through our own tokenising, splitting, engine and outputs, without the servers around them."""

    def __init__(self, folder: ModelFolder, config: RoseConfig | None = None) -> None:
        self.name, self.path = folder.name, folder.path
        self.engine: Engine = open_engine(folder, config or RoseConfig())
        self.tokenizer = Tokenizer(folder)

    def tokens(self, texts: Sequence[str]) -> TokenBatch:
        return self.tokenizer.encode(list(texts), truncate=Truncate(on=True))

    def vectors(self, batch: TokenBatch) -> Float32:
        """[sequences, width], sorted by length inside so that steps are dense, answered in order."""
        order = np.argsort(batch.lengths, kind="stable")
        parts = [batch.slice(int(i), int(i) + 1) for i in order]
        merged = TokenBatch.merge(parts)
        rows = np.empty((len(batch), self.engine.info.width), np.float32)
        at = 0
        for chunk in split(merged, self.engine.info.batch_tokens):
            rows[order[at : at + len(chunk)]] = self.engine.step(chunk).result()
            at += len(chunk)
        return finish(rows, dimensions=None, normalize=self.engine.info.normalize)

    def embed(self, texts: Sequence[str]) -> Float32:
        return self.vectors(self.tokens(texts))


# Peers, as their documentation says to use them.


def _both_ways(folder: ModelFolder, model: Any) -> None:
    """transformers builds a Qwen3 that looks one way; a folder may say otherwise, as ours do for pplx-embed's shapes."""
    if folder.config.get("is_causal") is False:
        for layer in model.layers:
            layer.self_attn.is_causal = False


def _device_dtype(setting: Setting) -> tuple[torch.device, torch.dtype]:
    device = pick_device("auto")
    return device, pick_dtype(setting.dtype, device)


def sentence_transformer(setting: Setting) -> Any:
    """SentenceTransformer of the folder on the device and in the number format that the engine takes."""
    from sentence_transformers import SentenceTransformer

    device, dtype = _device_dtype(setting)
    model = SentenceTransformer(
        str(setting.path), device=device.type, model_kwargs={"dtype": dtype}, local_files_only=True
    )
    _both_ways(setting.folder, model[0].auto_model)
    return model


def _encode(model: Any, inputs: Inputs) -> Float32:
    rows: Float32 = model.encode(list(inputs.texts))
    return rows.astype(np.float32, copy=False)


def transformer(setting: Setting) -> Any:
    """AutoModel of the folder, where and as the engine computes. transformers chooses the attention: SDPA where it can."""
    from transformers import AutoModel

    device, dtype = _device_dtype(setting)
    model = AutoModel.from_pretrained(setting.folder.transformer, dtype=dtype, local_files_only=True).to(device).eval()
    _both_ways(setting.folder, model)
    return model


def _attention(model: Any) -> str:
    """Which of transformers' attentions the model runs, for the notes."""
    return f"{getattr(model.config, '_attn_implementation', 'unknown')} attention"


def transformers_run(setting: Setting, model: Any, *, compiled: bool) -> Callable[[Inputs], Float32]:
    """ids -> vectors by transformers' model: padded to the longest, pooled as the folder says (mean, first or last token)."""
    device = model.device
    pooling = _pooling(setting.folder)
    normalize = any(m.kind == "Normalize" for m in setting.folder.modules)
    if any(m.kind == "Dense" for m in setting.folder.modules):
        raise StartError("transformers knows no Dense modules; measure sentence-transformers instead")
    more = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    call = torch.compile(model, dynamic=False) if compiled else model

    @torch.inference_mode()
    def run(inputs: Inputs) -> Float32:
        ids, mask = padded(inputs.ids)
        on_device = torch.from_numpy(ids).to(device)
        # Inputs of one length need no mask: attention is faster so, and a decoder's layers say whether they look both ways.
        masks = None if mask.all() else torch.from_numpy(mask).to(device)
        if masks is not None and setting.folder.config.get("is_causal") is False:
            raise StartError("transformers: a decoder that looks both ways is measured on inputs of one length only")
        hidden = call(input_ids=on_device, attention_mask=masks, **more).last_hidden_state
        keep = torch.from_numpy(mask).to(device).to(hidden.dtype)[..., None]
        if pooling == "mean":
            rows = (hidden * keep).sum(1) / keep.sum(1)
        elif pooling == "cls":
            rows = hidden[:, 0]
        else:
            rows = hidden[torch.arange(len(ids), device=device), keep[..., 0].sum(1).long() - 1]
        return finish(rows.float().cpu().numpy(), dimensions=None, normalize=normalize)

    return run


def _pooling(folder: ModelFolder) -> str:
    config = next((m.config for m in folder.modules if m.kind == "Pooling"), {})
    mode = config.get("pooling_mode") or next(
        (k.removeprefix("pooling_mode_") for k, v in config.items() if k.startswith("pooling_mode_") and v is True),
        "mean",
    )
    known = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls", "lasttoken": "last"}
    if mode not in known:
        raise StartError(f"transformers: pooling {mode} is not measured; measure sentence-transformers instead")
    return known[mode]


def padded(batch: TokenBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """([sequences, longest] int64 ids, the same of 0 and 1) padded on the right."""
    ids = np.zeros((len(batch), batch.max_seqlen), np.int64)
    mask = np.zeros_like(ids)
    for i, (a, b) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        ids[i, : b - a], mask[i, : b - a] = batch.ids[a:b], 1
    return ids, mask
