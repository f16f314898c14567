"""Weights from files to named tensors: finds the files, maps the names, checks the shapes, says what is missing.

Does not know what a tensor is for: a family's `shapes` says what is wanted (see rose/models), the rest is names. Every
fault of the files is a StartError that names file, tensor and reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.folder import read_json

log = logging.getLogger(__name__)

Weights = dict[str, Tensor]

_WRAPPERS = ("0.auto_model.", "auto_model.", "0.model.")
"""What sentence-transformers puts before names when a whole SentenceTransformer is saved."""


def read_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    prefixes: tuple[str, ...] = (),
    renames: tuple[tuple[str, str], ...] = (),
    ignored: tuple[str, ...] = (),
) -> Weights:
    """Every tensor that `shapes` names, in dtype on device. The last three: see models.Family. Raises StartError.

    On the meta device nothing but names, shapes and formats is read.
    """
    harmless = re.compile("|".join(f"(?:{p})" for p in ignored)) if ignored else None
    weights: Weights = {}
    came_from: dict[str, str] = {}
    left_over: list[str] = []
    wrong: list[str] = []
    for stored, tensor in _tensors(folder, whole=device.type != "meta"):
        name = canonical(stored, shapes, prefixes, renames)
        if name not in shapes:
            if harmless is not None and harmless.fullmatch(name):
                log.debug("%s: ignored weight %s", folder, stored)
            else:
                left_over.append(stored)
            continue
        if name in came_from:
            raise StartError(f"{folder}: weights {came_from[name]} and {stored} both stand for {name}")
        came_from[name] = stored
        if tuple(tensor.shape) != shapes[name]:
            wrong.append(f"{stored} is {list(tensor.shape)}, config.json asks for {list(shapes[name])}")
        elif not tensor.is_floating_point():
            wrong.append(f"{stored} holds {tensor.dtype}: quantised weights are not supported")
        else:
            # A copy in any case: safetensors gives views of the file, and whoever writes into it would change the model that is
            # served, or end the process where it has become shorter. Row by row: a pickle keeps strides, and kernels walk memory.
            weights[name] = tensor.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    missing = [name for name in shapes if name not in came_from]
    faults = [
        *(wrong[:4] + ([f"and {len(wrong) - 4} more like these"] if len(wrong) > 4 else [])),
        *([f"missing: {_some(missing)}"] if missing else []),
        *([f"not of this architecture: {_some(left_over)}"] if left_over else []),
    ]
    if faults:
        raise StartError(f"{folder}: the weights do not fit config.json: " + "; ".join(faults))
    return weights


def dummy_weights(shapes: Mapping[str, tuple[int, ...]], *, device: torch.device, dtype: torch.dtype) -> Weights:
    """Random tensors of the true shapes, the same at every call: norms 1, biases 0, matrices normal(0, 0.02)."""
    if device.type == "meta":
        return {name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    seed = torch.Generator(device).manual_seed(0)
    weights: Weights = {}
    for name, shape in shapes.items():
        made = torch.empty(shape, device=device, dtype=dtype)
        if len(shape) == 1:
            made.fill_(0.0 if name.endswith(("bias", "beta")) else 1.0)
        else:
            made.normal_(0.0, 0.02, generator=seed)
        weights[name] = made
    return weights


def canonical(
    stored: str,
    wanted: Mapping[str, object],
    prefixes: tuple[str, ...] = (),
    renames: tuple[tuple[str, str], ...] = (),
) -> str:
    """A stored name as `wanted` spells it, when it can be; prefixes are stripped in any case."""
    name = stored
    for prefix in (*_WRAPPERS, *prefixes):
        if name not in wanted:
            name = name.removeprefix(prefix)
    for old, new in renames:
        if name not in wanted and name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _tensors(folder: Path, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """(stored name, tensor on the CPU) from whichever files the folder has. Not whole: on the meta device, without values."""
    for stem, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickle)):
        index = folder / f"{stem}.index.json"
        if (folder / stem).is_file():
            yield from read(folder / stem, whole)
            return
        if index.is_file():
            placed = read_json(index).get("weight_map")
            if not isinstance(placed, dict) or not all(isinstance(f, str) for f in placed.values()):
                raise StartError(f"{index}: expected a weight_map from names to files")
            shards = sorted(set(placed.values()))
            if absent := [s for s in shards if Path(s).name != s or not (folder / s).is_file()]:
                raise StartError(f"{folder}: {index.name} names shards that are not there: {_some(absent)}")
            for shard in shards:
                yield from read(folder / shard, whole)
            return
    raise StartError(f"{folder}: no weights (model.safetensors, its index, or pytorch_model.bin)")


def _safetensors(file: Path, whole: bool) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                if whole:
                    yield name, opened.get_tensor(name)
                else:
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    # A slice of nothing says the format by torch's name, so that a check decides as a start does.
                    form = (part[:0] if shape else opened.get_tensor(name)).dtype
                    yield name, torch.empty(shape, dtype=form, device="meta")
    except (SafetensorError, OSError, ValueError) as e:
        raise StartError(f"{file}: not a whole safetensors file ({e}); fetch it again") from None


def _pickle(file: Path, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """weights_only: an unpickler that makes tensors and nothing else."""
    try:
        state = torch.load(file, map_location="cpu" if whole else "meta", weights_only=True)
    except Exception as e:  # noqa: BLE001  a broken pickle raises anything; all of it means the same
        raise StartError(f"{file}: not weights that can be read safely ({_why(e)}); fetch it again") from None
    if not isinstance(state, dict):
        raise StartError(f"{file}: expected a dictionary of tensors")
    yield from ((str(name), t) for name, t in state.items() if isinstance(t, Tensor))


def _why(error: Exception) -> str:
    """The one line of torch's text that says what is wrong with the file; the rest is advice to read it unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((x for x in lines if "nsupported" in x), lines[0] if lines else "")
    told = told.split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {told:.160}" if told else type(error).__name__


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
