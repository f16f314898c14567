"""Classifiers, rerankers and sparse models: the reference libraries' logits and weights, of random and of real models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")
import transformers  # noqa: E402
from installed_models import package_folder  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.ivy import outputs  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

Made = tuple[Path, Any]

SIZES = {
    "vocab_size": 5000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DISTIL = {"vocab_size": 5000, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Writes a random model of one class -> (folder, the model)."""

    def run(family: str, head: str, **config: Any) -> Made:
        torch.manual_seed(0)
        sizes = (DISTIL if family == "DistilBert" else SIZES) | {"initializer_range": 0.2} | config
        model = getattr(transformers, family + head)(getattr(transformers, family + "Config")(**sizes)).eval()
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return run


def ragged(vocab: int = 5000) -> TokenBatch:
    """Ids of no special meaning; lengths 1, even and odd, and the longest RoBERTa takes."""
    rng = np.random.default_rng(0)
    return TokenBatch.of([rng.integers(5, vocab, n).tolist() for n in (1, 7, 16, 33, 510, 7)])


def each(model: Any, batch: TokenBatch) -> list[Any]:
    """The model's logits of every sequence, alone."""
    with torch.inference_mode():
        return [model(torch.from_numpy(part)[None]).logits[0] for part in np.split(batch.ids, batch.cu_seqlens[1:-1])]


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-5 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers(family: str, labels: int, make: Callable[..., Made]) -> None:
    path, model = make(family, "ForSequenceClassification", num_labels=labels)
    engine = open_engine(open_folder(str(path)), RoseConfig())
    assert (engine.info.kind, engine.info.width) == ("classify", labels)
    assert engine.info.labels == tuple(f"LABEL_{i}" for i in range(labels))
    close(engine.step(ragged()).result(), np.stack([row.numpy() for row in each(model, ragged())]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_sparse(family: str, tied: bool, make: Callable[..., Made]) -> None:
    path, model = make(
        family, "ForMaskedLM", tie_word_embeddings=tied, **({"hidden_act": "relu"} if family != "DistilBert" else {})
    )
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_()
    model.save_pretrained(path)
    engine = open_engine(open_folder(str(path)), RoseConfig())
    assert (engine.info.kind, engine.info.width, engine.info.labels) == ("sparse", 5000, ())
    want = np.stack([row.relu().log1p().amax(0).numpy() for row in each(model, ragged())])
    close(engine.step(ragged()).result(), want)


def test_a_kind_can_be_forced(make: Callable[..., Made]) -> None:
    path, _ = make("Bert", "ForMaskedLM")
    engine = open_engine(open_folder(str(path)), RoseConfig(kind="embed"))
    assert (engine.info.kind, engine.info.width) == ("embed", 32)
    with pytest.raises(StartError, match=r"missing: .*classifier\.weight"):
        open_engine(open_folder(str(path)), RoseConfig(kind="classify"))


def test_labels_are_in_order(make: Callable[..., Made]) -> None:
    path, _ = make("Bert", "ForSequenceClassification", id2label={1: "bad", 0: "good"}, label2id={"bad": 1, "good": 0})
    assert open_engine(open_folder(str(path)), RoseConfig()).info.labels == ("good", "bad")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"id2label": {"1": "bad", "2": "good"}}))
    with pytest.raises(StartError, match="id2label must number the labels from 0, not 1, 2"):
        open_engine(open_folder(str(path)), RoseConfig())


def _tokenizer(minilm_path: Path, path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(minilm_path / name, path / name)


def test_cross_encoder(make: Callable[..., Made], minilm_path: Path, tmp_path: Path) -> None:
    """As sentence-transformers saves it; its pairs, segments included."""
    from sentence_transformers import CrossEncoder

    path, _ = make("Bert", "ForSequenceClassification", num_labels=1, vocab_size=30522)
    _tokenizer(minilm_path, path)
    peer = CrossEncoder(str(path), device="cpu")
    saved = tmp_path / "saved"
    peer.save_pretrained(str(saved))
    pairs = [("a query", "a text"), ("what is it?", "A much longer text, of a few more words.")]
    engine = open_engine(open_folder(str(saved)), RoseConfig())
    assert (engine.info.kind, engine.info.width) == ("classify", 1)
    made = peer.tokenizer([p[0] for p in pairs], [p[1] for p in pairs])
    batch = TokenBatch.of(made["input_ids"])
    types = np.concatenate(made["token_type_ids"]).astype(np.uint8)
    rows = engine.step(TokenBatch(batch.ids, batch.cu_seqlens, types)).result()
    want = peer.predict(pairs)  # the sigmoid of the one logit
    assert np.abs(1 / (1 + np.exp(-rows[:, 0])) - want).max() < 1e-5

    # What its files say becomes of the logit, in each of the places where they can say it.
    identity, sigmoid = torch.nn.Identity(), torch.nn.Sigmoid()
    by_hand = tmp_path / "by_hand"
    for name, told, files in (
        ("saved", sigmoid, None),
        ("Identity", identity, None),
        ("new", identity, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
        ("old", identity, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        ("silent", sigmoid, {}),
    ):
        if files is None:
            where = tmp_path / name
            CrossEncoder(str(path), activation_fn=told, device="cpu").save_pretrained(str(where))
        else:
            where = by_hand
            shutil.copytree(path, by_hand, dirs_exist_ok=True)
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            (by_hand / "config.json").write_text(json.dumps({**config, **files}), encoding="utf-8")
        made = outputs.activation(open_folder(str(where)).activation or "Sigmoid")
        want = CrossEncoder(str(where), device="cpu").predict(pairs)
        assert np.abs(made(rows[:, 0]) - want).max() < 1e-5, name


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_encoder(
    strategy: Any, activation: Any, make: Callable[..., Made], minilm_path: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    path, _ = make("Bert", "ForMaskedLM", vocab_size=30522)
    _tokenizer(minilm_path, path)
    trunk = Transformer(str(path), transformer_task="fill-mask")
    peer = SparseEncoder(modules=[trunk, SpladePooling(strategy, activation)], device="cpu")
    saved = tmp_path / "saved"
    peer.save_pretrained(str(saved))
    texts = ["one", "A text of a few words."]
    engine = open_engine(open_folder(str(saved)), RoseConfig())
    assert (engine.info.kind, engine.info.pooling) == ("sparse", strategy)
    rows = engine.step(TokenBatch.of(peer.tokenizer(texts)["input_ids"])).result()
    close(rows, peer.encode(texts, convert_to_sparse_tensor=False).numpy())


def test_the_real_splade_tiny(open_ours: Any) -> None:
    golden = json.loads((Path(__file__).parent / "golden_splade.json").read_text(encoding="utf-8"))["items"]
    ours = open_ours(package_folder("cognition", "model"))
    rows = ours.encode([item["text"] for item in golden])
    for row, item in zip(rows, golden, strict=True):
        want = {at: value for at, _, value in item["entries"]}
        assert len(want) == item["nnz"] == int((row > 0).sum())
        assert max(abs(row[at] - value) for at, value in want.items()) < 1e-4
