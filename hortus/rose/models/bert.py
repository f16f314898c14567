"""BERT and those built like it: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet.

Learned positions, full attention, a LayerNorm after each residual sum (Devlin et al., arXiv 1810.04805). What differs is
data: the names of the tensors, where positions start, whether there are segments, or a bias by distance (MPNet).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.attention.relative import RelativeBias
from hortus.rose.kernels.few import FEW_TOKENS, LayerWeights, Pair
from hortus.rose.kernels.linear import Linear
from hortus.rose.models import ACTIVATION_NAMES, Classifier, Family, Kit, Step, Vocabulary, Weights
from hortus.rose.network import Inputs
from hortus.types import Int32

_BERT_NAMES = {
    "layer": "encoder.layer.",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_DISTILBERT_NAMES = {
    "layer": "transformer.layer.",
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}
_MPNET_NAMES = _BERT_NAMES | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
_RELATIVE = "encoder.relative_attention_bias.weight"
_BUCKETS = 32
"""MPNet's code divides distances into so many, whatever its config.json says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BertSpec:
    """What config.json says, checked."""

    model_type: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: Heads
    eps: float
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    positions: int
    """Rows of the position table."""
    first_position: int
    """The row that a sequence's first token takes."""
    segments: int
    """Rows of the token type table; 0: there is none."""
    tied: bool
    """The masked language model's last matrix is the word embeddings'."""

    @property
    def names(self) -> dict[str, str]:
        return {"distilbert": _DISTILBERT_NAMES, "mpnet": _MPNET_NAMES}.get(self.model_type, _BERT_NAMES)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that has positions."""
        return self.positions - self.first_position


def spec_from_config(config: dict[str, Any]) -> BertSpec:
    """config.json -> BertSpec; StartError names the key at fault. Defaults are transformers'."""
    kind = config["model_type"]
    distil, mpnet = kind == "distilbert", kind == "mpnet"

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise StartError(f"config.json of {kind}: {key} must be a whole number, not {value!r}")
        return value

    if (how := config.get("position_embedding_type", "absolute")) != "absolute":
        raise StartError(
            f"config.json of {kind}: position_embedding_type {how!r} is not supported; supported: absolute"
        )
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key):
            raise StartError(f"config.json of {kind}: {key} is not supported: only encoders are")
    act = config.get("activation" if distil else "hidden_act", "gelu")
    if act not in ACTIVATION_NAMES:
        raise StartError(
            f"config.json of {kind}: activation {act!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    if mpnet and config.get("relative_attention_num_buckets", _BUCKETS) != _BUCKETS:
        raise StartError(f"config.json of {kind}: relative_attention_num_buckets must be {_BUCKETS}")
    hidden = whole("dim" if distil else "hidden_size")
    heads = whole("n_heads" if distil else "num_attention_heads")
    if not heads or hidden % heads:
        raise StartError(f"config.json of {kind}: hidden size {hidden} is not a multiple of {heads} heads")
    return BertSpec(
        model_type=kind,
        hidden=hidden,
        layers=whole("n_layers" if distil else "num_hidden_layers"),
        intermediate=whole("hidden_dim" if distil else "intermediate_size"),
        vocab=whole("vocab_size"),
        heads=Heads(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        eps=1e-12 if distil else float(config.get("layer_norm_eps", 1e-12)),
        activation=ACTIVATION_NAMES[act],
        positions=whole("max_position_embeddings", 512),
        first_position=2 if mpnet else 0 if kind in ("bert", "distilbert") else whole("pad_token_id", 1) + 1,
        segments=0 if distil or mpnet else whole("type_vocab_size", 2),
        tied=config.get("tie_word_embeddings", True) is not False,
    )


def shapes(spec: BertSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without prefix."""
    h, n = spec.hidden, spec.names
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (spec.vocab, h),
        "embeddings.position_embeddings.weight": (spec.positions, h),
        "embeddings.LayerNorm.weight": (h,),
        "embeddings.LayerNorm.bias": (h,),
    }
    if spec.segments:
        found["embeddings.token_type_embeddings.weight"] = (spec.segments, h)
    if spec.model_type == "mpnet":
        found[_RELATIVE] = (_BUCKETS, spec.heads.heads)
    sizes = {"query": (h, h), "key": (h, h), "value": (h, h), "out": (h, h), "attention_norm": (h,)}
    sizes |= {"up": (spec.intermediate, h), "down": (h, spec.intermediate), "norm": (h,)}
    for layer in range(spec.layers):
        for part, size in sizes.items():
            name = f"{n['layer']}{layer}.{n[part]}"
            found[name + ".weight"], found[name + ".bias"] = size, size[:1]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block: four matrices, and weight and bias of two norms."""

    qkv: Linear
    out: Linear
    attention_norm: Pair
    up: Linear
    down: Linear
    norm: Pair


class Bert:
    """The trunk. query, key and value are one matrix."""

    def __init__(self, spec: BertSpec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops = spec, kit.ops
        relative = weights.pop(_RELATIVE, None)
        bias = None if relative is None else RelativeBias(relative, spec.longest)
        self._attention = kit.attention(spec.heads, bias)
        self._word = weights.pop("embeddings.word_embeddings.weight")
        self._position = weights.pop("embeddings.position_embeddings.weight")[spec.first_position :].contiguous()
        self._segment = weights.pop("embeddings.token_type_embeddings.weight") if spec.segments else None
        # Nearly every batch is of one segment: then its embedding is part of the position's.
        self._position_first_segment = self._position if self._segment is None else self._position + self._segment[0]
        self._norm = weights.pop("embeddings.LayerNorm.weight"), weights.pop("embeddings.LayerNorm.bias")
        layers = [_weights(spec, weights, f"{spec.names['layer']}{n}.") for n in range(spec.layers)]
        self._layers = [_layer(w, kit, spec.activation) for w in layers]
        self._few = kit.few(layers, spec.heads, spec.eps, spec.activation, bias) if kit.few else None
        self._cu_seqlens_cpu: Int32 | None = None

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._cu_seqlens_cpu = cu_seqlens_cpu
        self._attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs) -> Tensor:
        """[T, hidden] after the last layer."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        if inputs.token_types is None or self._segment is None:
            position, segment, types = self._position_first_segment, None, None
        else:
            position, segment, types = self._position, self._segment, inputs.token_types
        x: Tensor = ops.embed_layer_norm(
            inputs.ids, inputs.positions, types, self._word, position, segment, *self._norm, eps
        )
        if self._few is not None and self._cu_seqlens_cpu is not None and len(x) <= FEW_TOKENS:
            return self._few(x, self._cu_seqlens_cpu)
        for layer in self._layers:
            qkv = layer.qkv(x).contiguous().view(-1, 3 * h.heads, h.head_dim)
            q, k, v = torch.split(qkv, h.heads, 1)
            a = self._attention.run(q, k, v).flatten(1)
            x = ops.add_layer_norm(layer.out(a), x, *layer.attention_norm, eps)
            x = ops.add_layer_norm(layer.down(layer.up(x)), x, *layer.norm, eps)
        return x


def _weights(spec: BertSpec, weights: Weights, at: str) -> LayerWeights:
    def take(part: str) -> Pair:
        name = at + spec.names[part]
        return weights.pop(name + ".weight"), weights.pop(name + ".bias")

    qkv = [take(part) for part in ("query", "key", "value")]
    return LayerWeights(
        qkv=(torch.cat([w for w, _ in qkv]), torch.cat([b for _, b in qkv])),
        out=take("out"),
        attention_norm=take("attention_norm"),
        up=take("up"),
        down=take("down"),
        norm=take("norm"),
    )


def _layer(weights: LayerWeights, kit: Kit, activation: str) -> Layer:
    return Layer(
        qkv=kit.linear(*weights.qkv),
        out=kit.linear(*weights.out),
        attention_norm=weights.attention_norm,
        up=kit.linear(*weights.up, activation),
        down=kit.linear(*weights.down),
        norm=weights.norm,
    )


def classifier(spec: BertSpec, labels: int) -> Classifier:
    """*ForSequenceClassification: the first token, one matrix, one more."""
    first, last, act = {
        "bert": ("pooler.dense", "classifier", "tanh"),
        "distilbert": ("pre_classifier", "classifier", "relu"),
    }.get(spec.model_type, ("classifier.dense", "classifier.out_proj", "tanh"))
    h = spec.hidden
    steps = (Step(name=first, inputs=h, outputs=h, activation=act), Step(name=last, inputs=h, outputs=labels))
    return Classifier(pooling="cls", steps=steps)


def vocabulary(spec: BertSpec) -> Vocabulary:
    """*ForMaskedLM: one matrix with a norm, then the vocabulary."""
    act = spec.activation
    name, norm, decoder, bias = {
        "bert": (
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
        "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    }.get(spec.model_type, ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"))
    if name == "lm_head.dense":
        act = "gelu"  # whatever hidden_act says
    h = spec.hidden
    return Vocabulary(
        steps=(Step(name=name, inputs=h, outputs=h, activation=act, norm=norm, eps=spec.eps),),
        decoder=("embeddings.word_embeddings" if spec.tied else decoder) + ".weight",
        tied=spec.tied,
        bias=bias if spec.tied else decoder + ".bias",  # untied, the reference adds the decoder's own
    )


FAMILY = Family(
    spec_from_config=spec_from_config,
    shapes=shapes,
    build=Bert,
    classifier=classifier,
    vocabulary=vocabulary,
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
