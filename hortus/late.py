"""How a late-interaction model (ColBERT) reads queries and documents, as its folder says. A part of `folder`, pure but for files.

Three kinds of folder: sentence-transformers' MultiVectorEncoder, PyLate's, and the original ColBERT's with its
artifact.metadata. Defaults and their order are those of sentence-transformers, which opens all three. Does not know torch.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hortus.errors import StartError

METADATA = "artifact.metadata"
"""The original ColBERT's own settings, JSON."""

Read = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """Queries are filled up with one token: those places get vectors too, which stand for what the query might have said."""

    length: int
    """Tokens that every query has at least, special ones included."""
    fixed: bool
    """None has more."""
    attend: bool
    """The filled places are seen by the others; else they only see."""
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Late:
    """What is done to texts on their way to a vector a token."""

    prompts: Mapping[str, str]
    """`query` and `document`: what goes before a text."""
    markers: tuple[str, ...] = ()
    """Those of them that were one token in training, whatever the tokenizer makes of them now."""
    query_length: int | None = None
    """Most tokens of a query; None: the model's limit."""
    document_length: int | None = None
    expansion: Expansion | None = None
    skip: tuple[str, ...] = ()
    """Tokens that get no vector."""
    skip_queries: bool = False
    """Not in queries either."""
    skip_documents: bool = True
    mean: bool = False
    """A score is divided by the query's vectors."""
    dim: int | None = None
    """The original ColBERT: values a vector, of the projection that lies with the other weights."""


def is_late(config: dict[str, Any], described: dict[str, Any]) -> bool:
    """Whether config.json and config_sentence_transformers.json are those of a late-interaction model."""
    if described.get("model_type") in ("MultiVectorEncoder", "ColBERT") or "query_prefix" in described:
        return True
    return "HF_ColBERT" in (config.get("architectures") or ())


def read_late(
    path: Path,
    transformer: Path,
    config: dict[str, Any],
    described: dict[str, Any],
    settings: dict[str, Any],
    mask: dict[str, Any] | None,
    read: Read,
) -> Late:
    """From the folder's files. mask: config.json of its MultiVectorMask module, None without one. StartError."""
    if "HF_ColBERT" in (config.get("architectures") or ()):
        return _original(read(path / METADATA), path, transformer, read)
    file = path / "config_sentence_transformers.json"
    prompts = {k: v or "" for k, v in (described.get("prompts") or {}).items()}
    markers = []
    for key, name in (("query_prefix", "query"), ("document_prefix", "document")):
        if prefix := described.get(key) or "":
            if not isinstance(prefix, str):
                raise StartError(f"{file}: {key} must be a text, not {prefix!r:.80}")
            markers.append(prefix)
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    told = {**described, **{k: v for k, v in settings.items() if v is not None or k == "query_expansion"}}
    pylate = any(
        k in described for k in ("query_prefix", "do_query_expansion", "attend_to_expansion_tokens", "query_length")
    )
    expansion, query_length = told.get("query_expansion"), _length(told, "query_length", file)
    if "query_expansion" not in told and pylate and told.get("do_query_expansion") is not False:
        attend = told.get("attend_to_expansion_tokens", told.get("attend_to_mask_tokens"))
        expansion = {"strategy": "fixed", "attend": bool(attend), "length": query_length or 32}
        query_length = None
    skip, tasks = (string.punctuation if pylate else ()), ["document"]
    if mask is not None:
        skip, tasks = mask.get("skiplist_words") or (), mask.get("skiplist_tasks") or tasks
        if mask.get("keep_only_token_ids"):
            raise StartError(f"{path}: keep_only_token_ids of a MultiVectorMask is not supported")
    elif described.get("skiplist_words") is not None:
        skip = described["skiplist_words"]
    if (similarity := described.get("similarity_fn_name")) not in (
        None,
        "maxsim",
        "MaxSim",
        "meanmaxsim",
        "cosine",
        "dot",
    ):
        raise StartError(f"{file}: similarity_fn_name {similarity!r} is not supported; supported: maxsim, meanmaxsim")
    return Late(
        prompts=prompts,
        markers=tuple(markers),
        query_length=query_length,
        document_length=_length(told, "document_length", file),
        expansion=None if expansion is None else _expansion(expansion, file, transformer, read),
        skip=tuple(skip),
        skip_queries="query" in tasks,
        skip_documents="document" in tasks,
        mean=similarity == "meanmaxsim",
    )


def _original(told: dict[str, Any], path: Path, transformer: Path, read: Read) -> Late:
    file = path / METADATA
    query, document = told.get("query_token_id") or "[unused0]", told.get("doc_token_id") or "[unused1]"
    length = _length(told, "query_maxlen", file) or 32
    expansion = {"strategy": "fixed", "length": length, "attend": bool(told.get("attend_to_mask_tokens"))}
    return Late(
        prompts={"query": query + " ", "document": document + " "},
        markers=(query, document),
        document_length=_length(told, "doc_maxlen", file),
        expansion=_expansion(expansion, file, transformer, read),
        skip=tuple(string.punctuation) if told.get("mask_punctuation", True) else (),
        dim=_length(told, "dim", file) or 128,
    )


def _length(told: dict[str, Any], key: str, file: Path) -> int | None:
    value = told.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise StartError(f"{file}: {key} must be a positive whole number, not {value!r}")
    return value


def _expansion(told: Any, file: Path, transformer: Path, read: Read) -> Expansion:
    known = {"strategy", "length", "attend", "token"}
    if not isinstance(told, dict) or told.keys() - known or told.get("strategy") not in ("fixed", "min"):
        raise StartError(f"{file}: query_expansion {json.dumps(told)} is not supported; strategies: fixed, min")
    length, token = _length(told, "length", file), told.get("token")
    if length is None:
        raise StartError(f"{file}: query_expansion without a length")
    if token is None:  # a decoder has no mask
        named = {**read(transformer / "special_tokens_map.json"), **read(transformer / "tokenizer_config.json")}
        token = named.get("mask_token") or named.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        raise StartError(
            f"{file}: query_expansion names no token, and the tokenizer has neither a mask nor an end token"
        )
    return Expansion(length=length, fixed=told["strategy"] == "fixed", attend=bool(told.get("attend")), token=token)
