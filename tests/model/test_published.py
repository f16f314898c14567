"""GTE as `new`, and both kinds of JinaBERT, against what tests/model/published.py makes of the same files.

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
        (JINA | {"num_attention_heads": 5}, "hidden size 48 does not make 5 heads"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=told):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy"))
