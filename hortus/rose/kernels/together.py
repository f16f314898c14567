"""A whole Qwen3 trunk in one kernel, for steps of a few tokens: the GPU's multiprocessors go through it together.

The physics. Such a step is a chain: 28 layers of some eight kernels each, of which none has much to do, and which each cost
3 to 4 us all the same: to be started, to find their first bytes, to end. Here one program runs on each multiprocessor to the
end. A layer is five phases, and between two of them all programs meet (1 us): one adds to a counter in memory and waits
until it says that all have come.

    1 qkv     normed -> queries, keys and values; rotated; each head's sum of squares
    2 attend  softmax(q k^T) v in each sequence; the heads' norms are factors of their scores
    3 o       added to the residual (residual.py); its sum of squares; normed but for the factor of a row
    4 gated   silu(gate) * up
    5 down    as 3

RMSNorm costs no phase: whoever grows the residual writes it times the norm's weight, and the sum of squares of its columns;
whoever reads that multiplies its product's rows by the factor that follows. Sums are added in one order: the same bits each run.

Weights are kept as the other kernels keep them: q and k in pairs that rotate (heads.py), gate and up in pairs (dense.py).
How it is called: short.py. Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from hortus.rose.kernels.residual import PART, WHOLE

ROWS = tl.constexpr(16)
"""Most tokens: the rows of a tensor core's least tile. With 32 it was slower than a kernel an operation (decisions/010)."""


@triton.jit
def _meet(counter, goal):
    """Wait until the counter is `goal`: until each program has added one.

    What a program wrote before is seen by all after: the add releases it, the wait acquires it (PTX ISA, memory consistency
    model). One thread waits, the others wait for it.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .u32 thread;
        .reg .b64 seen;
        mov.u32 thread, %tid.x;
        setp.ne.u32 p, thread, 0;
        @p bra MET;
        WAIT:
        ld.acquire.gpu.global.b64 seen, [$1];
        setp.lt.s64 p, seen, $2;
        @p bra WAIT;
        MET:
        mov.u32 $0, 0;
        }
        """,
        "=r,l,l",
        [counter.to(tl.int64), goal],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _pointer(table, like, n: tl.constexpr):
    return tl.multiple_of(tl.load(table + n).to(like.dtype), 16)


