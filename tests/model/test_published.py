"""GTE as `new`, both kinds of JinaBERT, and Jina's XLM-RoBERTa, against what tests/model/published.py makes of the same files.

transformers has no code for them, and what it would run from the hub may not be run here: so the references are written
anew from what was published, and prove our reading of it no better than that. The files are as the hub's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402
from test_families import check_rows  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 40, "layer_norm_eps": 1e-12}
NEW = SIZES | {
    "model_type": "new", "num_attention_heads": 6, "max_position_embeddings": 320, "type_vocab_size": 0,
    "position_embedding_type": "rope", "rope_theta": 500000, "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "hidden_act": "gelu", "layer_norm_type": "layer_norm", "pack_qkv": True, "unpad_inputs": False,
    "logn_attention_scale": False, "logn_attention_clip1": False, "use_memory_efficient_attention": False,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
}  # fmt: skip
JINA = SIZES | {
    "model_type": "bert", "num_attention_heads": 12, "max_position_embeddings": 320, "type_vocab_size": 2,
    "position_embedding_type": "alibi", "feed_forward_type": "geglu", "hidden_act": "gelu", "emb_pooler": "mean",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}  # fmt: skip
CODE = JINA | {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
ROBERTA = SIZES | {
    "model_type": "xlm-roberta", "num_attention_heads": 6, "max_position_embeddings": 322, "type_vocab_size": 1,
    "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "hidden_act": "gelu", "pad_token_id": 1,
    "auto_map": {"AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig"},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "new": NEW,
    "new, not stretched": NEW | {"rope_scaling": None, "type_vocab_size": 1},
    "new, far": NEW | {"rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "type_vocab_size": 2},
    "jina": JINA,
    "jina, reglu": JINA | {"feed_forward_type": "reglu", "num_attention_heads": 8},
    "jina, code": CODE,
    "jina, code, by name": JINA | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm", "auto_map": {}},
}
LENGTHS = (1, 2, 3, 16, 40, 129, 320)


def tensors(config: dict[str, Any], *, head: str = "") -> dict[str, Any]:
    """A random checkpoint of the published names."""
    torch.manual_seed(0)
    h, inner = config["hidden_size"], config["intermediate_size"]
    state: dict[str, Any] = {}

    def matrix(name: str, out: int, into: int = h, *, bias: bool = True) -> None:
        state[name + ".weight"] = torch.randn(out, into) * 0.2
        if bias:
            state[name + ".bias"] = torch.randn(out) * 0.2

    def norm(name: str) -> None:
        state[name + ".weight"], state[name + ".bias"] = 1 + torch.randn(h) * 0.3, torch.randn(h) * 0.3

    matrix("embeddings.word_embeddings", config["vocab_size"], bias=False)
    if config["type_vocab_size"]:
        matrix("embeddings.token_type_embeddings", config["type_vocab_size"], bias=False)
    norm("embeddings.LayerNorm")
    new, code = config["model_type"] == "new", "qk-post-norm" in json.dumps(config)
    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        if new:
            matrix(at + "attention.qkv_proj", 3 * h)
            matrix(at + "attention.o_proj", h)
            norm(at + "attn_ln")
            norm(at + "mlp_ln")
            up, down = "mlp.up_gate_proj", "mlp.down_proj"
        else:
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                matrix(f"{at}attention.{name}", h)
            norm(at + "attention.output.LayerNorm")
            up, down = ("mlp.up_gated_layer", "mlp.down_layer") if code else ("mlp.gated_layers", "mlp.wo")
            for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
                if code:
                    norm(at + name)
            if not code:
                norm(at + "mlp.layernorm")
        matrix(at + up, 2 * inner, bias=False)
        matrix(at + down, h, inner)
    if head == "classifier":
        matrix("pooler.dense", h)
        matrix("classifier", 1)
    if head == "masked":
        at, bias = (
            ("lm_head.", "lm_head.decoder.bias") if new else ("cls.predictions.transform.", "cls.predictions.bias")
        )
        matrix(at + "dense", h)
        norm(at + ("norm" if new else "LayerNorm"))
        state[bias] = torch.randn(config["vocab_size"])
    return state


def written(path: Path, config: dict[str, Any], architecture: str, state: dict[str, Any], prefix: str = "") -> None:
    """As the hub has it: heads' tensors never have the trunk's prefix, but for the pooler."""
    (path / "config.json").write_text(
        json.dumps(config | {"architectures": [architecture], "id2label": {"0": "LABEL_0"}})
    )
    heads = ("classifier.", "lm_head.", "cls.")
    save_file({k if k.startswith(heads) else prefix + k: v for k, v in state.items()}, path / "model.safetensors")


def ragged() -> TokenBatch:
    rng = np.random.default_rng(0)
    return TokenBatch.of([rng.integers(0, 300, n).tolist() for n in LENGTHS])


def hidden(config: dict[str, Any], state: dict[str, Any], batch: TokenBatch) -> list[Any]:
    run: Callable[..., Any] = published.new if config["model_type"] == "new" else published.jina
    kinds = batch.token_types if batch.token_types is not None else np.zeros(batch.total_tokens, np.uint8)
    parts = zip(*(np.split(x.astype(np.int64), batch.cu_seqlens[1:-1]) for x in (batch.ids, kinds)), strict=True)
    return [run(state, config, torch.from_numpy(ids), torch.from_numpy(types)) for ids, types in parts]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "new."])
def test_hidden_states(case: str, prefix: str, tmp_path: Path) -> None:
    config = CASES[case]
    state, prefix = tensors(config), prefix if config["model_type"] == "new" else prefix.replace("new", "bert")
    written(tmp_path, config, "NewModel" if config["model_type"] == "new" else "JinaBertModel", state, prefix)
    check_rows(tmp_path, [x.mean(0) for x in hidden(config, state, ragged())], "embed", ragged())


def roberta_tensors(*, rotary: bool, labels: int = 0) -> dict[str, Any]:
    """A random checkpoint of Jina's XLM-RoBERTa, by the published names."""
    torch.manual_seed(0)
    h, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    norms, matrices = ["emb_ln"], {"embeddings.word_embeddings": (300, h), "embeddings.token_type_embeddings": (1, h)}
    if not rotary:
        matrices["embeddings.position_embeddings"] = (322, h)
    for n in range(SIZES["num_hidden_layers"]):
        at = f"encoder.layers.{n}."
        norms += [at + "norm1", at + "norm2"]
        matrices |= {at + "mixer.Wqkv": (3 * h, h), at + "mixer.out_proj": (h, h)}
        matrices |= {at + "mlp.fc1": (inner, h), at + "mlp.fc2": (h, inner)}
    if labels:
        matrices |= {"classifier.dense": (h, h), "classifier.out_proj": (labels, h)}
    state = {name + ".weight": torch.randn(shape) * 0.2 for name, shape in matrices.items()}
    state |= {n + ".bias": torch.randn(s[0]) * 0.2 for n, s in matrices.items() if not n.startswith("embeddings.")}
    for name in norms:
        state |= {name + ".weight": 1 + torch.randn(h) * 0.3, name + ".bias": torch.randn(h) * 0.3}
    return state


