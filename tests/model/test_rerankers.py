"""Rerankers that are language models, from folders as they are published: Qwen3-Reranker and bge-reranker-v2-gemma.

The reference is their model cards' own recipe on transformers' models, tiny and random, with a tokenizer made here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402

from hortus.config import IvyConfig, RoseConfig  # noqa: E402
from hortus.errors import InvalidInput, StartError, TooLong  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.ivy.embed import Embedder  # noqa: E402
from hortus.ivy.scores import Question, Scores, score  # noqa: E402
from hortus.metrics import Metrics  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import Result, TokenBatch  # noqa: E402

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
    "initializer_range": 0.2,
    "pad_token_id": 256,
}
QUERIES = ["What is it?", "a much longer question, of a few more words than the others"]
DOCUMENTS = ["It is a cat.", "x", "", "Long. " * 30]
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB = "Given a web search query, retrieve relevant passages that answer the query"
PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)


def tokenizer(path: Path, bos: bool = False) -> Any:
    """A byte for a token, and a few whole words, as transformers reads it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(letters)}
    merges = []
    for word in ("yes", "no", "Yes"):
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges.append((word[: end - 1], word[end - 1]))
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<bos>")
    made.save_pretrained(path)
    return made


class Now:
    """An Encoder that asks the engine at once."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        return Result(self._engine.step(batch).result())


def opened(path: Path, kind: str = "rerank", **ivy: Any) -> Embedder:
    folder = open_folder(str(path))
    engine = open_engine(folder, RoseConfig(kind=kind, threads=1))
    return Embedder(folder, engine.info, Now(engine), IvyConfig(**ivy), Metrics())


async def scored(embedder: Embedder, query: str, documents: list[str], **asked: Any) -> Scores:
    question = Question(
        queries=[query], documents=documents, truncate=embedder.truncate(asked.pop("truncate", None)), **asked
    )
    return await score(embedder, question, deadline=time.monotonic() + 60, route="/rerank")


def qwen(path: Path, head: str = "ForCausalLM", **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = getattr(transformers, "Qwen3" + head)(transformers.Qwen3Config(**SIZES | config)).eval()
    model.save_pretrained(path)
    return model, tokenizer(path)


def ids_of(tok: Any, query: str, document: str, instruction: str, most: int = 10**6) -> list[int]:
    """The model card's process_inputs."""
    before, after = (tok.encode(t, add_special_tokens=False) for t in (BEFORE, AFTER))
    body = tok.encode(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", add_special_tokens=False)
    return [*before, *body[: most - len(before) - len(after)], *after]


def logits(model: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("tied", [True, False])
async def test_qwen3_reranker(tied: bool, tmp_path: Path) -> None:
    model, tok = qwen(tmp_path, tie_word_embeddings=tied)
    yes, no = (tok.convert_tokens_to_ids(t) for t in ("yes", "no"))
    embedder = opened(tmp_path)
    info = embedder.info
    assert (info.kind, info.width, info.labels, info.pooling) == ("classify", 1, ("yes",), "last")
    for query in QUERIES:
        for told, instruction in ((None, WEB), ("Find the cat.", "Find the cat.")):
            rows = [logits(model, ids_of(tok, query, d, instruction))[-1] for d in DOCUMENTS]
            want = np.array([torch.softmax(r[[no, yes]], 0)[1].item() for r in rows])
            got = await scored(embedder, query, DOCUMENTS, instruction=told)
            assert np.abs(got.values - want).max() < 1e-5
    raw = await scored(embedder, QUERIES[0], DOCUMENTS, raw=True)
    rows = [logits(model, ids_of(tok, QUERIES[0], d, WEB))[-1] for d in DOCUMENTS]
    want = np.array([(r[yes] - r[no]).item() for r in rows])
    assert np.abs(raw.values - want).max() < 1e-5 * max(1.0, np.abs(want).max())


async def test_a_long_pair_loses_the_document_s_end(tmp_path: Path) -> None:
    model, tok = qwen(tmp_path)
    yes, no = (tok.convert_tokens_to_ids(t) for t in ("yes", "no"))
    embedder = opened(tmp_path)
    long = "word " * 100
    with pytest.raises(TooLong, match=r"pair 0 has \d+ tokens, this model takes at most 600"):
        await scored(embedder, "q", [long])
    got = await scored(embedder, "q", [long, "short"], truncate=True)
    row = logits(model, ids_of(tok, "q", long, WEB, 600))[-1]
    assert abs(got.values[0] - torch.softmax(row[[no, yes]], 0)[1].item()) < 1e-5
    with pytest.raises(TooLong, match=r"no room for any of it; shorten it$"):  # nothing would be left of the document
        await scored(embedder, "q" * 400, ["short"], truncate=True)


async def test_the_conversion_to_a_classifier(tmp_path: Path) -> None:
    """Qwen3ForSequenceClassification with one label reads the same words."""
    model, tok = qwen(tmp_path, "ForSequenceClassification", num_labels=1)
    embedder = opened(tmp_path, "auto")
    rows = [logits(model, ids_of(tok, QUERIES[0], d, WEB)) for d in DOCUMENTS]
    got = await scored(embedder, QUERIES[0], DOCUMENTS)
    assert np.abs(got.values - np.array([torch.sigmoid(r)[0].item() for r in rows])).max() < 1e-5


async def test_a_cross_encoder_of_a_language_model(tmp_path: Path) -> None:
    """As sentence-transformers saves it: a LogitScore module names the tokens, a prompt the instruction."""
    from sentence_transformers import CrossEncoder

    model, tok = qwen(tmp_path / "plain")
    CrossEncoder(str(tmp_path / "plain"), device="cpu").save_pretrained(str(tmp_path / "saved"))
    described = tmp_path / "saved" / "config_sentence_transformers.json"
    said = json.loads(described.read_text()) | {"prompts": {"cat": "Find the cat."}, "default_prompt_name": "cat"}
    described.write_text(json.dumps(said))
    yes, no = (tok.convert_tokens_to_ids(t) for t in ("yes", "no"))
    embedder = opened(tmp_path / "saved", "auto")
    rows = [logits(model, ids_of(tok, QUERIES[0], d, "Find the cat."))[-1] for d in DOCUMENTS]
    got = await scored(embedder, QUERIES[0], DOCUMENTS)
    assert np.abs(got.values - np.array([torch.sigmoid(r[yes] - r[no]).item() for r in rows])).max() < 1e-5
    (tmp_path / "saved" / "1_LogitScore" / "config.json").write_text('{"true_token_id": "yes"}')
    with pytest.raises(StartError, match="true_token_id and false_token_id must be token ids"):
        opened(tmp_path / "saved", "auto")


async def test_bge_reranker_gemma(tmp_path: Path) -> None:
    """The logit of Yes alone, after pieces tokenised apart behind one <bos>."""
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    tok = tokenizer(tmp_path, bos=True)
    embedder = opened(tmp_path)
    assert embedder.info.labels == ("Yes",)
    want = []
    for document in DOCUMENTS:
        pieces = (f"A: {QUERIES[0]}", "\n", f"B: {document}", "\n", PROMPT)
        ids = [
            tok.convert_tokens_to_ids("<bos>"),
            *(i for p in pieces for i in tok.encode(p, add_special_tokens=False)),
        ]
        want.append(logits(model, ids)[-1][tok.convert_tokens_to_ids("Yes")].item())
    got = await scored(embedder, QUERIES[0], DOCUMENTS, raw=True)
    assert np.abs(got.values - want).max() < 1e-5 * max(1.0, np.abs(want).max())


async def test_templates_of_one_s_own(tmp_path: Path) -> None:
    model, tok = qwen(tmp_path)
    yes, no = (tok.convert_tokens_to_ids(t) for t in ("yes", "no"))
    file = tmp_path / "own.toml"
    file.write_text('instruction = "Find the cat."')
    rows = [logits(model, ids_of(tok, QUERIES[0], d, "Find the cat."))[-1] for d in DOCUMENTS]
    want = np.array([torch.sigmoid(r[yes] - r[no]).item() for r in rows])
    got = await scored(opened(tmp_path, templates=str(file)), QUERIES[0], DOCUMENTS)
    assert np.abs(got.values - want).max() < 1e-5
    file.write_text('pair = ["<think>", "{query}{document}", "</think>"]')
    embedder = opened(tmp_path, templates=str(file))
    got = await scored(embedder, "no", ["yes"])
    assert got.tokens == 4
    with pytest.raises(InvalidInput, match="takes no `instruction`"):
        await scored(embedder, "no", ["yes"], instruction="Find the cat.")
    for wrong, told in (
        ('pair = ["{query}"]', "pair must be a text with"),
        ("pair = [1]", "pair must be a text with"),
        ('pair = ["{query}", "{document} x"]', "one must end in {document}"),
        ('pair = "{query} {document}"\ninstruction = "x"', "instruction without a pair"),
        ("instruction = 1", "instruction must be a text"),
    ):
        file.write_text(wrong)
        with pytest.raises(StartError, match=told):
            opened(tmp_path, templates=str(file))


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    """A language model is an embedder unless its files, or --kind, say otherwise; its tokens and words must be known."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    tokenizer(tmp_path)
    assert opened(tmp_path, "auto").info.kind == "embed"
    with pytest.raises(StartError, match=r"of model_type llama answers by is not known; .*classifier_from_token"):
        opened(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"classifier_from_token": ["no", "yes"]}))
    with pytest.raises(StartError, match="how is not known for llama: give `pair` in a file for --templates"):
        opened(tmp_path, "auto")
    (tmp_path / "own.toml").write_text('pair = "{query}{document}"')
    assert opened(tmp_path, "auto", templates=str(tmp_path / "own.toml")).info.labels == ("yes",)
    file.write_text(json.dumps(config | {"classifier_from_token": ["no", "maybe"]}))
    with pytest.raises(StartError, match="has no single token 'maybe' or 'no'"):
        opened(tmp_path, "auto")
    file.write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}))
    with pytest.raises(StartError, match="--kind rerank needs a classifier with one label"):
        opened(tmp_path)
