"""hortus.Engine: the same vectors as the parts it is made of, any number of texts, errors by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpus_runs import texts

import hortus
from hortus import local
from hortus.corpus.vectors import Local, Wish
from hortus.errors import EngineError, InvalidInput, RequestError, StartError, TooLong
from hortus.ivy.outputs import finish
from hortus.tulip.fake import fake_rows


def wanted(engine: hortus.Engine, given: list[str]) -> np.ndarray:
    batch = engine._opened.embedder.tokenizer.encode(given)
    return finish(fake_rows(batch, engine.info.width), None, engine.info.normalize)


def test_rows_in_order_over_several_windows(fake: hortus.Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "WINDOW_ROWS", 100)
    given = texts(1001)
    assert np.array_equal(fake.embed(given), wanted(fake, given))
    assert np.array_equal(asyncio.run(fake.aembed(given[:5])), wanted(fake, given[:5]))
    assert fake.embed([]).shape == (0, 384)


def test_forms(fake: hortus.Engine):
    given = texts(9)
    full = wanted(fake, given)
    assert np.array_equal(fake.embed(given, precision="float16"), full.astype(np.float16))
    bits = fake.embed(given, precision="ubinary")
    assert np.array_equal(np.unpackbits(bits, axis=1), full > 0)
    short = fake.embed(given, dimensions=64)
    assert short.shape == (9, 64)
    assert np.allclose(np.linalg.norm(short, axis=1), 1)
    for wrong in ({"precision": "int8"}, {"precision": "int4"}, {"dimensions": 385}, {"prompt_name": "nope"}):
        with pytest.raises(InvalidInput):
            fake.embed(given, **wrong)


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (None, InvalidInput, "input 2: no text: null"),
        (7, InvalidInput, "input 2: no text: int"),
        ("\ud800", InvalidInput, "input 2: the text is not Unicode"),
        ("word " * 400, TooLong, "input 2: the text has 402 tokens"),
    ],
    ids=["null", "number", "surrogate", "long"],
)
def test_the_first_text_at_fault_is_named(fake: hortus.Engine, bad, kind, said):
    with pytest.raises(kind, match=said):
        fake.embed(["a", "b", bad, "c", bad])


def test_cut_on_request(fake: hortus.Engine):
    assert np.array_equal(fake.embed(["word " * 400], truncate=True), wanted(fake, ["word " * 254]))


def test_rerank_is_the_cosine_of_an_embedding_model(fake: hortus.Engine):
    rows = wanted(fake, ["q", "a", "b"]).astype(np.float64)
    assert np.allclose(fake.rerank("q", ["a", "b"]), rows[1:] @ rows[0], atol=1e-6)
    assert fake.rerank("q", []).shape == (0,)
    assert np.array_equal(asyncio.run(fake.arerank("q", ["a"])), fake.rerank("q", ["a"]))
    with pytest.raises(InvalidInput, match=r"documents\[1\]"):
        fake.rerank("q", ["a", None])


def test_tables(fake: hortus.Engine):
    given = pa.table({"n": [1, 2, 3], "text": ["a", None, "b"]})
    told = fake.embed_table(given, precision="float16")
    assert told.schema.field("embedding").type == pa.list_(pa.field("element", pa.float16()), 384)
    rows = told.column("embedding").to_pylist()
    assert rows[1] is None
    assert np.array_equal(np.array([rows[0], rows[2]], np.float16), fake.embed(["a", "b"], precision="float16"))
    assert fake.embed_table(given.slice(1, 1)).column("embedding").null_count == 1
    with pytest.raises(InvalidInput, match="no column 'txt'"):
        fake.embed_table(given, "txt")
    with pytest.raises(InvalidInput, match="already"):
        fake.embed_table(told)
    with pytest.raises(InvalidInput, match="two columns 'text'"):
        fake.embed_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))
    for table in (None, [{"text": "a"}]):
        with pytest.raises(TypeError, match=r"give a pyarrow\.Table"):
            fake.embed_table(table)


def test_many_threads_at_once(fake: hortus.Engine):
    given, found = texts(50), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: fake.embed(given[i:])})) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(np.array_equal(found[i], wanted(fake, given[i:])) for i in range(8))


def test_settings_are_the_knobs_and_no_other():
    with pytest.raises(StartError, match="unknown setting 'devise'"):
        hortus.Engine("demo", devise="cpu")
    with pytest.raises(StartError, match="no such folder"):
        hortus.Engine("./nowhere at all")


@pytest.mark.parametrize(
    "wrong", [{"truncate": "no"}, {"truncate": 0}, {"dimensions": True}, {"dimensions": "3"}, {"dimensions": 3.0}]
)
def test_options_of_another_kind_are_refused_by_name(fake: hortus.Engine, wrong: dict):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        fake.embed(["a"], **wrong)


def test_rerank_names_what_is_no_text(fake: hortus.Engine):
    for query, documents, said in (
        ("\ud800", ["a"], "query: the text is not Unicode"),
        ("q", ["a", "b\udfff"], r"documents\[1\]: the text is not Unicode: .* at character 1"),
        (5, [], "query: no text: int"),
    ):
        with pytest.raises(InvalidInput, match=said):
            fake.rerank(query, documents)
    with pytest.raises(TypeError, match="truncate"):
        fake.rerank("q", ["a"], truncate="no")


class Labelled:
    """A column that is sliced by its labels, as a data frame's is, and iterates in its order."""

    def __init__(self, given: list[str]) -> None:
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __getitem__(self, at: object) -> list[str]:
        return sorted(self._given)


