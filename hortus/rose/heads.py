"""What comes after the trunk: pooling, Dense and Normalize, in the order of the folder's modules.

`plan_head` (pure) turns modules into a plan and refuses by name what is not supported; `Head` runs it. The last Normalize is
not run here: the gateway cuts a row to the asked width first, and normalises then. Formulas are sentence-transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hortus.errors import StartError
from hortus.folder import ModelFolder, Module
from hortus.rose import loader

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older spelling, in the order in which several are put side by side."""

_OPS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
"""sentence-transformers' name -> ops.pool's."""

_ACTIVATIONS = ("ELU", "GELU", "Hardtanh", "Identity", "LeakyReLU", "Mish", "ReLU", "SELU", "SiLU", "Sigmoid", "Tanh")
"""Classes of torch.nn that need no argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSpec:
    """activation(x W^T + b), plus x (projected when the widths differ) when residual."""

    path: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"linear.weight": (self.outputs, self.inputs)}
        if self.bias:
            found["linear.bias"] = (self.outputs,)
        if self.residual and self.inputs != self.outputs:
            found["residual.weight"] = (self.outputs, self.inputs)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    pooling: tuple[str, ...]
    """ops.pool's modes; the rows of several stand side by side."""
    steps: tuple[DenseSpec | None, ...]
    """In order; None is a Normalize in the middle."""
    width: int
    normalize: bool
    """Rows are to be normalised at the very end, by the gateway."""
    kind: str = "embed"
    """embed, or tokens."""


def plan_tokens(folder: ModelFolder, hidden: int) -> HeadPlan:
    """A late-interaction model's: Dense modules on every token, then always normalised. StartError names module and why.

    A row is the mean of a span of one token, so that what follows is a pooled row's. The original ColBERT's projection is
    among the trunk's weights: see modelcfg.
    """
    width, steps = hidden, []
    for module in folder.modules[1:]:
        if module.kind == "Dense":
            dense = _dense(module, "token_embeddings")
            if dense.inputs != width:
                raise StartError(
                    f"{module.path}: Dense takes {dense.inputs} values, but what comes before gives {width}"
                )
            steps.append(dense)
            width = dense.outputs
        elif module.kind == "Normalize":
            _check_keys(module, "token_embeddings")
        elif module.kind != "MultiVectorMask":
            raise StartError(
                f"{folder.path / 'modules.json'}: a {module.kind} module in a late-interaction model is not supported"
            )
    return HeadPlan(pooling=("mean",), steps=(*steps, None), width=width, normalize=False, kind="tokens")


def plan_head(folder: ModelFolder, hidden: int) -> HeadPlan:
    """The folder's modules after the Transformer, for a trunk of `hidden` values a token. StartError names module and why."""
    if not folder.modules:
        architectures = folder.config.get("architectures") or [""]
        causal = architectures[0].endswith("ForCausalLM") and folder.config.get("is_causal", True)
        return HeadPlan(pooling=("last" if causal else "mean",), steps=(), width=hidden, normalize=False)
    rest = [m for m in folder.modules[1:] if m.kind != "Dropout"]
    if not rest or rest[0].kind != "Pooling":
        raise StartError(f"{folder.path / 'modules.json'}: a Pooling module must follow the Transformer")
    modes = _pooling(rest[0], folder, hidden)
    rest = rest[1:]
    if rest and rest[-1].kind == "FlexibleQuantizer":
        rest = rest[:-1]  # rows are quantised at output, in the encoding that a request asks for
    normalize = bool(rest) and rest[-1].kind == "Normalize"
    while rest and rest[-1].kind == "Normalize":
        _check_keys(rest[-1])
        rest = rest[:-1]
    width = hidden * len(modes)
    steps: list[DenseSpec | None] = []
    for module in rest:
        if module.kind == "Normalize":
            _check_keys(module)
            steps.append(None)
        elif module.kind == "Dense":
            dense = _dense(module)
            if dense.inputs != width:
                raise StartError(
                    f"{module.path}: Dense takes {dense.inputs} values, but what comes before gives {width}"
                )
            steps.append(dense)
            width = dense.outputs
        else:
            raise StartError(f"{folder.path / 'modules.json'}: a {module.kind} module at this place is not supported")
    return HeadPlan(pooling=modes, steps=tuple(steps), width=width, normalize=normalize)


