"""Values of a config.json, checked one by one, so that what a model needs and we lack is named; and what all encoders say by the
same keys. Does not know families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.models import ACTIVATION_NAMES, Step, Vocabulary
from hortus.rose.models.encoder_spec import EncoderSpec, Names

LAYER_TYPES = ("full_attention", "sliding_attention")
MOST, MOST_LAYERS = 1 << 24, 4096
"""No model has more of anything that is counted: lists as long as a file says are made of them."""


class Config:
    """A config.json. Everything that is asked for and wrong is a StartError that names the key.

    spellings: a key as most files have it -> as files of this kind may.
    """

    def __init__(self, values: Mapping[str, Any], spellings: Mapping[str, str] | None = None) -> None:
        self.values = dict(values)
        self.kind = str(values.get("model_type"))
        self._spellings = spellings or {}

    def spelt(self, key: str) -> str:
        """The key as this file has it, or, where it is not there, as files of its kind have it."""
        other = self._spellings.get(key, key)
        return key if key in self.values and other not in self.values else other

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(self.spelt(key), default)

    def wrong(self, what: str) -> StartError:
        return StartError(f"config.json of {self.kind}: {what}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to MOST (a number of layers: MOST_LAYERS); default None: it must be there."""
        value, most = self.get(key, default), MOST_LAYERS if "layer" in key else MOST
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(f"{self.spelt(key)} must be a whole number from {least} to {most}, not {value!r:.80}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number, such as an epsilon."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(f"{self.spelt(key)} must be a positive number, not {value!r:.80}")
        return float(value)

    def activation(self, key: str, default: str = "gelu") -> str:
        """A key of kernels.linear.ACTIVATIONS."""
        if not isinstance(name := self.get(key, default), str) or name not in ACTIVATION_NAMES:
            raise self.wrong(f"{self.spelt(key)} must be one of {', '.join(ACTIVATION_NAMES)}, not {name!r:.80}")
        return ACTIVATION_NAMES[name]

    def one_of(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        value = self.values.get(key, default)
        if value not in supported:
            raise self.wrong(f"{key} {value!r:.80} is not supported; supported: {', '.join(supported)}")
        return str(value)

    def only(self, switches: Mapping[str, Any]) -> None:
        """Switches, and the only place of each that is supported; one that is not there stands so."""
        for key, wanted in switches.items():
            if (value := self.values.get(key, wanted)) != wanted:
                raise self.wrong(f"{key} {value!r:.80} is not supported; supported: {wanted!r}")

    def flag(self, key: str, default: bool) -> bool:
        """null is false, as Python's None is to the reference."""
        value = self.values.get(key, default)
        if value not in (True, False, None):
            raise self.wrong(f"{key} must be true or false, not {value!r:.80}")
        return bool(value)

    def windowed(self, default: list[str], known: tuple[str, ...] = LAYER_TYPES) -> tuple[bool, ...]:
        """layer_types, or default: whether each layer sees a window alone. known: which of LAYER_TYPES there may be."""
        kinds = self.values.get("layer_types") or default
        if not isinstance(kinds, list) or len(kinds) != len(default) or not all(k in known for k in kinds):
            raise self.wrong(f"layer_types must be {len(default)} times one of {', '.join(known)}, not {kinds!r:.80}")
        return tuple(kind == "sliding_attention" for kind in kinds)

    def heads(self, hidden: int, heads: int, *, even: bool = False) -> Heads:
        """As many key heads as query heads, which divide the hidden size; even: so that a head can be turned."""
        d = hidden // heads
        if hidden % heads or (even and d % 2) or self.values.get("head_dim") not in (None, d):
            raise self.wrong(f"hidden size {hidden} does not make {heads} heads" + (" of even size" if even else ""))
        return Heads(heads=heads, kv_heads=heads, head_dim=d)

    def grouped_heads(self, heads: int, kv_heads: int, head_dim: int) -> Heads:
        """A decoder's: several query heads may share a key head, and their size is its own."""
        if heads % kv_heads or head_dim % 2:
            raise self.wrong(
                f"{heads} heads must be a multiple of {kv_heads} key-value heads, and head_dim {head_dim} even"
            )
        return Heads(heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def read_encoder(
    read: Config,
    names: Names,
    *,
    eps: float,
    activation: str,
    masked: str | None = None,
    pooler: str = "tanh",
    positions: int = 512,
    segments: int = 2,
    even: bool = False,
    tied: bool | None = None,
) -> EncoderSpec:
    """What all encoders' config.json say by the same keys; the family replaces what is its own.

    activation: the MLP's; masked, pooler: those of the heads (None: as the MLP's). positions, segments: defaults. even: heads are
    turned. tied: as Vocabulary.tied; None: tie_word_embeddings.
    """
    hidden = read.whole("hidden_size")
    tied = read.flag("tie_word_embeddings", True) if tied is None else tied
    step = Step(
        name=names.masked,
        inputs=hidden,
        outputs=hidden,
        activation=masked or activation,
        norm=names.masked_norm,
        eps=eps,
    )
    bias = names.decoder_bias
    if bias is not None and not tied:  # the reference adds the decoder's own
        bias = names.decoder + ".bias"
    decoder = (names.word if tied else names.decoder) + ".weight"
    return EncoderSpec(
        model_type=read.kind,
        names=names,
        hidden=hidden,
        layers=read.whole("num_hidden_layers", least=0),
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=read.heads(hidden, read.whole("num_attention_heads"), even=even),
        eps=eps,
        activation=activation,
        positions=read.whole("max_position_embeddings", positions),
        segments=read.whole("type_vocab_size", segments, least=0),
        classifier=(Step(name=names.pooler, inputs=hidden, outputs=hidden, activation=pooler),),
        vocabulary=Vocabulary(steps=(step,), decoder=decoder, tied=tied, bias=bias),
    )
