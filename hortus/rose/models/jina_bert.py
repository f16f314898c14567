"""JinaBERT, jina-embeddings-v2: BERT's blocks with a gated MLP, and ALiBi in place of learned positions.

Günther et al., arXiv 2310.19923. config.json calls it `bert` and says position_embedding_type `alibi`. There are two kinds of
checkpoints: the first, and the one with norms on q and k and one more norm after attention (that of base-code), known by the
code that config.json points to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hortus.rose.attention import Bias
from hortus.rose.attention.relative import alibi
from hortus.rose.models import Weights
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config, read_encoder

FIRST = Names(up=("mlp.gated_layers",), down="mlp.wo", mlp_norm="mlp.layernorm")
NORMED = Names(
    qk_norm=("attention.self.layer_norm_q", "attention.self.layer_norm_k"),
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
    spec = read_encoder(
        read,
        NORMED if normed else FIRST,
        eps=read.number("layer_norm_eps", 1e-12),
        activation={"geglu": "gelu", "reglu": "relu"}[mlp],
        masked=read.activation("hidden_act"),
    )
    return dataclasses.replace(
        spec, gated=1 if normed else 0, biased=frozenset(("qkv", "out", "down", "norm")), scores=Alibi()
    )
