"""`hortus bench kernels`: each fused kernel and each attention backend alone, on the GPU it runs on.

Physics: the fused kernels move bytes, so their floor is (bytes read once + bytes written once) / (bandwidth of a plain
copy, measured first). Up to about 4,096 tokens everything lies in the L2 cache, as it does inside a model, and may beat
that "floor"; there the launch is what is left to save. Attention is bound by the matrix units; its rows are the source
of rose/attention/measured.py.

Everything is timed by replay of a CUDA graph that holds several calls, so that launches from Python are not in the
numbers. Prints a short table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hortus.bench.flags import whole, written_file
from hortus.rose.attention import Attention, Heads
from hortus.rose.attention.choose import Gpu

SHAPES = (
    Heads(heads=16, kv_heads=8, head_dim=128),
    Heads(heads=32, kv_heads=8, head_dim=128),
    Heads(heads=12, kv_heads=12, head_dim=64),
)
MIX = [16, 2048, 512, 64, 1024, 300, 128, 700, 2048, 90, 450, 1500, 33, 256, 612, 800, 40, 1900, 75, 350] + [356] * 10
BATCHES: tuple[list[int], ...] = ([128], [512], [4096], [128] * 8, [512] * 8, [512] * 50, [512] * 100, MIX)


def time_us(call: Callable[[], object], *, target_us: float = 20_000.0) -> float:
    """Median microseconds of one call, by replay of a graph of as many calls as fill about a millisecond."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = max(float(start.elapsed_time(end)) * 1000, 1.0)  # an eager launch: an upper bound for small calls
    calls = int(min(50, max(1, 1000 / once)))
    if once < 100:
        calls = 50
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(int(min(15, max(3, target_us / (once * calls))))):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000 / calls)
    return statistics.median(times)


