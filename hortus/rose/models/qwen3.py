"""Qwen3: Qwen3-Embedding (causal, last token) and pplx-embed (bidirectional, mean), one trunk.

RMSNorm before each block, a per-head RMSNorm on q and k before the rotary embedding, grouped-query attention, SwiGLU, a
final norm (Qwen3 technical report, arXiv 2505.09388; transformers' Qwen3Model for the details). The two differ in one
bit: whether a token sees those after it. Qwen2 has a bias on q, k and v in place of those norms; Llama and Mistral (llama.py)
have neither. The end token that Qwen3-Embedding appends is the tokenizer's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import Heads
from hortus.rose.kernels.linear import Linear
from hortus.rose.models import Classifier, Family, Kit, Step, Vocabulary, Weights
from hortus.rose.models.rotary import Rope, read_rope, rotary_tables
from hortus.rose.network import Inputs
from hortus.types import Int32


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Spec:
    """What config.json says, checked."""

    model_type: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: Heads
    eps: float
    rope: Rope
    positions: int
    """Longest sequence: rows of the rotary tables."""
    qk_norm: bool
    """q and k are normed by head."""
    qkv_bias: bool
    out_bias: bool
    tied: bool
    """The language model's last matrix is the word embeddings'."""


def spec_from_config(config: dict[str, Any]) -> Qwen3Spec:
    """config.json -> Qwen3Spec; StartError names the key that is missing or the feature we lack."""
    model_type = config.get("model_type", "qwen3")

    def whole(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StartError(f"config.json of {model_type}: {key} must be a positive whole number, not {value!r}")
        return value

    if (act := config.get("hidden_act", "silu")) != "silu":
        raise StartError(f"config.json of {model_type}: hidden_act {act!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise StartError(f"config.json of {model_type}: mlp_bias is not supported")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    # A window in config.json counts only when use_sliding_window or a layer's type turns it on.
    if kinds or (config.get("use_sliding_window") and config.get("sliding_window")):
        raise StartError(
            f"config.json of {model_type}: sliding-window or other attention kinds "
            f"({', '.join(sorted(kinds)) or 'use_sliding_window'}) are not supported; supported: full_attention"
        )
    heads = whole("num_attention_heads")
    kv_heads = whole("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    # Not hidden / heads: the 4B model has 32 heads of 128 on a hidden size of 2560.
    head_dim = whole("head_dim") if config.get("head_dim") is not None else whole("hidden_size") // heads
    if heads % kv_heads or head_dim % 2:
        raise StartError(
            f"config.json of {model_type}: {heads} heads must be a multiple of {kv_heads} key-value heads, "
            f"and head_dim {head_dim} even"
        )
    positions, causal = whole("max_position_embeddings"), _causal(config, model_type)
    window: int | None = None
    if model_type == "mistral" and config.get("sliding_window") is not None:  # a token among those it sees
        if not causal:
            raise StartError(f"config.json of {model_type}: sliding_window without causal attention is not supported")
        window = whole("sliding_window") - 1 if whole("sliding_window") < positions else None
    bias, qwen2 = bool(config.get("attention_bias", False)), model_type == "qwen2"
    return Qwen3Spec(
        model_type=model_type,
        hidden=whole("hidden_size"),
        layers=whole("num_hidden_layers"),
        intermediate=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        heads=Heads(heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal, window=window),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, 10_000.0, head_dim),
        positions=positions,
        qk_norm=model_type in ("qwen3", "bidirectional_pplx_qwen3"),
        qkv_bias=bias or qwen2,
        out_bias=bias and not qwen2,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _causal(config: dict[str, Any], model_type: str) -> bool:
    """Whether a token sees only those before it.

    pplx-embed says use_bidirectional_attention; its model_type alone decides when the key is absent. Other fine-tunes say
    is_causal, as transformers does.
    """
    both_ways = config.get("use_bidirectional_attention")
    if both_ways is None:
        both_ways = model_type == "bidirectional_pplx_qwen3" or config.get("is_causal") is False
    return not both_ways


def shapes(spec: Qwen3Spec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without `model.`."""
    h, d = spec.hidden, spec.heads.head_dim
    q, kv = spec.heads.heads * d, spec.heads.kv_heads * d
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab, h), "norm.weight": (h,)}
    for n in range(spec.layers):
        at = f"layers.{n}."
        found[at + "input_layernorm.weight"] = (h,)
        found[at + "post_attention_layernorm.weight"] = (h,)
        if spec.qk_norm:
            found[at + "self_attn.q_norm.weight"] = (d,)
            found[at + "self_attn.k_norm.weight"] = (d,)
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            found[f"{at}self_attn.{name}_proj.weight"] = (out, h)
            if spec.qkv_bias:
                found[f"{at}self_attn.{name}_proj.bias"] = (out,)
        found[at + "self_attn.o_proj.weight"] = (h, q)
        if spec.out_bias:
            found[at + "self_attn.o_proj.bias"] = (h,)
        found[at + "mlp.gate_proj.weight"] = (spec.intermediate, h)
        found[at + "mlp.up_proj.weight"] = (spec.intermediate, h)
        found[at + "mlp.down_proj.weight"] = (h, spec.intermediate)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block: matrices joined with what follows them, see kernels/twin.py."""

    qkv: Callable[[Tensor, Any], Tensor]
    """(input, the step's angles) -> q, k and v; q and k normed and turned."""
    o: Callable[[Tensor, Tensor], Tensor]
    """(attention's output, residual) -> the MLP's input, normed; the residual has grown."""
    gated: Linear
    down: Callable[[Tensor, Tensor], Tensor]
    """(gated, residual) -> the next block's input, normed; the residual has grown."""


class Qwen3:
    """The trunk. Matrices that read the same input are one: qkv, and gate with up."""

    def __init__(self, spec: Qwen3Spec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops = spec, kit.ops
        self._attention = kit.attention(spec.heads)
        self._embed = weights.pop("embed_tokens.weight")
        tables = rotary_tables(spec.rope, spec.heads.head_dim, spec.positions, self._embed.device)
        self._rotary = kit.ops.Rotary(*tables)
        norms = [weights.pop(f"layers.{n}.input_layernorm.weight") for n in range(spec.layers)]
        norms.append(weights.pop("norm.weight"))
        self._first_norm = norms[0]
        self._layers = [_layer(spec, weights, kit, n, self._rotary, norms[n + 1]) for n in range(spec.layers)]

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs) -> Tensor:
        """[T, hidden] after the final norm."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        residual = ops.embed(inputs.ids, self._embed)  # [T, hidden], grows in place
        x: Tensor = ops.rms_norm(residual, self._first_norm, eps)
        angles = self._rotary.at(inputs.positions)
        for layer in self._layers:
            qkv = layer.qkv(x, angles)  # [T, (heads + 2 kv_heads) head_dim]
            q, k, v = torch.split(qkv.view(qkv.shape[0], -1, h.head_dim), [h.heads, h.kv_heads, h.kv_heads], 1)
            x = layer.o(self._attention.run(q, k, v).flatten(1), residual)
            x = layer.down(layer.gated(x), residual)
        return x


def _layer(spec: Qwen3Spec, weights: Weights, kit: Kit, n: int, rotary: Any, next_norm: Tensor) -> Layer:
    """Block n, its weights taken out of `weights`. next_norm: what norms the residual after it."""
    at, eps, h = f"layers.{n}.", spec.eps, spec.heads

    def take(name: str) -> Tensor:
        return weights.pop(f"{at}{name}.weight")

    def bias(*names: str) -> Tensor:
        return torch.cat([weights.pop(f"{at}{name}.bias") for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        qkv=kit.ops.turned(
            torch.cat([take(name) for name in qkv]),
            bias(*qkv) if spec.qkv_bias else None,
            take("self_attn.q_norm") if spec.qk_norm else None,
            take("self_attn.k_norm") if spec.qk_norm else None,
            rotary,
            h.heads,
            h.kv_heads,
            eps,
            kit.linear,
        ),
        o=kit.ops.add_norm(
            take("self_attn.o_proj"),
            bias("self_attn.o_proj") if spec.out_bias else None,
            take("post_attention_layernorm"),
            eps,
            kit.linear,
        ),
        gated=kit.ops.gated(take("mlp.gate_proj"), take("mlp.up_proj"), kit.linear),
        down=kit.ops.add_norm(take("mlp.down_proj"), None, next_norm, eps, kit.linear),
    )


def classifier(spec: Qwen3Spec, labels: int) -> Classifier:
    """*ForSequenceClassification: one matrix, on the last token."""
    return Classifier(pooling="last", steps=(Step(name="score", inputs=spec.hidden, outputs=labels, bias=False),))


def language(spec: Qwen3Spec) -> Vocabulary:
    """*ForCausalLM."""
    name = "embed_tokens.weight" if spec.tied else "lm_head.weight"
    return Vocabulary(steps=(), decoder=name, tied=spec.tied, bias=None)


FAMILY = Family(
    spec_from_config=spec_from_config,
    shapes=shapes,
    build=Qwen3,
    classifier=classifier,
    language=language,
    prefixes=("model.",),
    ignored=(r"lm_head\..*", r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    refused_dtypes=(("float16", "activations overflow its range and become NaN; use bfloat16 or float32"),),
)
