"""The tokenizer against transformers' own, and everything that must be refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from hortus.errors import InvalidInput, StartError, TooLong
from hortus.ivy.assemble import Truncate
from hortus.ivy.tokenize import Tokenizer

CUT = Truncate(on=True)

TEXTS = [
    "",
    " ",
    "The cat sits on the mat.",
    "a\x00b \x07 \x1b[0m",
    "[CLS] special [SEP] tokens [MASK] [PAD] in text",
    "سلام. چه طوری؟ joyeux noël 日本語 😀👩‍👩‍👧",
    "long " * 400,
    "x" * 500,
    "tab\tand\nnewline\r\n",
]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoTokenizer.from_pretrained(str(folder.path))


@pytest.mark.parametrize("limit", [3, 4, 10, 128, 256])
def test_ids_equal_transformers_at_any_limit(folder, reference, limit):
    batch = Tokenizer(folder, max_tokens=limit).encode(TEXTS, truncate=CUT)
    theirs = reference(TEXTS, truncation=True, max_length=limit)["input_ids"]
    for i, ids in enumerate(theirs):
        assert batch.ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].tolist() == ids, TEXTS[i]


def test_limits_baked_into_the_file_are_ignored(folder, tokenizer):
    baked = tokenizers.Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    assert baked.truncation["max_length"] == 128, "the file no longer shows what this test is about"
    assert tokenizer.encode(["word " * 200]).total_tokens == 202
    assert tokenizer.encode(["word"]).total_tokens == 3


def test_truncation_side_of_the_folder_is_honoured(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(folder.path / name, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "truncation_side": "left"}))
    text = "one two three four five six seven"
    ours = Tokenizer(replace(folder, path=tmp_path, transformer=tmp_path), max_tokens=5).encode([text], truncate=CUT)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))([text], truncation=True, max_length=5)["input_ids"][0]
    assert ours.ids.tolist() == theirs


def _variant(folder, tmp_path, change, beside=None):
    """The folder with its tokenizer.json changed."""
    data = json.loads((folder.path / "tokenizer.json").read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    if beside:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(beside))
    return replace(folder, path=tmp_path, transformer=tmp_path)


def test_do_lower_case_is_applied_first(folder, tmp_path):
    def cased(data):
        data["normalizer"]["lowercase"] = False

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    plain = _variant(folder, tmp_path, cased)
    assert 100 in Tokenizer(plain).encode(["CAT"]).ids  # [UNK]: the vocabulary is uncased
    lower = _variant(folder, tmp_path, cased, {"max_seq_length": 256, "do_lower_case": True})
    np.testing.assert_array_equal(Tokenizer(lower).encode(["CAT"]).ids, Tokenizer(folder).encode(["cat"]).ids)


def test_without_special_tokens_an_empty_text_is_refused_by_index(folder, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    bare = Tokenizer(_variant(folder, tmp_path, lambda data: data.update(post_processor=None)), max_tokens=4)
    for texts, index in ([""], 0), (["ok", ""], 1), (["a", " ", "b"], 1), (["a", "b", "\x00"], 2):
        with pytest.raises(InvalidInput, match=f"input {index} is empty") as caught:
            bare.encode(texts)
        assert caught.value.param == f"input[{index}]"
    assert len(bare.encode(["one two three four five six"], truncate=CUT).ids) == 4


def _with_token(special, word="[IMAGE]"):
    token = {"id": 30522, "content": word, "special": special, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    return lambda data: data["added_tokens"].append(token)


def test_a_special_token_without_an_embedding_is_refused_where_a_text_spells_it(folder, tmp_path):
    tokenizer = Tokenizer(_variant(folder, tmp_path, _with_token(True)))
    with pytest.raises(InvalidInput, match="input 1 spells a special token that this model has no embedding for"):
        tokenizer.encode(["", "a [IMAGE]"])
    assert tokenizer.encode(["image"]).total_tokens == 3


@pytest.mark.parametrize(
    ("change", "rows", "told"),
    [
        (lambda data: None, 3000, "token '.+' has id 3000"),
        (_with_token(False, "covid19"), 30522, "token 'covid19' has id 30522"),
        (
            lambda data: (
                _with_token(True)(data),
                data["post_processor"]["special_tokens"]["[SEP]"].update(ids=[30522], tokens=["[IMAGE]"]),
            ),
            30522,
            r"token '\[IMAGE\]' has id 30522",
        ),
    ],
)
def test_a_tokenizer_of_another_model_is_refused_at_start(folder, tmp_path, change, rows, told):
    other = _variant(folder, tmp_path, change)
    told = rf"tokenizer.json: {told}, but the model's embedding table has {rows} rows \(vocab_size of config.json\)"
    with pytest.raises(StartError, match=told):
        Tokenizer(other, vocab_size=rows)


def test_too_long_names_the_numbers_and_the_ways_out(tokenizer):
    with pytest.raises(TooLong) as caught:
        tokenizer.encode(["ok", "word " * 300], first=7)
    for part in ("input 8", "302", "256", "--max-length", "truncate", "--auto-truncate"):
        assert part in caught.value.message
    assert caught.value.param == "input[8]"


async def test_long_requests_in_threads_equal_short_ones_inline(folder):
    texts = [f"text number {i} " + "and more " * (i % 30) for i in range(400)]
    tokenizer = Tokenizer(folder, inline_chars=10)
    threaded, inline = await tokenizer.batch(texts, truncate=CUT), tokenizer.encode(texts, truncate=CUT)
    np.testing.assert_array_equal(threaded.ids, inline.ids)
    np.testing.assert_array_equal(threaded.cu_seqlens, inline.cu_seqlens)
    with pytest.raises(TooLong, match="input 399"):
        await tokenizer.batch([*texts[:399], "word " * 300])
    tokenizer.close()


def test_ids_are_packed_as_given(tokenizer):
    batch = tokenizer.pack([[101, 7592, 102], [5]])
    assert batch.ids.tolist() == [101, 7592, 102, 5]
    assert batch.ids.dtype == batch.cu_seqlens.dtype == np.int32
    assert tokenizer.pack([list(range(300))], truncate=CUT).ids.tolist() == list(range(256))


@pytest.mark.parametrize("bad", [-1, 30522, 151936, 2**31, 2**63, 10**30, -(10**30)])
def test_foreign_ids_are_refused_by_index(tokenizer, bad):
    with pytest.raises(InvalidInput, match="0 to 30521") as caught:
        tokenizer.pack([[1, 2], [3, 4, bad], [bad]])
    assert caught.value.param == "input[1][2]"
    with pytest.raises(InvalidInput) as caught:
        tokenizer.pack([[1, bad]], flat=True)
    assert caught.value.param == "input[1]"


def test_empty_and_too_long_id_lists_are_refused_by_index(tokenizer):
    with pytest.raises(InvalidInput, match="input 1 is an empty list"):
        tokenizer.pack([[1], []])
    with pytest.raises(TooLong, match="input 1 has 257 tokens"):
        tokenizer.pack([[1], [1] * 257])


def test_folders_that_cannot_serve_are_start_errors(folder, tmp_path):
    with pytest.raises(StartError, match="fast tokenizer file is needed"):
        Tokenizer(replace(folder, transformer=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="not a tokenizer file"):
        Tokenizer(replace(folder, transformer=tmp_path))
    with pytest.raises(StartError, match="--max-length"):
        Tokenizer(folder, max_tokens=2)


async def test_sift_leaves_out_what_encode_would_refuse(folder, tmp_path):
    tokenizer = Tokenizer(folder, max_tokens=8, max_chars=50)
    given = ["a", "b " * 9, "c", "d" * 51, "e"]
    batch, refused = await tokenizer.sift(given)
    assert batch.ids.tolist() == tokenizer.encode(["a", "c", "e"]).ids.tolist()
    assert {i: type(e) for i, e in refused.items()} == {1: TooLong, 3: TooLong}
    for i in refused:
        with pytest.raises(TooLong) as e:
            tokenizer.encode(given[i : i + 1], i)
        assert str(e.value) == str(refused[i])
    assert len((await tokenizer.sift(given, truncate=Truncate(True)))[0]) == 5
    assert (await tokenizer.sift(["x " * 20]))[0].rows == 0
    narrow = Tokenizer(_variant(folder, tmp_path, _with_token(True)))
    batch, refused = await narrow.sift(["a", "[IMAGE]"])
    assert (len(batch), list(refused)) == (1, [1])
    assert (len((await narrow.sift([]))[0])) == 0
    tokenizer.close()
    narrow.close()
