"""Rotary positions: what config.json says of them, and the tables of angles that come of it. Does not know models.

Frequency i of a head of d values is theta^(-2 i / d), and a token at position p is turned by p times that (Su et al., arXiv
2104.09864). Ways of stretching them to longer texts:

    linear   all frequencies are divided by a factor
    ntk      theta is larger too, as GTE's checkpoints have it
    llama3   slow frequencies are divided by a factor, fast ones left, those between mixed (Llama 3.1)
    yarn     the same with borders of its own, and queries and keys grow (Peng et al., arXiv 2309.00071)
    dynamic  nothing, up to max_position_embeddings; longer texts are not served

Formulas and defaults of all but ntk are those of transformers' ROPE_INIT_FUNCTIONS, in float32 step by step as it rounds. Not
served is longrope: there a text's frequencies depend on the longest text in its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""What transformers' own models may say, of those served."""


@dataclass(frozen=True, slots=True)
class Linear:
    factor: float

    def frequencies(self, power: Tensor) -> Tensor:
        """theta^(2 i / d) of all i -> frequencies."""
        return 1.0 / power / self.factor


@dataclass(frozen=True, slots=True)
class Llama3:
    """A frequency is fast that turns `high` times in `original` positions, slow that turns `low` times."""

    factor: float
    low: float
    high: float
    original: int

    def frequencies(self, power: Tensor) -> Tensor:
        """As Linear's."""
        frequency = 1.0 / power
        wave = 2 * math.pi / frequency
        fast = ((self.original / wave - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - fast) * frequency / self.factor + fast * frequency


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequencies up to number `first` are fast, from `last` on slow; both need not be whole."""

    factor: float
    first: float
    last: float

    def frequencies(self, power: Tensor) -> Tensor:
        """As Linear's."""
        number = torch.arange(len(power), dtype=torch.float32)
        width = self.last - self.first or 0.001
        fast = 1 - ((number - self.first) / width).clamp(0, 1)
        return 1.0 / (self.factor * power) * (1 - fast) + 1.0 / power * fast


@dataclass(frozen=True, slots=True)
class Rope:
    """How the positions of one kind of layer turn."""

    theta: float
    way: Linear | Llama3 | Yarn | None = None
    grown: float = 1.0
    """Queries and keys are multiplied by it: YaRN's attention factor."""


def read_rope(
    config: dict[str, Any],
    default: float,
    head_dim: int,
    *,
    layers: str = "",
    key: str = "rope_theta",
    kinds: tuple[str, ...] = KINDS,
) -> Rope:
    """What config.json says: rope_parameters (transformers 5), or `key` and rope_scaling (4). StartError names what we lack.

    Of both, rope_scaling wins: model cards have it added for longer texts, whoever saved the file. It takes the place of
    rope_parameters, theta and all; where each kind of layer has an entry, of its keys.

    default: theta where nothing is said. layers: the entry of rope_parameters, where each kind of layer has one. kinds: those
    that the family may say.
    """
    whose = f"config.json of {config.get('model_type')}"
    ours = _entry(config, "rope_parameters", whose)
    scaling = _entry(config, "rope_scaling", whose)
    rope = _entry(ours, layers, whose) | scaling if layers else scaling or ours
    said = _Said(rope, whose)
    theta = said.number(key, rope.get("rope_theta", config.get(key, default)))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise said.wrong("partial_rotary_factor is not supported")
    how = rope.get("rope_type", rope.get("type", "default"))
    if how not in kinds or rope.get("mixed_b") is not None:
        what = f"rope type {how!r:.80}" + ("" if rope.get("mixed_b") is None else " with mixed_b")
        raise said.wrong(f"{what} is not supported; supported: {', '.join(kinds)}")
    if how in ("default", "dynamic"):
        return Rope(theta)
    positions = config.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings", positions)
    if not layers:  # said beside the others it wins
        original = config.get("original_max_position_embeddings", original)
    factor = rope.get("factor")
    if how == "yarn" and factor is None:
        factor = said.whole("max_position_embeddings", positions) / said.whole(_ORIGINAL, original)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise said.wrong(f"the factor of rope type {how!r} must be 1 or more, not {factor!r:.80}")
    if how == "linear":
        return Rope(theta, Linear(factor))
    if how == "ntk":  # fixed: the slowest frequency is stretched by the factor, the fastest hardly
        return Rope(theta * factor, Linear(factor ** (2 / head_dim)))
    original = said.whole(_ORIGINAL, original)
    if how == "llama3":
        low, high = (said.number(name, rope.get(name)) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise said.wrong(f"low_freq_factor {low} must be less than high_freq_factor {high}")
        return Rope(theta, Llama3(factor, low, high, original))
    # transformers looks for `truncate` here even where each kind of layer has parameters of its own.
    truncate = (ours if layers else rope).get("truncate", True)
    return Rope(theta, _yarn(said, theta, factor, head_dim, original, truncate=truncate), _grown(said, factor))


_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class _Said:
    """Rope parameters, and whose they are."""

    values: dict[str, Any]
    whose: str

    def wrong(self, what: str) -> StartError:
        return StartError(f"{self.whose}: {what}")

    def number(self, name: str, value: Any) -> float:
        """A positive number as it was said, whole or not."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(f"{name} must be a positive number, not {value!r:.80}")
        return value

    def whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(f"{name} must be a whole number of at least 1, not {value!r:.80}")
        return value


def _entry(values: dict[str, Any], name: str, whose: str) -> dict[str, Any]:
    """values[name], an object of JSON; none is an empty one."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise StartError(f"{whose}: {name} must be an object, not {found!r:.80}")
    return found


def _yarn(said: _Said, theta: float, factor: float, head_dim: int, original: int, *, truncate: Any) -> Yarn:
    if theta <= 1:
        raise said.wrong(f"rope type 'yarn' needs a rope_theta above 1, not {theta}")

    def number_of(turns: float) -> float:
        """Of the frequency, a fraction maybe, that turns so often in the texts of training."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = (
        number_of(said.number(name, said.values.get(name) or usual))
        for name, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    return Yarn(factor, max(first, 0), min(last, head_dim - 1))


def _grown(said: _Said, factor: float) -> float:
    """YaRN's attention factor."""
    if (value := said.values.get("attention_factor")) is not None:
        return said.number("attention_factor", value)

    def by(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, whole = (said.values.get(name) for name in ("mscale", "mscale_all_dim"))
    if scale and whole:
        return by(said.number("mscale", scale)) / by(said.number("mscale_all_dim", whole))
    return by(1)


def rotary_tables(rope: Rope, head_dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, head_dim / 2] float32."""
    power = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequency = 1.0 / power if rope.way is None else rope.way.frequencies(power)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return (angle.cos() * rope.grown).to(device), (angle.sin() * rope.grown).to(device)
