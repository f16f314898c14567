"""Text to vector by every route, beside sentence-transformers on the same folder: the whole way, tokenizer included.

Reports of other servers: one model gives other vectors at each of them, and a multilingual BERT other similarities, because
what stands between text and trunk (case, accents, prompts, special tokens, pooling) is done anew by each.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer  # noqa: E402

from hortus.config import IvyConfig, RoseConfig  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.ivy.app import App  # noqa: E402
from hortus.ivy.exchange import Request  # noqa: E402
from hortus.metrics import Metrics  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import Float32, Result, TokenBatch  # noqa: E402

TEXTS = [
    "mountains", "joyeux noel", "Joyeux Noël !", "JOYEUX NOËL", "The Mountains", "das Gebirge über München",
    "  spaces   around\tand\nlines ", "ﬁne ﬂow ½ Ⅳ", "e\u0301 é", "سلام. چه طوری؟", "Привет, мир", "你好，世界", "नमस्ते दुनिया",
    "안녕하세요",
    "😀 emoji 👩‍🚀", "x" * 300, "many words " * 150, "-_*/\\<tag>[SEP]",
]  # fmt: skip


@dataclass
class Direct:
    """An engine as an Encoder, without a queue."""

    engine: Any

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        lazy = self.engine.step(batch)
        return Result(lazy.result())


class Gateway:
    """Ivy over the engine, called without a port."""

    def __init__(self, path: Path) -> None:
        folder = open_folder(str(path), served_name="model")
        engine = open_engine(folder, RoseConfig())
        self.app = App(IvyConfig(), Metrics())
        self.app.open(folder, engine.info, Direct(engine))

    async def post(self, path: str, **fields: Any) -> Any:
        request = Request("POST", path, {}, 60.0, client="", keep_alive=True)
        request.body = json.dumps(fields).encode()
        self.app.admit(request)
        answer = await self.app.answer(request)
        assert answer is not None
        body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        assert answer.status == 200, body
        return json.loads(body)


async def _openai(gateway: Gateway, texts: list[str]) -> Float32:
    told = await gateway.post("/v1/embeddings", model="model", input=texts, truncate=True)
    return np.float32([d["embedding"] for d in told["data"]])


async def _base64(gateway: Gateway, texts: list[str]) -> Float32:
    told = await gateway.post("/embeddings", model="model", input=texts, truncate=True, encoding_format="base64")
    return np.stack([np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in told["data"]])


async def _tei(gateway: Gateway, texts: list[str]) -> Float32:
    return np.float32(await gateway.post("/embed", inputs=texts, truncate=True))


async def _cohere(gateway: Gateway, texts: list[str]) -> Float32:
    return np.float32((await gateway.post("/v2/embed", model="model", texts=texts))["embeddings"]["float"])


ROUTES = {"/v1/embeddings": _openai, "/embeddings, base64": _base64, "/embed": _tei, "/v2/embed": _cohere}


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As paraphrase-multilingual-MiniLM-L12-v2 is made: a BERT trunk that reads XLM-R's kind of pieces (Unigram, <s> </s>,
    case and accents kept), mean pooling, at most 128 tokens. Random weights, pieces learnt from the texts here."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    base, path = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("multilingual")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([t for t in TEXTS if len(t) < 100] * 3, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, **names, unk_token="<unk>", mask_token="<mask>", model_max_length=512
    )
    wrapped.save_pretrained(base)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=inner.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, initializer_range=0.2, pad_token_id=1,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(base)
    trunk = Transformer(str(base), max_seq_length=128)
    made = sentence_transformers.SentenceTransformer(modules=[trunk, Pooling(32), Normalize()], device="cpu")
    made.save(str(path))
    return path


@pytest.mark.parametrize("model", ["minilm_path", "multilingual"])
async def test_every_route_gives_the_reference_s_vectors(
    model: str, request: pytest.FixtureRequest, peer: Callable[[Path], Any]
) -> None:
    path = request.getfixturevalue(model)
    want = peer(path).encode(TEXTS, normalize_embeddings=True)
    gateway = Gateway(path)
    told = {}
    for route, ask in ROUTES.items():
        together = await ask(gateway, TEXTS)
        assert np.abs(together - want).max() < 1e-5, route
        for i in range(0, len(TEXTS), 3):
            assert np.abs((await ask(gateway, [TEXTS[i]]))[0] - want[i]).max() < 1e-5, (route, TEXTS[i])
        told[route] = float(np.vecdot(together, want).min())
    assert min(told.values()) > 0.999999, told
    gateway.app.close()


async def test_similarities_are_the_reference_s(multilingual: Path, peer: Callable[[Path], Any]) -> None:
    """Of every two texts, by the routes that compare as well."""
    want = peer(multilingual).encode(TEXTS, normalize_embeddings=True)
    want = want @ want.T
    assert np.abs(want[0, 2] - want[0, 3]) > 1e-3  # case and accents tell texts apart here
    gateway = Gateway(multilingual)
    for i, text in itertools.islice(enumerate(TEXTS), 6):
        cut = {"truncate": True}
        given = {"source_sentence": text, "sentences": TEXTS}
        found = await gateway.post("/similarity", inputs=given, parameters=cut)
        assert np.abs(np.float32(found) - want[i]).max() < 1e-5
        ranked = await gateway.post("/rerank", query=text, texts=TEXTS, **cut)
        assert np.abs(np.float32([r["score"] for r in sorted(ranked, key=lambda r: r["index"])]) - want[i]).max() < 1e-5
        scored = (await gateway.post("/score", queries=text, documents=TEXTS, **cut))["data"]
        assert np.abs(np.float32([r["score"] for r in scored]) - want[i]).max() < 1e-5
    gateway.app.close()
