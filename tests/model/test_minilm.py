"""all-MiniLM-L6-v2, real weights: our vectors are sentence-transformers', whatever stands next to a text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hortus.types import TokenBatch

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))["items"]


def test_golden_texts_together_and_alone(minilm: Any) -> None:
    want = np.array([item["vector"] for item in GOLDEN])
    batch = minilm.batch([item["text"] for item in GOLDEN])
    assert batch.lengths.tolist() == [item["tokens"] for item in GOLDEN]
    assert np.abs(minilm.rows(batch) - want).max() < 1e-5
    for i in range(len(batch)):
        assert np.abs(minilm.rows(batch.slice(i, i + 1))[0] - want[i]).max() < 1e-5


def test_info(minilm: Any) -> None:
    info = minilm.info
    assert (info.width, info.max_tokens, info.vocab_size) == (384, 256, 30522)
    assert (info.normalize, info.pooling, info.family, info.dtype, info.device) == (
        True,
        "mean",
        "bert",
        "float32",
        "cpu",
    )
    assert info.parameters == 22_565_376  # the checkpoint's 22.7 M without its pooler


@pytest.mark.timeout(120)
def test_a_thousand_mixed_texts(
    minilm: Any, minilm_path: Path, peer: Callable[[Path], Any], sentences: list[str]
) -> None:
    """Lengths 1..256 (most of them short, to save time), as one huge batch, in random batches, and alone."""
    rng = random.Random(0)
    texts = []
    for i in range(1000):
        longest = 400 if i % 50 == 0 else 16
        words = " ".join(rng.choices(sentences, k=longest // 8)).split()
        texts.append(" ".join(words[: rng.randint(0, longest)]))
    batch = minilm.batch(texts)
    assert batch.lengths.min() == 2
    assert batch.lengths.max() == 256
    want = peer(minilm_path).encode(texts, batch_size=64)
    rows = minilm.rows(batch)
    assert np.abs(rows - want).max() < 1e-5
    order = rng.sample(range(1000), 96)
    for lo in range(0, len(order), 24):
        some = order[lo : lo + 24]
        assert np.abs(minilm.encode([texts[i] for i in some]) - rows[some]).max() < 1e-6
    for i in order[:16]:
        assert np.abs(minilm.rows(batch.slice(i, i + 1))[0] - rows[i]).max() < 1e-6


def test_one_token(minilm: Any) -> None:
    """Ids may come from a client, so a sequence of one token is possible."""
    pair = TokenBatch.of([[101], [101, 2003, 102]])
    assert np.abs(minilm.rows(pair)[0] - minilm.rows(pair.slice(0, 1))[0]).max() < 1e-6


def test_segments_are_used(minilm: Any, minilm_path: Path) -> None:
    import torch
    from transformers import AutoModel

    ids = [101, 2003, 2023, 102, 2748, 102]
    types = [0, 0, 0, 0, 1, 1]
    batch = TokenBatch.of([ids, ids])
    batch = TokenBatch(batch.ids, batch.cu_seqlens, np.array(types + [0] * 6, np.uint8))
    model = AutoModel.from_pretrained(minilm_path).eval()
    with torch.inference_mode():
        want = [
            model(torch.tensor([ids]), token_type_ids=torch.tensor([t])).last_hidden_state[0].mean(0).numpy()
            for t in (types, [0] * 6)
        ]
    assert np.abs(minilm.engine.step(batch).result() - np.array(want)).max() < 1e-5


def test_bfloat16_is_close(minilm: Any, minilm_path: Path, open_ours: Any) -> None:
    rough = open_ours(minilm_path, dtype="bfloat16")
    texts = [item["text"] for item in GOLDEN]
    assert ((rough.encode(texts) * minilm.encode(texts)).sum(1) > 0.999).all()
    assert rough.info.dtype == "bfloat16"


def test_spans(minilm: Any, minilm_path: Path) -> None:
    """A vector a token is the last hidden state; one of a range is its tokens' mean."""
    import torch
    from transformers import AutoModel

    texts = [item["text"] for item in GOLDEN[:3]]
    batch = minilm.batch(texts)
    model = AutoModel.from_pretrained(minilm_path).eval()
    with torch.inference_mode():
        hidden = [
            model(torch.from_numpy(part)[None]).last_hidden_state[0].numpy()
            for part in np.split(batch.ids, batch.cu_seqlens[1:-1])
        ]
    packed = np.concatenate(hidden)
    each = np.stack([np.arange(len(packed)), np.arange(1, len(packed) + 1)], 1).astype(np.int32)
    tokens = TokenBatch(batch.ids, batch.cu_seqlens, None, each, batch.lengths)
    assert np.abs(minilm.engine.step(tokens).result() - packed).max() < 1e-5
    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    some = np.stack([starts + 1, ends - 1], 1).repeat(2, 0)
    some[1::2, 1] = some[1::2, 0] + 1
    chunks = TokenBatch(batch.ids, batch.cu_seqlens, None, some, np.full(len(batch), 2, np.int32))
    want = np.stack([packed[a:b].mean(0) for a, b in some])
    assert np.abs(minilm.engine.step(chunks).result() - want).max() < 1e-5
