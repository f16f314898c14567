"""How a trunk in one kernel (together.py) is made from a trunk's layers, tried, and called.

Does not know models: a layer is what the operations dense.py and heads.py made of its weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from hortus.rose.attention import Heads
from hortus.rose.kernels.dense import Added, Gated
from hortus.rose.kernels.heads import Rotary, Turned
from hortus.rose.kernels.residual import form
from hortus.rose.kernels.together import ROWS, trunk
from hortus.rose.network import Each, Inputs, ranges

log = logging.getLogger(__name__)

MOST_TOKENS: int = ROWS.value
MOST_HIDDEN = 1024
"""Most values a token for which that was measured; of wider models the weights alone take longer."""
MOST_PROGRAMS = 128
"""No phase has work for more."""


class Block(NamedTuple):
    """One layer's weights, in the order of the kernel's table of addresses."""

    qkv: Tensor
    """[(heads + 2 kv_heads) d, H]; pairs of q and k that rotate are neighbours, here and in their norms."""
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    o_norm: Tensor
    """[H]: of the MLP's input."""
    gated: Tensor
    """[2 I, H]: gate 0, up 0, gate 1, .."""
    down: Tensor
    down_norm: Tensor
    """[H]: of the next layer's input."""


class Cut(NamedTuple):
    """How phases are cut into programs and turns. Measured on one H200: decisions/010."""

    qkv: int = 32
    """Columns a program; no more than a head's."""
    grown: int = 8
    pairs: int = 32
    step: int = 128
    """Of the depth, a turn."""
    stages: int = 8
    """Turns under way at once: all of the depth, where it is 1,024."""
    grown_step: int = 64
    chains: int = 4
    grown_stages: int = 8
    warps: int = 4


def fits(cut: Cut, hidden: int, heads: Heads, inner: int) -> bool:
    """Whether sizes are cut evenly. Pure."""
    d, mixed, turn = heads.head_dim, heads.heads * heads.head_dim, cut.grown_step * cut.chains
    whole = d % cut.qkv == 0 and hidden % cut.grown == 0 and inner % cut.pairs == 0 and hidden % cut.step == 0
    return whole and d & (d - 1) == 0 and mixed % turn == 0 and inner % turn == 0


