"""How well cosines follow people's judgement of 50 news texts (Lee et al., 2005), served over HTTP: the published figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from installed_models import package_folder  # noqa: E402
from scipy import stats  # noqa: E402
from service.gateway_server import running  # noqa: E402

from hortus.config import RoseConfig  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import open_engine  # noqa: E402


def texts() -> list[str]:
    return package_folder("gensim", "test", "test_data", "lee.cor").read_text("latin-1").splitlines()


def correlations(rows: np.ndarray) -> tuple[float, float]:
    """(Pearson's, Spearman's) of the cosines of all pairs with people's."""
    judged = np.loadtxt(package_folder("gensim", "test", "test_data", "similarities0-1.txt"))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = np.triu_indices(50, 1)
    cosines = (rows @ rows.T)[pairs]
    return float(stats.pearsonr(cosines, judged[pairs])[0]), float(stats.spearmanr(cosines, judged[pairs])[0])


def dense(url: str, prefix: str) -> np.ndarray:
    asked = {"model": "m", "input": [prefix + text for text in texts()], "encoding_format": "float"}
    answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=100).raise_for_status().json()
    return np.array([item["embedding"] for item in answer["data"]])


def sparse(url: str, _: str) -> np.ndarray:
    answer = httpx.post(f"{url}/embed_sparse", json={"inputs": texts()}, timeout=100).raise_for_status().json()
    rows = np.zeros((len(answer), 30522))
    for row, entries in zip(rows, answer, strict=True):
        for entry in entries:
            row[entry["index"]] = entry["value"]
    return rows


@pytest.mark.parametrize(
    ("model", "ask", "prefix", "pearson", "spearman"),
    [
        ("all-MiniLM-L6-v2", dense, "", 0.656367, 0.508270),
        ("splade-tiny", sparse, "", 0.697144, 0.477182),
        ("multilingual-e5-small", dense, "query: ", 0.589074, 0.468388),
    ],
)
def test_human_similarity(
    model: str, ask: Callable[[str, str], np.ndarray], prefix: str, pearson: float, spearman: float,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    path: Any = {
        "all-MiniLM-L6-v2": lambda: request.getfixturevalue("minilm_path"),
        "splade-tiny": lambda: package_folder("cognition", "model"),
        "multilingual-e5-small": lambda: request.getfixturevalue("e5_path"),
    }[model]()
    folder = open_folder(str(path), served_name="m")
    with running(open_engine(folder, RoseConfig()), folder=folder) as server:
        found = correlations(ask(server.url, prefix))
    assert np.abs(np.array(found) - (pearson, spearman)).max() < 5e-4