def copy_gbps() -> float:
    """Bandwidth of a device-to-device copy, read and write counted, GB/s."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / time_us(lambda: b.copy_(a)) / 1000


def kernel_cases(
    tokens: int, hidden: int, intermediate: int, heads: Heads
) -> list[tuple[str, float, Callable[[], Any]]]:
    """(name, bytes that must move, call) of every fused kernel at one size, bf16."""
    from hortus.rose.kernels import dense, fused, quantise
    from hortus.rose.kernels.heads import norm_turn_

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    x, residual, weight, bias = random(tokens, hidden), random(tokens, hidden), random(hidden), random(hidden)
    gate_up, wide = random(tokens, 2 * intermediate), random(tokens, intermediate)
    qkv = random(tokens, (heads.heads + 2 * heads.kv_heads) * heads.head_dim)
    qw, kw = random(heads.head_dim), random(heads.head_dim)
    word = random(30_000, hidden)
    ids = torch.randint(30_000, (tokens,), device="cuda", dtype=torch.int32)
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32) % 512
    angle = torch.randn(512, heads.head_dim // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    row, length = tokens * hidden * 2, min(tokens, 512)
    kept = fused.residual(residual)
    many = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
    one = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    roped = tokens * (heads.heads + heads.kv_heads) * heads.head_dim * 2
    eight: list[tuple[str, float, Callable[[], Any]]] = []
    if torch.cuda.get_device_capability() >= (9, 0):
        eight = [
            ("fp8 rows", 3 * row // 2, lambda: quantise.rows(x)),
            ("fp8 add_rms_norm_", 7 * row // 2, lambda: quantise.add_rms_norm_(x, kept, weight, 1e-6)),
            ("fp8 silu_pairs", 5 * tokens * intermediate, lambda: quantise.silu_pairs(gate_up)),
            ("fp8 gelu", 3 * tokens * intermediate, lambda: quantise.activated(wide, "gelu")),
        ]
    return [
        *eight,
        ("embed_rms_norm", 3 * row, lambda: fused.embed_rms_norm(ids, word, 1.0, weight, 1e-6)),
        (
            "embed_layer_norm",
            3 * row,
            lambda: fused.embed_layer_norm(ids, positions, None, word, word, None, weight, bias, 1e-6),
        ),
        ("rms_norm", 2 * row, lambda: fused.rms_norm(x, weight, 1e-6)),
        ("add_rms_norm_", 4 * row, lambda: fused.add_rms_norm_(x, kept, weight, 1e-6)),
        ("add_layer_norm", 3 * row, lambda: fused.add_layer_norm(x, residual, weight, bias, 1e-6)),
        (
            "norm_turn_",
            2 * roped,
            lambda: norm_turn_(qkv, qw, kw, cos, sin, positions, heads.heads, heads.kv_heads, 1e-6),
        ),
        ("silu_pairs", 3 * tokens * intermediate * 2, lambda: dense.silu_pairs(gate_up)),
        (
            "add_layer_norm_",
            4 * row,
            lambda: fused.add_layer_norm_(x, kept, weight, bias, 1e-6),
        ),
        ("glu", 3 * tokens * intermediate * 2, lambda: fused.glu(gate_up, "gelu", 0)),
        ("gelu_", 2 * tokens * intermediate * 2, lambda: fused.gelu_(wide)),
        ("pool mean, of 512", row, lambda: fused.pool(x, many, "mean")),
        ("pool mean, one", row, lambda: fused.pool(x, one, "mean")),
        ("pool last", 0, lambda: fused.pool(x, many, "last")),
    ]


def backends(heads: Heads, gpu: Gpu) -> dict[str, Attention]:
    """Those that can run here; prints why the others cannot."""
    from hortus.rose.attention import fa4, flashinfer, varlen
    from hortus.rose.attention.pick import refusals

    device, dtype = torch.device("cuda"), torch.bfloat16
    makers: dict[str, Callable[[], Attention]] = {
        "varlen": lambda: varlen.VarlenAttention(heads),
        "fa4": lambda: fa4.Fa4Attention(heads),
        "flashinfer_fa3": lambda: flashinfer.FlashInferAttention("fa3", heads, device, dtype),
        "flashinfer_fa2": lambda: flashinfer.FlashInferAttention("fa2", heads, device, dtype),
    }
    refused = refusals(heads, gpu, dtype)
    for name in makers:
        if refused[name] is not None:
            print(f"{name}: {refused[name]}")
    return {name: make() for name, make in makers.items() if refused[name] is None}


def attention_us(backend: Attention, heads: Heads, lengths: list[int]) -> float:
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    n, tokens = heads.heads + 2 * heads.kv_heads, int(cu[-1])
    qkv = torch.randn(tokens, n, heads.head_dim, device="cuda").bfloat16()
    q, k, v = torch.split(qkv, [heads.heads, heads.kv_heads, heads.kv_heads], 1)
    backend.plan(cu, torch.from_numpy(cu).cuda(), max(lengths))
    return time_us(lambda: backend.run(q, k, v))


def main(argv: list[str]) -> int:
    """Entry point of `hortus bench kernels`."""
    parser = argparse.ArgumentParser(prog="hortus bench kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=whole, nargs="*", default=[128, 512, 4096, 51200], help="sizes of the kernels")
    parser.add_argument("--hidden", type=whole, default=1024)
    parser.add_argument("--intermediate", type=whole, default=3072)
    parser.add_argument("--only", choices=("fused", "attention"), help="half of it")
    parser.add_argument("--out", type=written_file, help="append the JSON line to this file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("hortus bench kernels needs a CUDA device")
        return 2
    gpu = Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    result: dict[str, Any] = {"suite": "kernels", "hardware": gpu.name, "torch": torch.__version__, "dtype": "bfloat16"}
    with torch.inference_mode():
        if args.only != "attention":
            result |= fused_table(args.tokens, args.hidden, args.intermediate)
        if args.only != "fused":
            result["attention"] = attention_table(gpu)
    line = json.dumps(result)
    if args.out:
        with args.out.open("a") as f:
            f.write(line + "\n")
    print(line)
    return 0


def fused_table(sizes: list[int], hidden: int, intermediate: int) -> dict[str, Any]:
    """Measure and print the fused kernels; -> {"copy_gbps", "fused": [{kernel, tokens, us, gbps}]}."""
    copy = copy_gbps()
    print(f"copy {copy:.0f} GB/s; us and (% of the copy's bandwidth), hidden {hidden}, intermediate {intermediate}")
    print(f"{'kernel':<20}" + "".join(f"{f'{n} tokens':>18}" for n in sizes))
    lines: dict[str, str] = {}
    rows = []
    for tokens in sizes:
        for name, size, call in kernel_cases(tokens, hidden, intermediate, SHAPES[0]):
            us = time_us(call)
            gbps = size / us / 1000
            rows.append({"kernel": name, "tokens": tokens, "us": round(us, 2), "gbps": round(gbps)})
            lines[name] = lines.get(name, f"{name:<20}") + f"{us:>11.2f} ({100 * gbps / copy:>3.0f}%)"
    print("\n".join(lines.values()))
    return {"copy_gbps": round(copy), "fused": rows}


def attention_table(gpu: Gpu) -> list[dict[str, Any]]:
    """Measure and print the backends; -> rows as measured.Row has them."""
    rows = []
    for heads in SHAPES:
        found = backends(heads, gpu)
        print(f"{heads.heads}/{heads.kv_heads}x{heads.head_dim}, us" + "".join(f"{name:>16}" for name in found))
        for lengths in BATCHES:
            us = {name: round(attention_us(backend, heads, lengths), 1) for name, backend in found.items()}
            print(f"{sum(lengths):>6} of {max(lengths):<6}" + "".join(f"{t:>16.1f}" for t in us.values()))
            shape = {"heads": heads.heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
            rows.append({**shape, "tokens": sum(lengths), "longest": max(lengths), "us": us})
    return rows


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
