"""open_folder: what the small files say, and what is refused. No hub is asked: its client is replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hortus.errors import StartError
from hortus.folder import Module, kind_of, length_limit, open_folder

BERT = {"model_type": "bert", "max_position_embeddings": 512}
ST = "sentence_transformers.models."


def write(path: Path, **files: Any) -> Path:
    for name, value in files.items():
        file = path / (name.replace("__", "/") + ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def modules(*entries: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"idx": i, "name": str(i), "type": t, "path": p} for i, (t, p) in enumerate(entries)]


@pytest.mark.parametrize(
    ("config", "settings", "tokenizer", "limit"),
    [
        (BERT, {"max_seq_length": 256}, {"model_max_length": 512}, 256),
        (BERT, {"max_seq_length": None}, {"model_max_length": 128}, 128),
        (BERT, {}, {"model_max_length": 10**30}, 512),
        (BERT, {}, {}, 512),
        (BERT, {"max_seq_length": 2048}, {}, 512),  # never more than there are positions
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}, {}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514}, {}, {"model_max_length": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514}, {"max_seq_length": 514}, {}, 512),
        ({"model_type": "qwen3", "max_position_embeddings": 32768}, {}, {"model_max_length": 131072}, 32768),
        (BERT, {"max_seq_length": 256, "tokenizer_args": {"model_max_length": 300}}, {}, 300),
        ({"model_type": "x"}, {}, {}, 512),
    ],
)
def test_length_limit(config: dict, settings: dict, tokenizer: dict, limit: int) -> None:
    assert length_limit(config, settings, tokenizer)[0] == limit


def test_a_sentence_transformers_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        modules=modules(
            (ST + "Transformer", "0_Transformer"), (ST + "Pooling", "1_Pooling"), (ST + "Normalize", "2_N")
        ),
        config_sentence_transformers={
            "prompts": {"query": "query: ", "document": None},
            "default_prompt_name": "query",
        },
        **{"0_Transformer__config": BERT, "1_Pooling__config": {"pooling_mode": "cls"}},
        **{"0_Transformer__sentence_roberta_config": {"max_seq_length": 100}},
    )
    folder = open_folder(str(tmp_path), max_length=90)
    assert folder.name == tmp_path.name
    assert folder.transformer == tmp_path / "0_Transformer"
    assert [m.kind for m in folder.modules] == ["Transformer", "Pooling", "Normalize"]
    assert folder.modules[1].config == {"pooling_mode": "cls"}
    assert folder.prompts == {"query": "query: ", "document": ""}
    assert folder.default_prompt_name == "query"
    assert folder.max_tokens == 90
    assert folder.revision is None
    assert open_folder(str(tmp_path), served_name="other").name == "other"


def test_a_plain_transformers_folder(tmp_path: Path) -> None:
    """Without modules.json, sentence_bert_config.json does not count: sentence-transformers does not read it either."""
    folder = open_folder(str(write(tmp_path, config=BERT, sentence_bert_config={"max_seq_length": 7})))
    assert folder.modules == ()
    assert folder.transformer == tmp_path
    assert folder.max_tokens == 512


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "no config.json"),
        ({"config": "{"}, "not valid JSON"),
        ({"config": "[]"}, "expected a JSON object"),
        ({"config": BERT, "modules": {}}, "expected a list of modules"),
        ({"config": BERT, "modules": []}, "first module must be a Transformer"),
        ({"config": BERT, "modules": modules((ST + "Pooling", ""))}, "first module must be a Transformer"),
        ({"config": BERT, "modules": modules((ST + "Transformer", "../x"))}, "leaves the model folder"),
        ({"config": BERT, "modules": modules((ST + "Transformer", "/etc"))}, "leaves the model folder"),
        (
            {"config": BERT, "modules": modules(("custom.Transformer", ""))},
            "custom.Transformer is the model's own code",
        ),
        (
            {"config": BERT, "modules": modules((ST + "Transformer", ""), (ST + "LSTM", "1"))},
            r"module 1 \(1\) of .*LSTM",
        ),
        ({"config": BERT, "config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name 'q'"),
        ({"config": BERT, "config_sentence_transformers": {"prompts": ["q"]}}, "prompts must map"),
        ({"config": BERT, "config_sentence_transformers": {"model_type": "Router"}}, "a Router of"),
        (
            {
                "config": BERT,
                "modules": modules((ST + "Transformer", "")),
                "sentence_bert_config": {"transformer_task": "fill-mask"},
            },
            r"transformer_task 'fill-mask' does not go with its modules \(Transformer\)",
        ),
        (
            {
                "config": BERT,
                "modules": modules((ST + "Transformer", "")),
                "sentence_bert_config": {"transformer_task": "translation"},
            },
            "transformer_task 'translation' is not supported",
        ),
    ],
)
def test_refused(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=told):
        open_folder(str(write(tmp_path, **files)))


def test_max_length_above_the_limit(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--max-length 513: the model takes at most 512 tokens \(max_position"):
        open_folder(str(write(tmp_path, config=BERT)), max_length=513)


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="a file; give the model's folder"):
        open_folder(str(tmp_path / "file"))
    for path in (str(tmp_path / "none"), "../none", "a b", "", "a/b/" + "x" * 5000, "a\0b"):
        with pytest.raises(StartError, match="no such folder"):
            open_folder(path)


def test_a_folder_whose_name_is_not_utf8_is_called_so(tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le")
    os.mkdir(place)
    with pytest.raises(StartError, match=r"mod\\udce8le': the folder's name is not UTF-8"):
        open_folder(place)


# The hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Stands for snapshot_download: makes the asked files of `there` in a snapshot folder, or fails."""

    def __init__(self, place: Path, there: dict[str, str], fault: Exception | None = None) -> None:
        self.place, self.there, self.fault = place / COMMIT, there, fault
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **how: Any) -> str:
        from fnmatch import fnmatch

        self.calls.append({"repo": repo, **how})
        if self.fault is not None:
            raise self.fault
        for name, text in self.there.items():
            wanted = any(fnmatch(name, p) for p in how["allow_patterns"])
            if wanted and not any(fnmatch(name, p) for p in how["ignore_patterns"]):
                (self.place / name).parent.mkdir(parents=True, exist_ok=True)
                (self.place / name).write_text(text)
        return str(self.place)


