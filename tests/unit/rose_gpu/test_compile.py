"""The Triton kernels compile for Hopper, on a machine without a GPU, and their PTX moves 16 bytes a thread."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hortus.rose.kernels import (  # noqa: E402
    attend,
    dense,
    fused,
    heads,
    layernorm,
    pooling,
    quantise,
    rms,
    skinny,
)

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 leaves nothing to compile in this process"
)
POINTERS = {"ids": "*i32", "positions": "*i32", "types": "*i32", "cu": "*i32", "cos": "*fp32", "sin": "*fp32"}
POINTERS |= {"values": "*fp8e4nv", "scale": "*fp32", "ends": "*i32"}
POINTERS |= {"squares": "*fp32", "residual": "*fp16", "table": "*fp16"}
SCALARS = {"eps": "fp32", "n": "i32", "row_stride": "i32", "tokens": "i32", "rows": "i32"}
SCALARS |= {"score_scale": "fp32", "factor": "fp32"}
NORM = {"WIDTH": 1024, "BLOCK": 1024}
FOUR = {**NORM, "ROWS": 4}
ONE = {**NORM, "ROWS": 1}
HEADS = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128}
BLOCKS = {"ROWS": attend._ROWS, "KEYS": attend.MOST_TOKENS}


def product(tile, width, depth, *, gated):
    cut = {"ROWS": tile.rows, "COLS": tile.cols, "STEP": tile.depth, "PARTS": tile.parts}
    return {**cut, "DEPTH": depth, "WIDTH": width, "GATED": gated, "EARLY": True}


KERNELS = {
    "embed_rms_norm": (rms._embed_rms_norm, {**NORM, "EARLY": True}, 4),
    "embed_layer_norm": (
        fused._embed_layer_norm,
        {"WIDTH": 384, "BLOCK": 512, "POSITION": True, "TYPE": True, "IDS_OF_TYPE": True, "BIAS": True},
        2,
    ),
    "add_layer_norm": (
        layernorm._add_layer_norm,
        {"WIDTH": 384, "BLOCK": 512, "ROWS": 1, "PARTS": 3, "BIAS": True, "GROW": False, "EARLY": True},
        2,
    ),
    "add_layer_norm of rows": (
        layernorm._add_layer_norm,
        {"WIDTH": 768, "BLOCK": 1024, "ROWS": 4, "PARTS": 1, "BIAS": False, "bias": None, "GROW": True, "EARLY": True},
        4,
    ),
    "glu": (layernorm._glu, {"INNER": 1152, "FIRST": 0, "ACT": 0, "BLOCK": 1024, "EARLY": True}, 4),
    "glu, tanh": (layernorm._glu, {"INNER": 1152, "FIRST": 1, "ACT": 1, "BLOCK": 1024, "EARLY": False}, 4),
    "rms_norm": (rms._rms_norm, {**ONE, "PARTS": 0, "residual": None, "EARLY": True}, 4),
    "rms_norm of rows": (rms._rms_norm, {**FOUR, "PARTS": 0, "residual": None, "EARLY": True}, 4),
    "add_rms_norm": (rms._rms_norm, {**FOUR, "PARTS": 1, "EARLY": False}, 4),
    "add_rms_norm 2560": (rms._rms_norm, {"WIDTH": 2560, "BLOCK": 4096, "ROWS": 4, "PARTS": 1, "EARLY": True}, 16),
    "sum_rms_norm": (rms._rms_norm, {**ONE, "PARTS": 4, "EARLY": True}, 4),
    "norm_turn": (
        heads._norm_turn,
        {"Q_HEADS": 16, "ALL_HEADS": 24, "HALF": 64, "HALF_BLOCK": 64, "HEADS": 16, "NORM": True, "EARLY": True},
        4,
    ),
    "look_up": (heads._look_up, {"WIDTH": 256, "ROWS": 8, "EARLY": True}, 4),
    "attend": (attend._attend, {**HEADS, **BLOCKS, "PARTS": 2, "CAUSAL": False, "EARLY": True}, attend._WARPS),
    "attend without norm": (
        attend._attend,
        {**HEADS, **BLOCKS, "PARTS": 0, "CAUSAL": True, "EARLY": True},
        attend._WARPS,
    ),
    "turned product": (
        attend._turned,
        {**HEADS, "DEPTH": 1024, "ROWS": 64, "COLS": 32, "STEP": 128, "NORM": True, "EARLY": True},
        8,
    ),
    "silu_pairs": (dense._silu_pairs, {"BLOCK": 1024, "EARLY": True}, 4),
    "product in parts": (skinny._product, product(skinny.split(128, 1024, 2048), 1024, 2048, gated=False), 8),
    "gated product": (skinny._product, product(skinny.gated(64, 3072, 1024), 3072, 1024, gated=True), 4),
    "gelu": (fused._gelu, {"BLOCK": 1024}, 4),
    "fp8 rows": (quantise._rows, {**FOUR, "EARLY": True}, 4),
    "fp8 add_rms_norm": (quantise._add_rms_norm, {**FOUR, "EARLY": True}, 4),
    "fp8 add_rms_norm 2560": (quantise._add_rms_norm, {"WIDTH": 2560, "BLOCK": 4096, "ROWS": 1, "EARLY": True}, 16),
    "fp8 silu_pairs": (quantise._silu_pairs, {"WIDTH": 3072, "BLOCK": 4096, "EARLY": True}, 16),
    "fp8 silu_pairs 9728": (quantise._silu_pairs, {"WIDTH": 9728, "BLOCK": 16384, "EARLY": True}, 16),
    "fp8 gelu": (quantise._activated, {"WIDTH": 3072, "BLOCK": 4096, "KIND": 0, "HALF": -1, "EARLY": True}, 16),
    "fp8 glu": (quantise._activated, {"WIDTH": 1152, "BLOCK": 2048, "KIND": 1, "HALF": 1, "EARLY": True}, 8),
    "pick": (pooling._pick, {"WIDTH": 1024, "BLOCK": 256, "LAST": True}, 1),
    "reduce mean": (pooling._reduce, {"WIDTH": 1024, "ROWS": 64, "COLS": 64, "PARTS": 1, "MODE": 0}, 4),
    "reduce max": (pooling._reduce, {"WIDTH": 1024, "ROWS": 64, "COLS": 64, "PARTS": 16, "MODE": 3}, 4),
    "reduce weighted": (pooling._reduce, {"WIDTH": 1024, "ROWS": 64, "COLS": 64, "PARTS": 1, "MODE": 2}, 4),
    "join": (pooling._join, {"WIDTH": 1024, "BLOCK": 64, "PARTS": 16, "MODE": 0}, 2),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles_with_wide_accesses(name):
    kernel, constants, warps = KERNELS[name]
    floats = {"out", "parts"} if kernel.__name__ in ("_pick", "_reduce", "_join") else set()
    if name == "product in parts":
        floats = {"out"}
    if name in ("sum_rms_norm", "add_layer_norm"):  # of parts
        floats = {"x"}
    signature, divisible = {}, {}
    for at, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        bf16 = "*fp32" if argument in floats else "*bf16"
        signature[argument] = SCALARS.get(argument) or POINTERS.get(argument, bf16)
        if SCALARS.get(argument) != "fp32":  # as torch's tensors are, and sizes that are multiples of 16
            divisible[(at,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, constants, divisible),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx = built.asm["ptx"]
    if constants.get("EARLY"):
        waits = ptx.index("griddepcontrol.wait")
        assert waits < ptx.index("st.global"), "nothing is written before the kernel before is complete"
    wide = re.findall(r"\b(?:ld|st)\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)\b", ptx)
    wide += re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)
    assert wide, f"no 16-byte access: {sorted(set(re.findall(r'(?:ld|st).global[.a-z0-9:]*', ptx)))}"
    assert ".local" not in ptx, "spilled to local memory"


UNWRITTEN = {"weight", "bias", "q_weight", "k_weight", "q_norm", "k_norm", "table", "positions"}
"""Arguments that no kernel of a step writes: weights, and what was copied up before its first one."""


@pytest.mark.parametrize("name", [name for name, (kernel, *_) in KERNELS.items() if "EARLY" in kernel.arg_names])
def test_before_its_wait_a_kernel_reads_what_no_kernel_writes(name):
    """launch.py's rules, which no run can be trusted to show: what is read too early is mostly there."""
    kernel, *_ = KERNELS[name]
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    means: dict[str, set[str]] = {argument: {argument} for argument in kernel.arg_names}
    read: set[str] = set()

    def behind(node):
        """The arguments that an expression is made of, what it loads left out."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            read.update(*(means.get(n.id, set()) for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)))
            return set()
        if isinstance(node, ast.Name):
            return means.get(node.id, set())
        return set().union(*(behind(child) for child in ast.iter_child_nodes(node)))

    def waits(nodes):
        for node in nodes:
            if isinstance(node, ast.Expr) and ast.unparse(node.value) == "gdc_wait()":
                return True
            if isinstance(node, ast.If):
                behind(node.test)
                if waits(node.body) or waits(node.orelse):
                    return True
                continue
            made = behind(node)
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                for n in ast.walk(target) if target is not None else ():
                    if isinstance(n, ast.Name):
                        means[n.id] = means.get(n.id, set()) | made
        return False

    assert waits(function.body)
    pointers = {a for a in kernel.arg_names if a not in SCALARS and not a.isupper()}
    assert read & pointers <= UNWRITTEN
