"""A tiny random model of each further family against transformers: hidden states, logits, weights over the vocabulary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

SIZES = {
    "vocab_size": 500,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERN = SIZES | SPECIAL | {"initializer_range": 0.2, "local_attention": 16}

DEBERTA = SIZES | {
    "relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 32, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "max_position_embeddings": 300, "pad_token_id": 0,
    "initializer_range": 0.2, "layer_norm_eps": 1e-7,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
LLAMA3 = LINEAR | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 60}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 60}
DECODER = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 300, "pad_token_id": 0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBert", MODERN),
    "modernbert, biases": (
        "ModernBert",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False}
        | {"classifier_pooling": "mean", "tie_word_embeddings": False, "hidden_activation": "relu", "norm_eps": 1e-3},
    ),
    "mpnet": ("MPNet", SIZES | {"max_position_embeddings": 300}),
    "nomic_bert": ("NomicBert", SIZES | {"pad_token_id": 0}),
    "nomic_bert, relu": ("NomicBert", SIZES | {"pad_token_id": 0, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "gte": ("Gte", SIZES),
    "gte, no segments": (
        "Gte",
        SIZES
        | {"type_vocab_size": 0, "hidden_act": "silu", "tie_word_embeddings": False}
        | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    ),
    "gte, stretched": (
        "Gte",
        SIZES | {"rope_parameters": {"rope_theta": 20_000.0, "rope_type": "linear", "factor": 4.0}},
    ),
    "deberta": ("DebertaV2", DEBERTA),
    "deberta, matrices of its own": (
        "DebertaV2",
        DEBERTA | {"share_att_key": False, "norm_rel_ebd": "none", "position_biased_input": True, "type_vocab_size": 2},
    ),
    "deberta, no buckets": ("DebertaV2", DEBERTA | {"position_buckets": -1, "max_relative_positions": 100}),
    "deberta, one term": ("DebertaV2", DEBERTA | {"pos_att_type": "c2p", "pooler_hidden_act": "relu"}),
    "deberta, the other": ("DebertaV2", DEBERTA | {"pos_att_type": ["p2c"], "share_att_key": False, "legacy": False}),
    "deberta, convolution": ("DebertaV2", DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta, wide convolution": (
        "DebertaV2",
        DEBERTA | {"conv_kernel_size": 5, "share_att_key": False, "layer_norm_eps": 1e-3},
    ),
    "jina v3": ("JinaEmbeddingsV3", SIZES | {"max_position_embeddings": 300}),
    "jina v3, yarn": ("JinaEmbeddingsV3", SIZES | {"max_position_embeddings": 300, "rope_parameters": YARN}),
    "modernbert, all layers see all": ("ModernBert", MODERN | {"global_attn_every_n_layers": 1}),
    "modernbert, stretched": (
        "ModernBert",
        MODERN | {"rope_parameters": {"full_attention": dict(YARN), "sliding_attention": dict(LLAMA3)}},
    ),
    "gte, yarn": ("Gte", SIZES | {"rope_parameters": YARN}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", DECODER | {"head_dim": 16}),
    "qwen2": ("Qwen2", DECODER),
    "llama": ("Llama", DECODER | {"attention_bias": True}),
    "mistral": ("Mistral", DECODER | {"sliding_window": None}),
    "mistral, window": ("Mistral", DECODER | {"sliding_window": 12}),
    "llama, llama3": ("Llama", DECODER | {"rope_parameters": LLAMA3}),
    "mistral, linear": ("Mistral", DECODER | {"sliding_window": None, "rope_parameters": LINEAR}),
    "qwen2, dynamic": ("Qwen2", DECODER | {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}),
    "qwen3, yarn": ("Qwen3", DECODER | {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3, yarn, all keys": (
        "Qwen3",
        DECODER
        | {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.7}},
    ),
}


def batch_of(vocab: int = 500) -> TokenBatch:
    rng = np.random.default_rng(0)
    return TokenBatch.of([rng.integers(3, vocab, n).tolist() for n in (1, 2, 9, 16, 33, 298, 9)])


def written(path: Path, case: str, head: str) -> Any:
    """A random model of a case in `path`: biases and norms random too."""
    name, config = (CASES | DECODERS)[case]
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(getattr(transformers, name + "Config")(**config)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.randn(weight.shape) * 0.3 + ("bias" not in key))
    model.save_pretrained(path)
    return model


def each(model: Any, field: str, batch: TokenBatch) -> list[Any]:
    with torch.inference_mode():
        return [model(torch.from_numpy(part)[None])[field][0] for part in np.split(batch.ids, batch.cu_seqlens[1:-1])]


def check(path: Path, rows: list[Any], kind: str) -> None:
    check_rows(path, rows, kind, batch_of())


def check_rows(path: Path, rows: list[Any], kind: str, batch: TokenBatch) -> None:
    engine = open_engine(open_folder(str(path)), RoseConfig(threads=1))
    assert engine.info.kind == kind
    want = np.stack([row.numpy() for row in rows])
    most = 1e-5 * max(1.0, np.abs(want).max())
    assert np.abs(engine.step(batch).result() - want).max() < most
    for lo, hi in ((0, 5), *((i, i + 1) for i in range(len(batch)))):  # few tokens may have a way of their own
        assert np.abs(engine.step(batch.slice(lo, hi)).result() - want[lo:hi]).max() < most


@pytest.mark.parametrize("case", CASES | DECODERS)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    model = written(tmp_path, case, "Model")
    check(tmp_path, [x.mean(0) for x in each(model, "last_hidden_state", batch_of())], "embed")


@pytest.mark.parametrize("case", CASES | DECODERS)
def test_logits(case: str, tmp_path: Path) -> None:
    check(tmp_path, each(written(tmp_path, case, "ForSequenceClassification"), "logits", batch_of()), "classify")


@pytest.mark.parametrize("case", CASES)
def test_sparse(case: str, tmp_path: Path) -> None:
    model = written(tmp_path, case, "ForMaskedLM")
    check(tmp_path, [x.relu().log1p().amax(0) for x in each(model, "logits", batch_of())], "sparse")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be 4 times one of full_attention, sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type 'longrope'"),
        ({"hidden_activation": "xielu"}, "hidden_activation must be one of gelu, .*, not 'xielu'"),
        ({"classifier_pooling": "max"}, "classifier_pooling 'max' is not supported; supported: cls, mean"),
        ({"num_attention_heads": 5}, "does not make 5 heads"),
    ],
)
def test_modernbert_refuses(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert"} | MODERN | change))
    with pytest.raises(StartError, match=told):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy"))


@pytest.mark.parametrize("case", ["deberta, convolution", "mpnet", "gte", "modernbert"])
def test_files_of_other_habits(case: str, tmp_path: Path) -> None:
    """In shards, every name with the classifier's prefix, norms called gamma and beta where old checkpoints do."""
    model = written(tmp_path, case, "ForSequenceClassification")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors").unlink()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    if case in ("deberta, convolution", "mpnet"):
        for shard in shards:
            state = load_file(shard)
            save_file({re.sub(r"(LayerNorm\.)weight", r"\1gamma", k).replace("LayerNorm.bias", "LayerNorm.beta"): v
                       for k, v in state.items()}, shard)  # fmt: skip
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(
            index.read_text().replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        )
    check(tmp_path, each(model, "logits", batch_of()), "classify")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"conv_kernel_size": 4}, "conv_kernel_size 4 is not supported; supported: odd numbers"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups 2 is not supported; supported: 1"),
        ({"conv_kernel_size": 3, "conv_act": "mish"}, "conv_act must be one of gelu, .*, not 'mish'"),
        ({"embedding_size": 16}, "embedding_size 16 is not supported; supported: 32"),
        ({"relative_attention": False}, "relative_attention must be true"),
        ({"pos_att_type": "p2p|c2p"}, "pos_att_type 'p2p|c2p' is not supported"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd 'batch_norm' is not supported"),
        ({"pooler_hidden_act": "mish"}, "pooler_hidden_act must be one of gelu, .*, not 'mish'"),
    ],
)
def test_deberta_refuses(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2"} | DEBERTA | change))
    with pytest.raises(StartError, match=re.escape(told) if "|" in told else told):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy"))


def test_modernbert_of_transformers_4(tmp_path: Path) -> None:
    """Its config names the bases apart and says how often a layer sees all."""
    model = written(tmp_path, "modernbert", "Model")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, [x.mean(0) for x in each(model, "last_hidden_state", batch_of())], "embed")


