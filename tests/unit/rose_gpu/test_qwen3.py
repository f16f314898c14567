"""Our Qwen3 against transformers' own, tiny and random, in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from hortus.errors import StartError
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.kernels import linear, twin
from hortus.rose.models import Kit, find
from hortus.rose.models.qwen3 import FAMILY, Qwen3Spec
from hortus.rose.models.rotary import Rope
from hortus.rose.network import Inputs
from hortus.types import TokenBatch

KIT = Kit(ops=twin, linear=linear.plain, attention=TwinAttention)
LIMIT = 48


def config(**changes: Any) -> Qwen3Config:
    values = {
        "vocab_size": 97,
        "hidden_size": 40,  # not heads x head_dim, as in the 4B model
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return Qwen3Config(**{**values, **changes})


def reference(cfg: Qwen3Config, *, causal: bool) -> Qwen3Model:
    torch.manual_seed(3)
    model = Qwen3Model._from_config(cfg, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # larger than transformers' start, so that attention is not flat
            p.normal_(1.0 if "norm" in name else 0.0, 0.15)
    for layer in model.layers:
        layer.self_attn.is_causal = causal
    return model


def rows(model: Qwen3Model, ids: list[int], *, causal: bool) -> torch.Tensor:
    """[tokens, hidden] of one sequence alone. A mapping of None masks leaves is_causal to decide."""
    mask = None if causal else {"full_attention": None}
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).last_hidden_state[0]


def ours(spec: Qwen3Spec, weights: dict[str, torch.Tensor], batch: TokenBatch) -> torch.Tensor:
    assert {k: tuple(v.shape) for k, v in weights.items()} == FAMILY.shapes(spec)
    weights = {k: v.clone() for k, v in weights.items()}
    trunk = FAMILY.build(spec, weights, KIT)
    assert not weights, "fused weights are taken out: none lives twice"
    cu = torch.tensor(batch.cu_seqlens)
    positions = torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int32) for n in batch.lengths]))
    with torch.inference_mode():
        trunk.plan(batch.cu_seqlens, cu, batch.max_seqlen)
        return trunk.forward(Inputs(torch.from_numpy(batch.ids), positions, None, cu))


def batch_of(lengths: list[int]) -> TokenBatch:
    random = np.random.default_rng(5)
    return TokenBatch.of([random.integers(0, 97, n).tolist() for n in lengths])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lengths", [[1], [LIMIT], [7, 1, 30, 30, 2]])
def test_hidden_states_equal_transformers(lengths, bias, causal):
    cfg = config(attention_bias=bias)
    model = reference(cfg, causal=causal)
    said = {**cfg.to_dict(), "use_bidirectional_attention": not causal}
    batch = batch_of(lengths)
    found = ours(FAMILY.spec_from_config(said), model.state_dict(), batch)
    truth = torch.cat([rows(model, batch.slice(i, i + 1).ids.tolist(), causal=causal) for i in range(len(batch))])
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    cu = torch.tensor(batch.cu_seqlens)
    for mode in ("mean", "last"):
        torch.testing.assert_close(twin.pool(found, cu, mode), twin.pool(truth, cu, mode), rtol=1e-5, atol=1e-5)


def test_direction_shows():
    """The two directions differ, so the test above would notice the wrong one."""
    cfg = config()
    model = reference(cfg, causal=True)
    batch = batch_of([9])
    a, b = (
        ours(FAMILY.spec_from_config({**cfg.to_dict(), "use_bidirectional_attention": both}), model.state_dict(), batch)
        for both in (False, True)
    )
    assert (a - b)[:-1].abs().max() > 0.1


def test_direction_by_config():
    said = config().to_dict()

    def causal(**more: Any) -> bool:
        return FAMILY.spec_from_config({**said, **more}).heads.causal

    assert causal()
    assert not causal(model_type="bidirectional_pplx_qwen3")
    assert not causal(model_type="bidirectional_pplx_qwen3", use_bidirectional_attention=True)
    assert not causal(is_causal=False)
    assert causal(use_bidirectional_attention=False)


def test_theta_by_either_name():
    said = config().to_dict()
    del said["rope_parameters"]
    old = FAMILY.spec_from_config({**said, "rope_theta": 1e6})
    new = FAMILY.spec_from_config({**said, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert old.rope == new.rope == Rope(1e6)
    assert FAMILY.spec_from_config({**said, "rope_theta": 1e6, "rope_scaling": None}).rope == Rope(1e6)


def test_both_model_types_are_this_family():
    assert find("qwen3") is find("bidirectional_pplx_qwen3") is FAMILY
    assert dict(FAMILY.refused_dtypes)["float16"].startswith("activations overflow")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_parameters": None}, "rope type 'ntk'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}, "rope_parameters": None}, "must be 1 or more, not 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window"),
        ({"num_key_value_heads": 3}, "multiple of 3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_named(change, words):
    with pytest.raises(StartError, match=words):
        FAMILY.spec_from_config({**config().to_dict(), **change})