class Together:
    """A trunk: Inputs of at most MOST_TOKENS -> [T, H] after the final norm. One call at a time on one stream."""

    def __init__(
        self, blocks: Sequence[Block], embed: Tensor, first_norm: Tensor, rotary: Rotary, heads: Heads, eps: float,
        cut: Cut, programs: int,
    ) -> None:  # fmt: skip
        """Weights are kept, not copied. programs: at most as many as the device runs at once."""
        self._kept, self._embed, self._first_norm, self._rotary = tuple(blocks), embed, first_norm, rotary
        self._heads, self._eps, self._cut, self._programs = heads, eps, cut, programs
        self._inner = blocks[0].down.shape[1]
        assert fits(cut, embed.shape[1], heads, self._inner), f"{cut} does not cut the sizes evenly"
        rows = [[w.data_ptr() for w in block] for block in self._kept]
        self._table = torch.tensor(rows, dtype=torch.int64, device=embed.device)
        self.device, self.vocab, self.most_tokens = embed.device, embed.shape[0], MOST_TOKENS
        self._counter = torch.zeros(1, dtype=torch.int64, device=embed.device)

    def __call__(self, inputs: Inputs) -> Tensor:
        tokens, sequences = inputs.ids.shape[0], inputs.cu_seqlens.shape[0] - 1
        assert tokens <= MOST_TOKENS, f"{tokens} tokens; at most {MOST_TOKENS}"
        assert sequences <= 2 * MOST_TOKENS, f"{sequences} sequences; at most {2 * MOST_TOKENS}"
        h, cut, like = self._heads, self._cut, self._embed
        hidden, mixed = like.shape[1], h.heads * h.head_dim
        width = mixed + 2 * h.kv_heads * h.head_dim
        residual = torch.empty(tokens, hidden, dtype=form(like.dtype), device=like.device)
        normed, out = (like.new_empty(tokens, hidden) for _ in range(2))
        squares, head_squares = (
            torch.empty(parts, MOST_TOKENS, dtype=torch.float32, device=like.device)
            for parts in (hidden // cut.grown, width // cut.qkv)
        )
        qkv, attended, gated = (like.new_empty(tokens, n) for n in (width, mixed, self._inner))

        def launch(phase: int, first: int, last: int) -> None:
            trunk[(self._programs,)](
                inputs.ids, inputs.positions, inputs.cu_seqlens[1:], like, self._first_norm, self._table,
                self._rotary.cos, self._rotary.sin, residual, normed, squares, head_squares, qkv, attended, gated, out,
                self._counter, tokens, sequences, first, last, self._eps, h.scale / math.log(2),
                hidden, triton.next_power_of_2(hidden), h.heads, h.kv_heads, h.head_dim, self._inner, h.causal,
                self._programs, cut.qkv, cut.grown, cut.pairs, cut.step, cut.stages, cut.grown_step, cut.chains,
                cut.grown_stages, phase,
                # The driver refuses to start what cannot all run at once, instead of letting some wait for ever.
                num_warps=cut.warps, launch_cooperative_grid=True,
            )  # fmt: skip

        layers = len(self._kept)
        if like.is_cuda:
            launch(-1, 0, layers)
            return out
        launch(0, 0, 1)
        for n in range(layers):
            for phase in range(1, 6):
                launch(phase, n, n + 1)
        launch(6, layers - 1, layers)
        return out


def together(
    layers: Sequence[Any], embed: Tensor, first_norm: Tensor, rotary: Any, heads: Heads, eps: float, each: Each
) -> Together | None:
    """A ShortFactory. None, which the log tells, where it does not fit, fails, or does not give what `each` gives."""
    try:
        blocks = [_block(o.qkv, o.o, o.gated, o.down) for o in layers]
        _check(blocks, embed, heads)
        programs = min(torch.cuda.get_device_properties(embed.device).multi_processor_count, MOST_PROGRAMS)
        whole = Together(blocks, embed, first_norm, rotary, heads, eps, Cut(), programs)
        with torch.inference_mode():
            _try(whole, each, [5, 1, 7])
    except NotImplementedError as e:
        log.info("short steps run layer by layer: %s", e)
        return None
    except Exception as e:  # noqa: BLE001  a compiler's or a driver's fault: whatever fails, there is the other way
        log.warning("short steps run layer by layer: one kernel for all layers failed: %s: %s", type(e).__name__, e)
        return None
    log.info("short steps: all layers in one kernel, up to %d tokens", MOST_TOKENS)
    return whole


def _block(qkv: Any, o: Any, gated: Any, down: Any) -> Block:
    if not (isinstance(qkv, Turned) and isinstance(o, Added) and isinstance(gated, Gated) and isinstance(down, Added)):
        raise NotImplementedError("one kernel for all layers takes bfloat16, and no biases")
    if qkv.q_norm is None or qkv.k_norm is None or qkv.bias is not None:
        raise NotImplementedError("one kernel for all layers takes heads that are normed, and no biases")
    return Block(qkv.weight, qkv.q_norm, qkv.k_norm, o.weight, o.norm, gated.weight, down.weight, down.norm)


def _check(blocks: Sequence[Block], embed: Tensor, heads: Heads) -> None:
    hidden = embed.shape[1]
    if torch.cuda.get_device_capability(embed.device) < (9, 0) or embed.dtype != torch.bfloat16:
        raise NotImplementedError("one kernel for all layers is measured in bfloat16 on Hopper only")
    if hidden > MOST_HIDDEN or heads.window is not None:
        raise NotImplementedError(
            f"one kernel for all layers takes at most {MOST_HIDDEN} values a token, and no window"
        )
    if not fits(Cut(), hidden, heads, blocks[0].down.shape[1]):
        raise NotImplementedError(f"one kernel for all layers does not cut {hidden} values and {heads} evenly")


def _try(whole: Together, each: Each, lengths: list[int]) -> None:
    """ArithmeticError where a token is not what the layers make of it one by one."""
    starts = np.zeros(len(lengths), np.int32)
    positions, cu = ranges(starts, np.array(lengths, np.int32))
    ids = np.arange(cu[-1], dtype=np.int32) % whole.vocab
    device = whole.device
    inputs = Inputs(
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        token_types=None,
        cu_seqlens=torch.from_numpy(cu).to(device),
    )
    least = float(torch.nn.functional.cosine_similarity(whole(inputs).float(), each(cu, inputs).float()).min())
    if not least > 0.99:
        raise ArithmeticError(f"a token's cosine to what the layers give one by one is {least:.3f}")
