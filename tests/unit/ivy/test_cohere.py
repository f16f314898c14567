"""Cohere's API: several formats in one answer, cutting by default, codes by ranges."""

from __future__ import annotations

import numpy as np
import pytest
from models_stubs import client, post, sequences

pytestmark = pytest.mark.usefixtures("tokenizer_read_once")
LONG = "word " * 100


async def test_cohere_embed(folder, embed):
    texts = ["hello", "there"]
    reply = await post(embed, "/v2/embed", model="mini", texts=texts, input_type="search_document",
                       embedding_types=["float", "ubinary", "binary"], output_dimension=8)  # fmt: skip
    told = reply.json
    assert set(told["embeddings"]) == {"float", "ubinary", "binary"}
    assert told["texts"] == texts
    assert told["meta"]["billed_units"] == {"input_tokens": 6}
    rows = np.array(told["embeddings"]["float"])
    assert told["embeddings"]["ubinary"] == np.packbits(rows > 0, axis=1).tolist()
    assert told["embeddings"]["binary"] == (np.packbits(rows > 0, axis=1).astype(int) - 128).tolist()
    inputs = [{"content": [{"type": "text", "text": t}]} for t in texts]
    same = await post(embed, "/v2/embed", model="mini", inputs=inputs, output_dimension=8)
    assert same.json["embeddings"]["float"] == told["embeddings"]["float"]


async def test_cohere_cuts_by_default_from_either_end(embed):
    for truncate, last in ((None, 2773), ("END", 2773), ("START", 2203)):
        fields = {} if truncate is None else {"truncate": truncate}
        text = "word " * 90 + "end"
        reply = await post(embed, "/v2/embed", model="mini", texts=[text], input_type="classification", **fields)
        assert reply.json["meta"]["billed_units"]["input_tokens"] == 64
        assert sequences(embed.encoder.batches[-1])[0][-2] == last
    reply = await post(embed, "/v2/embed", model="mini", texts=[LONG], max_tokens=10)
    assert reply.json["meta"]["billed_units"]["input_tokens"] == 10


@pytest.mark.parametrize(
    "bad",
    [
        {"texts": ["a"], "inputs": []},
        {},
        {"texts": ["a"], "embedding_types": ["float64"]},
        {"texts": ["a"], "embedding_types": ["int8"]},
        {"texts": ["a"], "input_type": "image"},
        {"texts": ["a"], "truncate": "end"},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"inputs": [{"content": [{"type": "text", "text": "a"}], "extra": 1}]},
        {"inputs": [{"content": [{"type": "text", "text": "a", "more": 1}]}]},
        {"inputs": [{}]},
        {"texts": ["a"], "max_tokens": 0},
    ],
)
async def test_cohere_refusals(embed, bad):
    reply = await post(embed, "/v2/embed", model="mini", **bad)
    assert (reply.status, reply.error["code"]) == (400, "invalid_input")


async def test_int8_by_ranges(folder, tmp_path):
    ranges = np.stack([np.full(16, -1.0), np.full(16, 1.0)])
    np.save(tmp_path / "ranges.npy", ranges)
    gateway = client(folder, int8_ranges=str(tmp_path / "ranges.npy"))
    told = (
        await post(gateway, "/v2/embed", model="mini", texts=["a"], embedding_types=["float", "int8", "uint8"])
    ).json
    x = np.float32(told["embeddings"]["float"][0])
    steps = (ranges[1] - ranges[0]).astype(np.float32) / 255
    want = np.clip(np.floor((x + 1) / steps), 0, 255)
    assert told["embeddings"]["uint8"][0] == want.tolist()
    assert told["embeddings"]["int8"][0] == (want - 128).tolist()
    cut = await post(gateway, "/v1/embeddings", model="mini", input="a", encoding_format="base64_int8", dimensions=8)
    assert cut.error["param"] == "dimensions"
