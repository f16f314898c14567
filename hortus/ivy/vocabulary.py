"""A model's tokenizer.json and the small files that say how it is meant. Read at start; does not know requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import normalizers

from hortus.errors import StartError
from hortus.folder import ST_CONFIGS, ModelFolder, read_json


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
