"""Gemma 3 text (EmbeddingGemma among them) and Gemma: norms before and after each block, wide heads, scaled embeddings.

RMSNorm weights are stored less one. Gemma 3 norms q and k by head, norms what a block gives before it is added, and most of
its layers see a window, with a rotary base of their own; EmbeddingGemma sees both ways (Gemma 3 report, arXiv 2503.19786;
EmbeddingGemma, arXiv 2509.20354). Gemma (arXiv 2403.08295) has none of these. transformers' models for the details.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.kernels.linear import Linear
from hortus.rose.models import Family, Kit, Weights
from hortus.rose.models.decoder_heads import classifier, language
from hortus.rose.models.reading import LAYER_TYPES, Config
from hortus.rose.models.rotary import Rope, read_rope, rotary_tables
from hortus.rose.network import Inputs
from hortus.types import Int32


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaSpec:
    """What config.json says, checked."""

    model_type: str
    hidden: int
    intermediate: int
    vocab: int
    heads: Heads
    """Of a layer that sees all tokens (all before it, when causal)."""
    window: int
    """Tokens that the other layers see to each side, or before."""
    windowed: tuple[bool, ...]
    """Layer by layer."""
    ropes: tuple[Rope, Rope]
    """Of layers that see all, and of the others."""
    positions: int
    """Longest sequence: rows of the rotary tables."""
    eps: float
    activation: str
    """A key of kernels.linear.ACTIVATIONS."""
    third: bool
    """Gemma 3: q and k are normed, and what a block gives too."""
    tied: bool
    """The language model's last matrix is the word embeddings'."""


def spec_from_config(config: dict[str, Any]) -> GemmaSpec:
    """config.json -> GemmaSpec; StartError names the key at fault. Defaults are transformers'."""
    read = Config({"model_type": "gemma3_text"} | config)
    third = read.kind == "gemma3_text"
    for key in ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise read.wrong(f"{key} {config[key]!r:.80} is not supported")
    # Gemma's first files say gelu and mean its approximation by tanh; Gemma 3 means what it says.
    key = "hidden_activation" if third else "hidden_act"
    activation = read.activation(key, "gelu_pytorch_tanh")
    if activation == "gelu" and not third:
        activation = "gelu_tanh"
    head_dim = read.whole("head_dim", 256)
    heads = read.grouped_heads(read.whole("num_attention_heads"), read.whole("num_key_value_heads"), head_dim)
    both_ways, layers = read.flag("use_bidirectional_attention", False), read.whole("num_hidden_layers")
    if config.get("is_causal") is False and not both_ways:
        if third:  # what its windows would be is nowhere said
            raise read.wrong("is_causal false without use_bidirectional_attention is not supported")
        both_ways = True
    every = read.whole("sliding_window_pattern", 6)
    default = ["sliding_attention" if third and (n + 1) % every else "full_attention" for n in range(layers)]
    windowed = read.windowed(default, LAYER_TYPES if third else LAYER_TYPES[:1])
    sliding = read.whole("sliding_window", 4096) if any(windowed) else 2
    return GemmaSpec(
        model_type=read.kind,
        hidden=read.whole("hidden_size"),
        intermediate=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        heads=replace(
            heads, causal=not both_ways, scaled=read.whole("query_pre_attn_scalar", 256) ** -0.5 if third else None
        ),
        # Both ways it is the width of the whole window; else the token itself is one of those seen.
        window=sliding // 2 if both_ways else sliding - 1,
        windowed=windowed,
        ropes=(
            read_rope(config, 1_000_000.0, head_dim, layers="full_attention")
            if third
            else read_rope(config, 10_000.0, head_dim),
            # A rope_scaling is that of the layers that see all.
            read_rope(
                {**config, "rope_scaling": None},
                10_000.0,
                head_dim,
                layers="sliding_attention",
                key="rope_local_base_freq",
            ),
        ),
        positions=read.whole("max_position_embeddings", 131_072 if third else 8192),
        eps=read.number("rms_norm_eps", 1e-6),
        activation=activation,
        third=third,
        tied=config.get("tie_word_embeddings", True) is not False,
    )


