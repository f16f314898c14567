from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, FakeNetwork, expected, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus.config import Config, RoseConfig, TulipConfig
from hortus.engines import load_engine
from hortus.errors import EngineError, OutOfMemory, StartError
from hortus.metrics import Metrics
from hortus.rose import engine as rose
from hortus.rose.gpu import BATCH_TOKENS, PIECES, REHEARSED, GpuEngine
from hortus.types import ModelInfo, TokenBatch

INFO = ModelInfo(name="fake", width=4, max_tokens=8192, vocab_size=1000)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def make(device=None, **knobs):
    device = device or FakeDevice()
    return GpuEngine(FakeNetwork(), INFO, RoseConfig(**knobs), Metrics(), device=device), device


def counts(engine):
    metric = engine.metrics.graph_steps
    return {how: int(metric.labels(how)._value.get()) for how in ("eager", "capture", "replay")}


def test_eager_capture_replay_answer_alike(rng):
    engine, _ = make()
    for _ in range(3):
        batch = random_batch(rng, [5, 1, 60])
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert counts(engine) == {"eager": 1, "capture": 1, "replay": 1}


def test_steps_are_enqueued_while_earlier_ones_run(rng):
    """The trace: three whole steps enqueued before the device did anything, none of which spoils another."""
    engine, device = make()
    batches = [random_batch(rng, [int(n)]) for n in rng.integers(100, 128, 6)]  # one shape, so every buffer is shared
    waiting = [engine.step(b) for b in batches]
    assert all(what == "enqueued" for what, _ in device.log)
    assert [w for _, w in device.log] == ["upload", "run", "download"] + ["upload", "replay", "download"] * 5
    assert not any(lazy.ready() for lazy in waiting)
    np.testing.assert_array_equal(waiting[0].result(), expected(batches[0]))
    assert waiting[0].ready()
    assert not waiting[1].ready()
    late = engine.step(batches[0])
    for lazy, batch in zip(waiting, batches, strict=True):
        np.testing.assert_array_equal(lazy.result(), expected(batch))
    np.testing.assert_array_equal(late.result(), expected(batches[0]))


def test_pinned_memory_is_as_large_as_what_is_in_flight(rng):
    engine, _ = make()
    for _ in range(20):
        two = [engine.step(random_batch(rng, [9])) for _ in range(2)]
        [lazy.result() for lazy in two]
    assert len(engine._ring._free) == 2


def test_rows_belong_to_the_caller(rng):
    engine, _ = make()
    batch = random_batch(rng, [7, 9])
    lazy = engine.step(batch)
    rows = lazy.result()
    engine.step(random_batch(rng, [3, 4])).result()
    np.testing.assert_array_equal(rows, expected(batch))
    assert lazy.result() is rows


def test_a_forgotten_result_harms_nobody(rng):
    engine, _ = make()
    engine.step(random_batch(rng, [7]))
    batch = random_batch(rng, [8])
    np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 900), min_size=1, max_size=30), st.booleans(), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from([16, 64, 112, 1024]),
)
def test_any_traffic_is_answered_right(steps, seed, fine):
    rng = np.random.default_rng(seed)
    engine, device = make(graph_cap=3, graph_max_tokens=2048, graph_bucket=fine)
    waiting = []
    for lengths, typed, wait, spans in steps:
        batch = random_batch(rng, lengths, typed, spans)
        waiting.append((engine.step(batch), batch))
        if wait:
            lazy, batch = waiting.pop(0)
            np.testing.assert_array_equal(lazy.result(), expected(batch))
        for _ in range(int(rng.integers(0, 3))):
            if device.queue:
                device.advance()
    for lazy, batch in waiting:
        np.testing.assert_array_equal(lazy.result(), expected(batch))


def test_large_batches_are_cut_and_land_in_one_result(rng):
    engine, device = make()
    batch = random_batch(rng, [1024] * 48)  # three pieces of 16
    np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert sum(what == ("enqueued", "upload") for what in device.log) == 3
    assert counts(engine) == {"eager": 1, "capture": 1, "replay": 1}


def test_the_cap_drops_the_least_recently_used(rng):
    engine, _ = make(graph_cap=2)
    small, middle, large = (random_batch(rng, [n]) for n in (10, 100, 200))
    for batch in (small, small, middle, middle, small, large, large):  # middle is the oldest when large comes
        engine.step(batch).result()
    assert engine.metrics.graphs._value.get() == 2
    assert engine.metrics.graph_evictions._value.get() == 1
    before = counts(engine)
    engine.step(small).result()
    engine.step(large).result()
    assert counts(engine)["replay"] == before["replay"] + 2
    engine.step(middle).result()
    assert counts(engine)["eager"] == before["eager"] + 1