def _pooling(module: Module, folder: ModelFolder, hidden: int) -> tuple[str, ...]:
    config, at = module.config, module.path / "config.json"
    if not config:
        raise StartError(f"{at}: missing, so how to pool is not known")
    width = config.get("embedding_dimension", config.get("word_embedding_dimension", hidden))
    if width != hidden:
        raise StartError(f"{at}: pools {width} values a token, but the model has {hidden}")
    if folder.prompts_apart and any(folder.prompts.values()):
        raise StartError(f"{at}: include_prompt false (leave a prompt's tokens out of pooling) is not supported")
    if unknown := [k for k, on in config.items() if k.startswith("pooling_mode_") and on and k not in _FLAGS]:
        raise StartError(f"{at}: {unknown[0]} is not known; known: {', '.join(_FLAGS)}")
    wanted: Any = config.get("pooling_mode")
    if wanted is None:
        wanted = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    modes = [wanted] if isinstance(wanted, str) else list(wanted)
    for mode in modes:
        if mode not in _OPS:
            raise StartError(f"{at}: pooling mode {mode!r} is not supported; supported: {', '.join(_OPS)}")
    return tuple(_OPS[m] for m in modes)


def _dense(module: Module, reads: str = "sentence_embedding") -> DenseSpec:
    config, at = module.config, module.path / "config.json"
    _check_keys(module, reads)
    for key in ("in_features", "out_features"):
        if not isinstance(config.get(key), int):
            raise StartError(f"{at}: {key} must be a whole number, not {config.get(key)!r}")
    path = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    origin, _, name = str(path).rpartition(".")
    if origin.split(".")[0] != "torch" or name not in _ACTIVATIONS:
        raise StartError(f"{at}: activation {path!r} is not supported; supported: torch.nn's {', '.join(_ACTIVATIONS)}")
    return DenseSpec(
        path=module.path,
        inputs=config["in_features"],
        outputs=config["out_features"],
        bias=config.get("bias", True),
        activation=name,
        residual=config.get("use_residual", False),
    )


def _check_keys(module: Module, reads: str = "sentence_embedding") -> None:
    """Modules may read and write other things than the pooled row, or each token's; we have only that."""
    for key in ("module_input_name", "module_output_name"):
        if (value := module.config.get(key)) not in (None, reads):
            raise StartError(f"{module.path / 'config.json'}: {key} {value!r} is not supported")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Weights of a DenseSpec, float32: rows are few, so its cost is nothing and rounding is saved."""

    weight: Tensor
    bias: Tensor | None
    activation: nn.Module
    residual: Tensor | None
    """None: no residual; empty: the row itself; else the projection."""

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(F.linear(x, self.weight, self.bias))
        if self.residual is None:
            return y
        return y + (F.linear(x, self.residual) if self.residual.numel() else x)


class Head:
    """The plan with its weights, on a device."""

    labels: tuple[str, ...] = ()

    def __init__(
        self,
        plan: HeadPlan,
        ops: ModuleType,
        device: torch.device,
        load_format: str,
        projection: Tensor | None = None,
    ) -> None:
        """projection: [width, hidden] of the original ColBERT, in place of the plan's Dense modules."""
        self.plan, self.kind = plan, plan.kind
        self.width, self.normalize, self.pooling = plan.width, plan.normalize, "+".join(plan.pooling)
        self.parameters = 0
        self._ops = ops
        self._steps: list[Dense | None] = []
        if projection is not None:
            self._steps.append(Dense(weight=projection.float(), bias=None, activation=nn.Identity(), residual=None))
            self.width = projection.shape[0]
        for spec in plan.steps:
            if spec is None:
                self._steps.append(None)
                continue
            if load_format == "dummy":
                weights = loader.dummy_weights(spec.shapes, device=device, dtype=torch.float32)
            else:
                weights = loader.read_weights(spec.path, spec.shapes, device=device, dtype=torch.float32)
            self.parameters += sum(w.numel() for w in weights.values())
            self._steps.append(
                Dense(
                    weight=weights["linear.weight"],
                    bias=weights.get("linear.bias"),
                    activation=getattr(nn, spec.activation)(),
                    residual=weights.get("residual.weight", torch.empty(0)) if spec.residual else None,
                )
            )

    def __call__(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> rows [N, width] float32."""
        pooled = [self._ops.pool(x, cu_seqlens, mode) for mode in self.plan.pooling]
        rows: Tensor = pooled[0] if len(pooled) == 1 else torch.cat(pooled, -1)
        for step in self._steps:
            rows = F.normalize(rows, dim=-1) if step is None else step(rows)
        return rows
