"""BERT and those built like it: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet. JinaBERT too: see jina_bert.py.

Learned positions, full attention, a LayerNorm after each residual sum (Devlin et al., arXiv 1810.04805). What differs is
data: the names of the tensors, where positions start, whether there are segments, or a bias by distance (MPNet).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hortus.rose.attention import Bias
from hortus.rose.attention.relative import learned
from hortus.rose.models import Step, Weights, jina_bert
from hortus.rose.models.encoder import family, vocabulary
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config

BERT = Names(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm=("attention.output.LayerNorm",),
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
DISTILBERT = Names(
    layer="transformer.layer.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm=("sa_layer_norm",),
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
MPNET = Names(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm=("attention.LayerNorm",),
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)

_BUCKETS = 32
"""MPNet's code divides distances into so many, whatever its config.json says."""


@dataclass(frozen=True)
class LearnedByDistance:
    """MPNet's: one table for all layers."""

    name: str = "encoder.relative_attention_bias.weight"

    def shapes(self, spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
        return {self.name: (_BUCKETS, spec.heads.heads)}

    def biases(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> list[Bias]:
        return [learned(weights.pop(self.name), longest)] * spec.layers


def spec_from_config(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault. Defaults are transformers'."""
    if jina_bert.is_one(config):
        return jina_bert.spec_from_config(config)
    read = Config(config)
    kind, distil, mpnet = read.kind, read.kind == "distilbert", read.kind == "mpnet"
    read.only({"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False})
    if mpnet:
        read.only({"relative_attention_num_buckets": _BUCKETS})
    hidden = read.whole("dim" if distil else "hidden_size")
    # Row 0 is the first token's, or the one after padding's (MPNet's code says 2, whatever padding is).
    first = 2 if mpnet else 0 if kind in ("bert", "distilbert") else read.whole("pad_token_id", 1, least=0) + 1
    eps = 1e-12 if distil else float(config.get("layer_norm_eps", 1e-12))
    act = read.activation("activation" if distil else "hidden_act")
    names = {"distilbert": DISTILBERT, "mpnet": MPNET}.get(kind, BERT)

    def square(name: str, activation: str, norm: str | None = None) -> Step:
        return Step(name=name, inputs=hidden, outputs=hidden, activation=activation, norm=norm, eps=eps)

    # Where the heads keep their matrices: a classifier's two, and the vocabulary's matrix, norm, decoder and bias.
    if kind == "bert":
        pooler, last, at = square("pooler.dense", "tanh"), "classifier", "cls.predictions."
        step, decoder, bias = (
            square(at + "transform.dense", act, at + "transform.LayerNorm"),
            at + "decoder",
            at + "bias",
        )
    elif distil:
        pooler, last = square("pre_classifier", "relu"), "classifier"
        step, decoder = square("vocab_transform", act, "vocab_layer_norm"), "vocab_projector"
        bias = decoder + ".bias"
    else:
        pooler, last = square("classifier.dense", "tanh"), "classifier.out_proj"
        step, decoder = (
            square("lm_head.dense", "gelu", "lm_head.layer_norm"),
            "lm_head.decoder",
        )  # whatever hidden_act is
        bias = "lm_head.bias"
    return EncoderSpec(
        model_type=kind,
        names=names,
        hidden=hidden,
        layers=read.whole("n_layers" if distil else "num_hidden_layers", least=0),
        intermediate=read.whole("hidden_dim" if distil else "intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=read.heads(hidden, read.whole("n_heads" if distil else "num_attention_heads")),
        eps=eps,
        activation=act,
        positions=read.whole("max_position_embeddings", 512, least=first + 1) - first,
        first_position=first,
        segments=0 if distil or mpnet else read.whole("type_vocab_size", 2, least=0),
        scores=LearnedByDistance() if mpnet else None,
        classifier=(pooler,),
        last=last,
        vocabulary=vocabulary(step, names.word, decoder, bias, tied=read.flag("tie_word_embeddings", True)),
    )


FAMILY = family(
    spec_from_config,
    prefixes=("bert.", "roberta.", "distilbert.", "mpnet.", "model."),
    renames=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    ignored=(
        r"pooler\..*",
        r"cls\..*",
        r"lm_head\..*",
        r"vocab_(transform|layer_norm|projector)\..*",
        r"(pre_)?classifier\..*",
        r"embeddings\.(position_ids|token_type_ids)",
    ),
)