def test_a_new_thread_runs_eagerly_before_it_captures(rng):
    engine, _ = make()
    batch = random_batch(rng, [10])
    engine.step(batch).result()
    with ThreadPoolExecutor(1) as pool:
        for after in ({"eager": 2}, {"eager": 2, "capture": 1}, {"replay": 1}):
            np.testing.assert_array_equal(pool.submit(engine.step, batch).result().result(), expected(batch))
            assert counts(engine).items() >= after.items()


def test_what_cannot_be_captured_runs_eagerly(rng, caplog):
    engine, device = make()
    device.fail_captures = 1
    batch = random_batch(rng, [10])
    for _ in range(4):
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert counts(engine) == {"eager": 4, "capture": 0, "replay": 0}
    assert caplog.text.count("no graph for") == 1


def test_out_of_memory_is_retried_in_halves(rng):
    engine, device = make()
    batch = random_batch(rng, [50] * 8)
    device.fail_next = [torch.OutOfMemoryError("full")]
    np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert device.relieved == 1
    assert [w for _, w in device.log if w in ("run", "replay")].count("run") >= 2


def test_pieces_under_way_keep_their_inputs_when_a_later_one_is_out_of_memory(rng):
    """The halves are written over them: a kernel that read ids of one cut by the lengths of another would leave its tables."""
    engine, device = make(graph_max_tokens=512)
    for lengths in ([9000, 9000], [500] * 70):
        batch = random_batch(rng, lengths)
        device.fail_next = [None, torch.OutOfMemoryError("full")]
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))


def test_out_of_memory_twice_fails_this_batch_only(rng):
    engine, device = make()
    batch = random_batch(rng, [50] * 8)
    device.fail_next = [torch.OutOfMemoryError("full")] * 2
    with pytest.raises(OutOfMemory, match="--max-batch-tokens"):
        engine.step(batch)
    np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))


def test_an_odd_fault_fails_this_batch_only(rng):
    engine, device = make()
    device.fail_next = [ValueError("bad shape")]
    with pytest.raises(EngineError, match="bad shape"):
        engine.step(random_batch(rng, [5]))
    batch = random_batch(rng, [5])
    np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert engine.metrics.step_failures._value.get() == 1


def test_a_dead_device_fails_every_step_and_never_hangs(rng):
    engine, device = make()
    lazy = engine.step(random_batch(rng, [5]))
    device.broken = True
    with pytest.raises(EngineError, match="cannot use it any more"):
        lazy.result()
    with pytest.raises(EngineError, match="illegal memory access"):
        lazy.result()
    assert lazy.ready()
    with pytest.raises(EngineError, match="cannot use it any more"):
        engine.step(random_batch(rng, [5]))
    engine.close()


def test_close_twice(rng):
    engine, device = make()
    for _ in range(2):
        engine.step(random_batch(rng, [5])).result()
    engine.close()
    engine.close()
    assert not device.alive
    with pytest.raises(EngineError, match="closed"):
        engine.step(random_batch(rng, [5]))


def test_warm_captures_at_start(rng):
    engine, _ = make(warm="2x64,1x10")
    assert counts(engine) == {"eager": 2, "capture": 2, "replay": 0}
    engine.step(random_batch(rng, [60, 60])).result()
    assert counts(engine)["replay"] == 1
    with pytest.raises(StartError, match="--warm"):
        make(warm="2y64")


@pytest.mark.parametrize(
    ("most", "sizes"), [(0, REHEARSED), (BATCH_TOKENS, REHEARSED), (BATCH_TOKENS + 1, REHEARSED + PIECES)]
)
def test_a_rehearsal_runs_all_sizes_once(rng, most, sizes):
    engine, _ = make()
    engine.rehearse(most)
    assert counts(engine) == {"eager": len(sizes), "capture": 0, "replay": 0}
    assert engine.metrics.tokens._value.get() == sum(tokens for tokens, _ in sizes)
    engine.step(random_batch(rng, [70])).result()
    assert counts(engine)["capture"] == 1, "a size that was rehearsed is captured at its first hit"


@pytest.mark.parametrize("asked", [None, 8192])
def test_a_server_rehearses_the_batches_it_makes(monkeypatch, tmp_path, asked):
    told = []
    monkeypatch.setattr(rose, "open_engine", lambda *given, most_tokens: told.append(most_tokens))
    config = Config(tulip=TulipConfig(max_batch_tokens=asked))
    load_engine(SimpleNamespace(path=tmp_path), config, Metrics())
    assert told == [asked or 0]


