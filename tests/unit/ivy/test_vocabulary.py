"""The faster reader gives the ids that the tokenizer itself gives."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hortus.errors import StartError
from hortus.folder import ModelFolder
from hortus.ivy import plain, vocabulary, wordpiece
from hortus.ivy.plain import Plain
from hortus.ivy.reading import Reader

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


TOKENIZERS = [
    made(),
    made(lowercase=False),
    made(added=("Fig", "café", "a b", "Z")),
    made(normalizer="several"),
    made(lowercase=False, added=("Fig", "0", "b.")),
]
READERS = [vocabulary.reader(inner) for inner in TOKENIZERS]
TEXT = st.text(st.sampled_from("abcXYZ 09.,-_~[]'\t\n\r\x00\x0b\x1f\x7f\x85\u00a0é中e\u0301İ"), max_size=30) | st.text(
    max_size=20
)


@pytest.fixture
def built() -> None:
    if plain.library("wordpiece") is None:
        why = "wordpiece.c was not built: install again with a C compiler"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@pytest.mark.usefixtures("built")
def test_only_what_c_does_is_read_by_it() -> None:
    assert [type(r).__name__ for r in READERS] == ["Plain", "Plain", "Plain", "Tokenizer", "Plain"]


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), special=st.booleans())
@example(texts=["The [SEP] cat", "a [sep] b", "[MASK]", "cats", ""], special=True)
@example(texts=["the fig", "FIG 1", "a cafe", "café", "cat\x0bs", "cat\tcat", "don't"], special=True)
def test_ids_are_the_tokenizer_s_own(which: int, texts: list[str], special: bool) -> None:
    want = [e.ids for e in TOKENIZERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    got = [e.ids for e in READERS[which].encode_batch_fast(texts, add_special_tokens=special)]
    assert got == want


def test_real_text_and_real_vocabulary(folder: ModelFolder) -> None:
    """Sources, licences and prose, by paragraphs and whole: code has all of ASCII's marks, long words and none."""
    inner = vocabulary.load(folder.transformer / "tokenizer.json")
    ours = vocabulary.reader(inner)
    places = [Path(wordpiece.__file__).parent, Path(json.__file__).parent, Path(__file__).parents[3] / "docs"]
    files = [
        file for place in places for file in sorted(place.glob("*.*")) if file.suffix in (".py", ".md", ".js", ".c")
    ]
    assert len(files) > 40
    for file in files:
        text = file.read_text(encoding="utf-8")
        texts = [text, *text.split("\n\n"), text.replace("\n", " ").replace(" ", "")[:5000]]
        got, want = ours.encode_batch_fast(texts), inner.encode_batch_fast(texts)
        assert [e.ids for e in got] == [e.ids for e in want], file
        assert [*map(len, got)] == [*map(len, want)]


@pytest.mark.usefixtures("built")
def test_a_tokenizer_that_does_more_is_left_alone() -> None:
    def changed(**parts: object) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(json.loads(made().to_str()) | parts))

    model = json.loads(made().to_str())["model"]
    assert isinstance(vocabulary.reader(changed()), Plain)
    for parts in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": None},
        {"normalizer": json.loads(made().to_str())["normalizer"] | {"clean_text": False}},
        {"model": model | {"max_input_chars_per_word": 1000}},
    ):
        assert isinstance(vocabulary.reader(changed(**parts)), tokenizers.Tokenizer), parts


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("most", [1, 5, 100, 256])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 99, 100, 101, 255, 256, 257, 5000])
def test_long_words_and_unknown_ones(most: int, length: int) -> None:
    whole = json.loads(made().to_str())
    whole["model"]["max_input_chars_per_word"] = most
    inner = tokenizers.Tokenizer.from_str(json.dumps(whole))
    texts = [word * length + end for word in ("a", "the", "~", "_") for end in ("", "!", " b")]
    ours = vocabulary.reader(inner)
    assert isinstance(ours, Plain)
    assert [e.ids for e in ours.encode_batch_fast(texts)] == [e.ids for e in inner.encode_batch_fast(texts)]


def test_threads_share_a_reader(folder: ModelFolder) -> None:
    inner = vocabulary.load(folder.transformer / "tokenizer.json")
    ours = vocabulary.reader(inner)
    texts = [["word " * i, "naïve", "[SEP]"] for i in range(0, 3000, 50)]  # by both ways: with the GIL and without it
    want = [[e.ids for e in inner.encode_batch_fast(t)] for t in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert [[e.ids for e in found] for found in pool.map(ours.encode_batch_fast, texts)] == want


def test_without_c_the_tokenizer_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "library", lambda name: None)
    assert isinstance(vocabulary.reader(made()), tokenizers.Tokenizer)