def test_nomic_bert_as_first_published(tmp_path: Path) -> None:
    """The config.json of the first checkpoints, whose switches are refused where they are set otherwise."""
    model = written(tmp_path, "nomic_bert", "Model")
    config = {
        "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "swiglu",
        "n_embd": 32, "n_head": 4, "n_layer": 4, "n_inner": 48, "n_positions": 2048, "vocab_size": 500,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "prenorm": False,
        "rotary_emb_interleaved": False, "qkv_proj_bias": False, "type_vocab_size": 2, "rotary_scaling_factor": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, [x.mean(0) for x in each(model, "last_hidden_state", batch_of())], "embed")
    for key, value in (("prenorm", True), ("rotary_scaling_factor", 2)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(StartError, match=f"{key} {value} is not supported"):
            open_engine(open_folder(str(tmp_path)), RoseConfig())


@pytest.mark.parametrize("case", ["nomic_bert", "gte", "gte, no segments"])
def test_segments(case: str, tmp_path: Path) -> None:
    name, config = CASES[case]
    CASES["segments"] = name, config | ({"type_vocab_size": 2} if config.get("type_vocab_size") != 0 else {})
    model = written(tmp_path, "segments", "Model")
    batch = batch_of().slice(2, 3)
    types = np.arange(9, dtype=np.uint8) // 5
    with torch.inference_mode():
        ids = torch.from_numpy(batch.ids)[None]
        want = model(ids, token_type_ids=torch.from_numpy(types)[None].long()).last_hidden_state[0].mean(0).numpy()
    engine = open_engine(open_folder(str(tmp_path)), RoseConfig())
    got = engine.step(TokenBatch(batch.ids, batch.cu_seqlens, types)).result()[0]
    assert np.abs(got - want).max() < 1e-5 * max(1.0, np.abs(want).max())
