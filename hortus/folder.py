"""A model folder: where it is, and what its small files say. Weights are rose/loader's, the tokenizer's ivy/tokenize's.

Knows JSON and the layout that sentence-transformers and transformers write. Does not know torch. Read by both
Ivy (prompts, length limit, where the tokenizer is) and ROSE (config, modules), so that the two can never disagree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hortus.errors import StartError

ST_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)


@dataclass(frozen=True, slots=True)
class Module:
    """One line of modules.json."""

    kind: str
    """Last part of its type: Transformer, Pooling, Dense, Normalize, or a name we may not know."""
    path: Path
    """Its folder; may not exist (Normalize has no files)."""
    config: dict[str, Any]
    """config.json of that folder, {} when absent (for the Transformer: see ModelFolder.config)."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk, opened."""

    path: Path
    name: str
    revision: str | None
    transformer: Path
    """Folder of the Transformer module: config.json, tokenizer.json and the weights."""
    config: dict[str, Any]
    """The transformer's config.json."""
    modules: tuple[Module, ...]
    """modules.json in order; () when there is none (a plain transformers folder)."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int = 512
    """Longest input in tokens, special ones included, as sentence-transformers applies it."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file; StartError when it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise StartError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: expected a JSON object")
    return value
