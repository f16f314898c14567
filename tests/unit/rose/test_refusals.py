"""Each model_type refuses by key a variant of its architecture that is not built here, when config.json is read."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from hortus.errors import StartError
from hortus.rose.modelcfg import read_spec
from hortus.rose.models import every

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DISTIL = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
DEBERTA = SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bert": (SIZES, {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    "bidirectional_pplx_qwen3": (SIZES, {"mlp_bias": True}, "mlp_bias"),
    "camembert": (SIZES, {"is_decoder": True}, "is_decoder True"),
    "deberta-v2": (DEBERTA, {"conv_groups": 2}, "conv_groups 2"),
    "distilbert": (DISTIL, {"activation": "tanh"}, "activation"),
    "gemma": (SIZES, {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0"),
    "gemma3_text": (SIZES, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0"),
    "gte": (SIZES, {"pack_qkv": False}, "pack_qkv False"),
    "jina_embeddings_v3": (SIZES, {"is_decoder": True}, "is_decoder True"),
    "llama": (SIZES, {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope type 'longrope'"),
    "mistral": (SIZES, {"sliding_window": 8, "is_causal": False}, "sliding_window without causal attention"),
    "modernbert": (SIZES, {"classifier_pooling": "max"}, "classifier_pooling 'max'"),
    "mpnet": (SIZES, {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64"),
    "new": (SIZES, {"logn_attention_scale": True}, "logn_attention_scale True"),
    "nomic_bert": (SIZES, {"moe_every_n_layers": 2}, "moe_every_n_layers 2"),
    "qwen2": (SIZES, {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    "qwen3": (SIZES, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "roberta": (SIZES, {"add_cross_attention": True}, "add_cross_attention True"),
    "xlm-roberta": (SIZES, {"position_embedding_type": "rotary", "rotary_emb_interleaved": True}, "rotary_emb_inter"),
}


def test_none_is_left_out() -> None:
    assert list(REFUSED) == list(every())


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_variant_is_refused_by_name(model_type: str) -> None:
    config, change, told = REFUSED[model_type]
    read_spec({"model_type": model_type} | config)
    with pytest.raises(StartError, match=f"config.json of {model_type}: .*{told}"):
        read_spec({"model_type": model_type} | config | change)


@pytest.mark.parametrize("odd", [None, "7", -1, 0.5, [], {}, True, 10**30, float("nan")])
@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_no_size_is_refused_by_its_key(model_type: str, odd: Any) -> None:
    config, _, _ = REFUSED[model_type]
    sizes = [key for key, value in config.items() if type(value) is int and key != "num_key_value_heads"]
    assert len(sizes) == 6
    for key in sizes:
        with pytest.raises(StartError, match=f"config.json of {model_type}: {key} must be a whole number"):
            read_spec({"model_type": model_type} | config | {key: odd})


EPS = {"gemma": "rms_norm_eps", "gemma3_text": "rms_norm_eps", "modernbert": "norm_eps"}
EPS |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "bidirectional_pplx_qwen3"), "rms_norm_eps")


@pytest.mark.parametrize("odd", [None, "1e-5", -1, 0, [], {}, True, float("inf"), float("nan")])
@pytest.mark.parametrize("model_type", [name for name in REFUSED if name != "distilbert"])  # its is not in its files
def test_what_is_no_epsilon_is_refused_by_its_key(model_type: str, odd: Any) -> None:
    config, key = REFUSED[model_type][0], EPS.get(model_type, "layer_norm_eps")
    with pytest.raises(StartError, match=f"config.json of {model_type}: {key} must be a positive number"):
        read_spec({"model_type": model_type} | config | {key: odd})
