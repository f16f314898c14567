"""JinaBERT, jina-embeddings-v2: BERT's blocks with a gated MLP, and ALiBi in place of learned positions.

Günther et al., arXiv 2310.19923. config.json calls it `bert` and says position_embedding_type `alibi`. There are two kinds of
checkpoints: the first, and the one with norms on q and k and one more norm after attention (that of base-code), known by the
code that config.json points to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hortus.rose.attention import Bias
from hortus.rose.attention.relative import alibi
from hortus.rose.models import Step, Weights
from hortus.rose.models.encoder import vocabulary
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config

_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
FIRST = Names(
    qkv=_QKV,
    out="attention.output.dense",
    attention_norm=("attention.output.LayerNorm",),
    up=("mlp.gated_layers",),
    down="mlp.wo",
    mlp_norm="mlp.layernorm",
)
NORMED = Names(
    qkv=_QKV,
    qk_norm=("attention.self.layer_norm_q", "attention.self.layer_norm_k"),
    out="attention.output.dense",
    attention_norm=("attention.output.LayerNorm", "layer_norm_1"),
    up=("mlp.up_gated_layer",),
    down="mlp.down_layer",
    mlp_norm="layer_norm_2",
)


@dataclass(frozen=True)
class Alibi:
    """A penalty for distance, nothing learned."""

    def shapes(self, spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
        return {}

    def biases(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> list[Bias]:
        some = next(iter(weights.values()))
        return [alibi(spec.heads.heads, longest, device=some.device, dtype=some.dtype)] * spec.layers


def is_one(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi"


def spec_from_config(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault."""
    read = Config(config)
    read.only({"is_decoder": False, "add_cross_attention": False})
    # The activation is part of this name; hidden_act is the heads' alone.
    mlp = read.one_of("feed_forward_type", "original", ("geglu", "reglu"))
    normed = "qk-post-norm" in f"{config.get('_name_or_path')} {config.get('auto_map')}"
    hidden, eps = read.whole("hidden_size"), float(config.get("layer_norm_eps", 1e-12))

    def square(name: str, activation: str, norm: str | None = None) -> Step:
        return Step(name=name, inputs=hidden, outputs=hidden, activation=activation, norm=norm, eps=eps)

    at = "cls.predictions."
    step = square(at + "transform.dense", read.activation("hidden_act"), at + "transform.LayerNorm")
    return EncoderSpec(
        model_type="bert",
        names=NORMED if normed else FIRST,
        hidden=hidden,
        layers=read.whole("num_hidden_layers", least=0),
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=read.heads(hidden, read.whole("num_attention_heads")),
        eps=eps,
        activation={"geglu": "gelu", "reglu": "relu"}[mlp],
        gated=1 if normed else 0,
        biased=frozenset(("qkv", "out", "down", "norm")),
        positions=read.whole("max_position_embeddings", 512),
        segments=read.whole("type_vocab_size", 2, least=0),
        scores=Alibi(),
        classifier=(square("pooler.dense", "tanh"),),
        vocabulary=vocabulary(
            step, FIRST.word, at + "decoder", at + "bias", tied=read.flag("tie_word_embeddings", True)
        ),
    )
