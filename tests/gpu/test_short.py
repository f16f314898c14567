"""A Qwen3 trunk in one kernel against the same layer by layer: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1).

tests/unit/rose_gpu runs this same file the second way. Under the interpreter phases are launched one by one, so what is
tested there is what each computes; that programs meet is the GPU's to show.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hortus.rose.attention.twin import TwinAttention
from hortus.rose.kernels import linear, twin
from hortus.rose.models import Kit, find
from hortus.rose.network import Inputs, ranges

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HERE = INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a GPU of capability 9.0 or later"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # the interpreter's
]
if HERE:
    from hortus.rose.kernels import short
    from hortus.rose.kernels.dense import paired
    from hortus.rose.kernels.heads import in_pairs

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TINY = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
TRUE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
TRUE |= {"intermediate_size": 3072}
BATCHES = [[3, 1, 12], [9]] if INTERPRETED else [[1], [5], [16], [3, 1, 12], [1] * 16]


def config(*, causal: bool = False) -> dict[str, Any]:
    kind = "qwen3" if causal else "bidirectional_pplx_qwen3"
    sizes = TINY if INTERPRETED else TRUE
    return sizes | {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 90, "max_position_embeddings": 64}


def weights(said: dict[str, Any]) -> dict[str, torch.Tensor]:
    family = find(said["model_type"])
    torch.manual_seed(0)
    made = {}
    for name, shape in family.shapes(family.spec_from_config(said)).items():
        w = torch.randn(shape) * (0.7 if name.startswith("embed") else 1.0)
        made[name] = (w / shape[1] ** 0.5 if len(shape) == 2 and "embed" not in name else w).to(DEVICE, DTYPE)
        if len(shape) == 1:
            made[name] = made[name] * 0.1 + 1
    return made


def trunk(said: dict[str, Any], made: dict[str, torch.Tensor], kit: Kit) -> Any:
    family = find(said["model_type"])
    return family.build(family.spec_from_config(said), dict(made), kit)


def whole(said: dict[str, Any], made: dict[str, torch.Tensor]) -> short.Together:
    """From a checkpoint's weights, cut for their sizes."""
    spec = find(said["model_type"]).spec_from_config(said)
    rotary = trunk(said, made, Kit(ops=twin, linear=linear.plain, attention=TwinAttention))._rotary
    blocks = []
    for n in range(spec.layers):
        o = {name.removeprefix(f"layers.{n}."): w for name, w in made.items() if name.startswith(f"layers.{n}.")}
        o = {name.removesuffix(".weight"): w for name, w in o.items()}
        qkv = torch.cat([o[f"self_attn.{name}_proj"] for name in "qkv"])
        heads = spec.heads.heads + spec.heads.kv_heads
        weight, _, q_norm, k_norm = in_pairs(qkv, None, o["self_attn.q_norm"], o["self_attn.k_norm"], rotary, heads)
        after = "norm.weight" if n == spec.layers - 1 else f"layers.{n + 1}.input_layernorm.weight"
        blocks.append(
            short.Block(
                weight,
                q_norm,
                k_norm,
                o["self_attn.o_proj"],
                o["post_attention_layernorm"],
                paired(o["mlp.gate_proj"], o["mlp.up_proj"]),
                o["mlp.down_proj"],
                made[after],
            )
        )
    cut = short.Cut()
    if INTERPRETED:
        cut = short.Cut(qkv=16, grown=8, pairs=16, step=16, stages=2, grown_step=16, chains=2, grown_stages=2)
    first = made["layers.0.input_layernorm.weight"]
    return short.Together(
        blocks, made["embed_tokens.weight"], first, rotary, spec.heads, spec.eps, cut, 2 if INTERPRETED else 128
    )


