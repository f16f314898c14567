"""Published models that transformers has no code for, written down anew from what was published, the slow way.

Each takes a checkpoint's tensors by their names and one sequence, and gives hidden states [tokens, hidden]. GTE under
its own name `new`: Zhang et al., arXiv 2407.19669. JinaBERT: Günther et al., arXiv 2310.19923. XLM-RoBERTa with rotary
positions, that of jina-colbert-v2: Jha et al., arXiv 2408.16672. No part of Hortus is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[name + ".weight"], state.get(name + ".bias"))


def norm(state: State, name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = torch.sqrt(centred.square().mean(-1, keepdim=True) + config["layer_norm_eps"])
    return centred / spread * state[name + ".weight"] + state[name + ".bias"]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """[heads, tokens, d] each -> [tokens, heads d]."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)


def new_frequencies(config: dict[str, Any], d: int) -> Tensor:
    """Of the rotary positions: the NTK rule as published multiplies the base, then divides what comes of it."""
    scaling, base = config.get("rope_scaling"), config["rope_theta"]
    exponent = torch.arange(0, d, 2).float() / d
    if scaling is None:
        return 1.0 / base**exponent
    factor = scaling["factor"]
    return 1.0 / (base * factor) ** exponent / factor ** (2 / d)


def new(state: State, config: dict[str, Any], ids: Tensor, types: Tensor) -> Tensor:
    heads, inner = config["num_attention_heads"], config["intermediate_size"]
    x = state["embeddings.word_embeddings.weight"][ids]
    if config["type_vocab_size"]:
        x = x + state["embeddings.token_type_embeddings.weight"][types]
    x = norm(state, "embeddings.LayerNorm", x, config)
    angle = torch.outer(torch.arange(len(ids)).float(), new_frequencies(config, x.shape[1] // heads))
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    def turn(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        q, k, v = (split(y, heads) for y in linear(state, at + "attention.qkv_proj", x).chunk(3, -1))
        x = norm(state, at + "attn_ln", x + linear(state, at + "attention.o_proj", attend(turn(q), turn(k), v)), config)
        both = linear(state, at + "mlp.up_gate_proj", x)
        up, gate = both[:, :inner], both[:, inner:]
        x = norm(state, at + "mlp_ln", x + linear(state, at + "mlp.down_proj", up * F.gelu(gate)), config)
    return x


def rotary_roberta(state: State, config: dict[str, Any], ids: Tensor, types: Tensor) -> Tensor:
    """XLM-RoBERTa's blocks; no token has a position but by its angle."""
    heads = config["num_attention_heads"]
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][types]
    x = norm(state, "emb_ln", x, config)
    d = x.shape[1] // heads
    angle = torch.outer(
        torch.arange(len(ids)).float(), 1.0 / config["rotary_emb_base"] ** (torch.arange(0, d, 2).float() / d)
    )

    def turn(y: Tensor) -> Tensor:
        a, b = y[..., : d // 2], y[..., d // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layers.{n}."
        q, k, v = (split(y, heads) for y in linear(state, at + "mixer.Wqkv", x).chunk(3, -1))
        x = norm(state, at + "norm1", x + linear(state, at + "mixer.out_proj", attend(turn(q), turn(k), v)), config)
        x = norm(
            state, at + "norm2", x + linear(state, at + "mlp.fc2", F.gelu(linear(state, at + "mlp.fc1", x))), config
        )
    return x


def slopes(heads: int) -> list[float]:
    """As ALiBi's authors compute them."""

    def of_power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power_of_two(heads)
    near = 2 ** math.floor(math.log2(heads))
    return of_power_of_two(near) + slopes(2 * near)[0::2][: heads - near]


def jina(state: State, config: dict[str, Any], ids: Tensor, types: Tensor) -> Tensor:
    heads, inner = config["num_attention_heads"], config["intermediate_size"]
    act = {"geglu": F.gelu, "reglu": F.relu}[config["feed_forward_type"]]
    normed = "encoder.layer.0.layer_norm_1.weight" in state
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][types]
    x = norm(state, "embeddings.LayerNorm", x, config)
    at_token = torch.arange(len(ids))
    far = (at_token[None, :] - at_token[:, None]).abs()
    bias = -torch.tensor(slopes(heads))[:, None, None] * far
    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        q, k, v = (linear(state, f"{at}attention.self.{name}", x) for name in ("query", "key", "value"))
        if normed:
            q = norm(state, at + "attention.self.layer_norm_q", q, config)
            k = norm(state, at + "attention.self.layer_norm_k", k, config)
        a = attend(split(q, heads), split(k, heads), split(v, heads), bias)
        a = norm(state, at + "attention.output.LayerNorm", linear(state, at + "attention.output.dense", a) + x, config)
        if normed:
            a = norm(state, at + "layer_norm_1", x + a, config)
            up = linear(state, at + "mlp.up_gated_layer", a)
            down = linear(state, at + "mlp.down_layer", up[:, :inner] * act(up[:, inner:]))
            x = norm(state, at + "layer_norm_2", a + down, config)
        else:
            up = linear(state, at + "mlp.gated_layers", a)
            down = linear(state, at + "mlp.wo", act(up[:, :inner]) * up[:, inner:])
            x = norm(state, at + "mlp.layernorm", down + a, config)
    return x


def pooled(state: State, x: Tensor) -> Tensor:
    """BERT's pooler and the classifier on it: logits."""
    return linear(state, "classifier", linear(state, "pooler.dense", x[:1]).tanh())[0]


def masked(state: State, x: Tensor, config: dict[str, Any], kind: str) -> Tensor:
    """Logits over the vocabulary, the word embeddings being the last matrix."""
    names = {
        "new": ("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias"),
        "jina": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    }[kind]
    x = norm(state, names[1], F.gelu(linear(state, names[0], x)), config)
    return x @ state["embeddings.word_embeddings.weight"].T + state[names[2]]