class Name(str):
    """A text of a kind of its own."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        iter,
        Labelled,
        lambda given: (t for t in given),
        lambda given: [Name(t) for t in given],
        np.array,
        lambda given: np.array(given, object),
        pa.array,
        lambda given: pa.chunked_array([given[:3], given[3:]]),
        lambda given: pa.array(given).dictionary_encode(),
        lambda given: dict(enumerate(given)).values(),
    ],
    ids=[
        "tuple",
        "iterator",
        "labels",
        "generator",
        "subclass",
        "numpy",
        "objects",
        "arrow",
        "chunked",
        "coded",
        "values",
    ],
)
def test_texts_are_any_iterable_in_its_order(fake: hortus.Engine, kind):
    given = texts(9)[::-1]
    assert np.array_equal(fake.embed(kind(given)), wanted(fake, given))
    assert np.array_equal(asyncio.run(fake.aembed(kind(given))), wanted(fake, given))
    assert np.array_equal(fake.rerank(Name("q"), kind(given)), fake.rerank("q", given))


@pytest.mark.parametrize(
    "bad",
    ["one", b"one", None, 7, {"a": 1}, {"a"}, np.array("one"), pa.table({"a": ["x"]})],
    ids=lambda b: type(b).__name__,
)
def test_what_is_no_list_of_texts_is_a_type_error(fake: hortus.Engine, bad):
    with pytest.raises(TypeError, match="texts: give a list of texts"):
        fake.embed(bad)
    with pytest.raises(TypeError, match="documents: give a list of texts"):
        fake.rerank("q", bad)
    with pytest.raises(TypeError, match="texts: give a list of texts"):
        asyncio.run(fake.aembed(bad))


@pytest.mark.parametrize(
    ("model", "said"),
    [(None, "not NoneType"), (7, "not int"), ("", "an empty string"), (Path("not_here"), "not_here: no such folder")],
    ids=str,
)
def test_a_model_that_cannot_be_one_is_told(model, said):
    with pytest.raises(StartError, match=said):
        hortus.Engine(model, fake_delay_ms=0.0)


# A failing engine


async def vectors(engine: hortus.Engine, given: list[object], **wish):
    backend = Local(engine._opened.embedder, Wish(**wish))
    return await backend.vectors(given)


def run(engine: hortus.Engine, given: list[object], **wish):
    return engine._run(vectors(engine, given, **wish))


def test_a_step_that_fails_costs_the_row_at_fault_alone():
    with hortus.Engine("demo", fake_delay_ms=0.0) as engine:
        model = engine._opened.scheduler._pump._engine
        tokenizer = engine._opened.embedder.tokenizer
        model.fail_id, model.nan_id = tokenizer.plain_ids("poison")[0], tokenizer.plain_ids("venus")[0]
        given = texts(40)
        given[7], given[8] = "poison", "venus"
        found = run(engine, given)
        assert set(found.refused) == {7, 8}
        assert found.refused[7].code == "engine_error"
        assert found.refused[8].code == "non_finite"
        good = [i for i in range(40) if i not in (7, 8)]
        assert found.owners.tolist() == good
        assert np.array_equal(found.rows, wanted(engine, [given[i] for i in good]))


def test_a_step_that_fails_says_where():
    with hortus.Engine("demo", fake_delay_ms=0.0) as engine:
        model = engine._opened.scheduler._pump._engine
        model.fail_id = engine._opened.embedder.tokenizer.plain_ids("poison")[0]
        for ask in (lambda: engine.embed(["a", "poison"]), lambda: engine.rerank("poison", ["a"])):
            with pytest.raises(EngineError, match="fails on purpose") as seen:
                ask()
            assert "fake.py" in "".join(seen.value.__notes__)


def test_half_a_text_is_no_answer():
    """A chunk that fails takes its text's other chunks with it."""
    with hortus.Engine("demo", fake_delay_ms=0.0) as engine:
        model = engine._opened.scheduler._pump._engine
        model.nan_id = engine._opened.embedder.tokenizer.plain_ids("venus")[0]
        found = run(engine, ["cat " * 9, "cat " * 9 + "venus", "mat"], chunk_tokens=6)
        assert set(found.refused) == {1}
        assert set(found.owners.tolist()) == {0, 2}


