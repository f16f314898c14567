"""A head that reads one token of each sequence: what follows the last attention is computed for those tokens alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hortus.config import RoseConfig  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.attention.twin import TwinAttention  # noqa: E402
from hortus.rose.cpu import positions  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.rose.kernels import linear, twin  # noqa: E402
from hortus.rose.kernels.linear import Linear  # noqa: E402
from hortus.rose.models import Kit, Trunk, every, find  # noqa: E402
from hortus.rose.network import Inputs  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 90}
SIZES |= {"max_position_embeddings": 400, "num_key_value_heads": 1, "head_dim": 16}
DISTILLED = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48}
ALIBI = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
DEBERTA = {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 16}
ADAPTED = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "type_vocab_size": 1}
ADAPTED |= {"lora_adaptations": ["a", "b"], "auto_map": {"AutoModel": "XLMRobertaFlashConfig"}}
MORE: dict[str, dict[str, Any]] = {
    "deberta-v2": DEBERTA,
    "distilbert": DISTILLED,
    "gemma3_text": {"sliding_window": 8},
    "modernbert": {"local_attention": 8},
}
"""What a model_type's config.json needs besides."""
CASES = {kind: {"model_type": kind} | MORE.get(kind, {}) for kind in every()} | {
    "alibi": ALIBI,
    "alibi, two norms": ALIBI | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
    "adapters": ADAPTED,
    "convolution": DEBERTA | {"conv_kernel_size": 3},
    "convolution, one layer": DEBERTA | {"conv_kernel_size": 3, "num_hidden_layers": 1},
    "one layer": {"model_type": "bert", "num_hidden_layers": 1},
    "no layer": {"model_type": "bert", "num_hidden_layers": 0},
}
ALL_TO_THE_END = ("convolution, one layer", "no layer")
LENGTHS = ([1, 19], [7, 1, 30, 30, 2, 1], [1, 140, 3], [1] * 20 + [3], [50])

Products = list[tuple[tuple[int, ...], int]]


def counted(seen: Products) -> Callable[..., Linear]:
    """A LinearFactory whose products note (the weight's shape, how many rows they are given)."""

    def factory(weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None) -> Linear:
        product = linear.plain(weight, bias, activation)

        def run(x: torch.Tensor) -> torch.Tensor:
            seen.append((tuple(weight.shape), len(x)))
            return product(x)

        return run

    return factory


def trunk_of(config: dict[str, Any], kit: Kit) -> Trunk:
    family = find(config["model_type"])
    torch.manual_seed(0)
    weights = {}
    for name, shape in family.shapes(family.spec_from_config(config)).items():
        w = torch.randn(shape) * (0.2 if len(shape) == 2 else 0.3)
        weights[name] = w + 1 if len(shape) == 1 and name.endswith("weight") else w
    return family.build(family.spec_from_config(config), weights, kit)


def inputs_of(lengths: list[int], *, typed: bool) -> tuple[np.ndarray, Inputs]:
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 90, cu[-1]).astype(np.int32))
    types = torch.arange(len(ids), dtype=torch.int32) % 3 if typed else None
    return cu, Inputs(ids, torch.from_numpy(positions(cu)), types, torch.from_numpy(cu))


@pytest.mark.parametrize("case", CASES)
def test_rows_alone_are_the_whole_computations(case: str) -> None:
    config = SIZES | CASES[case]
    seen: Products = []
    trunk = trunk_of(config, Kit(ops=twin, linear=counted(seen), attention=TwinAttention))
    for lengths in LENGTHS:
        cu, inputs = inputs_of(lengths, typed=case == "adapters")
        trunk.plan(cu, inputs.cu_seqlens, max(lengths))
        for mode in ("cls", "last"):
            rows = twin.picked(inputs.cu_seqlens, len(inputs.ids), mode)
            assert rows is not None
            with torch.inference_mode():
                want = trunk.forward(inputs).index_select(0, rows)
                whole = seen.copy()
                seen.clear()
                got = trunk.forward(inputs, rows)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * max(1.0, float(want.abs().max())))
            # The last block's products but the first, which makes queries, keys and values.
            few = 0 if case in ALL_TO_THE_END else 3
            assert [n for _, n in seen] == [n for _, n in whole[: len(whole) - few]] + [len(lengths)] * few
            assert [shape for shape, _ in seen] == [shape for shape, _ in whole]
            seen.clear()


@pytest.mark.parametrize("mode", ["cls", "last"])
def test_which_rows_are_picked(mode: str) -> None:
    def picked(lengths: list[int], tokens: int) -> list[int] | None:
        rows = twin.picked(torch.tensor([0, *lengths]).cumsum(0).int(), tokens, mode)
        return None if rows is None else rows.tolist()

    assert picked([3, 1, 16], 20) == ([0, 3, 4] if mode == "cls" else [2, 3, 19])
    assert picked([1] * 20, 20) is None, "all of them"
    assert picked([16], 16) is None, "too few"
    rows = picked([0, 5, 0, 24, 0], 29)
    assert rows is not None
    assert min(rows) >= 0, "of an empty sequence: any that there is"
    assert max(rows) < 29
    assert [rows[1], rows[3]] == ([0, 5] if mode == "cls" else [4, 28])


def pooled_folder(path: Path, pooling: str, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(SIZES | config))
    (path / "pool").mkdir()
    (path / "pool" / "config.json").write_text(json.dumps({"pooling_mode": pooling.split("+")}))
    kinds = {"Transformer": "", "Pooling": "pool"}
    modules = [{"path": at, "type": f"sentence_transformers.models.{kind}"} for kind, at in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    return path


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean", "cls+lasttoken", "classify", "spans"])
def test_an_engines_rows_are_those_of_the_whole_computation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pooling: str, model_type: str
) -> None:
    kind = "classify" if pooling == "classify" else "embed"
    path = pooled_folder(tmp_path, "cls" if pooling in ("classify", "spans") else pooling, CASES[model_type])
    engine = open_engine(open_folder(str(path)), RoseConfig(load_format="dummy", kind=kind))
    asked: list[bool] = []

    def run(batch: TokenBatch, picked: Callable[..., Any]) -> Any:
        def spy(*args: Any) -> Any:
            asked.append((rows := picked(*args)) is not None)
            return rows

        monkeypatch.setattr(twin, "picked", spy)
        return engine.step(batch).result()

    picked = twin.picked
    for lengths in LENGTHS:
        rng = np.random.default_rng(0)
        batch = TokenBatch.of([rng.integers(0, 90, n).tolist() for n in lengths])
        if pooling == "spans":
            ends = batch.cu_seqlens[1:]
            batch = dataclasses.replace(
                batch, spans=np.stack([ends - 1, ends], 1), span_counts=np.ones(len(batch), np.int32)
            )
        want, got = run(batch, lambda *_: None), run(batch, picked)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1.0, np.abs(want).max()))
    one = pooling in ("cls", "lasttoken", "classify")
    assert asked == ([False, True] * len(LENGTHS) if one else []), "all that is asked pays, on a CPU"