@triton.jit
def _product(
    x, weight, tokens, first, DEPTH: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x [tokens, DEPTH] times rows first .. first + COLS - 1 of the weight -> [ROWS, COLS] float32.

    CHAINS: parts of the depth that are summed on their own, a warp each: a sum of many products in a row waits for each.
    """
    rows = tl.arange(0, ROWS)
    if CHAINS == 1:
        k = tl.arange(0, STEP)
        x_at = x + rows[:, None] * DEPTH + k[None, :]
        w_at = weight + (first + tl.arange(0, COLS))[:, None] * DEPTH + k[None, :]
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for i in tl.range(0, DEPTH, STEP, num_stages=STAGES):
            part = tl.load(x_at + i, mask=(rows < tokens)[:, None], other=0.0)
            acc = tl.dot(part, tl.load(w_at + i).T, acc)
        return acc
    else:
        k = (tl.arange(0, CHAINS) * STEP)[:, None, None] + tl.arange(0, STEP)[None, None, :]
        x_at = x + rows[None, :, None] * DEPTH + k
        w_at = weight + (first + tl.arange(0, COLS))[None, :, None] * DEPTH + k
        acc = tl.zeros((CHAINS, ROWS, COLS), tl.float32)
        for i in tl.range(0, DEPTH, CHAINS * STEP, num_stages=STAGES):
            part = tl.load(x_at + i, mask=(rows < tokens)[None, :, None], other=0.0)
            acc = tl.dot(part, tl.permute(tl.load(w_at + i), (0, 2, 1)), acc)
        return tl.sum(acc, 0)


@triton.jit
def _squares(squares, first, tokens, PARTS: tl.constexpr):
    """[PARTS or more, ROWS]: what the rows' sums of squares are the sum of, from part `first` on."""
    n, rows = tl.arange(0, triton.next_power_of_2(PARTS)), tl.arange(0, ROWS)
    mask = (n < PARTS)[:, None] & (rows < tokens)[None, :]
    return tl.load(squares + (first + n)[:, None] * ROWS + rows[None, :], mask=mask, other=0.0)


@triton.jit
def _qkv(
    normed, weight, q_norm, k_norm, squares, head_squares, qkv, positions, cos, sin, tokens, n, eps,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns n COLS .. of the first phase's output, all of one head."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    rows = tl.arange(0, ROWS)
    live = (rows < tokens)[:, None]
    head, at = n * COLS // DIM, n * COLS % DIM
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    turns = is_q | is_k
    # All that does not hang on the product is read before it. Values are neither normed nor turned: by 1, and by no angle.
    parts = _squares(squares, 0, tokens, PARTS)
    col, half = at + tl.arange(0, COLS), at // 2 + tl.arange(0, COLS // 2)
    w = tl.load(q_norm + col, mask=is_q & (col >= 0), other=0.0).to(tl.float32)
    w += tl.load(k_norm + col, mask=is_k & (col >= 0), other=0.0).to(tl.float32) + tl.where(turns, 0.0, 1.0)
    angle = tl.load(positions + rows, mask=rows < tokens, other=0)[:, None] * (DIM // 2) + half[None, :]
    c = tl.load(cos + angle, mask=live & turns, other=1.0)
    s = tl.load(sin + angle, mask=live & turns, other=0.0)
    y = _product(normed, weight, tokens, n * COLS, HIDDEN, COLS, STEP, 1, STAGES)
    y *= tl.rsqrt(tl.sum(parts, 0) / HIDDEN + eps)[:, None]
    y = y.to(qkv.dtype.element_ty).to(tl.float32)  # rounded here, as where the norm of a head is a kernel of its own
    tl.store(head_squares + n * ROWS + rows, tl.sum(y * y, 1), mask=rows < tokens)
    a, b = tl.split(tl.reshape(y * w[None, :], (ROWS, COLS // 2, 2)))
    y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, COLS))
    to = qkv + rows[:, None] * WIDTH + n * COLS + tl.arange(0, COLS)[None, :]
    tl.store(to, y.to(qkv.dtype.element_ty), mask=live)


@triton.jit
def _sequence(ends, sequences):
    """[ROWS]: the sequence of each row; past the tokens, one after the last. ends: [sequences], at most 2 ROWS."""
    rows = tl.arange(0, ROWS)
    n = tl.arange(0, 2 * ROWS)
    end = tl.load(ends + n, mask=n < sequences, other=2147483647)
    return tl.sum((end[None, :] <= rows[:, None]).to(tl.int32), 1)


@triton.jit
def _attend(
    qkv, head_squares, out, ends, sequences, tokens, head, eps, score_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """One head of the second phase's output. score_scale: times log2(e)."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    rows, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    live = (rows < tokens)[:, None]
    kv = HEADS + head // (HEADS // KV_HEADS)
    q = tl.load(qkv + rows[:, None] * WIDTH + head * DIM + d[None, :], mask=live, other=0.0)
    k = tl.load(qkv + rows[:, None] * WIDTH + kv * DIM + d[None, :], mask=live, other=0.0)
    v = tl.load(qkv + rows[:, None] * WIDTH + (kv + KV_HEADS) * DIM + d[None, :], mask=live, other=0.0)
    of_q = tl.sum(_squares(head_squares, head * PARTS, tokens, PARTS), 0)
    of_k = tl.sum(_squares(head_squares, kv * PARTS, tokens, PARTS), 0)
    sequence = _sequence(ends, sequences)
    seen = sequence[:, None] == sequence[None, :]
    if CAUSAL:
        seen = seen & (rows[None, :] <= rows[:, None])
    # 0 times what is not finite is NaN: through its values a broken token would reach other sequences. So it breaks the scores
    # of those who see it, and its values are 0. (Bits: a maximum of numbers drops NaN.)
    broken = tl.max(v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >= 0x7F800000
    v = tl.where(broken[:, None], 0.0, v)
    s = tl.dot(q, k.T) * (tl.rsqrt(of_q / DIM + eps) * score_scale)[:, None] * tl.rsqrt(of_k / DIM + eps)[None, :]
    s = tl.where(seen, tl.where(broken[None, :], float("nan"), s), float("-inf"))
    e = tl.exp2(s - tl.max(s, 1)[:, None])
    y = tl.dot(e.to(v.dtype), v) / tl.sum(e, 1)[:, None]
    tl.store(out + rows[:, None] * (HEADS * DIM) + head * DIM + d[None, :], y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _grow(
    x, weight, residual, normed, squares, norm, tokens, n, DEPTH: tl.constexpr, HIDDEN: tl.constexpr,
    COLS: tl.constexpr, STEP: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns n COLS .. of the residual += x weight^T; of residual * norm; part n of its sums of squares."""
    rows, cols = tl.arange(0, ROWS), n * COLS + tl.arange(0, COLS)
    at, live = rows[:, None] * HIDDEN + cols[None, :], (rows < tokens)[:, None]
    before = tl.load(residual + at, mask=live, other=0.0).to(tl.float32) * WHOLE
    w = tl.load(norm + cols).to(tl.float32)
    y = before + _product(x, weight, tokens, n * COLS, DEPTH, COLS, STEP, CHAINS, STAGES)
    kept = (y * PART).to(residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=live)
    y = kept.to(tl.float32) * WHOLE
    tl.store(normed + at, (y * w[None, :]).to(normed.dtype.element_ty), mask=live)
    tl.store(squares + n * ROWS + rows, tl.sum(y * y, 1), mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens", "sequences", "first", "last"])  # one kernel for all steps
def trunk(
    ids, positions, ends, embed, first_norm, table, cos, sin, residual, normed, squares, head_squares, qkv, mixed, gated, out,
    counter, tokens, sequences, first, last, eps, score_scale,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    INNER: tl.constexpr, CAUSAL: tl.constexpr, PROGRAMS: tl.constexpr, QKV: tl.constexpr,
    GROWN: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GROWN_STEP: tl.constexpr,
    CHAINS: tl.constexpr, GROWN_STAGES: tl.constexpr, PHASE: tl.constexpr,
) -> None:  # fmt: skip
    """Layers first .. last - 1, and with PHASE -1 what is before and after them, all PROGRAMS meeting between phases.

    PHASE 0 .. 6: that one alone (0: embeddings, 6: the last norm), without meeting: for the interpreter, which runs programs
    one after another. QKV, GROWN, PAIRS: columns a program; ends: cu_seqlens from its second value on; table: [layers, 8]
    addresses, see short.Block; scratch memory: see short.Together.
    """
    MIXED: tl.constexpr = HEADS * DIM
    PARTS: tl.constexpr = HIDDEN // GROWN
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    within = col < HIDDEN
    # The counter only grows. Before the first meeting is over it is less than a whole turn beyond where it began.
    goal = tl.load(counter) // PROGRAMS * PROGRAMS
    if PHASE == -1 or PHASE == 0:
        w = tl.load(first_norm + col, mask=within, other=0.0).to(tl.float32)
        t = program
        while t < tokens:
            x = tl.load(embed + tl.load(ids + t).to(tl.int64) * HIDDEN + col, mask=within, other=0.0)
            kept = (x.to(tl.float32) * PART).to(residual.dtype.element_ty)
            tl.store(residual + t * HIDDEN + col, kept, mask=within)
            f = kept.to(tl.float32) * WHOLE
            tl.store(normed + t * HIDDEN + col, (f * w).to(normed.dtype.element_ty), mask=within)
            part = tl.arange(0, BLOCK // GROWN)
            sums = tl.sum(tl.reshape(f * f, (BLOCK // GROWN, GROWN)), 1)
            tl.store(squares + part * ROWS + t, sums, mask=part < PARTS)
            t += PROGRAMS
    if PHASE == -1:
        goal += PROGRAMS
        _meet(counter, goal)
    layer = first
    while layer < last:
        row = table + layer * 8
        w_qkv, q_norm, k_norm = _pointer(row, embed, 0), _pointer(row, embed, 1), _pointer(row, embed, 2)
        w_o, o_norm, w_gated = _pointer(row, embed, 3), _pointer(row, embed, 4), _pointer(row, embed, 5)
        w_down, down_norm = _pointer(row, embed, 6), _pointer(row, embed, 7)
        if PHASE == -1 or PHASE == 1:
            n = program
            while n < (MIXED + 2 * KV_HEADS * DIM) // QKV:
                _qkv(
                    normed, w_qkv, q_norm, k_norm, squares, head_squares, qkv, positions, cos, sin, tokens, n, eps,
                    HIDDEN, HEADS, KV_HEADS, DIM, QKV, PARTS, STEP, STAGES,
                )  # fmt: skip
                n += PROGRAMS
        if PHASE == -1:
            goal += PROGRAMS
            _meet(counter, goal)
        if PHASE == -1 or PHASE == 2:
            n = program
            while n < HEADS:
                _attend(
                    qkv, head_squares, mixed, ends, sequences, tokens, n, eps, score_scale,
                    HEADS, KV_HEADS, DIM, DIM // QKV, CAUSAL,
                )  # fmt: skip
                n += PROGRAMS
        if PHASE == -1:
            goal += PROGRAMS
            _meet(counter, goal)
        if PHASE == -1 or PHASE == 3:
            n = program
            while n < PARTS:
                _grow(
                    mixed, w_o, residual, normed, squares, o_norm, tokens, n,
                    MIXED, HIDDEN, GROWN, GROWN_STEP, CHAINS, GROWN_STAGES,
                )  # fmt: skip
                n += PROGRAMS
        if PHASE == -1:
            goal += PROGRAMS
            _meet(counter, goal)
        if PHASE == -1 or PHASE == 4:
            n = program
            while n < INNER // PAIRS:
                rows = tl.arange(0, ROWS)
                parts = _squares(squares, 0, tokens, PARTS)
                both = _product(normed, w_gated, tokens, n * 2 * PAIRS, HIDDEN, 2 * PAIRS, STEP, 1, STAGES)
                both *= tl.rsqrt(tl.sum(parts, 0) / HIDDEN + eps)[:, None]
                gate, up = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
                to = gated + rows[:, None] * INNER + n * PAIRS + tl.arange(0, PAIRS)[None, :]
                tl.store(to, (gate * tl.sigmoid(gate) * up).to(gated.dtype.element_ty), mask=(rows < tokens)[:, None])
                n += PROGRAMS
        if PHASE == -1:
            goal += PROGRAMS
            _meet(counter, goal)
        if PHASE == -1 or PHASE == 5:
            n = program
            while n < PARTS:
                _grow(
                    gated, w_down, residual, normed, squares, down_norm, tokens, n,
                    INNER, HIDDEN, GROWN, GROWN_STEP, CHAINS, GROWN_STAGES,
                )  # fmt: skip
                n += PROGRAMS
        if PHASE == -1:
            goal += PROGRAMS
            _meet(counter, goal)
        layer += 1
    if PHASE == -1 or PHASE == 6:
        w = tl.load(_pointer(table + (last - 1) * 8, embed, 7) + col, mask=within, other=0.0).to(tl.float32)
        t = program
        while t < tokens:
            f = tl.load(residual + t * HIDDEN + col, mask=within, other=0.0).to(tl.float32) * WHOLE
            y = f * tl.rsqrt(tl.sum(f * f, 0) / HIDDEN + eps) * w
            tl.store(out + t * HIDDEN + col, y.to(out.dtype.element_ty), mask=within)
            t += PROGRAMS
