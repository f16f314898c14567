"""Choices made while opening, name mapping, and configs that are refused. No weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine, pick_device, pick_dtype  # noqa: E402
from hortus.rose.loader import canonical, dummy_weights, read_weights  # noqa: E402
from hortus.rose.modelcfg import read_spec  # noqa: E402
from hortus.rose.models import bert  # noqa: E402
from hortus.rose.models.encoder import Encoder  # noqa: E402
from hortus.rose.models.encoder_spec import EncoderSpec  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    return tmp_path


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"
    with pytest.raises(StartError, match="--device cuda: this machine has no CUDA device"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == pick_device("cuda").type == "cuda"
    assert pick_device("cpu").type == "cpu"
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", torch.device("cuda")) == torch.float16


def test_gpus_left_idle_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, told in ((1, False), (4, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        pick_device("auto")
        assert ("using one of 4 GPUs; `hortus serve --replicas 4` uses them all" in caplog.text) is told


def test_dummy_engine(folder: Path) -> None:
    engine = open_engine(open_folder(str(folder)), RoseConfig(load_format="dummy", device="cpu", threads=1))
    assert torch.get_num_threads() == 1
    assert (engine.info.width, engine.info.max_tokens, engine.info.pooling) == (8, 32, "mean")
    rows = engine.step(TokenBatch.of([[3] * 32, [1], [2, 3]])).result()
    assert rows.shape == (3, 8)
    assert rows.dtype == np.float32
    with pytest.raises(StartError, match="no weights"):
        open_engine(open_folder(str(folder)), RoseConfig(device="cpu"))


def test_attention_names_need_a_gpu(folder: Path) -> None:
    with pytest.raises(StartError, match="--attention fa4 needs a GPU"):
        open_engine(open_folder(str(folder)), RoseConfig(attention="fa4", device="cpu", load_format="dummy"))


def test_warm_needs_a_gpu(folder: Path) -> None:
    with pytest.raises(StartError, match="--warm all captures CUDA graphs"):
        open_engine(open_folder(str(folder)), RoseConfig(warm="all", device="cpu", load_format="dummy"))


def test_weights_that_do_not_fit_the_memory_are_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 7.2 GiB")

    monkeypatch.setattr("hortus.rose.engine.build_network", full)
    with pytest.raises(StartError, match=r"weights do not fit the GPU's memory in float32; .*7\.2 GiB"):
        open_engine(open_folder(str(folder)), RoseConfig(load_format="dummy", device="cpu"))


def test_a_failing_first_step_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr(Encoder, "forward", fail)
    with pytest.raises(StartError, match=r"the first step failed: .*no kernel"):
        open_engine(open_folder(str(folder)), RoseConfig(load_format="dummy", device="cpu"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not supported; supported: .*bert"),
        ({"model_type": None}, "no model_type"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"model_type": "xlm-roberta", "position_embedding_type": "relative_key_query"}, "relative_key_query"),
        (
            {"model_type": "mpnet", "relative_attention_num_buckets": 64},
            "relative_attention_num_buckets 64 is not supported",
        ),
        (
            {"model_type": "distilbert", "dim": 8, "activation": "tanh"},
            "activation must be one of gelu, .*, not 'tanh'",
        ),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "tanh"}, "hidden_act must be one of gelu, .*, not 'tanh'"),
        ({"hidden_size": 9}, "hidden size 9 does not make 2 heads"),
        ({"hidden_act": ["gelu"]}, r"hidden_act must be one of gelu, .*, not \['gelu'\]"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps must be a positive number, not 'x'"),
        ({"layer_norm_eps": None}, "layer_norm_eps must be a positive number, not None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"model_type": "distilbert", "dim": 0}, "dim must be a whole number from 1 to 16777216, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 1 to 16777216, not 'many'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_refused_configs(change: dict[str, Any], told: str) -> None:
    with pytest.raises(StartError, match=told):
        read_spec(BERT | change)


def test_roberta_positions_start_after_padding() -> None:
    _, spec = read_spec(BERT | {"model_type": "xlm-roberta", "pad_token_id": 1})
    assert isinstance(spec, EncoderSpec)
    assert spec.first_position == 2


def test_canonical_names() -> None:
    wanted = {"encoder.layer.0.output.LayerNorm.weight": 0, "embeddings.word_embeddings.weight": 0}
    family = bert.FAMILY

    def name(stored: str) -> str:
        return canonical(stored, wanted, family.prefixes, family.renames)

    for prefix in ("", "bert.", "model.", "0.auto_model.", "0.auto_model.roberta.", "distilbert."):
        assert name(prefix + "embeddings.word_embeddings.weight") == "embeddings.word_embeddings.weight"
        assert name(prefix + "encoder.layer.0.output.LayerNorm.gamma") == "encoder.layer.0.output.LayerNorm.weight"
    assert name("cls.predictions.bias") == "cls.predictions.bias"


def test_dummy_weights_are_the_same_each_time() -> None:
    shapes = {"a.weight": (3, 4), "norm.weight": (4,), "a.bias": (3,)}
    device = torch.device("cpu")
    one, two = (dummy_weights(shapes, device=device, dtype=torch.bfloat16) for _ in range(2))
    assert {k: tuple(v.shape) for k, v in one.items()} == shapes
    assert all(torch.equal(one[k], two[k]) for k in shapes)
    assert one["norm.weight"].tolist() == [1] * 4
    assert one["a.bias"].abs().max() == 0


def test_a_pooling_flag_that_nobody_knows_is_refused(folder: Path) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_foo": True})
    )
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(StartError, match="pooling_mode_foo is not known"):
        open_engine(open_folder(str(folder)), RoseConfig(load_format="dummy", device="cpu"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_lie_row_by_row_however_a_pickle_has_them(tmp_path: Path, device: str) -> None:
    """Kernels walk memory: a table whose columns lay together gave other tokens' values on a GPU, without a word."""
    whole = torch.arange(24.0).view(4, 6)
    stored = {"turned": whole.t(), "cut": whole[:, 1:4], "spread": whole[0, :1].expand(5, 6), "row": whole[:, 2]}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    read = read_weights(tmp_path, shapes, device=torch.device(device), dtype=torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == shapes
    for name, tensor in read.items():
        assert tensor.is_contiguous(), name
        assert device == "meta" or torch.equal(tensor, stored[name])
