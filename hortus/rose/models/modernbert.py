"""ModernBERT: no learned positions, LayerNorm before each block, and most layers look only some tokens to each side.

Rotary positions with a base for each kind of layer, GeGLU, no biases by default (Warner et al., arXiv 2412.13663;
transformers' ModernBertModel for the details).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.kernels.linear import ACTIVATIONS, Linear
from hortus.rose.models import ACTIVATION_NAMES, Classifier, Family, Kit, Step, Vocabulary, Weights
from hortus.rose.models.rotary import Rope, read_rope, rotary_tables
from hortus.rose.network import Inputs
from hortus.types import Int32

_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModernBertSpec:
    """What config.json says, checked."""

    model_type: str
    hidden: int
    intermediate: int
    vocab: int
    heads: Heads
    """Of a layer that sees all tokens."""
    window: int
    """Tokens to each side that the other layers see."""
    windowed: tuple[bool, ...]
    """Layer by layer."""
    ropes: tuple[Rope, Rope]
    """Of layers that see all, and of the others."""
    positions: int
    """Longest sequence: rows of the rotary tables."""
    eps: float
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    tied: bool
    """The masked language model's last matrix is the word embeddings'."""
    decoder_bias: bool
    head_bias: bool
    head_activation: str
    pooling: str
    """A classifier's: cls or mean."""


