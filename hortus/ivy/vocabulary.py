"""A model's tokenizer.json and the small files that say how it is meant. Read at start; does not know requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import orjson
import tokenizers
from tokenizers import normalizers

from hortus.errors import StartError
from hortus.folder import ST_CONFIGS, ModelFolder, read_json
from hortus.ivy import bytepairs, wordpiece
from hortus.ivy.plain import Encoding


def load(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise StartError(
            f"{file}: not found. A fast tokenizer file is needed; write one with "
            "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # noqa: BLE001  the tokenizers library raises bare Exception
        raise StartError(f"{file}: not a tokenizer file that this version can read ({e})") from None
    inner.no_truncation()
    inner.no_padding()
    return inner


_BERT = (
    "BertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "MobileBertTokenizer",
    "MPNetTokenizer",
    "SqueezeBertTokenizer",
)
"""tokenizer_class of those that transformers makes a BertNormalizer for, whatever tokenizer.json says of it."""

_SPLITS = dict.fromkeys(_BERT, "BertPreTokenizer") | {"RobertaTokenizer": "ByteLevel"}
"""tokenizer_class -> the pre_tokenizer that transformers makes for it, whatever tokenizer.json says."""

_FRAMED = (*_SPLITS, "XLMRobertaTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer")
"""tokenizer_class of those that transformers puts one token before a text for and one after it, whatever tokenizer.json says."""

_UNTYPED = ("DistilBertTokenizer", "MPNetTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
"""tokenizer_class of those that tell no types of tokens, unless tokenizer_config.json says so. PreTrainedTokenizerFast is none:
with transformers 4 it told them, with 5 it does not, and models of two types that name it were trained with 4."""

_CLASSES = {"bert": "BertTokenizer", "distilbert": "BertTokenizer", "nomic_bert": "BertTokenizer"} | {
    "mpnet": "MPNetTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
"""model_type -> the class where no file names one."""

_GENERIC = ("mistral", "modernbert")
"""Families whose tokenizer.json is taken as it is, whatever class is named."""


def _class(folder: ModelFolder, settings: dict[str, Any]) -> str:
    """The tokenizer class that transformers takes for the folder; "" where it reads tokenizer.json as it is, for all we know."""
    kind = str(folder.config.get("model_type"))
    named = settings.get("tokenizer_class") or folder.config.get("tokenizer_class") or _CLASSES.get(kind)
    return "" if kind in _GENERIC or named is None else str(named).removesuffix("Fast")


def tells_types(folder: ModelFolder, settings: dict[str, Any]) -> bool:
    """Whether a model is given the types of its tokens: else all are of the first. As transformers decides."""
    names = settings.get("model_input_names")
    return "token_type_ids" in names if isinstance(names, list) else _class(folder, settings) not in _UNTYPED


def as_told(inner: tokenizers.Tokenizer, folder: ModelFolder, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer as transformers makes it of the same files. A class of its own takes little but the vocabulary from
    tokenizer.json: keys of tokenizer_config.json (settings), or where they are absent the class's defaults, win. These are
    do_lower_case, strip_accents and tokenize_chinese_chars for BERT's, add_prefix_space for RoBERTa's.

    StartError where tokenizer.json splits or frames texts, or lower-cases, otherwise than the class and no key says so.
    """
    name = _class(folder, settings)
    if name not in _FRAMED:
        return inner
    file = folder.transformer / "tokenizer_config.json"

    def flag(key: str, default: bool | None) -> bool | None:
        value = settings.get(key, default)
        if not isinstance(value, bool) and (value is not None or default is not None):
            raise StartError(f"{file}: {key} must be true or false, not {value!r}")
        return value

    split, splits = None, _SPLITS.get(name)
    if splits is not None:
        whole = orjson.loads(inner.to_str())
        split = whole["pre_tokenizer"] or {"type": "none"}
    if split is not None and split["type"] != splits:
        raise _unlike(file, name, f"splits texts by {splits}", f"has the pre_tokenizer {split['type']}")
    if (around := int(inner.num_special_tokens_to_add(False))) != 2:
        raise _unlike(file, name, "puts a token before a text and one after it", f"adds {around} tokens to a text")
    if name == "RobertaTokenizer" and split is not None:
        told = {"add_prefix_space": flag("add_prefix_space", False), "use_regex": True}
        if told.items() <= split.items():
            return inner
        return tokenizers.Tokenizer.from_str(json.dumps(whole | {"pre_tokenizer": split | told}))
    if name not in (*_BERT, "DebertaV2Tokenizer"):
        return inner
    lower, strip, chinese = (
        flag(key, default)
        for key, default in (("do_lower_case", True), ("strip_accents", None), ("tokenize_chinese_chars", True))
    )
    if split is not None and (was := whole["normalizer"]) is not None and was["type"] == "BertNormalizer":
        told = {"clean_text": True, "handle_chinese_chars": chinese, "strip_accents": strip, "lowercase": lower}
        if told.items() <= was.items():
            return inner
        # Made anew: added tokens that are found in normalised text are normalised when they are added.
        return tokenizers.Tokenizer.from_str(json.dumps(whole | {"normalizer": was | told}))
    lowers = inner.normalizer is not None and inner.normalizer.normalize_str("A").strip() == "a"
    if "do_lower_case" in settings and lower != lowers:
        raise StartError(
            f"{file}: do_lower_case {json.dumps(lower)} of a {name} is not what the normalizer of tokenizer.json does, and is "
            "only applied to a BertNormalizer; make the two agree, or name PreTrainedTokenizerFast as tokenizer_class there to "
            "use tokenizer.json as it is"
        )
    return inner


