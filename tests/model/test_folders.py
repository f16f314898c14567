"""Tiny random models of every head that sentence-transformers can save, and every family, against the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from installed_models import package_folder  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling  # noqa: E402
from torch import nn  # noqa: E402

import hortus  # noqa: E402
from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402
from hortus.types import TokenBatch  # noqa: E402

TEXTS = ["", "The cat sits on the mat.", "one", "a much longer text, with a few more words in it " * 8, "The cat sat."]

HEADS: dict[str, Callable[[], list[Any]]] = {
    **{mode: lambda mode=mode: [Pooling(32, mode)] for mode in Pooling.POOLING_MODES},
    "three side by side": lambda: [Pooling(32, ("max", "lasttoken", "mean"))],
    "normalised": lambda: [Pooling(32), Normalize()],
    "dense": lambda: [Pooling(32), Dense(32, 8)],
    "dense, plain": lambda: [Pooling(32), Dense(32, 40, bias=False, activation_function=nn.Identity()), Normalize()],
    "dense, relu": lambda: [Pooling(32, ("cls", "mean")), Dense(64, 16, activation_function=nn.ReLU())],
    "normalised in the middle": lambda: [
        Pooling(32),
        Normalize(),
        Dense(32, 8, activation_function=nn.GELU()),
        Normalize(),
    ],
    "two dense": lambda: [Pooling(32), Dense(32, 8, activation_function=nn.SiLU()), Dense(8, 8, use_residual=True)],
    "projected residual": lambda: [Pooling(32), Dense(32, 8, use_residual=True, activation_function=nn.Sigmoid())],
}


@pytest.mark.parametrize("head", HEADS)
def test_heads(head: str, make_tiny: Any, open_ours: Any, peer: Any) -> None:
    path = make_tiny(HEADS[head]())
    ours = open_ours(path)
    want = peer(path).encode(TEXTS)
    got = ours.encode(TEXTS)
    assert got.shape == want.shape == (len(TEXTS), ours.info.width)
    assert np.abs(got - want).max() < 1e-5 * max(1.0, np.abs(want).max())
    assert ours.info.max_tokens == 64


def _families() -> dict[str, Any]:
    from transformers import BertConfig, CamembertConfig, DistilBertConfig, RobertaConfig, XLMRobertaConfig

    sizes = {"vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "initializer_range": 0.2}
    distil = {"vocab_size": 30522, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "initializer_range": 0.2}
    return {
        "bert, gelu_new": BertConfig(**sizes, hidden_act="gelu_new"),
        "bert, relu, few positions": BertConfig(**sizes, hidden_act="relu", max_position_embeddings=40),
        "roberta": RobertaConfig(**sizes, max_position_embeddings=70, type_vocab_size=1, pad_token_id=0),
        "xlm-roberta": XLMRobertaConfig(**sizes, max_position_embeddings=70, type_vocab_size=1, pad_token_id=0),
        "camembert": CamembertConfig(**sizes, max_position_embeddings=70, type_vocab_size=1, pad_token_id=0),
        "distilbert": DistilBertConfig(**distil),
    }


@pytest.mark.parametrize(
    "family", ["bert, gelu_new", "bert, relu, few positions", "roberta", "xlm-roberta", "camembert", "distilbert"]
)
def test_families(family: str, make_tiny: Any, open_ours: Any, peer: Any) -> None:
    # pad_token_id 0 above: the tokenizer is BERT's, and RoBERTa counts positions by ids that are not padding.
    path = make_tiny([Pooling(32)], _families()[family])
    ours = open_ours(path)
    reference = peer(path)
    reference.max_seq_length = ours.info.max_tokens
    assert np.abs(ours.encode(TEXTS) - reference.encode(TEXTS)).max() < 1e-5
    assert ours.info.max_tokens == (40 if "few" in family else 64)


@pytest.fixture(scope="module")
def tiny(make_tiny: Any) -> Path:
    return make_tiny([Pooling(32), Dense(32, 8), Normalize()])


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def want(tiny: Path, open_ours: Any) -> Any:
    return open_ours(tiny).encode(TEXTS)


LEFT_NINE = {"truncation_side": "left", "model_max_length": 9}


@pytest.mark.parametrize(
    "told",
    [
        {"config_kwargs": {"hidden_act": "relu", "layer_norm_eps": 0.1}},
        {"config_args": {"hidden_act": "relu"}},
        {"processor_kwargs": LEFT_NINE},
        {"tokenizer_args": LEFT_NINE},
        {"processor_kwargs": {"do_lower_case": False}},
        {"processing_kwargs": {"text": {"padding": "longest"}, "chat_template": {"add_generation_prompt": True}}},
    ],
    ids=json.dumps,
)
def test_arguments_in_sentence_bert_config(told: dict[str, Any], tiny: Path, copy: Path, peer: Any) -> None:
    """What it gives from_pretrained besides the folder wins over config.json and tokenizer_config.json."""
    file = copy / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    with hortus.Engine(str(copy), device="cpu", threads=1) as engine:
        got = np.asarray(engine.embed(TEXTS, truncate=True))
    assert np.abs(got - peer(copy).encode(TEXTS)).max() < 1e-5
    assert "processing_kwargs" in told or np.abs(got - peer(tiny).encode(TEXTS)).max() > 1e-3


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "add_special_tokens in processing_kwargs is not",
        ),
        ({"config_args": ["relu"]}, "config_args must map names to values"),
    ],
)
def test_arguments_in_sentence_bert_config_that_are_refused(told: dict[str, Any], why: str, copy: Path) -> None:
    file = copy / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    with pytest.raises(StartError, match=rf"sentence_bert_config\.json: {why}"):
        open_folder(str(copy))


@pytest.mark.parametrize("prefix", ["bert.", "model.", "0.auto_model.", "roberta."])
def test_prefixed_names(prefix: str, tiny: Path, copy: Path, open_ours: Any) -> None:
    state = load_file(copy / "model.safetensors")
    save_file({prefix + k: v for k, v in state.items()}, copy / "model.safetensors")
    assert np.array_equal(open_ours(copy).encode(TEXTS), want(tiny, open_ours))


def test_shards(tiny: Path, copy: Path, open_ours: Any) -> None:
    state = load_file(copy / "model.safetensors")
    names = sorted(state)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, keys in parts.items():
        save_file({k: state[k] for k in keys}, copy / file)
    index = {"weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model.safetensors").unlink()
    assert np.array_equal(open_ours(copy).encode(TEXTS), want(tiny, open_ours))
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartError, match=r"model-00002-of-00002\.safetensors"):
        open_ours(copy)


def test_the_transformer_may_have_a_folder_of_its_own(tiny: Path, copy: Path, open_ours: Any) -> None:
    (copy / "0_Transformer").mkdir()
    for file in [f for f in copy.iterdir() if f.is_file() and not f.name.startswith(("modules", "config_sentence"))]:
        file.rename(copy / "0_Transformer" / file.name)
    modules = json.loads((copy / "modules.json").read_text(encoding="utf-8"))
    modules[0]["path"] = "0_Transformer"
    (copy / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    assert np.array_equal(open_ours(copy).encode(TEXTS), want(tiny, open_ours))


def test_pickled_weights_only_without_safetensors(tiny: Path, copy: Path, open_ours: Any) -> None:
    for folder in (copy, copy / "2_Dense"):
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    assert np.array_equal(open_ours(copy).encode(TEXTS), want(tiny, open_ours))
    whole = (copy / "pytorch_model.bin").read_bytes()
    for broken in (b"not a pickle", b"", b"\x80\x02}q\x00.", whole[: len(whole) // 2], b"<html>" * 100):
        (copy / "pytorch_model.bin").write_bytes(broken)
        with pytest.raises(StartError, match=r"pytorch_model\.bin: ") as told:
            open_ours(copy)
        assert len(str(told.value).replace(str(copy), "")) < 300
        assert "\n" not in str(told.value)
        assert "Re-running" not in str(told.value)


def test_a_pickle_that_runs_code_is_refused(copy: Path, open_ours: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(copy / "ran").touch, ())

    (copy / "model.safetensors").unlink()
    torch.save({"x": Evil()}, copy / "pytorch_model.bin")
    with pytest.raises(StartError, match=r"read safely \(UnpicklingError: .*nsupported .*GLOBAL"):
        open_ours(copy)
    assert not (copy / "ran").exists()


def test_a_cut_file_is_refused(copy: Path, open_ours: Any) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartError, match="not a whole safetensors file"):
        open_ours(copy)


@pytest.mark.parametrize("pickled", [False, True])
def test_who_writes_into_the_files_changes_nothing_that_is_served(
    pickled: bool, tmp_path: Path, make_tiny: Any, open_ours: Any
) -> None:
    path = tmp_path / "own"
    shutil.copytree(make_tiny([Pooling(32), Dense(32, 8)]), path)
    for file in [*path.rglob("model.safetensors")] if pickled else []:
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    ours = open_ours(path)
    want = ours.encode(TEXTS)
    files = [*path.rglob("model.safetensors"), *path.rglob("pytorch_model.bin")]
    assert len(files) == 2
    for file in files:  # as `cp new/* old/` does, and a trainer that saves over the folder
        with file.open("r+b") as f:
            f.write(b"\x40" * file.stat().st_size)
    assert np.array_equal(ours.encode(TEXTS), want)
    for file in files:
        file.write_bytes(b"")
    assert np.array_equal(ours.encode(TEXTS), want)


def test_names_that_do_not_fit(copy: Path, open_ours: Any) -> None:
    state = load_file(copy / "model.safetensors")
    del state["encoder.layer.1.output.dense.bias"]
    state["encoder.layer.7.output.dense.bias"] = torch.zeros(32)
    state["encoder.layer.0.output.dense.bias"] = torch.zeros(31)
    save_file(state, copy / "model.safetensors")
    with pytest.raises(StartError) as e:
        open_ours(copy)
    for part in (
        "missing: encoder.layer.1.output.dense.bias",
        "not of this architecture: encoder.layer.7.output.dense.bias",
        "encoder.layer.0.output.dense.bias is [31], config.json asks for [32]",
    ):
        assert part in str(e.value)


def test_harmless_left_overs(tiny: Path, copy: Path, open_ours: Any) -> None:
    state = load_file(copy / "model.safetensors")
    state["embeddings.position_ids"] = torch.arange(512)
    state["cls.predictions.bias"] = torch.zeros(5)
    save_file(state, copy / "model.safetensors")
    assert np.array_equal(open_ours(copy).encode(TEXTS), want(tiny, open_ours))


def test_nan_weights_do_not_start(copy: Path, open_ours: Any) -> None:
    state = load_file(copy / "model.safetensors")
    state["encoder.layer.0.output.dense.bias"][3] = float("nan")
    save_file(state, copy / "model.safetensors")
    with pytest.raises(StartError, match="NaN"):
        open_ours(copy)


def test_dummy_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "2_Dense" / "model.safetensors").unlink()
    batch = TokenBatch.of([[1, 2, 3], [4]])
    rows = [open_engine(open_folder(str(copy)), RoseConfig(load_format="dummy")).step(batch).result() for _ in range(2)]
    assert np.array_equal(rows[0], rows[1])
    assert np.isfinite(rows[0]).all()
    assert rows[0].std() > 0
    with pytest.raises(StartError, match="no weights"):
        open_engine(open_folder(str(copy)), RoseConfig())


def test_pplx_quantizer_is_left_to_the_output(tiny: Path, copy: Path, open_ours: Any) -> None:
    modules = json.loads((copy / "modules.json").read_text())
    modules.append(
        {"idx": 3, "name": "3", "path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    )
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "st_quantize.py").write_text("raise SystemExit('never run')")
    ours = open_ours(copy)
    assert ours.info.normalize
    assert np.array_equal(ours.encode(TEXTS), want(tiny, open_ours))


def test_splade_tiny_trunk(open_ours: Any) -> None:
    """A checkpoint with gamma and beta, a `bert.` prefix and an MLM head, and no modules.json: forced to embed: mean pooling."""
    from transformers import AutoTokenizer, BertModel

    path = package_folder("cognition", "model")
    ours = open_ours(path, kind="embed")
    model = BertModel.from_pretrained(path, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    want = []
    with torch.inference_mode():
        for text in TEXTS[:3]:
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            want.append(hidden.mean(0).numpy())
    assert np.abs(ours.encode(TEXTS[:3]) - np.array(want)).max() < 1e-5
    assert ours.info.pooling == "mean"
    assert not ours.info.normalize
