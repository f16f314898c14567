"""Rotary positions: what config.json says of them, and the tables of angles that come of it. Does not know models.

Frequency i of a head of d values is 1 / (theta^(2 i / d) divisor), and a token at position p is turned by p times that (Su et
al., arXiv 2104.09864). The ways of stretching them that are served change theta and divisor alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError


@dataclass(frozen=True, slots=True)
class Rope:
    """How the positions of one kind of layer turn."""

    theta: float
    divisor: float = 1.0


def read_rope(
    config: dict[str, Any], default: float, head_dim: int, *, layers: str = "", key: str = "rope_theta"
) -> Rope:
    """What config.json says: rope_parameters (transformers 5), or `key` and rope_scaling (4). StartError names what we lack.

    default: theta where nothing is said. layers: the entry of rope_parameters, where each kind of layer has one.
    """
    kind = config.get("model_type")
    ours = config.get("rope_parameters") or {}
    rope = {**(config.get("rope_scaling") or {}), **((ours.get(layers) or {}) if layers else ours)}
    theta = rope.get("rope_theta", config.get(key, default))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise StartError(f"config.json of {kind}: {key} must be a positive number, not {theta!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise StartError(f"config.json of {kind}: partial_rotary_factor is not supported")
    how = rope.get("rope_type", rope.get("type", "default"))
    if how == "default":
        return Rope(float(theta))
    if how not in ("linear", "ntk") or rope.get("mixed_b") is not None:
        what = f"rope type {how!r}" + (" with mixed_b" if how == "ntk" else "")
        raise StartError(f"config.json of {kind}: {what} is not supported; supported: default, linear, ntk")
    factor = rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise StartError(f"config.json of {kind}: the factor of rope type {how!r} must be 1 or more, not {factor!r}")
    if how == "linear":
        return Rope(float(theta), float(factor))
    # Fixed NTK, as GTE's checkpoints have it: the slowest frequency is stretched by the factor, the fastest hardly.
    return Rope(float(theta) * factor, factor ** (2 / head_dim))


def rotary_tables(rope: Rope, head_dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, head_dim / 2] float32. In float32 step by step, as the references round."""
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.divisor != 1.0:
        frequency = frequency / rope.divisor
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return angle.cos().to(device), angle.sin().to(device)
