"""Few tokens through all layers at once: the same rows as layer by layer."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hortus.rose.attention.twin import TwinAttention  # noqa: E402
from hortus.rose.cpu import positions  # noqa: E402
from hortus.rose.kernels import compiled, few, linear, twin  # noqa: E402
from hortus.rose.kernels.few import FEW_TOKENS, FewFactory  # noqa: E402
from hortus.rose.models import Kit, bert  # noqa: E402
from hortus.rose.models.encoder import Encoder  # noqa: E402
from hortus.rose.models.encoder_spec import shapes  # noqa: E402
from hortus.rose.network import Inputs  # noqa: E402

PLAIN = Kit(ops=twin, linear=linear.plain, attention=TwinAttention)


@pytest.fixture(params=["calls", "compiled"])
def way(request: pytest.FixtureRequest) -> FewFactory:
    """Each body of `few`."""
    if request.param == "calls":
        return few.few
    if compiled.library() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("few.c was not built: install again with a C compiler")
    return compiled.few


def both(config: dict[str, Any], way: FewFactory) -> tuple[Encoder, Encoder]:
    """The trunk of one config and one set of random weights, layer by layer and by `few`."""
    spec = bert.spec_from_config(
        {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
        | {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 200}
        | config
    )
    torch.manual_seed(0)
    made = {name: torch.randn(size) * (0.2 if len(size) == 2 else 0.5) for name, size in shapes(spec).items()}
    fast = dataclasses.replace(PLAIN, few=way)
    return Encoder(spec, dict(made), PLAIN), Encoder(spec, dict(made), fast)


def run(trunk: Encoder, lengths: list[int], rows: torch.Tensor | None = None) -> torch.Tensor:
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 50, int(cu[-1])).astype(np.int32))
    trunk.plan(cu, torch.from_numpy(cu), max(lengths))
    with torch.inference_mode():
        return trunk.forward(Inputs(ids, torch.from_numpy(positions(cu)), None, torch.from_numpy(cu)), rows)


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": kind} for kind in ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")),
        *({"model_type": "bert", "hidden_act": act} for act in ("gelu_new", "relu", "silu")),
        {"model_type": "bert", "layer_norm_eps": 0.1, "num_hidden_layers": 1},
        {"model_type": "bert", "num_hidden_layers": 0},
    ],
)
def test_few_is_layer_by_layer(config: dict[str, Any], way: FewFactory) -> None:
    plain, fast = both(config, way)
    for lengths in (
        [1],
        [2],
        [5],
        [8],
        [15],
        [16],
        [17],
        [24],
        [25],
        [33],
        [48],
        [FEW_TOKENS],
        [1, 1],
        [3, 4, 3],
        [16] * 8,
        [1, 30, 2, 40],
    ):
        got = run(fast, lengths)
        assert got.shape == (sum(lengths), 32)
        torch.testing.assert_close(got, run(plain, lengths), rtol=0, atol=5e-6)
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0) - 1
        torch.testing.assert_close(run(fast, lengths, ends), got[ends], rtol=0, atol=5e-6)


@pytest.mark.parametrize("rows", [[4], [0, 1, 2, 3, 4], [4, 4], [2, 0]])
def test_any_rows_may_be_asked_for(rows: list[int], way: FewFactory) -> None:
    _, fast = both({"model_type": "bert"}, way)
    some = run(fast, [2, 3], torch.tensor(rows, dtype=torch.int32))
    torch.testing.assert_close(some, run(fast, [2, 3])[rows], rtol=0, atol=5e-6)


def test_more_tokens_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch, way: FewFactory) -> None:
    _, fast = both({"model_type": "bert"}, way)
    monkeypatch.setattr(fast, "_few", lambda *_: pytest.fail("called"))
    run(fast, [FEW_TOKENS, 1])


def test_neighbours_do_not_matter(way: FewFactory) -> None:
    """Exactly: what a mask hides is multiplied by zero."""
    _, fast = both({"model_type": "bert"}, way)
    alone, together = run(fast, [10]), run(fast, [10, 7])
    torch.testing.assert_close(together[:10], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_sequence_and_no_other(way: FewFactory, act: str, poison: float) -> None:
    """The embedding of token 7 is broken; the sequences around it share panels with it."""
    plain, fast = both({"model_type": "bert", "hidden_act": act}, way)
    for trunk in (plain, fast):
        trunk._word[7] = poison
    ids = torch.tensor([1, 2, 3, 4, 7, 5, 6, 8, 9, 10, 11, 12], dtype=torch.int32)
    for lengths in ([3, 3, 6], [12]):
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = []
        for trunk in (plain, fast):
            trunk.plan(cu, torch.from_numpy(cu), max(lengths))
            inputs = Inputs(ids, torch.from_numpy(positions(cu)), None, torch.from_numpy(cu))
            with torch.inference_mode():
                rows.append(trunk.forward(inputs))
                last = trunk.forward(inputs, inputs.cu_seqlens[1:] - 1)
            torch.testing.assert_close(torch.isfinite(last), torch.isfinite(rows[-1][cu[1:] - 1]))
        torch.testing.assert_close(torch.isfinite(rows[1]), torch.isfinite(rows[0]))
        finite = torch.isfinite(rows[0])
        torch.testing.assert_close(rows[1][finite], rows[0][finite], rtol=0, atol=5e-6)
        assert int(finite.all(1).sum()) == (9 if len(lengths) > 1 else 0)


def test_compiled_takes_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.library() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("few.c was not built: install again with a C compiler")
    plain, fast = both({"model_type": "bert", "hidden_size": 64, "intermediate_size": 200}, compiled.few)
    want = run(plain, [9, 7])
    for threads in (1, 2, 3, 40):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for _ in range(20):
            torch.testing.assert_close(run(fast, [9, 7]), want, rtol=0, atol=5e-6)


def test_without_the_library_calls_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    plain, fast = both({"model_type": "bert"}, compiled.few)
    torch.testing.assert_close(run(fast, [5]), run(plain, [5]), rtol=0, atol=5e-6)