FILES = {
    "config.json": json.dumps(BERT),
    "tokenizer.json": "{}",
    "README.md": "",
    "onnx/model.onnx": "",
    "pytorch_model.bin": "",
    "model.safetensors": "",
    "model.fp16.safetensors": "",
}


def use(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", hub)
    return hub


def here(hub: Hub) -> set[str]:
    return {f.relative_to(hub.place).as_posix() for f in hub.place.rglob("*") if f.is_file()}


def test_hub_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = use(monkeypatch, Hub(tmp_path, FILES))
    folder = open_folder("org/name", revision="main", cache_dir="c", token="t", offline=True)
    assert here(hub) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder.name, folder.revision) == ("org/name", COMMIT)
    (call,) = hub.calls
    assert (call["revision"], call["cache_dir"], call["token"], call["local_files_only"]) == ("main", "c", "t", True)


def test_hub_pickles_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {k: v for k, v in FILES.items() if k != "model.safetensors"}
    files |= {"2_Dense/config.json": "{}", "2_Dense/pytorch_model.bin": "", "3_Dense/config.json": "{}"}
    files |= {"3_Dense/model.safetensors": "", "3_Dense/pytorch_model.bin": ""}
    hub = use(monkeypatch, Hub(tmp_path, files))
    open_folder("org/name")
    assert {f for f in here(hub) if f.endswith(".bin")} == {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}


def test_hub_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = use(monkeypatch, Hub(tmp_path, FILES))
    open_folder("name", weights=False)
    assert here(hub) == {"config.json", "tokenizer.json"}
    assert len(hub.calls) == 1


def _faults() -> list[tuple[Any, str]]:
    errors = pytest.importorskip("huggingface_hub").errors
    httpx = pytest.importorskip("httpx")
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    return [
        (errors.RepositoryNotFoundError("x", response=response), "no such model on the hub"),
        (errors.GatedRepoError("x", response=response), "gated model.*--hub-token"),
        (errors.RevisionNotFoundError("x", response=response), "no revision 'r'; check --revision"),
        (errors.HfHubHTTPError("x", response=response), "the hub refused"),
        (errors.LocalEntryNotFoundError("x"), "not in the cache, and the hub cannot be reached"),
        (errors.HFValidationError("x"), "not a hub id"),
        (OSError("no space left"), "no space left.*--cache-dir"),
    ]


@pytest.mark.parametrize("which", range(7))
def test_hub_faults(which: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault, told = _faults()[which]
    use(monkeypatch, Hub(tmp_path, {}, fault))
    with pytest.raises(StartError, match=told):
        open_folder("org/name", revision="r")


def test_hub_offline_names_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = pytest.importorskip("huggingface_hub").errors
    use(monkeypatch, Hub(tmp_path, {}, errors.LocalEntryNotFoundError("x")))
    with pytest.raises(StartError, match="--offline forbids"):
        open_folder("org/name", offline=True)


def test_kinds() -> None:
    def kind(architecture: str, *names: str, sort: str = "SentenceTransformer") -> str:
        return kind_of({"architectures": [architecture]}, tuple(Module(n, Path("m"), {}) for n in names), sort)

    assert kind("BertModel") == kind("Qwen3ForCausalLM") == "embed"
    assert kind("XLMRobertaForSequenceClassification") == "classify"
    assert kind("BertForMaskedLM") == "sparse"
    assert kind("BertForMaskedLM", "Transformer", "Pooling") == "embed", "its modules say more than its architecture"
    assert kind("BertForMaskedLM", "MLMTransformer", "SpladePooling") == "sparse"
    assert kind("BertModel", "Transformer", sort="CrossEncoder") == "classify"
    assert kind_of({}, ()) == "embed"


def test_vectors_cut_by_default_are_refused_not_served_whole(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 32}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 4}')
    with pytest.raises(StartError, match="truncate_dim 4"):
        open_folder(str(tmp_path))
