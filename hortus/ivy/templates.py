"""Which prompt goes before a text, and how a pair is put into words. Pure but for reading its file.

The rule for prompts is sentence-transformers' `encode`: the prompt named by the request, else the model's default prompt,
else none. They come from the model's own files; a templates file (--templates) adds to them and wins. Does not know tokens:
ids are taken as given and never get a prompt.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hortus.errors import InvalidInput, StartError

INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query", "retrieval.query"),
    "query": ("query", "search_query", "retrieval.query"),
    "search_document": ("search_document", "document", "passage", "retrieval.passage"),
    "document": ("document", "search_document", "passage", "retrieval.passage"),
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}
"""`input_type`, as Cohere and Voyage spell it, to the names that models give their prompts: the first that there is."""


@dataclass(frozen=True, slots=True)
class Pair:
    """How a reranker that is a language model reads a query and a document."""

    pieces: tuple[str, ...]
    """Texts with {query}, {document} and perhaps {instruction} in them. Several are tokenised apart and joined, and of a pair
    that is too long the document is cut at its end, where its piece ends too; one alone is read as any text is, and of a
    pair that is too long the longer text is cut first (fit.py)."""
    instruction: str = ""
    """What stands for {instruction} where a request brings none."""

    def texts(self, query: str, document: str, instruction: str | None = None) -> list[str]:
        """The pieces of one pair. Braces in the texts themselves stay as they are."""
        said = {"query": query, "document": document, "instruction": instruction or self.instruction}
        return [re.sub(r"\{(query|document|instruction)\}", lambda m: said[m[1]], piece) for piece in self.pieces]

    def text(self, instruction: str | None, query: str, document: str) -> str:
        """Of a template in one piece: the text."""
        (whole,) = self.texts(query, document, instruction)
        return whole

    @property
    def cut(self) -> int:
        """The piece that may be cut."""
        return next(i for i, piece in enumerate(self.pieces) if piece.endswith("{document}"))

    def takes_instruction(self) -> bool:
        return any("{instruction}" in piece for piece in self.pieces)


QWEN3_RERANKER = Pair(
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Given a web search query, retrieve relevant passages that answer the query",
)
"""As the model's card has it (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B); its tokenizer has no frame for pairs."""

BGE_GEMMA = Pair(
    ("A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'.",
)
"""As the model's card has it (https://huggingface.co/BAAI/bge-reranker-v2-gemma), which tokenises the pieces apart too."""


def pair_of(config: dict[str, Any]) -> Pair | None:
    """The pair template of a reranker by its config.json; None where the tokenizer frames pairs, or none is known."""
    name = str((config.get("architectures") or [""])[0])
    if config.get("model_type") == "qwen3":
        return QWEN3_RERANKER
    return BGE_GEMMA if name == "GemmaForCausalLM" else None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model's prompts, by name, and the one used when a request names none."""

    texts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    pair: Pair | None = None
    """For rerankers that read words around a pair; None: the tokenizer frames pairs."""
    adapters: tuple[str, ...] = ()
    """ModelFolder's: names that bring an adapter besides their text."""

    def choose(self, name: str | None, *, ids: bool = False) -> str:
        """The text to put before each input; "" for none.

        name: None takes the model's default; "" asks for no prompt; anything else must be one of the model's.
        ids: the request brings token ids, to which no prompt can be added; asking for one is InvalidInput.
        """
        if name:
            if ids:
                raise InvalidInput(
                    "`prompt_name` cannot be used with token ids: they are embedded as they are", param="prompt_name"
                )
            if name not in self.texts:
                known = ", ".join(sorted(self.texts)) or "none"
                raise InvalidInput(
                    f"unknown `prompt_name` {name!r:.80}; this model's prompts: {known}", param="prompt_name"
                )
            return self.texts[name] or ""
        if name is None and self.default is not None and not ids:
            return self.texts.get(self.default) or ""
        return ""

    def adapter(self, name: str | None, *, ids: bool = False) -> int:
        """The token type of a text before which `choose` puts its text; 0: no adapter."""
        if name is None and not ids:
            name = self.default
        return self.adapters.index(name) + 1 if name in self.adapters else 0

    def named(self, input_type: str | None) -> str | None:
        """The prompt name for an `input_type`; None, the default, where the model has none for it: every Cohere request
        must give a type, most models have no prompts. InvalidInput for a type that does not exist."""
        if input_type is None:
            return None
        if input_type not in INPUT_TYPES:
            raise InvalidInput(
                f"unknown `input_type` {input_type!r:.80}; allowed: {', '.join(INPUT_TYPES)}", param="input_type"
            )
        return next((n for n in INPUT_TYPES[input_type] if n in self.texts), None)


def read(file: str, own: Prompts) -> Prompts:
    """The model's own prompts with those of a templates file. StartError says what is wrong with the file.

    TOML: `default = "NAME"`, `pair = "..."` or a list of pieces, `instruction = "..."`, a table [prompts] of NAME = "TEXT".
    """
    try:
        told = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise StartError(f"--templates {file}: {e}") from None
    if unknown := sorted(told.keys() - {"prompts", "default", "pair", "instruction"}):
        raise StartError(f"--templates {file}: unknown key {unknown[0]!r}; known: default, instruction, pair, prompts")
    listed: Any = told.get("prompts", {})
    if not isinstance(listed, dict) or not all(isinstance(t, str) for t in listed.values()):
        raise StartError(f"--templates {file}: [prompts] must map names to texts")
    texts = {**own.texts, **listed}
    default = told.get("default", own.default)
    if default is not None and default not in texts:
        raise StartError(f"--templates {file}: default {default!r} is not one of the prompts ({', '.join(texts)})")
    return Prompts(texts, default, _read_pair(file, told, own.pair), own.adapters)


def _read_pair(file: str, told: dict[str, Any], own: Pair | None) -> Pair | None:
    """The file's `pair` and `instruction`, else the model's own."""
    given, instruction = told.get("pair"), told.get("instruction")
    pieces = [given] if isinstance(given, str) else given
    if pieces is not None:
        whole = "".join(pieces) if isinstance(pieces, list) and all(isinstance(p, str) for p in pieces) else ""
        if "{query}" not in whole or "{document}" not in whole:
            raise StartError(
                f"--templates {file}: pair must be a text with {{query}} and {{document}} in it, or a list"
            )
    if instruction is not None and not isinstance(instruction, str):
        raise StartError(f"--templates {file}: instruction must be a text")
    if pieces is not None and len(pieces) > 1 and not any(p.endswith("{document}") for p in pieces):
        raise StartError(
            f"--templates {file}: of a pair in pieces, one must end in {{document}}: its end is what is cut"
        )
    pair = own if pieces is None else Pair(tuple(pieces), own.instruction if own else "")
    if instruction is None:
        return pair
    if pair is None or not pair.takes_instruction():
        raise StartError(f"--templates {file}: instruction without a pair that has {{instruction}} in it")
    return replace(pair, instruction=instruction)