def test_a_rehearsal_keeps_to_what_the_engine_takes():
    short = replace(INFO, max_tokens=100)
    engine = GpuEngine(FakeNetwork(), short, RoseConfig(), Metrics(), device=FakeDevice(), piece_tokens=300)
    engine.rehearse()
    assert engine.metrics.tokens._value.get() == 16 + 64 + 128 + 192 + 256


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("full"), ValueError("bad kernel")])
def test_a_shape_of_warm_that_fails_is_named(fault):
    device = FakeDevice()
    device.fail_next = [fault] * 2
    with pytest.raises(StartError, match="--warm 8x128: 8 sequences, 1024 tokens in all"):
        make(device, warm="8x128")


def test_a_rehearsal_that_does_not_fit_ends_there(caplog):
    engine, device = make()
    device.fail_next = [torch.OutOfMemoryError("full")] * 2
    engine.rehearse()
    assert engine.metrics.tokens._value.get() == 0
    assert "--max-batch-tokens" in caplog.text
    device.fail_next = [ValueError("bad kernel")]
    with pytest.raises(EngineError, match="bad kernel"):
        engine.rehearse()


def test_the_engine_advises_its_step_as_the_batch():
    assert make()[0].info.batch_tokens == 4096


def test_a_row_for_every_span(rng):
    engine, _ = make()
    for _ in range(3):
        for lengths in ([5], [5, 3, 60], [9000, 1, 40], [500] * 40):
            batch = random_batch(rng, lengths, spans=True)
            rows = engine.step(batch).result()
            assert rows.shape == (batch.rows, 4)
            np.testing.assert_array_equal(rows, expected(batch))


def test_steps_with_spans_have_graphs_of_their_own(rng):
    engine, _ = make()
    for spans in (True, False):
        for how in ("eager", "capture", "replay", "replay"):
            batch = random_batch(rng, [5, 3, 60], spans=spans)
            before = counts(engine)[how]
            np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
            assert counts(engine)[how] == before + 1
    whole = np.tile(
        np.array([[0, 900]], np.int32), (5, 1)
    )  # five times the tokens: more than the shared block has room for
    batch = random_batch(rng, [900])
    batch = TokenBatch(batch.ids, batch.cu_seqlens, None, whole, np.array([5], np.int32))
    engine, _ = make(graph_max_tokens=1024)
    for _ in range(3):
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert counts(engine)["eager"] == 3
    engine.network.unseen = object()  # attention asks for ids on the host
    engine = GpuEngine(engine.network, INFO, RoseConfig(), device=FakeDevice())
    for _ in range(4):
        batch = random_batch(rng, [5, 3, 60], spans=True)
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert counts(engine)["eager"] == 4


@pytest.mark.parametrize("graphs", [True, False])
def test_eager_steps_with_spans_need_no_block_of_hidden_states(rng, graphs):
    """That is as large as the largest graph's; where it does not fit, or nothing is captured, steps go on without."""
    engine, _ = make(cuda_graphs=graphs)
    asked = []

    def hidden_like(tokens):
        asked.append(tokens)
        raise torch.OutOfMemoryError("no room for hidden states")

    engine.network.hidden_like = hidden_like
    for lengths in ([5, 3, 60], [5, 3, 60], [5, 3, 60], [8000, 8000, 1500]):
        batch = random_batch(rng, lengths, spans=True)
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
    assert asked == [RoseConfig().graph_max_tokens] * graphs
    assert counts(engine) == {"eager": 5, "capture": 0, "replay": 0}


def test_a_step_with_spans_is_never_quick(rng):
    """Pooling behind its graph may need a kernel that is not compiled yet, which the loop must not wait for."""
    engine, _ = make()
    for how in ("eager", "capture", "replay"):
        batch = random_batch(rng, [5, 3, 60], spans=True)
        assert not engine.quick(batch)
        np.testing.assert_array_equal(engine.step(batch).result(), expected(batch))
        assert counts(engine)[how] == 1
    assert not engine.quick(batch)


def test_quick_is_the_replay_of_one_graph(rng):
    engine, _ = make()
    batch = random_batch(rng, [5, 1, 60])
    seen = []
    for _ in range(3):
        seen.append(engine.quick(batch))
        engine.step(batch).result()
    assert seen == [False, False, True]
    assert not engine.quick(random_batch(rng, [6000, 6000, 6000])), "several pieces"
    engine.close()
    assert not engine.quick(batch)
