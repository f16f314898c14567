"""BERT's blocks with rotary positions and a gated MLP: NomicBERT and GTE, the latter also as `new`.

LayerNorm after each residual sum, as in BERT; no learned positions (Nussbaum et al., arXiv 2402.01613; Zhang et al., arXiv
2407.19669; transformers' NomicBertModel and GteModel for the details). `new` is what the hub's GTE checkpoints call
themselves: the same tensors, and a config.json with switches of its own.
"""

from __future__ import annotations

from typing import Any

from hortus.rose.models import Step
from hortus.rose.models.encoder import family, vocabulary
from hortus.rose.models.encoder_spec import ALL, EncoderSpec, Names
from hortus.rose.models.reading import Config
from hortus.rose.models.rotary import read_rope

NOMIC = Names(
    norm="emb_ln",
    layer="encoder.layers.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm=("norm1",),
    up=("mlp.fc11", "mlp.fc12"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
GTE = Names(
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm=("attn_ln",),
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)

_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
"""Keys of the config.json that came with the first NomicBERT checkpoints -> transformers' own."""

_NOMIC_SWITCHES = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": None,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
_GTE_SWITCHES = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}


def nomic_spec(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault. Defaults are transformers'."""
    Config(config).only(_NOMIC_SWITCHES)
    config = {_NOMIC_KEYS.get(key, key): value for key, value in config.items()}
    if config.get("hidden_act") == "swiglu":
        config["hidden_act"] = "silu"
    act = Config(config).activation("hidden_act", "silu")
    at = "cls.predictions."
    head = (at + "transform.dense", act, at + "transform.layer_norm", at + "decoder", at + "bias")
    return _spec(config, NOMIC, head, biased=frozenset(("norm",)), act="silu", theta=1000.0, positions=2048, segments=2)


def gte_spec(config: dict[str, Any]) -> EncoderSpec:
    """As nomic_spec."""
    read = Config(config)
    read.only(_GTE_SWITCHES)
    new = read.kind == "new"
    act = read.activation("hidden_act") if new else "gelu"  # transformers': whatever hidden_act says
    head = ("lm_head.dense", act, "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias")
    theta = 10_000.0 if new else 160_000.0
    return _spec(config, GTE, head, biased=ALL - {"up"}, act="gelu", theta=theta, positions=8192, segments=1)


def _spec(
    config: dict[str, Any],
    names: Names,
    head: tuple[str, str, str, str, str],
    *,
    biased: frozenset[str],
    act: str,
    theta: float,
    positions: int,
    segments: int,
) -> EncoderSpec:
    """head: the vocabulary's matrix, its activation, norm, decoder and bias. The last four: defaults."""
    read = Config(config)
    hidden, eps = read.whole("hidden_size"), float(config.get("layer_norm_eps", 1e-12))
    heads = read.heads(hidden, read.whole("num_attention_heads"), even=True)
    dense, head_act, norm, decoder, bias = head
    step = Step(name=dense, inputs=hidden, outputs=hidden, activation=head_act, norm=norm, eps=eps)
    return EncoderSpec(
        model_type=read.kind,
        names=names,
        hidden=hidden,
        layers=read.whole("num_hidden_layers", least=0),
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=heads,
        eps=eps,
        activation=read.activation("hidden_act", act),
        gated=1,
        biased=biased,
        positions=read.whole("max_position_embeddings", positions),
        segments=read.whole("type_vocab_size", segments, least=0),
        rope=(read_rope(config, theta, heads.head_dim),),
        classifier=(Step(name="pooler.dense", inputs=hidden, outputs=hidden, activation="tanh"),),
        vocabulary=vocabulary(step, names.word, decoder, bias, tied=read.flag("tie_word_embeddings", True)),
    )


FAMILY = family(
    lambda config: (nomic_spec if config["model_type"] == "nomic_bert" else gte_spec)(config),
    prefixes=("nomic_bert.", "gte.", "new.", "bert.", "model."),
    ignored=(r"pooler\..*", r"cls\..*", r"lm_head\..*", r"classifier\..*", r"(.*\.)?rotary_emb\..*"),
)
