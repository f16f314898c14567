"""BERT's blocks with rotary positions and a gated MLP: NomicBERT and GTE, the latter also as `new`.

LayerNorm after each residual sum, as in BERT; no learned positions (Nussbaum et al., arXiv 2402.01613; Zhang et al., arXiv
2407.19669; transformers' NomicBertModel and GteModel for the details). `new` is what the hub's GTE checkpoints call
themselves: the same tensors, and a config.json with switches of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hortus.rose.models.encoder import family
from hortus.rose.models.encoder_spec import ALL, EncoderSpec, Names
from hortus.rose.models.reading import Config, read_encoder
from hortus.rose.models.rotary import KINDS, read_rope

NOMIC = Names(
    norm="emb_ln",
    layer="encoder.layers.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm=("norm1",),
    up=("mlp.fc11", "mlp.fc12"),
    down="mlp.fc2",
    mlp_norm="norm2",
    masked_norm="cls.predictions.transform.layer_norm",
)
GTE = Names(
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm=("attn_ln",),
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    masked="lm_head.dense",
    masked_norm="lm_head.norm",
    decoder="lm_head.decoder",
    decoder_bias="lm_head.decoder.bias",
)

_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "hidden_act": "activation_function",
}
"""transformers' keys -> those of the config.json that came with the first NomicBERT checkpoints."""

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
    read = Config(config, _NOMIC_KEYS)
    read.only(_NOMIC_SWITCHES)
    act = "silu" if read.get("hidden_act") == "swiglu" else read.activation("hidden_act", "silu")
    return _spec(read, NOMIC, act, biased=frozenset(("norm",)), theta=1000.0, positions=2048, segments=2)


def gte_spec(config: dict[str, Any]) -> EncoderSpec:
    """As nomic_spec."""
    read = Config(config)
    read.only(_GTE_SWITCHES)
    new, act = read.kind == "new", read.activation("hidden_act")
    masked = act if new else "gelu"  # transformers': whatever hidden_act says
    theta = 10_000.0 if new else 160_000.0
    return _spec(read, GTE, act, masked, biased=ALL - {"up"}, theta=theta, positions=8192, segments=1)


def _spec(
    read: Config,
    names: Names,
    act: str,
    masked: str | None = None,
    *,
    biased: frozenset[str],
    theta: float,
    positions: int,
    segments: int,
) -> EncoderSpec:
    """act, masked: as read_encoder's. The last three: defaults."""
    eps = read.number("layer_norm_eps", 1e-12)
    spec = read_encoder(
        read, names, eps=eps, activation=act, masked=masked, positions=positions, segments=segments, even=True
    )
    kinds = ("default", "linear", "ntk") if read.kind == "new" else KINDS
    rope = read_rope(read.values, theta, spec.heads.head_dim, key=read.spelt("rope_theta"), kinds=kinds)
    return dataclasses.replace(spec, gated=1, biased=biased, rope=(rope,))


FAMILY = family(
    lambda config: (nomic_spec if config["model_type"] == "nomic_bert" else gte_spec)(config),
    prefixes=("nomic_bert.", "gte.", "new.", "bert.", "model."),
    ignored=(r"pooler\..*", r"cls\..*", r"lm_head\..*", r"classifier\..*", r"(.*\.)?rotary_emb\..*"),
)
