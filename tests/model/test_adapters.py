"""jina-embeddings-v3: a text's task brings its adapter, in one step with texts of other tasks.

The trunk's reference is transformers' JinaEmbeddingsV3Model. It has no adapters: here each task's are added to the matrices
first, as the published code does (W + alpha / rank B A; an embedding's W + alpha / rank A B), and each text goes through its
task's model alone. Files are as published: names with `parametrizations`, modules.json with the model's own Transformer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from test_routes import Gateway  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

import hortus  # noqa: E402
from hortus.config import Config, RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
INSTRUCTIONS = {"retrieval.query": "find : ", "retrieval.passage": "this : "} | dict.fromkeys(TASKS[2:], "")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 202, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip
FLASH = SIZES | {
    "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0, "hidden_act": "gelu", "lora_adaptations": TASKS, "lora_alpha": 2, "lora_rank": 4,
    "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "load_trained_adapters": True, "truncate_dim": None,
    "task_instructions": INSTRUCTIONS, "emb_pooler": None, "use_flash_attn": True,
    "matryoshka_dimensions": [8, 16, 32],
    "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA",
    },
}  # fmt: skip
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "find", "this", ":", *"abcdefghijklmnopqrstuvwxyz"]
MODULES = [
    {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]},
    {"idx": 1, "name": "pooler", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "normalizer", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """(the folder, a model of transformers for no task and for each)."""
    path = tmp_path_factory.mktemp("jina")
    torch.manual_seed(0)
    plain = transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**SIZES)).eval()
    with torch.no_grad():
        for key, weight in plain.named_parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.ndim == 2 else 0.1) + ("norm" in key.lower()))
    plain.save_pretrained(path)
    state = load_file(path / "model.safetensors")  # its names are the published ones
    stored, merged = {}, [dict(state) for _ in TASKS]
    for name, w in state.items():
        if w.ndim != 2:
            stored["roberta." + name] = w
            continue
        rows, width = w.shape
        table = name.startswith("embeddings.")
        a = torch.randn(len(TASKS), rows, 4) if table else torch.randn(len(TASKS), 4, width)
        b = torch.randn(len(TASKS), 4, width) if table else torch.randn(len(TASKS), rows, 4)
        at = "roberta." + name.removesuffix("weight") + "parametrizations.weight."
        stored |= {at + "original": w, at + "0.lora_A": a * 0.2, at + "0.lora_B": b * 0.2}
        for n, weights in enumerate(merged):
            delta = a[n] @ b[n] if table else b[n] @ a[n]
            weights[name] = w + 2 / 4 * 0.2 * 0.2 * delta
    each = [plain]
    for n, weights in enumerate(merged):
        there = path / f"task{n}"
        plain.save_pretrained(there)
        save_file(weights, there / "model.safetensors", {"format": "pt"})
        each.append(transformers.JinaEmbeddingsV3Model.from_pretrained(there).eval())
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(FLASH))
    (path / "modules.json").write_text(json.dumps(MODULES))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    inner.save(str(path / "tokenizer.json"))
    return path, each


@torch.inference_mode()
def alone(each: list[Any], task: int, ids: list[int]) -> np.ndarray:
    """[32]: the unit vector of one text by its task's model; 0: no task."""
    row = each[task](torch.tensor([ids])).last_hidden_state[0].mean(0)
    return (row / row.norm()).numpy()


def test_texts_of_all_tasks_in_one_step(made: tuple[Path, list[Any]]) -> None:
    path, each = made
    engine = open_engine(open_folder(str(path)), RoseConfig(threads=1))
    rng = np.random.default_rng(0)
    tasks = [0, 3, 1, 5, 2, 4, 0, 1, 1]
    texts = [rng.integers(3, 60, n).tolist() for n in (5, 1, 33, 198, 2, 70, 9, 9, 4)]
    want = np.stack([alone(each, t, ids) for t, ids in zip(tasks, texts, strict=True)])
    batch = TokenBatch.of(texts)
    types = np.repeat(np.array(tasks, np.uint8), batch.lengths)
    whole = TokenBatch(batch.ids, batch.cu_seqlens, types)

    def rows(part: TokenBatch) -> np.ndarray:
        x = engine.step(part).result()
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    assert np.abs(rows(whole) - want).max() < 1e-5
    for i in range(len(batch)):
        assert np.abs(rows(whole.slice(i, i + 1)) - want[i]).max() < 1e-5
    # No task: as without types.
    assert np.abs(rows(batch)[[0, 6]] - want[[0, 6]]).max() < 1e-5
    apart = [np.abs(alone(each, a, texts[2]) - alone(each, b, texts[2])).max() for a in range(6) for b in range(a)]
    assert min(apart) > 1e-2, "tasks that are alike would prove nothing"


