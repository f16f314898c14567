"""Byte-level BPE in C gives the ids that the tokenizer itself gives."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from hortus.ivy import bytepairs, plain, vocabulary
from hortus.ivy.bytepairs import MOST_PIECE, QWEN
from hortus.ivy.plain import Plain

PLACES = [Path(plain.__file__).parent, Path(json.__file__).parent, Path(__file__).parents[3] / "docs"]
FILES = [f for place in PLACES for f in sorted(place.glob("*.*")) if f.suffix in (".py", ".md", ".js", ".c")]
SPACES = ["  ", "   ", "    "]


def made(cut: str, added: list[str] | None = None, *, frame: bool = False) -> tokenizers.Tokenizer:
    """Trained on half of the files. cut: qwen or gpt2."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    if cut == "qwen":
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
    )  # fmt: skip
    inner.train_from_iterator([file.read_text(encoding="utf-8") for file in FILES[::2]], trainer)
    if frame:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(t, inner.token_to_id(t)) for t in ("<s>", "</s>")]
        )
    inner.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in added or []])
    return inner


TOKENIZERS = [
    made("qwen"),
    made("gpt2"),
    made("gpt2", SPACES, frame=True),
    made("qwen", ["Fig", "the", "é", "|||x|||"]),
]
READERS = [vocabulary.reader(inner) for inner in TOKENIZERS]
PARTS = [
    *"abXYZ 09.,-_~[]'<|>\t\n\r\x00\x0b\x1f\x7f\x85\u00a0é中e\u0301",
    "'s",
    "'LL",
    "'re",
    "the ",
    "  ",
    "\n\n",
    "<s>",
    "Fi",
]
TEXT = st.lists(st.sampled_from(PARTS), max_size=20).map("".join) | st.text(max_size=20)


@pytest.fixture
def built() -> None:
    if plain.library("bytepairs") is None:
        why = "bytepairs.c was not built: install again with a C compiler"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@pytest.mark.usefixtures("built")
def test_all_of_these_are_read_by_it() -> None:
    assert [type(r).__name__ for r in READERS] == ["Plain"] * len(READERS)


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), special=st.booleans())
@example(
    texts=["don't DON'T 'tis we'll WE'LL", "a  b", " \n \n  c", "\t(x)\n\ny ", "x\r\n", "12 345", "<s>", ""],
    special=True,
)
def test_ids_are_the_tokenizer_s_own(which: int, texts: list[str], special: bool) -> None:
    want = [e.ids for e in TOKENIZERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    got = [e.ids for e in READERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    assert got == want


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
def test_plain_characters_at_random(which: int) -> None:
    """Any printable character beside any other: what cuts a text is decided by two or three neighbours."""
    rng, inner, ours = random.Random(which), TOKENIZERS[which], READERS[which]
    some = [*map(chr, range(32, 127)), *"\t\n\r", *" '\n" * 8]
    texts = ["".join(rng.choices(some, k=rng.randint(1, 60))) for _ in range(4000)]
    want = [e.ids for e in inner.encode_batch_fast(texts)]
    assert [e.ids for e in ours.encode_batch_fast(texts)] == want


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
def test_sources_and_prose(which: int) -> None:
    inner, ours = TOKENIZERS[which], READERS[which]
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        texts = [text, *text.split("\n\n"), *text.split("\n"), text.replace("\n", " ").replace(" ", "")[:5000]]
        got, want = ours.encode_batch_fast(texts), inner.encode_batch_fast(texts)
        assert [e.ids for e in got] == [e.ids for e in want], file


@pytest.mark.parametrize("length", [1, 2, MOST_PIECE - 1, MOST_PIECE, MOST_PIECE + 1, 5000])
def test_long_pieces(length: int) -> None:
    ends = ("", " ", "\n", "x", "!", " b", "'s")
    texts = [before + c * length + end for c in "a9~ \n\t'" for before in ("", " ", "(") for end in ends]
    for inner, ours in zip(TOKENIZERS, READERS, strict=True):
        assert [e.ids for e in ours.encode_batch_fast(texts)] == [e.ids for e in inner.encode_batch_fast(texts)]


@pytest.mark.usefixtures("built")
def test_a_glance_tells_what_the_tokenizer_reads() -> None:
    qwen, _, spaces, _ = READERS
    assert isinstance(qwen, Plain)
    assert isinstance(spaces, Plain)
    assert qwen.sure(["a plain text, <of> 123 words\n", "a  b"])
    assert not spaces.sure(["a  b"])
    for text in ("é", "an <|endoftext|>", "a" * MOST_PIECE, "~" * 500):
        assert not qwen.sure(["plain", text]), text


@pytest.mark.usefixtures("built")
def test_a_tokenizer_that_does_more_is_left_alone() -> None:
    qwen, gpt2 = (json.loads(inner.to_str()) for inner in TOKENIZERS[:2])

    def read(told: dict, **parts: object) -> object:
        return vocabulary.reader(tokenizers.Tokenizer.from_str(json.dumps(told | parts)))

    split, last = qwen["pre_tokenizer"]["pretokenizers"]
    sequence = {"type": "Sequence", "pretokenizers": []}
    assert isinstance(read(qwen), Plain)
    assert isinstance(read(gpt2, normalizer={"type": "NFC"}), Plain)
    for told, parts in (
        (gpt2, {"normalizer": {"type": "Lowercase"}}),
        (gpt2, {"pre_tokenizer": None}),
        (gpt2, {"pre_tokenizer": gpt2["pre_tokenizer"] | {"add_prefix_space": True}}),
        (gpt2, {"pre_tokenizer": gpt2["pre_tokenizer"] | {"use_regex": False}}),
        (gpt2, {"model": gpt2["model"] | {"ignore_merges": True}}),
        (gpt2, {"model": gpt2["model"] | {"dropout": 0.1}}),
        (qwen, {"pre_tokenizer": sequence | {"pretokenizers": [split | {"behavior": "Removed"}, last]}}),
        (qwen, {"pre_tokenizer": sequence | {"pretokenizers": [split | {"pattern": {"Regex": r"\s+"}}, last]}}),
        (qwen, {"pre_tokenizer": sequence | {"pretokenizers": [split, last | {"use_regex": True}]}}),
    ):
        assert isinstance(read(told, **parts), tokenizers.Tokenizer), parts


def test_without_c_the_tokenizer_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytepairs.plain, "library", lambda name: None)
    assert isinstance(vocabulary.reader(TOKENIZERS[0]), tokenizers.Tokenizer)