def roberta_hidden(state: dict[str, Any], batch: TokenBatch) -> list[Any]:
    parts = np.split(batch.ids.astype(np.int64), batch.cu_seqlens[1:-1])
    return [published.rotary_roberta(state, ROBERTA, i, torch.zeros_like(i)) for i in map(torch.from_numpy, parts)]


@pytest.mark.parametrize("prefix", ["", "roberta."])
def test_rotary_roberta(prefix: str, tmp_path: Path) -> None:
    state = roberta_tensors(rotary=True)
    written(tmp_path, ROBERTA, "XLMRobertaModel", state, prefix)
    check_rows(tmp_path, [x.mean(0) for x in roberta_hidden(state, ragged())], "embed", ragged())


def test_jina_colbert(tmp_path: Path) -> None:
    """A vector a token through the projection beside the trunk, and the markers that its own file names."""
    state = roberta_tensors(rotary=True)
    linear = torch.randn(8, 48)
    written(tmp_path, ROBERTA, "HF_ColBERT", {"roberta." + k: v for k, v in state.items()} | {"linear.weight": linear})
    metadata = {"dim": 8, "query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "doc_maxlen": 300}
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata | {"attend_to_mask_tokens": True}))
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "<mask>"}')
    folder = open_folder(str(tmp_path))
    assert folder.late is not None
    assert folder.late.markers == ("[QueryMarker]", "[DocumentMarker]")
    assert folder.max_tokens == 320
    engine = open_engine(folder, RoseConfig(threads=1))
    assert (engine.info.kind, engine.info.width) == ("tokens", 8)
    batch = ragged()
    each = np.arange(batch.total_tokens, dtype=np.int32)
    spans = np.stack([each, each + 1], 1)
    got = engine.step(TokenBatch(batch.ids, batch.cu_seqlens, None, spans, batch.lengths)).result()
    got = got / np.linalg.norm(got, axis=1, keepdims=True)
    want = torch.nn.functional.normalize(torch.cat(roberta_hidden(state, batch)) @ linear.T, dim=1).numpy()
    assert np.abs(got - want).max() < 1e-5


