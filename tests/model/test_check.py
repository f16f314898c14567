"""`hortus models`: what a check says is what a start does, and no value of a weight is read for it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling  # noqa: E402
from test_families import written  # noqa: E402
from test_rerankers import qwen  # noqa: E402

from hortus import cli  # noqa: E402
from hortus.check import check  # noqa: E402
from hortus.config import Config, RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose import loader  # noqa: E402
from hortus.rose.engine import check_engine, open_engine  # noqa: E402


def same(path: Path, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> None:
    folder, config = open_folder(str(path)), RoseConfig(**knobs)
    want = open_engine(folder, config).info
    real = loader._tensors

    def names_alone(at: Path, *, whole: bool) -> Any:
        assert not whole
        for name, tensor in real(at, whole=False):
            assert tensor.is_meta
            yield name, tensor

    with monkeypatch.context() as m:
        m.setattr(loader, "_tensors", names_alone)
        assert check_engine(folder, config) == want


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForMaskedLM"])
@pytest.mark.parametrize("case", ["modernbert", "mpnet", "qwen3"])
def test_as_the_engine_says(case: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (case, head) == ("qwen3", "ForMaskedLM"):
        qwen(tmp_path)
        same(tmp_path, monkeypatch, kind="rerank")
    else:
        written(tmp_path, case, head)
        same(tmp_path, monkeypatch)


def test_dense_modules_and_pickles(make_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copytree(make_tiny([Pooling(32), Dense(32, 8), Normalize()]), tmp_path / "model"))
    same(path, monkeypatch)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    same(path, monkeypatch)


FORMATS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int64",
    "bool",
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_check_takes_the_formats_that_a_start_takes(name: str, file: str, tmp_path: Path) -> None:
    """A matrix and a scalar of each; what is refused is refused in the same words."""
    form = getattr(torch, name)
    state = {"a.weight": torch.ones(2, 3).to(form), "b": torch.ones(()).to(form)}
    (save_file if file.endswith("tensors") else torch.save)(state, tmp_path / file)
    told = []
    for device in ("cpu", "meta"):
        shapes: dict[str, tuple[int, ...]] = {"a.weight": (2, 3), "b": ()}
        try:
            read = loader.read_weights(tmp_path, shapes, device=torch.device(device), dtype=torch.float32)
            told.append(" ".join(f"{k} {tuple(w.shape)} {w.dtype}" for k, w in read.items()))
        except StartError as e:
            told.append(str(e))
    assert told[0] == told[1]
    assert ("quantised" in told[0]) == ("float" not in name)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main(["models", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_folder_that_would_be_served(minilm_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "check", str(minilm_path))
    assert status == 0
    for told in ("embed: 384 values a text, mean pooling, normalised", "256 tokens an input", "22.6 M"):
        assert told in out
    qwen(tmp_path)
    status, out, _ = run(capsys, "check", str(tmp_path), "--kind", "rerank", "--served-model-name", "judge")
    assert (status, "judge (qwen3)" in out, "classify: a score a pair (yes)" in out) == (0, True, True)
    assert "<Query>: {query}" in out


def test_a_folder_that_would_not(minilm_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(minilm_path, tmp_path / "model"))
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        state = {k: opened.get_tensor(k) for k in opened.keys()}  # noqa: SIM118
    some = next(k for k in state if k.endswith("layer.0.output.dense.weight"))
    wrong = {k: v for k, v in state.items() if not k.endswith("layer.1.output.dense.bias")}
    save_file(wrong | {some: torch.ones(3, 3), "extra.weight": torch.ones(1)}, path / "model.safetensors")
    status, out, err = run(capsys, "check", str(path))
    assert (status, out) == (1, "")
    for told in (
        "is [3, 3], config.json asks for [384, 1536]",
        "missing: ",
        "layer.1.output.dense.bias",
        "extra.weight",
    ):
        assert told in err
    save_file(state | {some: state[some].to(torch.int8)}, path / "model.safetensors")
    assert "quantised weights are not supported" in run(capsys, "check", str(path))[2]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    status, _, err = run(capsys, "check", str(path))
    assert (status, "model_type 't5' is not supported; supported: bert" in err) == (1, True)
    status, _, err = run(capsys, "check", str(tmp_path / "nowhere"))
    assert (status, "no such folder" in err) == (1, True)


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["bert"] == ["yes"] * 5
    assert lines["gemma3_text"] == ["yes", "yes", "yes", "yes", "-", "float16"]


@pytest.mark.parametrize("words", [["check"], ["demo"]])
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as told:
        run(capsys, *words)
    assert told.value.code == 2


ODD = [[], {}, "x", 10**30]


def test_odd_values_are_refused_in_words(make_tiny: Any, tmp_path: Path) -> None:
    """Every value of every file that describes a model, one at a time: a start error or a model, and never anything else."""
    path = Path(shutil.copytree(make_tiny([Pooling(32), Normalize()]), tmp_path / "model"))
    (path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "q: "}, "default_prompt_name": null}'
    )
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: i for word, i in words.items() if i < 1000}  # it is read some 200 times
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = []
    for file in sorted(path.rglob("*.json")):
        if file.name in ("tokenizer.json", "special_tokens_map.json"):
            continue
        whole = file.read_text()
        kept = json.loads(whole)
        parts = [kept] if isinstance(kept, dict) else kept
        for part in parts:
            for n, key in enumerate(
                [*part, "architectures", "transformer_task", "modality_config", "query_prefix", "id2label"]
            ):
                for odd in ODD[n % 2 :: 2]:
                    had = part.get(key, ...)
                    part[key] = odd
                    file.write_text(json.dumps(kept))
                    try:
                        check(str(path), Config())
                    except StartError as e:
                        told.append(str(e))
                    if had is ...:
                        del part[key]
                    else:
                        part[key] = had
        file.write_text(whole)
    assert len(told) > 50
    check(str(path), Config())


@pytest.mark.parametrize(
    ("name", "key", "odd"),
    [
        ("config.json", "architectures", 7),
        ("config.json", "architectures", [7]),
        ("config.json", "layer_norm_eps", "small"),
        ("config.json", "type_vocab_size", []),
        ("config_sentence_transformers.json", "default_prompt_name", ["query"]),
        ("config_sentence_transformers.json", "query_prefix", 7),
    ],
)
def test_odd_values_are_refused_by_file_and_key(make_tiny: Any, tmp_path: Path, name: str, key: str, odd: Any) -> None:
    path = Path(shutil.copytree(make_tiny([Pooling(32), Normalize()]), tmp_path / "model"))
    had = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(had | {key: odd}))
    with pytest.raises(StartError, match=f"{re.escape(name)}.*: {key} "):
        check(str(path), Config())


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "", "[]", "null"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
)
def test_files_that_are_no_json_are_named(make_tiny: Any, tmp_path: Path, name: str, text: str) -> None:
    path = Path(shutil.copytree(make_tiny([Pooling(32)]), tmp_path / "model"))
    (path / name).write_text(text)
    if (name, text) == ("modules.json", "[]"):
        return  # no modules: a transformers folder
    with pytest.raises(StartError, match=re.escape(name)):
        check(str(path), Config())
