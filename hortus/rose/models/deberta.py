"""DeBERTa v2 and v3: BERT's blocks, with attention that looks at what a token is and how far away it is apart from each other.

He et al., arXiv 2006.03654, 2111.09543; transformers' DebertaV2Model for the details. Each layer multiplies one table of
distances by its own matrices once, when the model is opened; see attention/disentangled.py for the scores.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hortus.rose.attention import Bias
from hortus.rose.attention.disentangled import DisentangledBias, buckets
from hortus.rose.models import Weights
from hortus.rose.models.convolution import Convolution
from hortus.rose.models.encoder import family
from hortus.rose.models.encoder_spec import EncoderSpec, Names
from hortus.rose.models.reading import Config, read_encoder

NAMES = Names(qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"))
NEWER = dataclasses.replace(
    NAMES,
    masked="lm_predictions.lm_head.dense",
    masked_norm="lm_predictions.lm_head.LayerNorm",
    decoder_bias="lm_predictions.lm_head.bias",
)
"""Where config.json says that `legacy` is false: the decoder is the word embeddings."""
_TABLE, _NORM = "encoder.rel_embeddings", "encoder.LayerNorm"


@dataclass(frozen=True, kw_only=True)
class Disentangled:
    """The scores' two further terms."""

    terms: tuple[str, ...]
    """c2p: what a query says of a distance; p2c: what a distance says of a key."""
    shared: bool
    """Distances go through the matrices that make the layer's keys and queries, not through their own."""
    normed: bool
    """The table is normed first."""
    count: int
    """Buckets to each side; 0: a row for each distance."""
    furthest: int

    def shapes(self, spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
        h = spec.hidden
        found: dict[str, tuple[int, ...]] = {_TABLE + ".weight": (2 * (self.count or self.furthest), h)}
        if self.normed:
            found |= {_NORM + ".weight": (h,), _NORM + ".bias": (h,)}
        for n in range(spec.layers if not self.shared else 0):
            for term in self.terms:
                name = self._matrix(spec, n, term)
                found |= {name + ".weight": (h, h), name + ".bias": (h,)}
        return found

    def biases(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> list[Bias]:
        table, h = weights.pop(_TABLE + ".weight"), spec.heads
        if self.normed:
            table = F.layer_norm(
                table, (spec.hidden,), weights.pop(_NORM + ".weight"), weights.pop(_NORM + ".bias"), spec.eps
            )
        bucket = buckets(longest, self.count, self.furthest, table.device)

        def through(n: int, term: str) -> Tensor | None:
            """[heads, rows, head_dim]"""
            if term not in self.terms:
                return None
            name = self._matrix(spec, n, term)
            take = weights.__getitem__ if self.shared else weights.pop
            rows = F.linear(table, take(name + ".weight"), take(name + ".bias"))
            return rows.view(len(rows), h.heads, h.head_dim).transpose(0, 1)

        return [DisentangledBias(through(n, "c2p"), through(n, "p2c"), bucket, h.scale) for n in range(spec.layers)]

    def _matrix(self, spec: EncoderSpec, n: int, term: str) -> str:
        own = {"c2p": "attention.self.pos_key_proj", "p2c": "attention.self.pos_query_proj"}
        same = {"c2p": spec.names.qkv[1], "p2c": spec.names.qkv[0]}
        return f"{spec.names.layer}{n}.{(same if self.shared else own)[term]}"


def spec_from_config(config: dict[str, Any]) -> EncoderSpec:
    """config.json -> EncoderSpec; StartError names the key at fault. Defaults are transformers'."""
    read = Config(config)
    hidden = read.whole("hidden_size")
    read.only(
        {
            "conv_groups": 1,
            "embedding_size": hidden,
            "pooler_hidden_size": hidden,
            "attention_head_size": hidden // max(1, read.whole("num_attention_heads")),
        }
    )
    if config.get("relative_attention") is not True:
        raise read.wrong("relative_attention must be true: without it nothing is disentangled")
    said = config.get("pos_att_type") or ()
    terms = tuple(t.strip() for t in (said.lower().split("|") if isinstance(said, str) else said))
    if not terms or not set(terms) <= {"c2p", "p2c"}:
        raise read.wrong(f"pos_att_type {said!r} is not supported; supported: c2p, p2c, or both")
    legacy = read.flag("legacy", True)
    spec = read_encoder(
        read,
        NAMES if legacy else NEWER,
        eps=read.number("layer_norm_eps", 1e-7),
        activation=read.activation("hidden_act"),
        pooler=read.activation("pooler_hidden_act"),
        segments=0,
        tied=None if legacy else True,
    )
    furthest, count = (read.whole(key, -1, least=-1) for key in ("max_relative_positions", "position_buckets"))
    return dataclasses.replace(
        spec,
        heads=dataclasses.replace(spec.heads, scaled=1 / math.sqrt(spec.heads.head_dim * (1 + len(set(terms))))),
        first_position=0 if read.flag("position_biased_input", True) else None,
        scores=Disentangled(
            terms=terms,
            shared=read.flag("share_att_key", False),
            normed=read.one_of("norm_rel_ebd", "none", ("none", "layer_norm")) == "layer_norm",
            count=max(count, 0),
            furthest=furthest if furthest > 0 else spec.positions,
        ),
        convolution=_convolution(read),
    )


def _convolution(read: Config) -> Convolution | None:
    """deberta-v2-xlarge and -xxlarge have one."""
    width = read.whole("conv_kernel_size", 0, least=0)
    if width == 0:
        return None
    if width % 2 == 0:
        raise read.wrong(f"conv_kernel_size {width} is not supported; supported: odd numbers")
    tanh = read.get("conv_act", "tanh") == "tanh"
    return Convolution(width=width, activation="tanh" if tanh else read.activation("conv_act"))


FAMILY = family(
    spec_from_config,
    prefixes=("deberta.",),
    renames=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    ignored=(
        r"pooler\..*",
        r"classifier\..*",
        r"cls\..*",
        r"(lm|mask)_predictions\..*",
        r"embeddings\.position_(ids|embeddings\.weight)",
        r"embeddings\.(word|position)_embeddings\._weight",  # of the authors' own training, never read
    ),
)
