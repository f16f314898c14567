"""What a start says of its model: the line to copy must be one that the model answers."""

import dataclasses
import json
import shlex
from typing import Any

import pytest

from hortus.config import Config
from hortus.serve import banner
from hortus.types import ModelInfo


@pytest.mark.parametrize(
    ("changes", "route", "words"),
    [
        ({"normalize": True}, "/v1/embeddings", "embed: 4 values a text, mean pooling, normalised"),
        ({"kind": "tokens"}, "/rerank", "tokens: 4 values a token, scored by MaxSim"),
        ({"kind": "sparse"}, "/embed_sparse", "sparse: a weight for each of 4 entries"),
        ({"kind": "classify", "width": 1, "labels": ("yes",)}, "/rerank", "classify: a score a pair (yes)"),
        (
            {"kind": "classify", "width": 2, "labels": ("a", "b")},
            "/predict",
            "classify: a logit for each of 2 labels: a, b",
        ),
    ],
)
def test_what_a_start_says_is_of_the_model_s_kind(changes, route, words):
    info = ModelInfo(**{"name": "mini", "width": 4, "max_tokens": 8, "vocab_size": 9} | changes)
    said = banner(info, Config(), "http://127.0.0.1:8080", 1.0)
    assert words in said
    line = said.split("  try        ")[1]
    assert line.startswith(f"curl http://127.0.0.1:8080{route} -H 'content-type: application/json' -d '")
    assert json.loads(line.strip().split("-d '")[1].removesuffix("'"))["model"] == "mini"


def test_the_line_to_copy_says_what_the_server_asks_for() -> None:
    info = ModelInfo(name="m", width=3, max_tokens=8, vocab_size=9)
    with_key = config_with(api_keys="a,b", tls_cert="c.pem", tls_key="k.pem")
    said = banner(info, with_key, "https://127.0.0.1:8080", 1.0)
    assert "curl -k -H 'authorization: Bearer YOUR-KEY' https://127.0.0.1:8080/v1/embeddings" in said
    assert "a,b" not in said


@pytest.mark.parametrize("name", ["Ann's model", 'a "b" \\ c', "modèle $HOME `x`"])
def test_the_line_to_copy_can_be_copied_whatever_the_name(name: str) -> None:
    said = banner(ModelInfo(name=name, width=3, max_tokens=8, vocab_size=9), Config(), "http://127.0.0.1:8080", 1.0)
    words = shlex.split(said.split("  try        ")[1])
    assert json.loads(words[-1])["model"] == name


def config_with(**ivy: Any) -> Config:
    return dataclasses.replace(Config(), ivy=dataclasses.replace(Config().ivy, **ivy))
