"""Gemma 3 text, EmbeddingGemma and Gemma against transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_families import batch_of, check, each  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402

SIZES = {
    "vocab_size": 500,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
}
THIRD = SIZES | {"sliding_window": 24, "query_pre_attn_scalar": 20}
SPLIT = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddinggemma": ("Gemma3Text", THIRD | {"use_bidirectional_attention": True, "layer_types": KINDS}),
    "embeddinggemma, odd window": (
        "Gemma3Text",
        THIRD | {"use_bidirectional_attention": True, "sliding_window": 17, "layer_types": KINDS},
    ),
    "gemma 3": ("Gemma3Text", THIRD | {"layer_types": KINDS}),
    "gemma 3, scaled positions": ("Gemma3Text", THIRD | {"rope_parameters": SPLIT, "layer_types": KINDS}),
    "gemma": ("Gemma", SIZES | {"num_key_value_heads": 1}),
    # hidden_activation is Gemma 3's key; Gemma's code does not read it.
    "gemma, both ways": ("Gemma", SIZES | {"is_causal": False, "hidden_activation": "relu"}),
}


def written(path: Path, case: str, head: str) -> Any:
    """A random model of a case in `path`: norms random too. The reference's own attention, which needs no mask of ours."""
    name, config = CASES[case]
    torch.manual_seed(0)
    cls = getattr(transformers, (name if head != "ForCausalLM" else name.removesuffix("Text")) + head)
    model = cls._from_config(getattr(transformers, name + "Config")(**config), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.ndim == 1 else 0.2))
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("case", CASES)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    model = written(tmp_path, case, "Model")
    check(tmp_path, [x.mean(0) for x in each(model, "last_hidden_state", batch_of())], "embed")


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    check(tmp_path, each(written(tmp_path, case, "ForSequenceClassification"), "logits", batch_of()), "classify")


@pytest.mark.parametrize("case", ["gemma", "embeddinggemma"])
def test_the_causal_checkpoint_s_names(case: str, tmp_path: Path) -> None:
    """`model.` before each name; the head that is left over does no harm."""
    model = written(tmp_path, case, "ForCausalLM")
    check(tmp_path, [x[-1] for x in each(model.model, "last_hidden_state", batch_of())], "embed")


def test_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    """EmbeddingGemma's own config.json: bases by their old names, a pattern of layers."""
    CASES["old"] = ("Gemma3Text", THIRD | {"use_bidirectional_attention": True, "num_hidden_layers": 7})
    model = written(tmp_path, "old", "Model")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    config |= {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "_sliding_window_pattern": 6,
        "rope_scaling": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, [x.mean(0) for x in each(model, "last_hidden_state", batch_of())], "embed")


def test_a_sentence_transformers_folder(make_tiny: Any, open_ours: Any, peer: Any) -> None:
    """Prompts, mean pooling, two Dense modules without activation, Normalize: EmbeddingGemma's folder."""
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

    config = transformers.Gemma3TextConfig(**CASES["embeddinggemma"][1] | {"vocab_size": 30522})
    dense = {"bias": False, "activation_function": torch.nn.Identity()}
    path = make_tiny([Pooling(32), Dense(32, 64, **dense), Dense(64, 32, **dense), Normalize()], config)
    said = json.loads((path / "config_sentence_transformers.json").read_text())
    said["prompts"] = {"query": "task: search result | query: ", "document": "title: none | text: "}
    (path / "config_sentence_transformers.json").write_text(json.dumps(said))
    texts = ["The cat.", "one", "a text of a few more words than the others " * 4]
    ours = open_ours(path)
    assert (ours.info.normalize, ours.info.width, ours.folder.prompts) == (True, 32, said["prompts"])
    prompt = said["prompts"]["query"]
    want = peer(path).encode_query(texts)
    assert np.abs(ours.encode([prompt + t for t in texts]) - want).max() < 1e-5


@pytest.mark.parametrize("mode", ["weightedmean", "lasttoken", "cls"])
def test_pooling_of_a_decoder(mode: str, make_tiny: Any, open_ours: Any, peer: Any) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    config = transformers.Gemma3TextConfig(**CASES["gemma 3"][1] | {"vocab_size": 30522})
    path = make_tiny([Pooling(32, mode)], config)
    texts = ["The cat.", "one", "a text of a few more words than the others " * 4]
    want = peer(path).encode(texts)
    assert np.abs(open_ours(path).encode(texts) - want).max() < 1e-5 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0 is not supported"),
        ({"is_causal": False}, "is_causal false without use_bidirectional_attention is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type 'longrope'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must be 4 times one of full_attention, sliding"),
        ({"hidden_activation": "xielu"}, "hidden_activation must be one of gelu, .*, not 'xielu'"),
    ],
)
def test_refusals(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"} | THIRD | change))
    with pytest.raises(StartError, match=told):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy"))


def test_float16_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"} | THIRD))
    with pytest.raises(StartError, match=r"--dtype float16 .*gemma3_text: activations overflow"):
        open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy", dtype="float16"))
    engine = open_engine(open_folder(str(tmp_path)), RoseConfig(load_format="dummy", dtype="bfloat16"))
    assert engine.info.dtype == "bfloat16"
