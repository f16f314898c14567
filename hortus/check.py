"""`hortus models`: the families there are, and whether a folder would be served, how, and why not. Starts no server.

What a folder says goes through the same code as at a server's start, but no weight is read: names, shapes and formats are
enough. Does not know how a model computes; only a server's first step proves that.
"""

from __future__ import annotations

from hortus.config import Config
from hortus.engines import open_model
from hortus.errors import StartError
from hortus.folder import ModelFolder, readable
from hortus.metrics import Metrics
from hortus.types import Result, TokenBatch

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 2}
"""A parameter's, while a model is loaded: for fp8 it is read as bfloat16, and the layers' matrices are halved one by one."""

_FORMAT = {"fp8": "bfloat16 (the layers' matrices, once loaded, half of theirs in fp8)"}


class _NoEncoder:
    """An Encoder that is never asked."""

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        raise AssertionError("a check computes nothing")


def families() -> str:
    """A line for each model_type: what its folders can be served as."""
    try:
        from hortus.rose.models import every
    except ModuleNotFoundError as e:
        raise _missing(e) from None
    lines = [f"{'model_type':<26}{'embed':<7}{'tokens':<8}{'classify':<10}{'rerank':<8}{'sparse':<8}not in"]
    for name, family in every().items():
        has = [True, True, bool(family.classifier), bool(family.classifier or family.language), bool(family.vocabulary)]
        cells = "".join(f"{'yes' if h else '-':<{w}}" for h, w in zip(has, (7, 8, 10, 8, 8), strict=True))
        lines.append(f"{name:<26}{cells}{', '.join(dtype for dtype, _ in family.refused_dtypes)}".rstrip())
    return "\n".join(lines) + "\n\nhortus models check MODEL   whether a folder would be served, how, and why not\n"


def check(model: str, config: Config) -> str:
    """How the model would be served, for a person. StartError says why it would not be."""
    folder = open_model(model, config.ivy.served_model_name, config.rose, weights=True)
    try:
        from hortus.rose.engine import check_engine
    except ModuleNotFoundError as e:
        raise _missing(e) from None
    from hortus.ivy.embed import Embedder

    with readable(folder.path):
        info = check_engine(folder, config.rose)
        embedder = Embedder(folder, info, _NoEncoder(), config.ivy, Metrics())
    embedder.close()
    prompts = embedder.prompts
    rows = {
        "served as": f"{info.name} ({info.family})",
        "kind": f"{info.kind}: {info.in_words()}",
        "weights": f"{info.parameters / 1e6:.1f} M parameters, "
        f"{info.parameters * _BYTES[info.dtype] / 2**20:,.0f} MiB in {_FORMAT.get(info.dtype, info.dtype)} on {info.device}",
        "limits": f"{info.max_tokens} tokens an input",
        "prompts": ", ".join(f"{k} {v!r}" for k, v in prompts.texts.items()) or "none",
    }
    if prompts.default is not None:
        rows["default"] = prompts.default
    if prompts.pair is not None:
        rows["pair"] = " + ".join(map(repr, prompts.pair.pieces))
        if prompts.pair.takes_instruction():
            rows["instruction"] = repr(prompts.pair.instruction)
    if folder.adapters:
        rows["adapters"] = ", ".join(folder.adapters) + " (with the prompt of that name)"
    if folder.late is not None and info.kind == "tokens":
        rows["reading"] = _reading(folder)
    return "\n".join(f"  {key:<12}{value}" for key, value in rows.items()) + "\n"


def _reading(folder: ModelFolder) -> str:
    late = folder.late
    assert late is not None, "asked only of late-interaction models"
    parts = [
        f"documents of at most {late.document_length or folder.max_tokens} tokens, {len(late.skip)} words left out"
    ]
    if late.expansion is not None:
        seen = "seen by the others" if late.expansion.attend else "not seen"
        parts.append(f"queries filled up to {late.expansion.length} with {late.expansion.token!r}, {seen}")
    return "; ".join(parts)


def _missing(e: ModuleNotFoundError) -> StartError:
    return StartError(f"`hortus models` needs the package {e.name}: pip install 'hortus[cpu]' (or 'hortus[gpu]')")
