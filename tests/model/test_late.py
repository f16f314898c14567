"""Late interaction against sentence-transformers: folders of its MultiVectorEncoder, of PyLate and of the original ColBERT."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sentence_transformers import MultiVectorEncoder  # noqa: E402
from sentence_transformers.base.modules import Normalize, Transformer  # noqa: E402
from sentence_transformers.base.modules.dense import Dense  # noqa: E402
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: E402
from test_rerankers import Now  # noqa: E402

from hortus.config import IvyConfig, RoseConfig  # noqa: E402
from hortus.errors import InvalidInput, StartError, TooLong  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.ivy.embed import Embedder  # noqa: E402
from hortus.ivy.scores import Question, score  # noqa: E402
from hortus.metrics import Metrics  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402

SIZES = {
    "vocab_size": 30522,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
MODERN = SIZES | {"pad_token_id": 0, "cls_token_id": 101, "sep_token_id": 102, "local_attention": 12}
QUERIES = ["What is it?", "one", "a much longer question, of rather more words than all the others have"]
DOCUMENTS = ["It is a cat, a cat!", "one", "The longest text, with many, many commas, " * 2, "?!", "It is a dog."]
FIXED = {"strategy": "fixed", "length": 24}

Base = Callable[..., Path]


@pytest.fixture
def base(minilm_path: Path, tmp_path: Path) -> Base:
    """Writes a random trunk with a tokenizer -> its folder."""

    def write(name: str = "Bert", added: tuple[str, ...] = (), **config: Any) -> Path:
        torch.manual_seed(0)
        path = tmp_path / "base"
        sizes = MODERN if name == "ModernBert" else SIZES
        model = getattr(transformers, name + "Model")(getattr(transformers, name + "Config")(**sizes | config))
        tok = transformers.AutoTokenizer.from_pretrained(minilm_path)
        if added:
            tok.add_tokens(list(added))
            model.resize_token_embeddings(len(tok), mean_resizing=False)
        model.save_pretrained(path)
        tok.save_pretrained(path)
        return path

    return write


def native(base: Path, to: Path, *, skip: tuple[str, ...] = (",", "!", "?", "."), **said: Any) -> MultiVectorEncoder:
    torch.manual_seed(1)
    dense = Dense(32, 8, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    mask = said.pop("mask", {})
    made = MultiVectorEncoder(
        modules=[
            Transformer(str(base), **said),
            dense,
            MultiVectorMask(skiplist_words=list(skip), **mask),
            Normalize(module_input_name="token_embeddings"),
        ],
        prompts={"query": "[Q] ", "document": "[D] "},
        device="cpu",
    )
    made.save_pretrained(str(to), create_model_card=False)
    return made


def opened(path: Path, **ivy: Any) -> Embedder:
    folder = open_folder(str(path))
    engine = open_engine(folder, RoseConfig(threads=1))
    return Embedder(folder, engine.info, Now(engine), IvyConfig(**ivy), Metrics())


async def rows(embedder: Embedder, texts: list[str], *, query: bool) -> list[np.ndarray]:
    tokens = await embedder.vectors(texts, query=query, truncate=embedder.truncate(True))
    done = await embedder.run(tokens, lambda first, rows: rows, deadline=time.monotonic() + 60)
    assert tokens.batch.span_counts is not None
    return np.split(np.concatenate(done.parts), np.cumsum(tokens.batch.span_counts)[:-1])


async def as_peer(path: Path, peer: MultiVectorEncoder) -> None:
    """Vectors of queries and documents, alone and together, and their scores."""
    embedder = opened(path)
    assert (embedder.info.kind, embedder.info.normalize) == ("tokens", False)
    for texts, query, encode in ((QUERIES, True, peer.encode_query), (DOCUMENTS, False, peer.encode_document)):
        want = [encode([t])[0].numpy() for t in texts]
        got = await rows(embedder, texts, query=query)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            assert np.abs(a - b).max() < 1e-5
        for text, b in zip(texts, want, strict=True):
            assert np.abs((await rows(embedder, [text], query=query))[0] - b).max() < 1e-5
    want = peer.similarity(peer.encode_query(QUERIES), peer.encode_document(DOCUMENTS)).numpy()
    for query, scores in zip(QUERIES, want, strict=True):
        question = Question(queries=[query], documents=DOCUMENTS, truncate=embedder.truncate(True))
        got = await score(embedder, question, deadline=time.monotonic() + 60, route="/rerank")
        assert np.abs(got.values - scores).max() < 1e-4


@pytest.mark.parametrize(("strategy", "attend"), [("fixed", False), ("min", False), ("fixed", True)])
async def test_expanded_queries(strategy: str, attend: bool, base: Base, tmp_path: Path) -> None:
    expansion = {"strategy": strategy, "length": 14, "attend": attend}
    peer = native(base(), tmp_path / "saved", query_expansion=expansion, document_length=20)
    await as_peer(tmp_path / "saved", peer)


async def test_no_expansion(base: Base, tmp_path: Path) -> None:
    peer = native(base(), tmp_path / "saved", query_length=12, mask={"skiplist_tasks": ["query", "document"]})
    await as_peer(tmp_path / "saved", peer)


@pytest.mark.parametrize("family", ["ModernBert", "MPNet"])
async def test_other_trunks(family: str, base: Base, tmp_path: Path) -> None:
    """A window, and a bias on scores, with the filled places unseen."""
    peer = native(base(family), tmp_path / "saved", query_expansion=FIXED)
    await as_peer(tmp_path / "saved", peer)


@pytest.mark.parametrize("said", [{"do_query_expansion": False}, {}])
async def test_pylate(said: dict[str, Any], base: Base, tmp_path: Path) -> None:
    """Two modules, the rest in config_sentence_transformers.json; prefixes that are tokens of their own."""
    path = base(added=("[Q] ", "[D] "))
    native(path, tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "2_MultiVectorMask")
    modules = json.loads((tmp_path / "saved" / "modules.json").read_text())[:2]
    modules[0]["type"] = "sentence_transformers.models.Transformer"
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (tmp_path / "saved" / "modules.json").write_text(json.dumps(modules))
    dense = {"in_features": 32, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "saved" / "1_Dense" / "config.json").write_text(json.dumps(dense))
    (tmp_path / "saved" / "sentence_bert_config.json").write_text('{"max_seq_length": 29, "do_lower_case": false}')
    described = {
        "model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16,
        "document_length": 30, "attend_to_expansion_tokens": False, "similarity_fn_name": "MaxSim",
        "skiplist_words": ["!", "?", ","], "prompts": {}, "default_prompt_name": None,
    } | said  # fmt: skip
    (tmp_path / "saved" / "config_sentence_transformers.json").write_text(json.dumps(described))
    await as_peer(tmp_path / "saved", MultiVectorEncoder(str(tmp_path / "saved"), device="cpu"))


@pytest.mark.parametrize(
    "metadata", [{"query_maxlen": 16, "doc_maxlen": 20, "dim": 8}, {"mask_punctuation": False, "dim": 8}]
)
async def test_the_original_colbert(metadata: dict[str, Any], base: Base, tmp_path: Path) -> None:
    """bert.* and linear.weight in one file, settings in artifact.metadata."""
    path = base()
    torch.manual_seed(2)
    state = {"bert." + k: v for k, v in load_file(path / "model.safetensors").items()}
    save_file(state | {"linear.weight": torch.randn(8, 32)}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    (path / "artifact.metadata").write_text(json.dumps(metadata))
    # The reference reads the trunk by transformers, which wants the names without a prefix.
    other = Path(shutil.copytree(path, tmp_path / "peer"))
    bare = {k.removeprefix("bert."): v for k, v in load_file(path / "model.safetensors").items()}
    save_file(bare, other / "model.safetensors", {"format": "pt"})
    await as_peer(path, MultiVectorEncoder(str(other), device="cpu"))


async def test_what_is_too_long_is_refused_unless_asked(base: Base, tmp_path: Path) -> None:
    native(base(), tmp_path / "saved", query_expansion=FIXED, document_length=20)
    embedder = opened(tmp_path / "saved")
    for query, most in ((True, 24), (False, 20)):
        with pytest.raises(TooLong, match=rf"input 1 has \d+ tokens, the limit given is {most}"):
            await embedder.vectors(["a", "word " * 40], query=query, truncate=embedder.truncate(False))
        with pytest.raises(
            InvalidInput, match=r"`truncate_prompt_tokens` is 9999; this model takes"
        ):  # as of any model
            await embedder.vectors(["a"], query=query, truncate=embedder.truncate(True, 9999))
    question = Question(queries=["a"], documents=["b"], truncate=embedder.truncate(), instruction="c")
    with pytest.raises(InvalidInput, match="no `instruction`"):
        await score(embedder, question, deadline=time.monotonic() + 60, route="/rerank")


def test_refusals(base: Base, tmp_path: Path) -> None:
    native(base(), tmp_path / "saved", query_expansion=FIXED)
    file = tmp_path / "saved" / "sentence_bert_config.json"
    said = json.loads(file.read_text())
    for expansion, told in (
        (FIXED | {"strategy": "odd"}, 'query_expansion .*"odd".* is not supported; strategies: fixed, min'),
        ({"strategy": "fixed"}, "query_expansion without a length"),
        (FIXED | {"token": "[NONE]"}, r"has no token '\[NONE\]' to expand queries by"),
    ):
        file.write_text(json.dumps(said | {"query_expansion": expansion}))
        with pytest.raises(StartError, match=told):
            opened(tmp_path / "saved")
    file.write_text(json.dumps(said))
    described = tmp_path / "saved" / "config_sentence_transformers.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"similarity_fn_name": "xtr"}))
    with pytest.raises(StartError, match="similarity_fn_name 'xtr' is not supported"):
        opened(tmp_path / "saved")
