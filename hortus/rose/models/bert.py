"""BERT and those built like it: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet. JinaBERT too: see jina_bert.py.

Learned positions, full attention, a LayerNorm after each residual sum (Devlin et al., arXiv 1810.04805). What differs is
data: the names of the tensors, where positions start, whether there are segments, or a bias by distance (MPNet). XLM-RoBERTa
in Jina's own writing (jina-reranker-v2, jina-colbert-v2, jina-embeddings-v3) has other names and may have rotary positions (arXiv
2408.16672) and adapters (adapters.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hortus.rose.attention import Bias
from hortus.rose.attention.relative import learned
from hortus.rose.models import Weights, jina_bert
from hortus.rose.models.adapters import Adapters
from hortus.rose.models.encoder import family
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config, read_encoder
from hortus.rose.models.rotary import KINDS, read_rope

ROBERTA = Names(
    pooler="classifier.dense",
    last="classifier.out_proj",
    masked="lm_head.dense",
    masked_norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    decoder_bias="lm_head.bias",
)
MPNET = dataclasses.replace(
    ROBERTA,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm=("attention.LayerNorm",),
)
DISTILBERT = Names(
    layer="transformer.layer.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm=("sa_layer_norm",),
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    pooler="pre_classifier",
    masked="vocab_transform",
    masked_norm="vocab_layer_norm",
    decoder="vocab_projector",
    decoder_bias="vocab_projector.bias",
)
JINA = dataclasses.replace(
    ROBERTA,
    norm="emb_ln",
    layer="encoder.layers.",
    qkv=("mixer.Wqkv",),
    out="mixer.out_proj",
    attention_norm=("norm1",),
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="norm2",
)
_NAMES = {"bert": Names(), "distilbert": DISTILBERT, "mpnet": MPNET}
"""By model_type; all others': RoBERTa's."""
_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}

MOST_ADAPTERS = 255
"""A token's type is one byte, and 0 is none."""
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
    distil, mpnet = config.get("model_type") == "distilbert", config.get("model_type") == "mpnet"
    read = Config(config, _DISTILBERT_KEYS if distil else {})
    third = read.kind == "jina_embeddings_v3"  # transformers' name for it, whose adapters are files of their own
    rotary = third or (read.kind == "xlm-roberta" and read.get("position_embedding_type") == "rotary")
    jina = rotary or "XLMRobertaFlashConfig" in str(read.get("auto_map"))  # said only there
    if not jina:
        read.only({"lora_adaptations": None})
    else:
        read.only({"rotary_emb_interleaved": False, "rotary_emb_scale_base": None})
    adapted = jina and not third and read.get("lora_adaptations") is not None
    if adapted:
        read.only(
            {
                "type_vocab_size": 1,
                "position_embedding_type": "rotary",
                "load_trained_adapters": True,
                "truncate_dim": None,
            }
        )
    positions = "rotary" if rotary else "absolute"
    read.only({"position_embedding_type": positions, "is_decoder": False, "add_cross_attention": False})
    if mpnet:
        read.only({"relative_attention_num_buckets": _BUCKETS})
    # Row 0 is the first token's, or the one after padding's (MPNet's code says 2, whatever padding is).
    plain = read.kind in ("bert", "distilbert")
    first = 2 if mpnet else 0 if plain else read.whole("pad_token_id", 1, least=0) + 1
    spec = read_encoder(
        read,
        JINA if jina else _NAMES.get(read.kind, ROBERTA),
        eps=1e-12 if distil else read.number("layer_norm_eps", 1e-5 if third else 1e-12),
        activation=read.activation("activation" if distil else "hidden_act"),
        masked=None if plain else "gelu",  # whatever hidden_act is
        pooler="relu" if distil else "tanh",
        positions=8194 if third else 512,
        segments=1 if third else 2,
        even=rotary,
    )
    if rotary:
        read.only({"rotary_emb_dim": spec.heads.head_dim})
        theta, key, kinds = (20_000.0, "rope_theta", KINDS) if third else (10_000.0, "rotary_emb_base", ("default",))
        rope = read_rope(config, theta, spec.heads.head_dim, key=key, kinds=kinds)
        return dataclasses.replace(spec, rope=(rope,), adapters=_adapters(read, spec.names) if adapted else None)
    return dataclasses.replace(
        spec,
        positions=read.whole("max_position_embeddings", 512, least=first + 1) - first,
        first_position=first,
        segments=0 if distil or mpnet else spec.segments,
        scores=LearnedByDistance() if mpnet else None,
    )


def _adapters(read: Config, names: Names) -> Adapters:
    """jina-embeddings-v3's, one a task."""
    if not isinstance(tasks := read.get("lora_adaptations"), list) or not 1 <= len(tasks) <= MOST_ADAPTERS:
        raise read.wrong(f"lora_adaptations must be a list of 1 to {MOST_ADAPTERS} names, not {tasks!r:.80}")
    rank = read.whole("lora_rank", 4)
    scale = read.number("lora_alpha", 1.0) / rank
    return Adapters(count=len(tasks), rank=rank, scale=scale, tables=(names.word, names.segment))


FAMILY = family(
    spec_from_config,
    prefixes=("bert.", "roberta.", "distilbert.", "mpnet.", "model."),
    renames=(
        ("LayerNorm.gamma", "LayerNorm.weight"),
        ("LayerNorm.beta", "LayerNorm.bias"),
        (".parametrizations.weight.original", ".weight"),
        (".parametrizations.weight.0.lora_A", ".lora_A"),
        (".parametrizations.weight.0.lora_B", ".lora_B"),
    ),
    ignored=(
        r"pooler\..*",
        r"cls\..*",
        r"lm_head\..*",
        r"vocab_(transform|layer_norm|projector)\..*",
        r"(pre_)?classifier\..*",
        r"embeddings\.(position_ids|token_type_ids)",
    ),
)
