"""`hortus bench fp8`: its score, and its tasks from files as they are published."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hortus.bench import fp8, main  # noqa: E402
from hortus.errors import StartError  # noqa: E402

NOUNS = """  1 This software and database is being provided to you, the LICENSEE, by
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived to exist
00002137 03 n 02 abstraction 0 abstract_entity 0 010 @ 00001740 n 0000 | a general concept; "an example"; "another"
00003553 03 n 02 whole 0 Entity 1 001 @ 00002684 n 0000 | an assemblage of parts
"""


def test_gains_are_discounted_by_rank():
    gains = np.array([[1, 0, 0.5], [0, 0, 1]], np.float32)
    scores = np.array([[3, 2, 1], [1, 2, 3]], np.float32)
    found = fp8.ndcg(scores, gains, most=2)
    assert found == pytest.approx([1 / (1 + 0.5 / math.log2(3)), 1])
    assert fp8.ndcg(-scores, gains, most=2)[1] == 0


def test_wordnet(tmp_path: Path):
    (tmp_path / "data.noun").write_text(NOUNS)
    task = fp8.wordnet(tmp_path, queries=9, documents=9)
    assert sorted(task.documents) == ["a general concept", "an assemblage of parts", "that which is perceived to exist"]
    assert sorted(task.queries) == ["abstract entity", "abstraction", "entity", "whole"]
    assert task.gains[task.queries.index("entity")].sum() == 2, "either sense"
    assert task.gains.sum() == 5
    with pytest.raises(StartError, match="expected WordNet"):
        fp8.wordnet(tmp_path / "no", queries=9, documents=9)


def test_lee():
    task = fp8.lee()
    assert len(task.queries) == 50
    np.testing.assert_array_equal(task.gains, task.gains.T)
    assert task.gains.diagonal().max() == 0
    assert task.gains.max(1).min() > 0, "each text is like another"


def test_a_machine_without_such_a_gpu_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["engine", "--shape", "tiny", "--dtype", "fp8", "--parts", "times"]) == 1
    assert "hortus bench: --dtype fp8 needs a GPU of capability 9.0" in capsys.readouterr().err
