"""ModernBERT: no learned positions, LayerNorm before each block, and most layers look only some tokens to each side.

Rotary positions with a base for each kind of layer, GeGLU, no biases by default (Warner et al., arXiv 2412.13663;
transformers' ModernBertModel for the details).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hortus.rose.models.encoder import family
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config, read_encoder
from hortus.rose.models.rotary import read_rope

NAMES = Names(
    word="embeddings.tok_embeddings",
    norm="embeddings.norm",
    final_norm="final_norm",
    layer="layers.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm=("attn_norm",),
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    masked="head.dense",
    masked_norm="head.norm",
    decoder="decoder",
    decoder_bias="decoder.bias",
)


def spec_from_config(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault. Defaults are transformers'."""
    read = Config(config)
    eps, norm_bias = read.number("norm_eps", 1e-5), read.flag("norm_bias", False)
    names = NAMES if read.flag("decoder_bias", True) else dataclasses.replace(NAMES, decoder_bias=None)
    spec = read_encoder(
        read, names, eps=eps, activation=read.activation("hidden_activation"), positions=8192, even=True
    )
    every = read.whole("global_attn_every_n_layers", 3)
    default = ["sliding_attention" if n % every else "full_attention" for n in range(spec.layers)]
    switches = {"attention_bias": ("qkv", "out"), "mlp_bias": ("up", "down"), "norm_bias": ("norm",)}
    # One matrix for both heads.
    head = dataclasses.replace(
        spec.vocabulary.steps[0],
        activation=read.activation("classifier_activation"),
        bias=read.flag("classifier_bias", False),
        norm_bias=norm_bias,
    )
    return dataclasses.replace(
        spec,
        gated=0,
        biased=frozenset(part for key, parts in switches.items() if read.flag(key, False) for part in parts),
        prenorm=True,
        segments=0,
        rope=(
            read_rope(config, 160_000.0, spec.heads.head_dim, layers="full_attention", key="global_rope_theta"),
            read_rope(config, 10_000.0, spec.heads.head_dim, layers="sliding_attention", key="local_rope_theta"),
        ),
        window=read.whole("local_attention", 128) // 2,
        windowed=read.windowed(default),
        pooling=read.one_of("classifier_pooling", "cls", ("cls", "mean")),
        classifier=(head,),
        vocabulary=dataclasses.replace(spec.vocabulary, steps=(head,)),
    )


FAMILY = family(
    spec_from_config,
    prefixes=("model.",),
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*", r"rotary_emb\..*"),
)
