"""The faster reader gives the ids that the tokenizer itself gives."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hortus.ivy import vocabulary

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?-[]()'\"#", *(
    "##" + c for c in "abcdefghijklmnopqrstuvwxyz0123456789"
), "the", "cat", "cafe", "##s", "Cat", "sep"]  # fmt: skip


def made(lowercase: bool = True, added: tuple[str, ...] = (), normalizer: str = "bert") -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({w: i for i, w in enumerate(dict.fromkeys(WORDS))}, unk_token="[UNK]")
    )
    bert = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    inner.normalizer = bert if normalizer == "bert" else tokenizers.normalizers.Sequence([bert])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    inner.add_tokens([tokenizers.AddedToken(word, normalized=True) for word in added])
    return inner


TOKENIZERS = [made(), made(lowercase=False), made(added=("Fig", "café")), made(normalizer="several")]
READERS = [vocabulary.reader(inner) for inner in TOKENIZERS]
TEXT = st.text(st.sampled_from("abcXYZ 09.,-[]'\t\n\r\x00\x0b\x1f\x7f\x85\u00a0é中e\u0301İ"), max_size=30) | st.text(
    max_size=20
)


def test_only_bert_s_normalising_is_left_out() -> None:
    assert [type(r).__name__ for r in READERS] == ["_Plain", "_Plain", "_Plain", "Tokenizer"]


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), special=st.booleans())
@example(texts=["The [SEP] cat", "a [sep] b", "[MASK]", "cats", ""], special=True)
@example(texts=["the fig", "FIG 1", "a cafe", "café", "cat\x0bs", "cat\tcat", "don't"], special=True)
def test_ids_are_the_tokenizer_s_own(which: int, texts: list[str], special: bool) -> None:
    want = [e.ids for e in TOKENIZERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    got = [e.ids for e in READERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    assert got == want


def test_the_vocabulary_is_shared() -> None:
    reader = READERS[0]
    assert isinstance(reader, vocabulary._Plain)
    assert json.loads(reader._bare.to_str())["model"]["vocab"] == json.loads(TOKENIZERS[0].to_str())["model"]["vocab"]
