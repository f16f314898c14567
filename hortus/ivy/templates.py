"""Which prompt goes before a text, and how a pair is put into one text. Pure but for reading its file.

The rule for prompts is sentence-transformers' `encode`: the prompt named by the request, else the model's default prompt,
else none. They come from the model's own files; a templates file (--templates) adds to them and wins. Does not know tokens:
ids are taken as given and never get a prompt.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hortus.errors import InvalidInput, StartError

INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "query": ("query", "search_query"),
    "search_document": ("search_document", "document", "passage"),
    "document": ("document", "search_document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""`input_type`, as Cohere and Voyage spell it, to the names that models give their prompts: the first that there is."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model's prompts, by name, and the one used when a request names none."""

    texts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    pair: str | None = None
    """A text with {query} and {document} in it, for rerankers that read one text; None: the tokenizer frames pairs."""

    def choose(self, name: str | None, *, ids: bool = False) -> str:
        """The text to put before each input; "" for none.

        name: None takes the model's default; "" asks for no prompt; anything else must be one of the model's.
        ids: the request brings token ids, to which no prompt can be added; asking for one is InvalidInput.
        """
        if name:
            if ids:
                raise InvalidInput(
                    "prompt_name cannot be used with token ids: they are embedded as they are", param="prompt_name"
                )
            if name not in self.texts:
                known = ", ".join(sorted(self.texts)) or "none"
                raise InvalidInput(
                    f"unknown prompt_name {name!r:.80}; this model's prompts: {known}", param="prompt_name"
                )
            return self.texts[name] or ""
        if name is None and self.default is not None and not ids:
            return self.texts.get(self.default) or ""
        return ""

    def named(self, input_type: str | None) -> str | None:
        """The prompt name for an `input_type`; None, the default, where the model has none for it: every Cohere request
        must give a type, most models have no prompts. InvalidInput for a type that does not exist."""
        if input_type is None:
            return None
        if input_type not in INPUT_TYPES:
            raise InvalidInput(
                f"unknown input_type {input_type!r:.80}; allowed: {', '.join(INPUT_TYPES)}", param="input_type"
            )
        return next((n for n in INPUT_TYPES[input_type] if n in self.texts), None)

    def joined(self, query: str, document: str) -> str:
        """The pair as one text. Braces in the texts themselves stay as they are."""
        assert self.pair is not None, "asked for only where there is such a template"
        return re.sub(r"\{(query|document)\}", lambda m: query if m[1] == "query" else document, self.pair)


def read(file: str, own: Prompts) -> Prompts:
    """The model's own prompts with those of a templates file. StartError says what is wrong with the file.

    TOML: `default = "NAME"`, `pair = "..."`, and a table [prompts] of NAME = "TEXT".
    """
    try:
        told = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise StartError(f"--templates {file}: {e}") from None
    if unknown := sorted(told.keys() - {"prompts", "default", "pair"}):
        raise StartError(f"--templates {file}: unknown key {unknown[0]!r}; known: default, pair, prompts")
    listed: Any = told.get("prompts", {})
    if not isinstance(listed, dict) or not all(isinstance(t, str) for t in listed.values()):
        raise StartError(f"--templates {file}: [prompts] must map names to texts")
    texts = {**own.texts, **listed}
    default, pair = told.get("default", own.default), told.get("pair", own.pair)
    if default is not None and default not in texts:
        raise StartError(f"--templates {file}: default {default!r} is not one of the prompts ({', '.join(texts)})")
    if pair is not None and not (isinstance(pair, str) and "{query}" in pair and "{document}" in pair):
        raise StartError(f"--templates {file}: pair must be a text with {{query}} and {{document}} in it")
    return Prompts(texts, default, pair)
