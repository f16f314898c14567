"""One encoder for all that are built like BERT: what differs between them is data (encoder_spec.py), and this runs it.

    x = norm(word [+ position] [+ segment])
    norm after (BERT's):    x = norm(x + attention(x));  x = norm(x + mlp(x))
    norm before (prenorm):  x = x + attention(norm(x));  x = x + mlp(norm(x));  a final norm

Another sum may come after the first block (convolution.py). Positions are a learned table, rotary (each kind of layer its own),
a bias on scores (a Scores), or several of these. Does not know files, devices or batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.attention import Attention, Bias
from hortus.rose.attention.relative import DistanceBias
from hortus.rose.kernels.few import FEW_TOKENS, Few, LayerWeights
from hortus.rose.kernels.linear import Linear, LinearFactory
from hortus.rose.models import Classifier, Family, Kit, Step, Weights
from hortus.rose.models.adapters import Adapted
from hortus.rose.models.convolution import Neighbours, as_matrix
from hortus.rose.models.encoder_spec import ALL, EncoderSpec, shapes
from hortus.rose.models.rotary import rotary_tables
from hortus.rose.network import Inputs
from hortus.types import Int32

Pair = tuple[Tensor, Tensor | None]
"""Weight and bias, of a matrix or of a norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block's tensors. Matrices that read the same input are one."""

    qkv: Pair
    qk_norm: tuple[Pair, ...]
    out: Pair
    attention_norm: tuple[Pair, ...]
    up: Pair
    down: Pair
    mlp_norm: Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block, ready to run."""

    qkv: Callable[[Tensor, Any], Tensor]
    """(input, the step's angles) -> q, k and v, [T, 3 hidden], normed and turned."""
    windowed: bool
    attention: Attention
    out: Linear
    attention_norm: tuple[Pair, ...]
    mlp: Callable[[Tensor], Tensor]
    mlp_norm: Pair


class Encoder:
    """The trunk."""

    def __init__(self, spec: EncoderSpec, weights: Weights, kit: Kit) -> None:
        self._spec, self._ops, names = spec, kit.ops, spec.names
        self._adapted = None if spec.adapters is None else Adapted(spec.adapters, weights)
        self._word = weights.pop(names.word + ".weight")
        self._position = None
        if spec.first_position is not None:
            self._position = weights.pop(names.position + ".weight")[spec.first_position :].contiguous()
        self._segment = weights.pop(names.segment + ".weight") if spec.segments else None
        # Nearly every batch is of one segment: then its embedding is part of the position's.
        self._position_first_segment = None
        if self._position is not None and self._segment is not None:
            self._position_first_segment = self._position + self._segment[0]
        self._norm = _taken(weights, names.norm)
        self._final_norm = None if names.final_norm is None else _taken(weights, names.final_norm)
        windowed = spec.windowed or (False,) * spec.layers
        self._rotary = {
            which: kit.ops.Rotary(*rotary_tables(rope, spec.heads.head_dim, spec.positions, self._word.device))
            for which, rope in zip((False, True), spec.rope, strict=False)
            if which in windowed
        }
        # What a device fills a step up with is a sequence too, of up to 255 tokens.
        biases = spec.scores.biases(spec, weights, longest=max(spec.positions, 256)) if spec.scores else []
        attention = _attentions(spec, kit, windowed, biases)
        self._attention = list(dict.fromkeys(attention))
        blocks = [_block(spec, weights, n) for n in range(spec.layers)]
        self._neighbours = _neighbours(spec, weights, kit)
        self._few = _few(spec, kit, blocks, biases)
        wide = _as_it_is if self._adapted is None else self._adapted.wide
        added = kit.added or kit.linear
        self._layers = []
        for n in range(spec.layers):
            at = f"{names.layer}{n}."
            block = blocks.pop(0)  # let go at once: a product may keep its weight in another format
            self._layers.append(
                Layer(
                    qkv=wide(_qkv(spec, kit, block, self._rotary.get(windowed[n])), at + names.qkv[0]),
                    windowed=windowed[n],
                    attention=attention[n],
                    out=wide(added(*block.out), at + names.out),
                    attention_norm=block.attention_norm,
                    mlp=_mlp(spec, kit, block, added, wide, at),
                    mlp_norm=block.mlp_norm,
                )
            )
        self._cu_seqlens_cpu: Int32 | None = None

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._cu_seqlens_cpu = cu_seqlens_cpu
        for attention in self._attention:
            attention.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def forward(self, inputs: Inputs, rows: Tensor | None = None) -> Tensor:
        """After the last block, and the final norm where there is one; see Trunk."""
        # Without a block there is no last attention, and a convolution after the only one reads all of its rows.
        if rows is not None and len(self._layers) < (1 if self._neighbours is None else 2):
            return self.forward(inputs).index_select(0, rows)
        if self._adapted is not None:
            self._adapted.begin(inputs.token_types)
        x = self._embedded(inputs)
        if self._few is not None and self._cu_seqlens_cpu is not None and len(x) <= FEW_TOKENS:
            few = self._few(x, self._cu_seqlens_cpu, rows)
            # A mask multiplies neighbours by zero, which NaN survives: then each sequence goes by itself.
            if len(self._cu_seqlens_cpu) == 2 or bool(torch.isfinite(few.sum())):
                return few
        angles = {windowed: rotary.at(inputs.positions) for windowed, rotary in self._rotary.items()}
        return (self._norms_before if self._spec.prenorm else self._norms_after)(x, angles, inputs.positions, rows)

    def _embedded(self, inputs: Inputs) -> Tensor:
        if self._adapted is not None:
            return self._normed(self._adapted.embedded(self._word, inputs.ids, inputs.token_types), self._norm)
        position, segment, types = self._position, self._segment, inputs.token_types
        if types is None and self._position_first_segment is not None:
            position, segment = self._position_first_segment, None
        if segment is None:
            types = None
        x: Tensor = self._ops.embed_layer_norm(
            inputs.ids, inputs.positions, types, self._word, position, segment, *self._norm, self._spec.eps
        )
        return x

    def _norms_after(self, x: Tensor, angles: dict[bool, Any], positions: Tensor, rows: Tensor | None) -> Tensor:
        ops, eps, embedded = self._ops, self._spec.eps, x
        for n, layer in enumerate(self._layers):
            mixed = self._attend(layer, x, angles)
            if rows is not None and layer is self._layers[-1]:
                mixed, x = self._only(rows, mixed, x)
            y = layer.out(mixed)
            for norm in layer.attention_norm:
                y = ops.add_layer_norm(y, x, *norm, eps)
            x = ops.add_layer_norm(layer.mlp(y), y, *layer.mlp_norm, eps)
            if n == 0 and self._neighbours is not None:
                x = self._neighbours(embedded, x, positions)
        return x if self._final_norm is None else self._normed(x, self._final_norm)

    def _norms_before(self, x: Tensor, angles: dict[bool, Any], _: Tensor, rows: Tensor | None) -> Tensor:
        """What is added to the residual, which grows in place, and the norm after it are one operation."""
        ops, eps = self._ops, self._spec.eps
        if not self._layers:
            return self._normed(x, self._last_norm)
        residual = ops.residual(x)
        for n, layer in enumerate(self._layers):
            last = n + 1 == len(self._layers)
            mixed = self._attend(layer, x, angles)
            if rows is not None and last:
                mixed, residual = self._only(rows, mixed, residual)
            x = ops.add_layer_norm_(layer.out(mixed), residual, *layer.mlp_norm, eps)
            norm = self._last_norm if last else self._layers[n + 1].attention_norm[0]
            x = ops.add_layer_norm_(layer.mlp(x), residual, *norm, eps)
        return x

    @property
    def _last_norm(self) -> Pair:
        assert self._final_norm is not None, "blocks that begin with their norms end with one"
        return self._final_norm

    def _attend(self, layer: Layer, x: Tensor, angles: dict[bool, Any]) -> Tensor:
        h = self._spec.heads
        qkv = layer.qkv(x, angles.get(layer.windowed)).contiguous().view(-1, 3 * h.heads, h.head_dim)
        q, k, v = torch.split(qkv, h.heads, 1)
        return layer.attention.run(q, k, v).flatten(1)

    def _only(self, rows: Tensor, mixed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on after the last attention."""
        if self._adapted is not None:
            self._adapted.only(rows)
        return mixed.index_select(0, rows), x.index_select(0, rows)

    def _normed(self, x: Tensor, norm: Pair) -> Tensor:
        return F.layer_norm(x, (self._spec.hidden,), *norm, self._spec.eps)


def _attentions(spec: EncoderSpec, kit: Kit, windowed: tuple[bool, ...], biases: list[Bias]) -> list[Attention]:
    """Each layer's; those that are alike are one."""
    kinds = {False: spec.heads, True: dataclasses.replace(spec.heads, window=spec.window)}
    wanted: list[tuple[bool, Bias | None]] = [(w, biases[n] if biases else None) for n, w in enumerate(windowed)]
    made = {key: kit.attention(kinds[key[0]], key[1]) for key in dict.fromkeys(wanted)}
    return [made[key] for key in wanted]


def _block(spec: EncoderSpec, weights: Weights, n: int) -> Block:
    """Block n, taken out of `weights`."""
    names, at = spec.names, f"{spec.names.layer}{n}."
    return Block(
        qkv=_taken(weights, *(at + name for name in names.qkv)),
        qk_norm=tuple(_taken(weights, at + name) for name in names.qk_norm),
        out=_taken(weights, at + names.out),
        attention_norm=tuple(_taken(weights, at + name) for name in spec.attention_norm(n)),
        up=_taken(weights, *(at + name for name in names.up)),
        down=_taken(weights, at + names.down),
        mlp_norm=_taken(weights, at + names.mlp_norm),
    )


def _taken(weights: Weights, *names: str) -> Pair:
    """Weight and bias, taken out; several matrices become one."""
    each = [(weights.pop(name + ".weight"), weights.pop(name + ".bias", None)) for name in names]
    if len(each) == 1:
        return each[0]
    biases = [bias for _, bias in each if bias is not None]
    return torch.cat([weight for weight, _ in each]), torch.cat(biases) if biases else None


def _qkv(spec: EncoderSpec, kit: Kit, block: Block, rotary: Any) -> Callable[[Tensor, Any], Tensor]:
    if rotary is not None:
        h = spec.heads
        turned: Callable[[Tensor, Any], Tensor] = kit.ops.turned(
            *block.qkv, None, None, rotary, h.heads, h.kv_heads, spec.eps, kit.linear
        )
        return turned
    product = kit.linear(*block.qkv)
    if not block.qk_norm:
        return lambda x, _: product(x)

    def normed(x: Tensor, _: Any) -> Tensor:
        q, k, v = product(x).chunk(3, 1)
        q, k = (F.layer_norm(y, y.shape[1:], *n, spec.eps) for y, n in zip((q, k), block.qk_norm, strict=True))
        return torch.cat([q, k, v], 1)

    return normed


def _as_it_is(run: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    return run


def _mlp(
    spec: EncoderSpec,
    kit: Kit,
    block: Block,
    added: LinearFactory,
    wide: Callable[..., Callable[..., Tensor]],
    at: str,
) -> Callable[[Tensor], Tensor]:
    """added: as Kit.added. wide: as Adapted.wide. at: the block's names begin so."""
    down = wide(added(*block.down), at + spec.names.down)
    if spec.gated is None:
        activated: Callable[[Tensor], Any]
        if spec.adapters is None:
            activated = kit.ops.activated(*block.up, spec.activation, kit.linear)
        else:  # what is activated is read by the adapters as well
            activated = wide(kit.linear(*block.up, spec.activation), at + spec.names.up[0])
        return lambda x: down(activated(x))
    both, glu, gated = kit.linear(*block.up), kit.ops.glu, spec.gated
    return lambda x: down(glu(both(x), spec.activation, gated))


def _neighbours(spec: EncoderSpec, weights: Weights, kit: Kit) -> Neighbours | None:
    if (c := spec.convolution) is None:
        return None
    weight, bias = _taken(weights, c.name)
    return Neighbours(
        width=c.width,
        product=kit.linear(as_matrix(weight), bias, c.activation),
        norm=_whole(_taken(weights, c.norm)),
        eps=spec.eps,
        ops=kit.ops,
    )


def _few(spec: EncoderSpec, kit: Kit, blocks: list[Block], biases: list[Bias]) -> Few | None:
    """All blocks at once, where a device has that and they are BERT's: see kernels/few.py."""
    names, bias = spec.names, biases[0] if biases else None
    like_bert = len(names.attention_norm) == 1 and not (names.qk_norm or spec.prenorm or spec.rope or spec.windowed)
    if kit.few is None or not like_bert or spec.convolution or spec.gated is not None or spec.biased != ALL:
        return None
    if bias is not None and not isinstance(bias, DistanceBias):
        return None
    layers = [
        LayerWeights(
            qkv=_whole(b.qkv),
            out=_whole(b.out),
            attention_norm=_whole(b.attention_norm[0]),
            up=_whole(b.up),
            down=_whole(b.down),
            norm=_whole(b.mlp_norm),
        )
        for b in blocks
    ]
    return kit.few(layers, spec.heads, spec.eps, spec.activation, bias)


def _whole(pair: Pair) -> tuple[Tensor, Tensor]:
    weight, bias = pair
    assert bias is not None, "asked for only where all have a bias"
    return weight, bias


def family(
    spec_from_config: Callable[[dict[str, Any]], EncoderSpec],
    *,
    prefixes: tuple[str, ...],
    renames: tuple[tuple[str, str], ...] = (),
    ignored: tuple[str, ...],
) -> Family:
    """The Family of a reader. What is ignored besides: heads' tensors, whoever does not ask for them."""

    def classifier(spec: EncoderSpec, labels: int) -> Classifier:
        last = Step(name=spec.names.last, inputs=spec.hidden, outputs=labels)
        return Classifier(pooling=spec.pooling, steps=(*spec.classifier, last))

    return Family(
        spec_from_config=spec_from_config,
        shapes=shapes,
        build=Encoder,
        classifier=classifier,
        vocabulary=lambda spec: spec.vocabulary,
        prefixes=prefixes,
        renames=renames,
        ignored=ignored,
    )