def test_chunks_have_their_places(fake: hortus.Engine):
    text = "the cat sat on a mat and saw nothing"
    found = run(fake, [text, "mat"], chunk_tokens=5, chunk_overlap=1)
    told = [text[a:b] if owner == 0 else "mat" for owner, (_, a, b) in zip(found.owners, found.chunks, strict=True)]
    assert told == ["the cat sat", "sat on a", "a mat and", "and saw nothing", "mat"]
    assert found.chunks[:, 0].tolist() == [0, 1, 2, 3, 0]
    assert np.array_equal(found.rows, wanted(fake, told))


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"chunk_tokens": 300}, "--chunk-tokens 300"),
        ({"chunk_tokens": 5, "chunk_overlap": 3}, "--chunk-overlap 3"),
        ({"chunk_tokens": 50, "contextual": True}, "--contextual"),
    ],
    ids=str,
)
def test_chunks_that_cannot_be(fake: hortus.Engine, wish, said):
    with pytest.raises(StartError, match=said):
        run(fake, ["a"], **wish)


def test_contextual_chunks_are_those_of_the_server(tmp_path):
    """A text's chunks in one sequence, as many as the model takes, each with its span."""
    from small_models import pplx_folder

    from hortus.config import IvyConfig, TulipConfig
    from hortus.ivy.embed import Embedder
    from hortus.metrics import Metrics
    from hortus.tulip.fake import FakeEngine
    from hortus.tulip.scheduler import Scheduler

    folder, metrics = pplx_folder(tmp_path / "model"), Metrics()
    model = FakeEngine(width=16, vocab_size=300, max_tokens=64)

    async def both(text: str, most: int):
        scheduler = Scheduler(model, TulipConfig(), metrics, merge=False)
        await scheduler.start()
        embedder = Embedder(folder, model.info, scheduler, IvyConfig(), metrics)
        found = await Local(embedder, Wish(chunk_tokens=most, contextual=True)).vectors([text, "", text[:30]])
        chunks = [text[a:b] for owner, (_, a, b) in zip(found.owners, found.chunks, strict=True) if owner == 0]
        runs = [chunks[:3], chunks[3:]]  # 3 x 20 bytes and 2 separators are within 64 tokens
        tokens = await embedder.documents(runs, truncate=embedder.truncate(False))
        wanted = fake_rows(tokens.batch, 16)
        embedder.close()
        await scheduler.close()
        return found, chunks, wanted

    text = "abcdefghijklmnopqrst" * 4 + "end"
    found, chunks, wanted = asyncio.run(both(text, 20))
    assert chunks == ["abcdefghijklmnopqrst"] * 4 + ["end"]
    assert np.array_equal(found.rows[:5], wanted)
    assert found.owners.tolist() == [0] * 5 + [2] * 2
    assert set(found.refused) == {1}


@pytest.mark.parametrize(
    ("flags", "tokens"), [({}, 300), ({"lanes": True}, 100), ({"max_batch_tokens": 50}, 50)], ids=str
)
def test_steps_are_large_where_no_short_text_waits_behind_one(flags: dict[str, object], tokens: int, monkeypatch):
    from dataclasses import replace

    from hortus.tulip.fake import FakeEngine

    model = FakeEngine(batch_tokens=100)
    model._info = replace(model.info, bulk_tokens=300)
    monkeypatch.setattr(local, "load_engine", lambda *_: model)
    with hortus.Engine("demo", fake_delay_ms=0.0, **flags) as engine:
        assert engine.info.batch_tokens == tokens
        engine.embed(["word " * 20] * 60)
        most = max(size for _, size in model.shapes)
        assert most <= tokens
        assert most > tokens - 22 or "lanes" in flags, "a lane of bulk work gets a part of each step"


@pytest.mark.parametrize(
    ("device", "flags", "threads"),
    [("NVIDIA H200", {}, 14), ("NVIDIA H200", {"tokenize_threads": 3}, 3), ("cpu", {}, 2)],
    ids=str,
)
def test_a_gpu_gets_its_tokens_from_all_cores_but_two(device, flags, threads, monkeypatch):
    from dataclasses import replace

    from hortus.tulip.fake import FakeEngine

    model = FakeEngine()
    model._info = replace(model.info, device=device)
    monkeypatch.setattr(local, "load_engine", lambda *_: model)
    monkeypatch.setattr(local, "usable_cores", lambda: 16)
    with hortus.Engine("demo", fake_delay_ms=0.0, **flags) as engine:
        assert engine._opened.embedder.tokenizer._threads._max_workers == threads


def test_errors_of_an_engine_speak_of_no_server(fake: hortus.Engine):
    with hortus.Engine("demo", fake_delay_ms=0.0, max_input_chars=10) as engine:
        said = []
        for call in (
            lambda: engine.embed(["word " * 9]),
            lambda: engine.rerank("a", ["word " * 9]),
            lambda: engine.embed(["a"], precision="int8"),
            lambda: engine.embed(["a"], dimensions=9999),
            lambda: engine.embed(["a"], precision="int4"),
            lambda: engine.embed(["a"], prompt_name="none"),
            lambda: engine.embed([None]),  # type: ignore[list-item]
        ):
            with pytest.raises(RequestError) as found:
                call()
            said.append(found.value.message)
    with pytest.raises(RequestError) as found:
        engine.embed(["a"])
    assert not [text for text in [*said, found.value.message] if "server" in text]
