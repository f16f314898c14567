"""pplx-embed's contextual chunks, from text to vectors, against transformers' Qwen3 read both ways.

The rule (https://huggingface.co/perplexity-ai/pplx-embed-context-v1-0.6b, modeling.py): a document's chunks are joined by the
separator token and read in one pass, and a chunk's vector is the mean over its own tokens, separators left out.
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

from small_models import END, pplx_folder  # noqa: E402
from test_rerankers import Now  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from hortus.config import IvyConfig, RoseConfig  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.ivy.embed import Embedder  # noqa: E402
from hortus.metrics import Metrics  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402

CONFIG = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
}
DOCUMENTS = [
    ["The first chunk.", "x", "the third one, which is longer than the others together"],
    ["a query: a document of one chunk"],
    [f"It says {END} itself, which makes no chunk.", "end"],
    ["long " * 20, "long too " * 20],
]


def write(path: Path) -> Any:
    """A folder as it is published, with random weights -> transformers' model."""
    torch.manual_seed(0)
    pplx_folder(path)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.15)
    for layer in model.layers:
        layer.self_attn.is_causal = False
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | {
        "model_type": "bidirectional_pplx_qwen3",
        "architectures": ["PPLXQwen3Model"],
        "auto_map": {"AutoModel": "modeling.PPLXQwen3ContextualModel"},
        "use_bidirectional_attention": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    kinds = [("sentence_transformers.models.Transformer", ""), ("sentence_transformers.models.Pooling", "1_Pooling")]
    kinds.append(("st_quantize.FlexibleQuantizer", ""))
    modules = [{"idx": i, "name": str(i), "path": where, "type": kind} for i, (kind, where) in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


async def test_chunks_in_the_context_of_their_document(tmp_path: Path) -> None:
    model = write(tmp_path)
    folder = open_folder(str(tmp_path))
    engine = open_engine(folder, RoseConfig(threads=1))
    embedder = Embedder(folder, engine.info, Now(engine), IvyConfig(), Metrics())
    assert embedder.contextual
    literal = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    separator = literal.token_to_id(END)
    literal.encode_special_tokens = True  # what a chunk spells is text

    async def rows(documents: list[list[str]]) -> np.ndarray:
        tokens = await embedder.documents(documents, truncate=embedder.truncate(False))
        done = await embedder.run(tokens, lambda first, rows: rows, deadline=time.monotonic() + 60)
        return np.concatenate(done.parts)

    want = []
    for document in DOCUMENTS:
        ids, spans = [], []
        for i, chunk in enumerate(document):
            ids += [separator] if i else []
            part = literal.encode(chunk, add_special_tokens=False).ids
            spans.append((len(ids), len(ids) + len(part)))
            ids += part
        assert ids.count(separator) == len(document) - 1
        with torch.inference_mode():
            hidden = model(torch.tensor([ids]), attention_mask={"full_attention": None}).last_hidden_state[0]
        want += [hidden[a:b].mean(0).numpy() for a, b in spans]
    together = await rows(DOCUMENTS)
    assert together.shape == (8, 32)
    assert np.abs(together - np.stack(want)).max() < 1e-5
    alone = np.concatenate([await rows([d]) for d in DOCUMENTS])
    assert np.abs(alone - np.stack(want)).max() < 1e-5
    # The context counts: the same chunk by itself is another vector.
    assert np.abs((await rows([["x"]]))[0] - together[1]).max() > 1e-3