@pytest.mark.parametrize("labels", [1, 3])
def test_jina_reranker_of_learned_positions(labels: int, tmp_path: Path) -> None:
    """transformers' XLM-RoBERTa, once its tensors are called by its names, the way back that Jina's converter took."""
    transformers = pytest.importorskip("transformers")
    state = roberta_tensors(rotary=False, labels=labels)
    config = ROBERTA | {"position_embedding_type": "absolute"}
    ours = {k if k.startswith("classifier") else "roberta." + k: v for k, v in state.items()}
    written(tmp_path, config, "XLMRobertaForSequenceClassification", ours)
    names = {f"LABEL_{i}": i for i in range(labels)}
    said = json.loads((tmp_path / "config.json").read_text()) | {"id2label": {i: n for n, i in names.items()}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs: dict[str, Any] = {}
    for key, value in ours.items():
        for new, old in (
            ("emb_ln", "embeddings.LayerNorm"), ("encoder.layers", "encoder.layer"), ("norm1", "attention.output.LayerNorm"),
            ("norm2", "output.LayerNorm"), ("mixer.out_proj", "attention.output.dense"),
            ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense"),
        ):  # fmt: skip
            key = key.replace(new, old)
        if "mixer.Wqkv" in key:
            parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
            theirs |= {key.replace("mixer.Wqkv", "attention.self." + name): part for name, part in parts}
        else:
            theirs[key] = value
    plain = {k: v for k, v in config.items() if k not in ("auto_map", "model_type", "position_embedding_type")}
    made = transformers.XLMRobertaConfig(**plain, num_labels=labels)
    model = transformers.XLMRobertaForSequenceClassification(made).eval()
    model.load_state_dict(theirs)
    batch = TokenBatch.of([np.random.default_rng(n).integers(2, 300, n).tolist() for n in LENGTHS])
    ids = np.split(batch.ids.astype(np.int64), batch.cu_seqlens[1:-1])
    with torch.inference_mode():
        want = [model(torch.from_numpy(i)[None]).logits[0] for i in ids]
    check_rows(tmp_path, want, "classify", batch)


@pytest.mark.parametrize("case", ["new", "jina", "jina, code"])
def test_logits(case: str, tmp_path: Path) -> None:
    config, new = CASES[case], case == "new"
    state = tensors(config, head="classifier")
    name = "NewForSequenceClassification" if new else "JinaBertForSequenceClassification"
    written(tmp_path, config, name, state, "new." if new else "bert.")
    check_rows(tmp_path, [published.pooled(state, x) for x in hidden(config, state, ragged())], "classify", ragged())


@pytest.mark.parametrize("case", ["new", "jina"])
def test_sparse(case: str, tmp_path: Path) -> None:
    config, new = CASES[case], case == "new"
    state = tensors(config, head="masked")
    written(tmp_path, config, "NewForMaskedLM" if new else "JinaBertForMaskedLM", state, "new." if new else "bert.")
    logits = [published.masked(state, x, config, case) for x in hidden(config, state, ragged())]
    check_rows(tmp_path, [x.relu().log1p().amax(0) for x in logits], "sparse", ragged())


@pytest.mark.parametrize("case", ["new, far", "jina", "jina, code"])
def test_segments(case: str, tmp_path: Path) -> None:
    config = CASES[case]
    state, batch = tensors(config), ragged()
    types = np.random.default_rng(1).integers(0, 2, batch.total_tokens).astype(np.uint8)
    batch = TokenBatch(batch.ids, batch.cu_seqlens, types)
    written(tmp_path, config, "Model", state)
    check_rows(tmp_path, [x.mean(0) for x in hidden(config, state, batch)], "embed", batch)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (NEW | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "rope type 'ntk' with mixed_b"),
        (NEW | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        (
            NEW | {"rope_scaling": {"type": "ntk", "factor": "2"}},
            "factor of rope type 'ntk' must be 1 or more, not '2'",
        ),
        (NEW | {"position_embedding_type": "absolute"}, "position_embedding_type 'absolute' is not supported"),
        (NEW | {"pack_qkv": False}, "pack_qkv False is not supported; supported: True"),
        (NEW | {"logn_attention_scale": True}, "logn_attention_scale True is not supported"),
        (NEW | {"layer_norm_type": "rms_norm"}, "layer_norm_type 'rms_norm' is not supported"),
        (
            JINA | {"feed_forward_type": "original"},
            "feed_forward_type 'original' is not supported; supported: geglu, reglu",
        ),
        (JINA | {"is_decoder": True}, "is_decoder True is not supported"),
        (ROBERTA | {"lora_adaptations": [*map(str, range(256))]}, "lora_adaptations must be a list of 1 to 255 names"),
        (ROBERTA | {"lora_adaptations": ["a"], "lora_rank": 0}, "lora_rank must be a whole number from 1"),
        (ROBERTA | {"lora_adaptations": ["a"], "load_trained_adapters": False}, "load_trained_adapters False is not"),
        (ROBERTA | {"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not supported"),
        (ROBERTA | {"rotary_emb_dim": 4}, "rotary_emb_dim 4 is not supported; supported: 8"),
        (ROBERTA | {"rotary_emb_base": 0}, "rotary_emb_base must be a positive number, not 0"),
        (
            ROBERTA | {"model_type": "roberta"},
            "position_embedding_type 'rotary' is not supported; supported: 'absolute'",
        ),
        (JINA | {"num_attention_heads": 5}, "hidden size 48 does not make 5 heads"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=told):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy"))