def bert_folder(path: Path, settings: dict, *, lowercase: bool = True, kind: str = "bert") -> ModelFolder:
    inner = made(lowercase=lowercase, added=("Fig", "café"))
    path.mkdir(exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    return ModelFolder(
        path=path, name="m", revision=None, transformer=path, config={"model_type": kind, "vocab_size": 300}, modules=()
    )


SETTINGS: list[dict] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": True},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
    {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"},
    {"do_lower_case": False, "tokenizer_class": "BertTokenizerFast", "padding_side": "left"},
    {"do_lower_case": False, "tokenizer_class": "MPNetTokenizer"},
    {"do_lower_case": False, "tokenizer_class": "ElectraTokenizer"},
]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("told", SETTINGS, ids=json.dumps)
def test_normalising_is_what_transformers_makes_of_the_files(told: dict, lowercase: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = bert_folder(tmp_path, told, lowercase=lowercase)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    inner = vocabulary.as_told(vocabulary.load(tmp_path / "tokenizer.json"), folder, told)
    ours = vocabulary.reader(inner)
    for text in ("The Cat's CAT", "the cat", "Café é É", "a中b 中", "fig Fig FIG", "x\x00y [SEP] z", "İ"):
        want = theirs.encode(text, add_special_tokens=False).ids
        got = ours.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert got == want, text


@pytest.mark.parametrize(
    ("kind", "told", "key"),
    [
        ("bert", {"do_lower_case": "yes"}, "do_lower_case"),
        ("bert", {"tokenize_chinese_chars": None}, "tokenize_chinese_chars"),
        ("bert", {"strip_accents": 1}, "strip_accents"),
    ],
)
def test_odd_settings_are_named(kind: str, told: dict, key: str, tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, told, kind=kind)
    with pytest.raises(StartError, match=rf"tokenizer_config\.json: {key} must be"):
        Reader(folder)


@pytest.mark.parametrize(("kind", "lower"), [("deberta-v2", True), ("bert", True)])
def test_lower_case_that_is_not_applied_is_refused(kind: str, lower: bool, tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, told := {"do_lower_case": lower}, kind=kind)
    inner = vocabulary.load(tmp_path / "tokenizer.json")
    inner.normalizer = tokenizers.normalizers.NFC()
    with pytest.raises(StartError, match="do_lower_case true"):
        vocabulary.as_told(inner, folder, told)
    assert vocabulary.as_told(inner, folder, {**told, "do_lower_case": False}) is inner


def byte_level(prefix: bool) -> tokenizers.Tokenizer:
    """RoBERTa's, a byte for a token."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    inner.add_special_tokens(words[:5])
    return inner


def framed(single: str) -> dict:
    around = {"special_tokens": [("[CLS]", 2), ("[SEP]", 3)]}
    return json.loads(tokenizers.processors.TemplateProcessing(single=single, **around).__getstate__())


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
WORDS_APART = {"pre_tokenizer": {"type": "WhitespaceSplit"}}
PIPELINES: list[tuple[str, dict, dict, str | None]] = [
    (
        "bert",
        {},
        {"post_processor": None},
        r"tokenizer\.json: adds 0 tokens to a text, but in transformers a BertTokenizer",
    ),
    ("bert", {}, {"post_processor": framed("[CLS] $A")}, "adds 1 tokens"),
    (
        "bert",
        {},
        WORDS_APART,
        "has the pre_tokenizer WhitespaceSplit, .* BertTokenizer splits texts by BertPreTokenizer",
    ),
    ("mpnet", {}, {"pre_tokenizer": None}, "has the pre_tokenizer none, .* MPNetTokenizer"),
    ("bert", PLAIN, {"post_processor": framed("[CLS] $A")} | WORDS_APART, None),
    ("roberta", {}, {"post_processor": None}, "adds 0 tokens to a text, .* a RobertaTokenizer"),
    ("roberta", {}, WORDS_APART, "RobertaTokenizer splits texts by ByteLevel"),
    ("roberta", {"add_prefix_space": 1}, {}, r"tokenizer_config\.json: add_prefix_space must be true or false, not 1"),
    ("roberta", {}, {}, None),
    ("roberta", {"add_prefix_space": True}, {}, None),
    ("roberta", {"add_prefix_space": True, **PLAIN}, {}, None),
]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("kind", "told", "edit", "refused"), PIPELINES)
def test_splitting_and_framing_are_what_transformers_makes_of_the_files_or_are_refused(
    kind: str, told: dict, edit: dict, refused: str | None, prefix: bool, tmp_path: Path
) -> None:
    """A class of its own takes little but the vocabulary from tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    folder = bert_folder(tmp_path, told, kind=kind)
    if kind == "roberta":
        byte_level(prefix).save(str(tmp_path / "tokenizer.json"))
    whole = json.loads((tmp_path / "tokenizer.json").read_text()) | edit
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    if refused is not None:
        with pytest.raises(StartError, match=refused):
            Reader(folder)
        return
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Reader(folder)
    for text in ("the cat", " the cat's", "a, b", "x"):
        assert ours.encode([text]).ids.tolist() == theirs(text)["input_ids"], text