def _unlike(file: Path, name: str, theirs: str, ours: str) -> StartError:
    return StartError(
        f"{file.with_name('tokenizer.json')}: {ours}, but in transformers a {name} {theirs}, whatever is said there; make the "
        f"two agree, or name PreTrainedTokenizerFast as tokenizer_class in {file.name} to use tokenizer.json as it is"
    )


def special_tokens(inner: tokenizers.Tokenizer, file: Path) -> tuple[int, int]:
    """How many special tokens the tokenizer puts before and after a single text."""
    total = int(inner.num_special_tokens_to_add(False))
    if total == 0:
        return 0, 0
    for probe in ("a", "1", "the"):
        mask = inner.encode(probe).special_tokens_mask
        if 0 in mask:
            before, after = mask.index(0), mask[::-1].index(0)
            if before + after == total:
                return before, after
    raise StartError(f"{file}: adds special tokens elsewhere than before and after the text, which cannot be truncated")


def all_have_rows(inner: tokenizers.Tokenizer, rows: int, file: Path) -> bool:
    """Whether every id has a row in an embedding table of `rows`. A special token may lack one (Gemma's, for images): only a text
    that spells it cannot be served. StartError where a text of plain words, or what goes around each, would be without one.
    """
    added, around = inner.get_added_tokens_decoder(), {*inner.encode("").ids, *inner.encode("a", "a").ids}
    over = sorted((i, token) for token, i in inner.get_vocab(with_added_tokens=True).items() if i >= rows)
    for i, token in over:
        if i in around or i not in added or not added[i].special:
            raise StartError(
                f"{file}: token {token!r} has id {i}, but the model's embedding table has {rows} rows (vocab_size of "
                "config.json): this is not the model's own tokenizer, or tokens were added to it alone"
            )
    return not over


def wants_lower_case(folder: ModelFolder) -> bool:
    files = [read_json(place / name) for place in (folder.transformer, folder.path) for name in ST_CONFIGS]
    return any(f.get("do_lower_case") is True for f in files)


def lower_first(normalizer: Any) -> Any:
    """sentence-transformers' do_lower_case: lower-casing before what the tokenizer does, unless it does that already."""
    steps: list[Any] = [] if normalizer is None else [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [*cast(Any, normalizer)]
    if any(isinstance(s, normalizers.Lowercase) for s in steps):
        return normalizer
    return normalizers.Sequence([normalizers.Lowercase(), *steps])


def token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class Reader(Protocol):
    """What makes ids of texts: a tokenizers.Tokenizer, or what stands in for one."""

    def encode_batch_fast(self, input: Sequence[str], /, *, add_special_tokens: bool = ...) -> Sequence[Encoding]:
        """Ids of every text; offsets are not kept."""


def teach(inner: tokenizers.Tokenizer, markers: Sequence[str]) -> None:
    """Make each marker that the vocabulary knows (whole, or its first word) one token wherever a text spells it."""
    for text in markers:
        known = next((t for t in (text, *text.split()[:1]) if inner.token_to_id(t) is not None), None)
        if known is not None and inner.encode(known, add_special_tokens=False).tokens != [known]:
            inner.add_special_tokens([tokenizers.AddedToken(known, normalized=False, special=True)])


def reader(inner: tokenizers.Tokenizer) -> Reader:
    """The tokenizer, or what gives the same ids faster."""
    told = orjson.loads(inner.to_str())
    return wordpiece.reader(inner, told) or bytepairs.reader(inner, told) or inner