TEXTS = ["a b c", "q", "x y z z y x " * 8]


def read(text: str) -> list[int]:
    return [0, *(WORDS.index(w) for w in text.split()), 2]


async def test_by_name_over_http(made: tuple[Path, list[Any]]) -> None:
    """`task` and `prompt_name` bring instruction and adapter, input_type finds them, a request that names none gets none."""
    path, each = made
    gateway = Gateway(path)
    for n, fields in enumerate([{}, *({"task": t} for t in TASKS)]):
        want = np.stack([alone(each, n, read(INSTRUCTIONS[TASKS[n - 1]] + t if n else t)) for t in TEXTS])
        told = await gateway.post("/v1/embeddings", model="model", input=TEXTS, **fields)
        assert np.abs(np.float32([d["embedding"] for d in told["data"]]) - want).max() < 1e-5
        if n:
            other = await gateway.post("/embed", inputs=TEXTS, prompt_name=TASKS[n - 1])
            assert np.abs(np.float32(other) - want).max() < 1e-5
    told = await gateway.post("/v1/embeddings", model="model", input=TEXTS, input_type="query")
    same = await gateway.post("/v1/embeddings", model="model", input=TEXTS, task="retrieval.query")
    assert told["data"] == same["data"]


async def test_reranking_takes_the_two_sides_adapters(made: tuple[Path, list[Any]]) -> None:
    path, each = made
    told = await Gateway(path).post("/rerank", model="model", query="a b", documents=TEXTS)
    query = alone(each, 1, read("find : a b"))
    want = [float(query @ alone(each, 2, read("this : " + t))) for t in TEXTS]
    found = {r["index"]: r["relevance_score"] for r in told["results"]}
    assert np.abs(np.array([found[i] for i in range(3)]) - want).max() < 1e-5


def test_in_python(made: tuple[Path, list[Any]]) -> None:
    path, each = made
    with hortus.Engine(str(path)) as engine:
        rows = engine.embed(TEXTS, prompt_name="separation")
    want = np.stack([alone(each, 3, read(t)) for t in TEXTS])
    assert np.abs(np.asarray(rows) - want).max() < 1e-5


def test_the_check_tells_of_adapters(made: tuple[Path, list[Any]]) -> None:
    from hortus.check import check

    told = check(str(made[0]), Config())
    assert "adapters    retrieval.query, retrieval.passage, separation, classification, text-matching" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_adaptations": ["a", "a"]}, "lora_adaptations must be a list of different names"),
        ({"lora_adaptations": {"a": 1}}, "lora_adaptations must be a list of different names"),
        ({"task_instructions": ["a"]}, "task_instructions must map names to texts"),
        ({"model_type": "bert"}, "lora_adaptations of a 'bert' are not supported"),
        ({"load_trained_adapters": False}, "load_trained_adapters False is not supported"),
        ({"type_vocab_size": 2}, "type_vocab_size 2 is not supported; supported: 1"),
        ({"truncate_dim": 16}, "truncate_dim 16 is not supported"),
        ({"lora_rank": 3}, r"word_embeddings.parametrizations.weight.0.lora_A is \[5, 60, 4\], config.json asks for"),
        ({"lora_adaptations": None}, "custom_st.Transformer is the model's own code, which is never run"),
    ],
)
def test_refused(change: dict[str, Any], told: str, made: tuple[Path, list[Any]], tmp_path: Path) -> None:
    for name in ("model.safetensors", "modules.json", "1_Pooling"):
        (tmp_path / name).symlink_to(made[0] / name)
    (tmp_path / "config.json").write_text(json.dumps(FLASH | change))
    with pytest.raises(StartError, match=told):
        open_engine(open_folder(str(tmp_path)), RoseConfig())
