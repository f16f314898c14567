"""Stretched rotary positions: our tables against transformers' own, to the last bit or nearly; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from hortus.errors import StartError  # noqa: E402
from hortus.rose.models.rotary import read_rope, rotary_tables  # noqa: E402

LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1": (LLAMA | {"original_max_position_embeddings": 8192}, {"rope_theta": 500_000.0}),
    "Llama 3.2": (LLAMA | {"factor": 32.0, "original_max_position_embeddings": 8192}, {"rope_theta": 500_000.0}),
    "llama3, no original length": (LLAMA, {"max_position_embeddings": 4096}),
    "llama3, the config's original length": (
        LLAMA | {"original_max_position_embeddings": 64},
        {"original_max_position_embeddings": 2048},
    ),
    "Qwen3's yarn": (YARN, {"rope_theta": 1_000_000.0}),
    "yarn, whole numbers": (YARN | {"factor": 4}, {"rope_theta": 10_000}),
    "yarn, not cut to whole": (YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2.5}, {}),
    "yarn, its own attention factor": (YARN | {"attention_factor": 0.8}, {}),
    "yarn, two scales": (YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}, {}),
    "yarn, one scale": (YARN | {"mscale": 0.7}, {}),
    "yarn, of short texts": (YARN | {"original_max_position_embeddings": 4}, {}),
    "yarn, one border": (YARN | {"beta_fast": 3, "beta_slow": 3, "truncate": False}, {}),
    "yarn, no factor": ({**YARN, "factor": None}, {"max_position_embeddings": 131072}),
    "yarn, factor 1": (YARN | {"factor": 1.0}, {}),
    "linear": ({"rope_type": "linear", "factor": 3.0}, {}),
    "dynamic, up to the limit": ({"rope_type": "dynamic", "factor": 3.0}, {}),
}


@pytest.mark.parametrize("spelt", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("way", WAYS)
def test_tables_are_transformers(way: str, spelt: str) -> None:
    """spelt: by transformers 5, or by 4, whose files say `type`."""
    rope, more = WAYS[way]
    base = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 40960,
        "rope_theta": 10_000.0,
    } | more
    theirs = transformers.LlamaConfig(**base, rope_parameters=dict(rope))
    frequency, grown = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    if spelt == "rope_scaling":
        rope = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    else:
        rope = rope | {"rope_theta": base.pop("rope_theta")}
    cos, sin = rotary_tables(read_rope({**base, spelt: rope}, 1.0, 128), 128, 3000, torch.device("cpu"))
    angle = torch.outer(torch.arange(3000).float(), frequency)
    # An angle of some thousands of radians has an error of 2e-4 in float32 once its frequency is off by one bit.
    np.testing.assert_allclose(cos, angle.cos() * grown, atol=1e-6)
    np.testing.assert_allclose(sin, angle.sin() * grown, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "ModernBert"])
@pytest.mark.parametrize("theta", [{}, {"rope_theta": 700.0}])
def test_rope_scaling_added_to_a_file_of_transformers_5(family: str, theta: dict[str, Any]) -> None:
    """As model cards have it for longer texts. Where layers are of two kinds each has an entry of its own."""
    each = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    kinds = ("full_attention", "sliding_attention") if family != "Llama" else ("",)
    told = {"rope_parameters": {kind: dict(each) for kind in kinds} if kinds[0] else each, "rope_scaling": YARN | theta}
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
    theirs = getattr(transformers, family + "Config")(**sizes, **json.loads(json.dumps(told)))
    for kind in kinds:
        said = theirs.rope_parameters[kind] if kind else theirs.rope_parameters
        # Gemma's reader leaves a rope_scaling to the layers that see all.
        ours = told | ({"rope_scaling": None} if family == "Gemma3Text" and kind == kinds[1] else {})
        got = read_rope({**sizes, **ours}, 10_000.0, 128, layers=kind)
        assert (got.theta, got.way.factor) == (said["rope_theta"], said["factor"])


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not supported; supported: default, linear"),
        ({"rope_type": "proportional"}, "rope type 'proportional' is not supported"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope type 'ntk' is not supported"),
        ({"rope_type": ["yarn"]}, r"rope type \['yarn'\] is not supported"),
        ({"rope_type": "linear"}, "the factor of rope type 'linear' must be 1 or more, not None"),
        ({"rope_type": "linear", "factor": float("nan")}, "must be 1 or more, not nan"),
        (LLAMA | {"factor": 0.5}, "the factor of rope type 'llama3' must be 1 or more, not 0.5"),
        (LLAMA | {"low_freq_factor": None}, "low_freq_factor must be a positive number, not None"),
        (LLAMA | {"high_freq_factor": 1.0}, "low_freq_factor 1.0 must be less than high_freq_factor 1.0"),
        (LLAMA | {"original_max_position_embeddings": 1.5}, "original_max_position_embeddings must be a whole number"),
        (YARN | {"beta_fast": "32"}, "beta_fast must be a positive number, not '32'"),
        (YARN | {"attention_factor": -1}, "attention_factor must be a positive number, not -1"),
        (YARN | {"mscale": True, "mscale_all_dim": 1.0}, "mscale must be a positive number, not True"),
        (YARN | {"rope_theta": 1.0}, "needs a rope_theta above 1"),
        (YARN | {"rope_theta": 0}, "rope_theta must be a positive number, not 0"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ([4.0], "rope_parameters must be an object"),
    ],
)
def test_refused(rope: Any, told: str) -> None:
    with pytest.raises(StartError, match=f"config.json of llama: .*{told}"):
        read_rope({"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": rope}, 10_000.0, 64)


def test_without_a_length_of_training() -> None:
    with pytest.raises(
        StartError, match="original_max_position_embeddings must be a whole number of at least 1, not None"
    ):
        read_rope({"model_type": "modernbert", "rope_scaling": LLAMA}, 10_000.0, 64)
