"""Values of a config.json, checked one by one, so that what a model needs and we lack is named. Does not know models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.models import ACTIVATION_NAMES

MOST, MOST_LAYERS = 1 << 24, 4096
"""No model has more of anything that is counted: lists as long as a file says are made of them."""


class Config:
    """A config.json. Everything that is asked for and wrong is a StartError."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.kind = str(values.get("model_type"))

    def wrong(self, what: str) -> StartError:
        return StartError(f"config.json of {self.kind}: {what}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to MOST (a number of layers: MOST_LAYERS); default None: it must be there."""
        value, most = self.values.get(key, default), MOST_LAYERS if "layer" in key else MOST
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(f"{key} must be a whole number from {least} to {most}, not {value!r:.80}")
        return value

    def activation(self, key: str, default: str = "gelu") -> str:
        """A key of kernels.linear.ACTIVATIONS."""
        if (name := self.values.get(key, default)) not in ACTIVATION_NAMES:
            raise self.wrong(f"{key} must be one of {', '.join(ACTIVATION_NAMES)}, not {name!r}")
        return ACTIVATION_NAMES[name]

    def one_of(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        value = self.values.get(key, default)
        if value not in supported:
            raise self.wrong(f"{key} {value!r} is not supported; supported: {', '.join(supported)}")
        return str(value)

    def only(self, switches: Mapping[str, Any]) -> None:
        """Switches, and the only place of each that is supported; one that is not there stands so."""
        for key, wanted in switches.items():
            if (value := self.values.get(key, wanted)) != wanted:
                raise self.wrong(f"{key} {value!r} is not supported; supported: {wanted!r}")

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.values.get(key, default))

    def heads(self, hidden: int, heads: int, *, even: bool = False) -> Heads:
        """As many key heads as query heads, which divide the hidden size; even: so that a head can be turned."""
        d = hidden // heads
        if hidden % heads or (even and d % 2) or self.values.get("head_dim") not in (None, d):
            raise self.wrong(f"hidden size {hidden} does not make {heads} heads" + (" of even size" if even else ""))
        return Heads(heads=heads, kv_heads=heads, head_dim=d)
