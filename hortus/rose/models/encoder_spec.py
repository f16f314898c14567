"""What an encoder built like BERT may be, as data; models/encoder.py runs it. Does not know tensors.

A family is two things: a reader, config.json -> EncoderSpec, and Names, where its checkpoints keep their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hortus.rose.attention import Bias, Heads
from hortus.rose.models import Step, Vocabulary, Weights
from hortus.rose.models.adapters import Adapters
from hortus.rose.models.convolution import Convolution
from hortus.rose.models.rotary import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Where checkpoints keep their tensors, without `.weight` and `.bias`; () and None: there is none. Defaults: BERT's.

    Those of a block come after `layer` and its number.
    """

    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    segment: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    final_norm: str | None = None
    layer: str = "encoder.layer."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """One matrix, or three."""
    qk_norm: tuple[str, ...] = ()
    """LayerNorms over all heads of q, and of k."""
    out: str = "attention.output.dense"
    attention_norm: tuple[str, ...] = ("attention.output.LayerNorm",)
    """Usually one. Of several, each adds the block's input once more."""
    up: tuple[str, ...] = ("intermediate.dense",)
    """One matrix or two: of a gated MLP they make twice `intermediate` values."""
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    pooler: str = "pooler.dense"
    """A classifier's first matrix, and its last."""
    last: str = "classifier"
    masked: str = "cls.predictions.transform.dense"
    """The masked language model's matrix, its norm, [vocabulary, hidden] and the bias of that, in full (None: it has none)."""
    masked_norm: str = "cls.predictions.transform.LayerNorm"
    decoder: str = "cls.predictions.decoder"
    decoder_bias: str | None = "cls.predictions.bias"


class Scores(Protocol):
    """A family's own addition to attention scores."""

    def shapes(self, spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
        """Tensors of its own."""

    def biases(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> list[Bias]:
        """One a layer, for sequences of up to `longest` tokens. Takes its own tensors out; may look at the blocks'."""


ALL = frozenset(("qkv", "out", "up", "down", "norm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """What a config.json says of an encoder, checked."""

    model_type: str
    names: Names
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: Heads
    """Of a layer that sees all tokens."""
    eps: float
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    gated: int | None = None
    """Which half of what `up` gives is activated and multiplies the other; None: the MLP is not gated."""
    biased: frozenset[str] = ALL
    """Those of ALL that have a bias."""
    prenorm: bool = False
    positions: int
    """Tokens of the longest sequence."""
    first_position: int | None = None
    """The row of the position table that a first token takes; None: there is no table."""
    segments: int = 0
    """Rows of the token type table; 0: there is none."""
    rope: tuple[Rope, ...] = ()
    """Of layers that see all and of windowed ones; (): none turns."""
    scores: Scores | None = None
    convolution: Convolution | None = None
    adapters: Adapters | None = None
    """Then there is one segment, and a token's type says its adapter."""
    window: int | None = None
    """Tokens to each side that a windowed layer sees."""
    windowed: tuple[bool, ...] = ()
    """Layer by layer; (): none is."""
    pooling: str = "cls"
    """A classifier's."""
    classifier: tuple[Step, ...]
    """Its steps but the last."""
    vocabulary: Vocabulary
    """The masked language model's head."""

    def attention_norm(self, n: int) -> tuple[str, ...]:
        """Names of block n's: before the first block nothing has changed since the embeddings' norm."""
        return () if self.prenorm and n == 0 else self.names.attention_norm


def shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without prefix."""
    h, inner, names = spec.hidden, spec.intermediate, spec.names
    found: dict[str, tuple[int, ...]] = {names.word + ".weight": (spec.vocab, h)}
    if spec.first_position is not None:
        found[names.position + ".weight"] = (spec.first_position + spec.positions, h)
    if spec.segments:
        found[names.segment + ".weight"] = (spec.segments, h)

    def add(part: str, name: str, *shape: int) -> None:
        found[name + ".weight"] = shape
        if part in spec.biased:
            found[name + ".bias"] = shape[:1]

    add("norm", names.norm, h)
    if names.final_norm is not None:
        add("norm", names.final_norm, h)
    for n in range(spec.layers):
        at = f"{names.layer}{n}."
        for name in names.qkv:
            add("qkv", at + name, 3 * h // len(names.qkv), h)
        for name in names.qk_norm:
            add("norm", at + name, h)
        add("out", at + names.out, h, h)
        for name in spec.attention_norm(n):
            add("norm", at + name, h)
        for name in names.up:
            add("up", at + name, (inner if spec.gated is None else 2 * inner) // len(names.up), h)
        add("down", at + names.down, h, inner)
        add("norm", at + names.mlp_norm, h)
    if spec.convolution is not None:
        found |= spec.convolution.shapes(h)
    if spec.adapters is not None:
        found |= spec.adapters.shapes(found)
    return found | (spec.scores.shapes(spec) if spec.scores else {})
