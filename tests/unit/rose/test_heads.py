"""plan_head: which modules become what, and which are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hortus.errors import StartError
from hortus.folder import ModelFolder, Module
from hortus.rose.heads import HeadPlan, plan_head

MEAN = {"pooling_mode_mean_tokens": True}
DENSE = {"in_features": 8, "out_features": 3}


def plan(*modules: tuple[str, dict[str, Any]], hidden: int = 8, **folder: Any) -> HeadPlan:
    listed = tuple(Module(kind, Path("/m") / str(i), config) for i, (kind, config) in enumerate(modules))
    if listed:
        listed = (Module("Transformer", Path("/m"), {}), *listed)
    made = {"name": "m", "revision": None, "transformer": Path("/m"), "config": {}, "modules": listed} | folder
    return plan_head(ModelFolder(path=Path("/m"), **made), hidden)


def test_pooling_spellings() -> None:
    assert plan(("Pooling", MEAN)).pooling == ("mean",)
    assert plan(("Pooling", {"pooling_mode": "lasttoken"})).pooling == ("last",)
    assert plan(("Pooling", {"pooling_mode": ["max", "cls"]})).pooling == ("max", "cls")
    assert plan(("Pooling", {"word_embedding_dimension": 8})).pooling == ("mean",), "no flag set means mean"
    several = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    assert plan(("Pooling", several)).pooling == ("cls", "last"), "sentence-transformers' order, not the file's"
    assert plan(("Pooling", several)).width == 16


def test_without_modules() -> None:
    assert plan().pooling == ("mean",)
    assert plan(config={"architectures": ["BertForMaskedLM"]}).pooling == ("mean",)
    assert plan(config={"architectures": ["Qwen3ForCausalLM"]}).pooling == ("last",)
    assert plan(config={"architectures": ["Qwen3ForCausalLM"], "is_causal": False}).pooling == ("mean",)
    assert plan().normalize is False


def test_the_last_normalize_is_the_gateways() -> None:
    normal = ("Normalize", {})
    assert plan(("Pooling", MEAN), normal).normalize
    assert plan(("Pooling", MEAN), normal).steps == ()
    made = plan(("Pooling", MEAN), normal, ("Dense", DENSE), ("Dropout", {}), normal, ("FlexibleQuantizer", {}))
    assert made.normalize
    assert made.steps[0] is None
    assert made.steps[1] is not None
    assert made.steps[1].activation == "Tanh", "sentence-transformers' default"
    assert (len(made.steps), made.width) == (2, 3)
    assert not plan(("Pooling", MEAN), normal, ("Dense", DENSE)).normalize


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ([("Dense", DENSE)], "Pooling module must follow"),
        ([("Pooling", {})], "config.json: missing"),
        ([("Pooling", MEAN | {"word_embedding_dimension": 9})], "pools 9 values a token, but the model has 8"),
        ([("Pooling", {"pooling_mode": "median"})], "pooling mode 'median'"),
        ([("Pooling", MEAN), ("Pooling", MEAN)], "a Pooling module at this place"),
        ([("Pooling", MEAN), ("FlexibleQuantizer", {}), ("Dense", DENSE)], "a FlexibleQuantizer module at this place"),
        ([("Pooling", MEAN), ("Dense", {"in_features": 8})], "out_features must be a whole number"),
        (
            [("Pooling", MEAN), ("Dense", DENSE | {"in_features": 9})],
            "Dense takes 9 values, but what comes before gives 8",
        ),
        ([("Pooling", MEAN), ("Dense", DENSE | {"activation_function": "my.Act"})], "activation 'my.Act'"),
        ([("Pooling", MEAN), ("Dense", DENSE | {"activation_function": "torch.nn.Bilinear"})], "Bilinear"),
        ([("Pooling", MEAN), ("Dense", DENSE | {"module_input_name": "token_embeddings"})], "module_input_name"),
        ([("Pooling", MEAN), ("Normalize", {"module_output_name": "x"})], "module_output_name 'x'"),
    ],
)
def test_refused(modules: list[tuple[str, dict[str, Any]]], told: str) -> None:
    with pytest.raises(StartError, match=told):
        plan(*modules)


def test_include_prompt() -> None:
    """Leaving a prompt out of pooling matters only where there is a prompt."""
    config = MEAN | {"include_prompt": False}
    assert plan(("Pooling", config), prompts={"query": ""}).pooling == ("mean",)
    with pytest.raises(StartError, match="include_prompt"):
        plan(("Pooling", config), prompts={"query": "query: "})
