"""Qwen3: Qwen3-Embedding (causal, last token) and pplx-embed (bidirectional, mean), one trunk.

RMSNorm before each block, a per-head RMSNorm on q and k before the rotary embedding, grouped-query attention, SwiGLU, a
final norm (Qwen3 technical report, arXiv 2505.09388; transformers' Qwen3Model for the details). The two differ in one
bit: whether a token sees those after it. Qwen2 has a bias on q, k and v in place of those norms; Llama and Mistral (llama.py)
have neither. The end token that Qwen3-Embedding appends is the tokenizer's matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.kernels.linear import Rows
from hortus.rose.models import Attended, Family, Kit, Weights
from hortus.rose.models.decoder_heads import classifier, language
from hortus.rose.models.reading import Config
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
    read = Config({"model_type": "qwen3"} | config)
    kind, qwen2 = read.kind, read.kind == "qwen2"
    read.one_of("hidden_act", "silu", ("silu",))
    if read.flag("mlp_bias", False):
        raise read.wrong("mlp_bias is not supported")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    # A window in config.json counts only when use_sliding_window or a layer's type turns it on.
    if kinds or (config.get("use_sliding_window") and config.get("sliding_window")):
        raise read.wrong(
            f"sliding-window or other attention kinds ({', '.join(sorted(kinds)) or 'use_sliding_window'}) are not "
            "supported; supported: full_attention"
        )
    heads = read.whole("num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else read.whole("num_key_value_heads")
    # Not hidden / heads: the 4B model has 32 heads of 128 on a hidden size of 2560.
    head_dim = read.whole("hidden_size") // heads if config.get("head_dim") is None else read.whole("head_dim")
    positions, causal = read.whole("max_position_embeddings"), _causal(read)
    window: int | None = None
    if kind == "mistral" and config.get("sliding_window") is not None:  # a token among those it sees
        if not causal:
            raise read.wrong("sliding_window without causal attention is not supported")
        window = read.whole("sliding_window") - 1 if read.whole("sliding_window") < positions else None
    bias = read.flag("attention_bias", False)
    return Qwen3Spec(
        model_type=kind,
        hidden=read.whole("hidden_size"),
        layers=read.whole("num_hidden_layers"),
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=dataclasses.replace(read.grouped_heads(heads, kv_heads, head_dim), causal=causal, window=window),
        eps=read.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, 10_000.0, head_dim),
        positions=positions,
        qk_norm=kind in ("qwen3", "bidirectional_pplx_qwen3"),
        qkv_bias=bias or qwen2,
        out_bias=bias and not qwen2,
        tied=read.flag("tie_word_embeddings", False),
    )


def _causal(read: Config) -> bool:
    """Whether a token sees only those before it.

    pplx-embed says use_bidirectional_attention; its model_type alone decides when the key is absent. Other fine-tunes say
    is_causal, as transformers does.
    """
    if read.get("use_bidirectional_attention") is None:
        return read.kind != "bidirectional_pplx_qwen3" and read.get("is_causal") is not False
    return not read.flag("use_bidirectional_attention", False)


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

    qkv: Callable[[Rows, Any], Tensor]
    """(input, the step's angles) -> q, k and v; q and k normed and turned."""
    o: Callable[[Tensor, Tensor], Rows]
    """(attention's output, residual) -> the MLP's input, normed; the residual has grown."""
    gated: Callable[[Rows], Rows]
    down: Callable[[Rows, Tensor], Rows]
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
        self._attended: Attended | None = None
        if kit.attended is not None:
            self._attended = kit.attended([layer.qkv for layer in self._layers], spec.heads, spec.eps)

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs, rows: Tensor | None = None) -> Tensor:
        """After the final norm; see Trunk."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        x: Rows  # what a block reads; the residual grows in place
        residual, x = ops.embed_rms_norm(inputs.ids, self._embed, 1.0, self._first_norm, eps)
        attended = self._attended
        if attended is not None and inputs.ids.shape[0] > attended.most_tokens:
            attended = None
        angles = self._rotary.at(inputs.positions)
        for layer in self._layers:
            if attended is not None:
                mixed = attended(layer.qkv, x, inputs)
            else:
                qkv = layer.qkv(x, angles)  # [T, (heads + 2 kv_heads) head_dim]
                q, k, v = torch.split(qkv.view(qkv.shape[0], -1, h.head_dim), [h.heads, h.kv_heads, h.kv_heads], 1)
                mixed = self._attention.run(q, k, v).flatten(1)
            if rows is not None and layer is self._layers[-1]:
                mixed, residual = mixed.index_select(0, rows), residual.index_select(0, rows)
            x = layer.o(mixed, residual)
            x = layer.down(layer.gated(x), residual)
        last: Tensor = x
        return last


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
        down=kit.ops.add_norm(take("mlp.down_proj"), None, next_norm, eps, kit.linear, last=n == spec.layers - 1),
    )


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
