"""Qwen3 on the GPU, Triton kernels and fast attention in bf16, against the same weights on the CPU in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hortus.rose.attention.pick import open_attention
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.kernels import linear, twin
from hortus.rose.models import Kit
from hortus.rose.models.qwen3 import FAMILY
from hortus.rose.network import Inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = {
    "model_type": "bidirectional_pplx_qwen3",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
}


def inputs_of(lengths: list[int], device: str) -> tuple[np.ndarray, Inputs]:
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.random.default_rng(sum(lengths)).integers(0, 1000, cu[-1]).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    on = [torch.from_numpy(a).to(device) for a in (ids, positions, cu)]
    return cu, Inputs(on[0], on[1], None, on[2])


@pytest.mark.parametrize("both_ways", [True, False])
def test_bf16_on_the_gpu_equals_float32_on_the_cpu(both_ways):
    from hortus.rose.kernels import fused

    spec = FAMILY.spec_from_config({**CONFIG, "use_bidirectional_attention": both_ways})
    torch.manual_seed(0)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.03
        for name, shape in FAMILY.shapes(spec).items()
    }
    on_gpu = {k: v.cuda().bfloat16() for k, v in weights.items()}
    exact = {k: v.bfloat16().float() for k, v in weights.items()}
    truth = FAMILY.build(spec, exact, Kit(ops=twin, linear=linear.plain, attention=TwinAttention))
    ours = FAMILY.build(
        spec,
        on_gpu,
        Kit(
            ops=fused,
            linear=linear.plain,
            attention=lambda h: open_attention(
                "auto", h, device=torch.device("cuda"), dtype=torch.bfloat16, graph_max_tokens=4096
            ),
        ),
    )
    with torch.inference_mode():
        for lengths in ([1], [64, 3, 0, 61], [500]):
            cu, there = inputs_of(lengths, "cuda")
            _, here = inputs_of(lengths, "cpu")
            ours.plan(cu, there.cu_seqlens, sum(lengths))
            truth.plan(cu, here.cu_seqlens, max(lengths))
            a = fused.pool(ours.forward(there), there.cu_seqlens, "mean").cpu()
            b = twin.pool(truth.forward(here), here.cu_seqlens, "mean")
            full = torch.tensor(lengths) > 0
            assert F.cosine_similarity(a[full], b[full]).min() > 0.9995
            assert (a[~full] == 0).all()

        # The same step as a graph, replayed with other lengths, equals the eager step bit for bit.
        cu, static = inputs_of([128, 0, 0, 0], "cuda")
        ours.plan(cu, static.cu_seqlens, 128)
        fused.pool(ours.forward(static), static.cu_seqlens, "mean")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = fused.pool(ours.forward(static), static.cu_seqlens, "mean")
        for lengths in ([64, 3, 0, 61], [1, 1, 1, 125]):
            cu, now = inputs_of(lengths, "cuda")
            for name in ("ids", "positions", "cu_seqlens"):
                getattr(static, name).copy_(getattr(now, name))
            graph.replay()
            replayed = rows.clone()
            ours.plan(cu, now.cu_seqlens, 128)
            assert torch.equal(replayed, fused.pool(ours.forward(now), now.cu_seqlens, "mean"))