def spec_from_config(config: dict[str, Any]) -> ModernBertSpec:
    """config.json -> ModernBertSpec; StartError names the key at fault. Defaults are transformers'."""

    def wrong(key: str, wanted: str) -> StartError:
        return StartError(f"config.json of modernbert: {key} must be {wanted}, not {config.get(key)!r}")

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(key, "a positive whole number")
        return value

    def activation(key: str) -> str:
        if (name := config.get(key, "gelu")) not in ACTIVATION_NAMES:
            raise wrong(key, f"one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[name]

    hidden, heads, layers = whole("hidden_size"), whole("num_attention_heads"), whole("num_hidden_layers")
    if hidden % heads or hidden // heads % 2:
        raise StartError(f"config.json of modernbert: hidden size {hidden} does not make {heads} heads of even size")
    every = whole("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_WINDOWED):
        raise wrong("layer_types", f"{layers} times one of {', '.join(_WINDOWED)}")
    if (pooling := config.get("classifier_pooling", "cls")) not in ("cls", "mean"):
        raise wrong("classifier_pooling", "cls or mean")
    return ModernBertSpec(
        model_type="modernbert",
        hidden=hidden,
        intermediate=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        heads=Heads(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        window=whole("local_attention", 128) // 2,
        windowed=tuple(_WINDOWED[k] for k in kinds),
        ropes=(
            read_rope(config, 160_000.0, hidden // heads, layers="full_attention", key="global_rope_theta"),
            read_rope(config, 10_000.0, hidden // heads, layers="sliding_attention", key="local_rope_theta"),
        ),
        positions=whole("max_position_embeddings", 8192),
        eps=float(config.get("norm_eps", 1e-5)),
        activation=activation("hidden_activation"),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_bias=bool(config.get("norm_bias", False)),
        tied=config.get("tie_word_embeddings", True) is not False,
        decoder_bias=bool(config.get("decoder_bias", True)),
        head_bias=bool(config.get("classifier_bias", False)),
        head_activation=activation("classifier_activation"),
        pooling=pooling,
    )


def shapes(spec: ModernBertSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without `model.`."""
    h, inner = spec.hidden, spec.intermediate
    found: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (spec.vocab, h)}

    def add(name: str, *shape: int, bias: bool) -> None:
        found[name + ".weight"] = shape
        if bias:
            found[name + ".bias"] = shape[:1]

    add("embeddings.norm", h, bias=spec.norm_bias)
    add("final_norm", h, bias=spec.norm_bias)
    for n in range(len(spec.windowed)):
        at = f"layers.{n}."
        if n:  # the first layer reads what the embeddings' norm has just normed
            add(at + "attn_norm", h, bias=spec.norm_bias)
        add(at + "attn.Wqkv", 3 * h, h, bias=spec.attention_bias)
        add(at + "attn.Wo", h, h, bias=spec.attention_bias)
        add(at + "mlp_norm", h, bias=spec.norm_bias)
        add(at + "mlp.Wi", 2 * inner, h, bias=spec.mlp_bias)
        add(at + "mlp.Wo", h, inner, bias=spec.mlp_bias)
    return found


Norm = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block."""

    attention_norm: Norm | None
    qkv: Callable[[Tensor, Any], Tensor]
    """(input, the step's angles) -> q, k and v; q and k turned."""
    windowed: bool
    out: Linear
    mlp_norm: Norm
    up: Linear
    """[what is activated | what it is multiplied by]"""
    down: Linear


class ModernBert:
    """The trunk. Two attentions, each with its window and its rotary tables."""

    def __init__(self, spec: ModernBertSpec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops = spec, kit.ops
        self._act = ACTIVATIONS[spec.activation]
        self._word = weights.pop("embeddings.tok_embeddings.weight")
        self._norm = _norm(weights, "embeddings.norm")
        self._final_norm = _norm(weights, "final_norm")
        h, device = spec.heads, self._word.device
        kinds = {False: h, True: Heads(heads=h.heads, kv_heads=h.kv_heads, head_dim=h.head_dim, window=spec.window)}
        self._attention = {w: kit.attention(kinds[w]) for w in sorted(set(spec.windowed))}
        self._rotary = {
            w: kit.ops.Rotary(*rotary_tables(spec.ropes[w], h.head_dim, spec.positions, device))
            for w in self._attention
        }
        self._layers = [_layer(spec, weights, kit, n, self._rotary[w]) for n, w in enumerate(spec.windowed)]

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        for attention in self._attention.values():
            attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs) -> Tensor:
        """[T, hidden] after the final norm."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        x: Tensor = ops.embed_layer_norm(inputs.ids, inputs.positions, None, self._word, None, None, *self._norm, eps)
        angles = {windowed: rotary.at(inputs.positions) for windowed, rotary in self._rotary.items()}
        for layer in self._layers:
            y = x if layer.attention_norm is None else self._normed(x, layer.attention_norm)
            qkv = layer.qkv(y, angles[layer.windowed]).contiguous()  # [T, 3 heads head_dim]
            q, k, v = torch.split(qkv.view(-1, 3 * h.heads, h.head_dim), h.heads, 1)
            x = x + layer.out(self._attention[layer.windowed].run(q, k, v).flatten(1))
            activated, gate = layer.up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(self._act(activated) * gate)
        return self._normed(x, self._final_norm)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (self._spec.hidden,), *norm, self._spec.eps)


def _layer(spec: ModernBertSpec, weights: Weights, kit: Kit, n: int, rotary: Any) -> Layer:
    at, h = f"layers.{n}.", spec.heads
    qkv = weights.pop(at + "attn.Wqkv.weight"), weights.pop(at + "attn.Wqkv.bias", None)
    return Layer(
        attention_norm=_norm(weights, at + "attn_norm") if n else None,
        qkv=kit.ops.turned(*qkv, None, None, rotary, h.heads, h.kv_heads, spec.eps, kit.linear),
        windowed=spec.windowed[n],
        out=_linear(weights, kit, at + "attn.Wo"),
        mlp_norm=_norm(weights, at + "mlp_norm"),
        up=_linear(weights, kit, at + "mlp.Wi"),
        down=_linear(weights, kit, at + "mlp.Wo"),
    )


def _norm(weights: Weights, name: str) -> Norm:
    return weights.pop(name + ".weight"), weights.pop(name + ".bias", None)


def _linear(weights: Weights, kit: Kit, name: str) -> Linear:
    return kit.linear(weights.pop(name + ".weight"), weights.pop(name + ".bias", None))


def _head(spec: ModernBertSpec) -> Step:
    return Step(
        name="head.dense",
        inputs=spec.hidden,
        outputs=spec.hidden,
        activation=spec.head_activation,
        bias=spec.head_bias,
        norm="head.norm",
        norm_bias=spec.norm_bias,
        eps=spec.eps,
    )


def classifier(spec: ModernBertSpec, labels: int) -> Classifier:
    """ModernBertForSequenceClassification."""
    last = Step(name="classifier", inputs=spec.hidden, outputs=labels)
    return Classifier(pooling=spec.pooling, steps=(_head(spec), last))


def vocabulary(spec: ModernBertSpec) -> Vocabulary:
    """ModernBertForMaskedLM."""
    return Vocabulary(
        steps=(_head(spec),),
        decoder=("embeddings.tok_embeddings" if spec.tied else "decoder") + ".weight",
        tied=spec.tied,
        bias="decoder.bias" if spec.decoder_bias else None,
    )


FAMILY = Family(
    spec_from_config=spec_from_config,
    shapes=shapes,
    build=ModernBert,
    classifier=classifier,
    vocabulary=vocabulary,
    prefixes=("model.",),
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*", r"rotary_emb\..*"),
)