def inputs(lengths: list[int], slots: int = 0) -> tuple[np.ndarray, Inputs]:
    """slots: empty sequences at the end, as a graph's bucket has."""
    each = np.array([*lengths, *[0] * slots], np.int32)
    positions, cu = ranges(np.zeros_like(each), each)
    ids = np.random.default_rng(sum(lengths)).integers(0, 80, cu[-1]).astype(np.int32)
    on = [torch.from_numpy(a).to(DEVICE) for a in (ids, positions, cu)]
    return cu, Inputs(on[0], on[1], None, on[2])


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    assert ours.shape == truth.shape
    if INTERPRETED:
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=2e-6)
    else:
        assert F.cosine_similarity(ours.float(), truth.float()).min() > 0.9995


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_one_kernel_is_the_layers_one_by_one(lengths: list[int], causal: bool) -> None:
    said = config(causal=causal)
    made = weights(said)
    exact = {name: w.float() for name, w in made.items()}
    loop = trunk(said, exact, Kit(ops=twin, linear=linear.plain, attention=TwinAttention))
    kernel = whole(said, made)
    for slots in (3,) if INTERPRETED else (0, 3):
        cu, given = inputs(lengths, slots)
        with torch.inference_mode():
            loop.plan(cu, given.cu_seqlens, max(lengths))
            close(kernel(given), loop.forward(given).to(DTYPE))


def test_a_text_does_not_hang_on_its_neighbours_and_a_broken_one_breaks_no_other() -> None:
    said = config()
    made = weights(said)
    _, given = inputs([3, 5, 4])
    kernel = whole(said, made)
    with torch.inference_mode():
        before = kernel(given)
        given.ids[3:8] = torch.arange(5, dtype=torch.int32)
        assert torch.equal(kernel(given)[:3], before[:3])
        assert torch.equal(kernel(given)[8:], before[8:])
        given.ids[4] = 85
        for bad in (float("nan"), float("inf")):
            kernel._embed[85] = bad
            after = kernel(given)
            assert torch.equal(after[:3], before[:3])
            assert torch.equal(after[8:], before[8:])
            assert not after[3:8].isfinite().any(), "all who see a broken token are broken"


def test_it_is_tried_against_the_layers_before_it_is_used() -> None:
    said = config() | {"vocab_size": 7}
    made = weights(said)
    loop = trunk(said, made, Kit(ops=twin, linear=linear.plain, attention=TwinAttention))
    short._try(whole(said, made), loop._planned, [5, 1, 7])
    made["embed_tokens.weight"] = made["embed_tokens.weight"].roll(1, 0)
    with pytest.raises(ArithmeticError, match="cosine"):
        short._try(whole(said, made), loop._planned, [5, 1, 7])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": 2048}, "at most 1024 values"),
        ({"intermediate_size": 3080}, "evenly"),
        ({"attention_bias": True}, "no biases"),
        ({"model_type": "llama"}, "normed"),
        ({"sliding_window": 16, "model_type": "mistral"}, "normed"),
    ],
)
@pytest.mark.skipif(INTERPRETED, reason="asks for the device's kind")
def test_what_does_not_fit_runs_layer_by_layer(change: dict[str, Any], why: str, caplog: Any) -> None:
    from hortus.rose.kernels import fused

    said = config(causal=True) | change
    caplog.set_level("INFO")
    kit = Kit(ops=fused, linear=linear.plain, attention=TwinAttention, short=short.together)
    assert trunk(said, weights(said), kit)._short is None
    assert why in caplog.text


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs programs one after another: they cannot meet")
def test_replayed_many_times_it_gives_the_same_bits() -> None:
    """Programs that met too early would read what others have not written yet, now and then."""
    said = config() | {"num_hidden_layers": 8}
    kernel = whole(said, weights(said))
    for lengths in ([5], [16], [11, 3]):
        _, given = inputs(lengths)
        with torch.inference_mode():
            want = kernel(given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = kernel(given)
            for _ in range(200):
                got.zero_()
                graph.replay()
                assert torch.equal(got, want)


def test_cuts_are_checked() -> None:
    heads = find("qwen3").spec_from_config(TRUE | config(causal=True) | TRUE).heads
    assert short.fits(short.Cut(), 1024, heads, 3072)
    assert not short.fits(short.Cut(), 1024, heads, 3080)
    assert not short.fits(short.Cut(), 1020, heads, 3072)
    assert not short.fits(short.Cut(qkv=256), 1024, heads, 3072)
