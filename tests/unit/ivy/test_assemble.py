"""Pairs and documents, against transformers and by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models_stubs import sequences
from small_models import END, pplx_folder
from transformers import AutoTokenizer

from hortus.errors import InvalidInput, StartError, TooLong
from hortus.ivy.assemble import Truncate, every_token, longest_first, owners
from hortus.ivy.tokenize import Tokenizer

CUT = Truncate(on=True)


@pytest.fixture(scope="module")
def pplx(tmp_path_factory) -> Tokenizer:
    return Tokenizer(pplx_folder(tmp_path_factory.mktemp("pplx")))


@pytest.fixture(scope="module")
def roomy(pplx, tmp_path_factory) -> Tokenizer:
    return Tokenizer(pplx_folder(tmp_path_factory.mktemp("roomy")), max_tokens=1000)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 60))
def test_longest_first_keeps_what_fits(a, b, room):
    x, y = longest_first(a, b, room)
    assert x <= a
    assert y <= b
    assert x + y == min(a + b, room)
    if a + b > room:  # the shorter one is only cut once both are half
        assert min(x, y) >= min(a, b, room // 2)


async def test_pairs_are_transformers_own(folder):
    theirs = AutoTokenizer.from_pretrained(folder.path)
    for limit in (200, 24, 9):
        ours = Tokenizer(folder, max_tokens=limit)
        queries = ["where is the cat", "a " * 40, "x", ""]
        documents = ["The cat sits on the mat. " * 5, "b", "c " * 90, "d"]
        batch = await ours.pairs(queries, documents, truncate=CUT)
        wanted = theirs(queries, documents, truncation="longest_first", max_length=limit)
        assert sequences(batch) == wanted["input_ids"]
        assert batch.token_types is not None
        assert batch.token_types.tolist() == [t for types in wanted["token_type_ids"] for t in types]


async def test_one_query_stands_for_all_and_limits_hold_for_each_text(folder):
    tokenizer = Tokenizer(folder, max_tokens=20)
    batch = await tokenizer.pairs(["one two three"], ["a b c d", "e"], most_left=2, most_right=3)
    assert [len(s) for s in sequences(batch)] == [3 + 2 + 3, 3 + 2 + 1]
    left = await tokenizer.pairs(["one two three"], ["a b c d"], most_right=1, truncate=Truncate(left=True))
    assert sequences(left)[0][-2] == sequences(await tokenizer.pairs(["x"], ["d"]))[0][-2]
    with pytest.raises(TooLong, match=r"pair 1 has 33 tokens.*at most 20") as caught:
        await tokenizer.pairs(["one"], ["a", "b " * 29])
    assert caught.value.param == "documents[1]"


async def test_types_only_where_the_model_has_them(pplx):
    batch = await pplx.pairs(["ab"], ["cd"])
    assert batch.token_types is None
    assert len(batch.ids) == 4
    with pytest.raises(InvalidInput, match="without tokens"):
        await pplx.pairs([""], [""])


async def test_documents_equal_the_joined_text(pplx):
    documents = [["one", "two", "three"], ["alone"]]
    batch = await pplx.documents(documents)
    joined = [pplx._inner.encode(END.join(d)).ids for d in documents]
    assert sequences(batch) == joined
    assert batch.span_counts.tolist() == [3, 1]
    assert owners(batch) == [0, 0, 0, 1]
    said = [pplx.texts([batch.ids[a:b].tolist()], skip_special=False)[0] for a, b in batch.spans.tolist()]
    assert said == ["one", "two", "three", "alone"]


@given(st.lists(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3), min_size=1, max_size=3))
def test_no_text_can_forge_a_separator(roomy, documents):
    documents = [[c + END * (i % 2) + c for i, c in enumerate(d)] for d in documents]
    batch = roomy._documents(documents, 0, Truncate(), "input")
    separator = roomy._inner.token_to_id(END)
    assert (batch.ids == separator).sum() == sum(len(d) - 1 for d in documents)
    inside = np.concatenate([batch.ids[a:b] for a, b in batch.spans.tolist()])
    assert separator not in inside
    assert batch.span_counts.tolist() == [len(d) for d in documents]


async def test_documents_too_long_are_refused_or_lose_of_their_last_chunk(pplx):
    with pytest.raises(TooLong, match="document 1 has 71 tokens") as caught:
        await pplx.documents([["a"], ["x" * 50, "y" * 20]])
    assert caught.value.param == "input[1]"
    batch = await pplx.documents([["x" * 50, "y" * 20]], truncate=CUT)
    assert batch.spans.tolist() == [[0, 50], [51, 64]]
    with pytest.raises(TooLong, match=r"of which nothing would be left; shorten it$"):  # a chunk without a vector
        await pplx.documents([["x" * 63, "y"]], truncate=CUT)


async def test_empty_chunks_are_named(pplx):
    with pytest.raises(InvalidInput) as caught:
        await pplx.documents([["a"], ["b", ""]])
    assert caught.value.param == "input[1][1]"


async def test_framed_documents_keep_the_frame_out_of_the_spans(folder, tmp_path):
    shutil.copy(folder.path / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sep_token": {"content": "[SEP]"}}))
    tokenizer = Tokenizer(replace(folder, path=tmp_path, transformer=tmp_path))
    batch = await tokenizer.documents([["hi", "you there"]])
    assert batch.ids.tolist() == [101, 7632, 102, 2017, 2045, 102]
    assert batch.spans.tolist() == [[1, 2], [3, 5]]


def test_no_separator_no_documents(tmp_path):
    folder = pplx_folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StartError, match="separator"):
        Tokenizer(folder).prepare_documents()


def test_every_token_has_a_span(pplx):
    batch = every_token(pplx.encode(["ab", "c"]))
    assert batch.spans.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert batch.span_counts.tolist() == [2, 1]