def shapes(spec: GemmaSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the trunk by its checkpoint name without `model.`."""
    h, d, inner = spec.hidden, spec.heads.head_dim, spec.intermediate
    q, kv = spec.heads.heads * d, spec.heads.kv_heads * d
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab, h), "norm.weight": (h,)}
    for n in range(len(spec.windowed)):
        at = f"layers.{n}."
        for norm in ("input", "post_attention", *(("pre_feedforward", "post_feedforward") if spec.third else ())):
            found[f"{at}{norm}_layernorm.weight"] = (h,)
        if spec.third:
            found[at + "self_attn.q_norm.weight"] = (d,)
            found[at + "self_attn.k_norm.weight"] = (d,)
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            found[f"{at}self_attn.{name}_proj.weight"] = (out, h)
        found[at + "self_attn.o_proj.weight"] = (h, q)
        found[at + "mlp.gate_proj.weight"] = (inner, h)
        found[at + "mlp.up_proj.weight"] = (inner, h)
        found[at + "mlp.down_proj.weight"] = (h, inner)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block. Norms are whole (the stored weight and one), in float32."""

    windowed: bool
    qkv: Callable[[Tensor, Any], Tensor]
    """(input, the step's angles) -> q, k and v; q and k turned."""
    out: Linear
    out_norm: Tensor | None
    mlp_norm: Tensor
    up: Linear
    """[what is activated | what it is multiplied by]"""
    down: Linear
    down_norm: Tensor | None
    next_norm: Tensor
    """What norms the residual after the block."""


class Gemma:
    """The trunk. An attention with its rotary tables for each kind of layer."""

    def __init__(self, spec: GemmaSpec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops = spec, kit.ops
        self._embed = weights.pop("embed_tokens.weight")
        # Rounded to the run's format, as the reference does: 27.71 is 27.75 in bfloat16.
        self._scale = float(torch.tensor(spec.hidden**0.5).to(self._embed.dtype))
        kinds = {False: spec.heads, True: replace(spec.heads, window=spec.window)}
        self._attention = {w: kit.attention(kinds[w]) for w in sorted(set(spec.windowed))}
        self._rotary = {}
        for w in self._attention:
            tables = rotary_tables(spec.ropes[w], spec.heads.head_dim, spec.positions, self._embed.device)
            self._rotary[w] = kit.ops.Rotary(*tables)
        layers = range(len(spec.windowed))
        norms = [_norm(weights, f"layers.{n}.input_layernorm") for n in layers] + [_norm(weights, "norm")]
        self._first_norm = norms[0]
        self._layers = [_layer(spec, weights, kit, n, self._rotary[spec.windowed[n]], norms[n + 1]) for n in layers]

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        for attention in self._attention.values():
            attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs, rows: Tensor | None = None) -> Tensor:
        """After the final norm; see Trunk."""
        ops, eps, h = self._ops, self._spec.eps, self._spec.heads
        x: Tensor  # what a block reads; the residual grows in place
        residual, x = ops.embed_rms_norm(inputs.ids, self._embed, self._scale, self._first_norm, eps)
        angles = {windowed: rotary.at(inputs.positions) for windowed, rotary in self._rotary.items()}
        for layer in self._layers:
            qkv = layer.qkv(x, angles[layer.windowed])  # [T, (heads + 2 kv_heads) head_dim]
            q, k, v = torch.split(qkv.view(qkv.shape[0], -1, h.head_dim), [h.heads, h.kv_heads, h.kv_heads], 1)
            mixed = self._attention[layer.windowed].run(q, k, v).flatten(1)
            if rows is not None and layer is self._layers[-1]:
                mixed, residual = mixed.index_select(0, rows), residual.index_select(0, rows)
            x = self._add_norm(layer.out(mixed), layer.out_norm, residual, layer.mlp_norm)
            x = self._add_norm(
                layer.down(ops.glu(layer.up(x), self._spec.activation, 0)), layer.down_norm, residual, layer.next_norm
            )
        return x

    def _add_norm(self, x: Tensor, own: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        """residual += x, normed by its own norm where it has one; -> the residual, normed."""
        ops, eps = self._ops, self._spec.eps
        x = x.contiguous() if own is None else ops.rms_norm(x.contiguous(), own, eps)
        y: Tensor = ops.add_rms_norm_(x, residual, norm, eps)
        return y


def _norm(weights: Weights, name: str) -> Tensor:
    return weights.pop(name + ".weight").float() + 1


def _layer(spec: GemmaSpec, weights: Weights, kit: Kit, n: int, rotary: Any, next_norm: Tensor) -> Layer:
    """Block n, its weights taken out of `weights`."""
    at, h = f"layers.{n}.", spec.heads

    def take(name: str) -> Tensor:
        return weights.pop(f"{at}{name}.weight")

    qkv = torch.cat([take(f"self_attn.{name}_proj") for name in "qkv"])
    q_norm, k_norm = (_norm(weights, f"{at}self_attn.{name}_norm") if spec.third else None for name in "qk")
    # Gemma calls the norm before the MLP what Gemma 3 calls the one after attention.
    after = _norm(weights, at + "post_attention_layernorm")
    return Layer(
        windowed=spec.windowed[n],
        qkv=kit.ops.turned(qkv, None, q_norm, k_norm, rotary, h.heads, h.kv_heads, spec.eps, kit.linear),
        out=kit.linear(take("self_attn.o_proj")),
        out_norm=after if spec.third else None,
        mlp_norm=_norm(weights, at + "pre_feedforward_layernorm") if spec.third else after,
        up=kit.linear(torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")])),
        down=kit.linear(take("mlp.down_proj")),
        down_norm=_norm(weights, at + "post_feedforward_layernorm") if spec.third else None,
        next_norm=next_norm,
    )


FAMILY = Family(
    spec_from_config=spec_from_config,
    shapes=shapes,
    build=Gemma,
    classifier=classifier,
    language=language,
    prefixes=("model.",),
    ignored=(r"lm_head\..*", r"rotary_emb(_local)?\..*"),
    refused_dtypes=(("float16", "activations overflow its range and become NaN; use bfloat16 or float32"),),
)
