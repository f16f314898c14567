"""ModernBERT: no learned positions, LayerNorm before each block, and most layers look only some tokens to each side.

Rotary positions with a base for each kind of layer, GeGLU, no biases by default (Warner et al., arXiv 2412.13663;
transformers' ModernBertModel for the details).
"""

from __future__ import annotations

from typing import Any

from hortus.rose.models import Step
from hortus.rose.models.encoder import family, vocabulary
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config
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
)

_WINDOWED = {"full_attention": False, "sliding_attention": True}


def spec_from_config(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault. Defaults are transformers'."""
    read = Config(config)
    hidden, layers = read.whole("hidden_size"), read.whole("num_hidden_layers")
    heads = read.heads(hidden, read.whole("num_attention_heads"), even=True)
    every = read.whole("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_WINDOWED):
        raise read.wrong(f"layer_types must be {layers} times one of {', '.join(_WINDOWED)}, not {kinds!r}")
    switches = {"attention_bias": ("qkv", "out"), "mlp_bias": ("up", "down"), "norm_bias": ("norm",)}
    eps, norm_bias = float(config.get("norm_eps", 1e-5)), read.flag("norm_bias", False)
    head = Step(
        name="head.dense",
        inputs=hidden,
        outputs=hidden,
        activation=read.activation("classifier_activation"),
        bias=read.flag("classifier_bias", False),
        norm="head.norm",
        norm_bias=norm_bias,
        eps=eps,
    )
    bias = "decoder.bias" if read.flag("decoder_bias", True) else None
    return EncoderSpec(
        model_type=read.kind,
        names=NAMES,
        hidden=hidden,
        layers=layers,
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=heads,
        eps=eps,
        activation=read.activation("hidden_activation"),
        gated=0,
        biased=frozenset(part for key, parts in switches.items() if read.flag(key, False) for part in parts),
        prenorm=True,
        positions=read.whole("max_position_embeddings", 8192),
        rope=(
            read_rope(config, 160_000.0, heads.head_dim, layers="full_attention", key="global_rope_theta"),
            read_rope(config, 10_000.0, heads.head_dim, layers="sliding_attention", key="local_rope_theta"),
        ),
        window=read.whole("local_attention", 128) // 2,
        windowed=tuple(_WINDOWED[kind] for kind in kinds),
        pooling=read.one_of("classifier_pooling", "cls", ("cls", "mean")),
        classifier=(head,),
        vocabulary=vocabulary(head, NAMES.word, "decoder", bias, tied=read.flag("tie_word_embeddings", True)),
    )


FAMILY = family(
    spec_from_config,
    prefixes=("model.",),
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*", r"rotary_emb\..*"),
)
