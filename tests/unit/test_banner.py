"""What a start says of its model: the line to copy must be one that the model answers."""

import json

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
