"""Rerankers of every encoder family, the whole way from two texts to a logit: sentence-transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

from sentence_transformers import CrossEncoder  # noqa: E402
from test_rerankers import opened, scored  # noqa: E402

SIZES = {
    "vocab_size": 30522,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
DISTIL = {"vocab_size": 30522, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "initializer_range": 0.2}
ONE = {"type_vocab_size": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Roberta": SIZES | ONE,
    "XLMRoberta": SIZES | ONE | {"pad_token_id": 1},
    "Camembert": SIZES | ONE,
    "JinaEmbeddingsV3": SIZES | ONE | {"pad_token_id": 1, "max_position_embeddings": 514},
    "DistilBert": DISTIL,
    "MPNet": SIZES,
    "ModernBert": SIZES | {"cls_token_id": 101, "sep_token_id": 102, "local_attention": 12},
    "NomicBert": SIZES,
    "Gte": SIZES | {"type_vocab_size": 2},
    "DebertaV2": SIZES
    | {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 16, "share_att_key": True}
    | {"type_vocab_size": 0},
}
QUERIES = ["What is it?", "a much longer question, of rather more words than the others have"]
DOCUMENTS = ["It is a cat.", "x", "Long and longer. " * 20]


def made(family: str, minilm_path: Path, path: Path) -> CrossEncoder:
    """A random model with a tokenizer that gives the second text its own token type, where the model has two."""
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**FAMILIES[family], num_labels=1)
    getattr(transformers, family + "ForSequenceClassification")(config).save_pretrained(path)
    told = ["input_ids", "attention_mask"]
    if getattr(config, "type_vocab_size", 0) > 1:
        told.append("token_type_ids")
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.txt"):
        (path / name).write_bytes((minilm_path / name).read_bytes())
    settings = json.loads((minilm_path / "tokenizer_config.json").read_text()) | {"model_input_names": told}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return CrossEncoder(str(path), device="cpu")


async def same(path: Path, peer: CrossEncoder) -> list[np.ndarray]:
    embedder = opened(path, "auto")
    assert (embedder.info.kind, embedder.info.width) == ("classify", 1)
    rows = []
    for query in QUERIES:
        want = peer.predict([(query, d) for d in DOCUMENTS], activation_fn=torch.nn.Identity())
        rows.append((await scored(embedder, query, DOCUMENTS, raw=True)).values)
        assert np.abs(rows[-1] - want).max() < 1e-5 * max(1.0, np.abs(want).max())
    return rows


@pytest.mark.parametrize("family", FAMILIES)
async def test_rerankers(family: str, minilm_path: Path, tmp_path: Path) -> None:
    await same(tmp_path, made(family, minilm_path, tmp_path))


async def test_a_default_prompt_goes_before_the_query(minilm_path: Path, tmp_path: Path) -> None:
    """As in sentence-transformers, which saves it; of a query that is cut the prompt stays whole."""
    plain = made("Bert", minilm_path, tmp_path / "plain")
    before = await same(tmp_path / "plain", plain)
    peer = CrossEncoder(str(tmp_path / "plain"), device="cpu", prompts={"q": "find me: "}, default_prompt_name="q")
    peer.save_pretrained(str(tmp_path / "saved"))
    rows = await same(tmp_path / "saved", peer)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(before, rows, strict=True))
    cut = await scored(opened(tmp_path / "saved", "auto"), "a much longer question", DOCUMENTS, raw=True, most_query=2)
    want = peer.predict([("a much", d) for d in DOCUMENTS], activation_fn=torch.nn.Identity())
    assert np.abs(cut.values - want).max() < 1e-5 * max(1.0, np.abs(want).max())


async def test_token_types_that_no_file_counts(minilm_path: Path, tmp_path: Path) -> None:
    """Without type_vocab_size in config.json BERT has two, and the second text of a pair is of the second."""
    peer = made("Bert", minilm_path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("type_vocab_size") == 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = await same(tmp_path, peer)
    (tmp_path / "config.json").write_text(json.dumps(config | {"type_vocab_size": 2}))
    assert all((a == b).all() for a, b in zip(rows, await same(tmp_path, peer), strict=True))


@pytest.mark.parametrize(
    "told",
    [
        {"model_input_names": ["input_ids", "attention_mask"]},
        {
            "model_input_names": ["input_ids", "attention_mask", "token_type_ids"],
            "tokenizer_class": "DistilBertTokenizer",
        },
        {"model_input_names": None, "tokenizer_class": "DistilBertTokenizer"},
    ],
)
async def test_token_types_that_the_tokenizer_does_not_tell(
    told: dict[str, Any], minilm_path: Path, tmp_path: Path
) -> None:
    """Then the model reads both texts as of the first type, whatever tokenizer.json makes of them."""
    made("Bert", minilm_path, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    said = json.loads(file.read_text()) | told
    file.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    await same(tmp_path, CrossEncoder(str(tmp_path), device="cpu"))


def test_every_family_has_a_reranker_here() -> None:
    """Those that transformers has no code for are in test_published.py, language models in test_rerankers.py."""
    from hortus.rose.models import every

    kinds = {getattr(transformers, name + "Config").model_type for name in FAMILIES}
    assert kinds | {"new"} == {name for name, family in every().items() if family.vocabulary is not None}
