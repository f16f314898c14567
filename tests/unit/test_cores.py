"""The cores a process may use: its affinity, and what its container leaves of that."""

from __future__ import annotations

import ast
import os
import re

import pytest
from test_arrows import FILES

from hortus import cores


@pytest.mark.parametrize(
    ("quota", "found"),
    [
        (None, 16),
        ("max 100000\n", 16),
        ("nonsense", 16),
        ("100000 0\n", 16),
        ("150000 100000\n", 2),
        ("400000 100000\n", 4),
        ("9900000 100000\n", 16),
        ("1000 100000\n", 1),
        ("0 100000\n", 1),
    ],
)
def test_a_quota_leaves_so_many(quota, found, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert cores.usable_cores() == found


def test_a_system_without_affinity_says_how_many_it_has(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "none")
    for told, found in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert cores.usable_cores() == found


def test_nobody_counts_cores_by_itself():
    """It would forget the quota, and start a thread for each core of a node. Which ones they are may be asked."""
    for path in FILES:
        if path.name == "cores.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert not re.match(r"len\(os\.sched_getaffinity|.*cpu_count\(", ast.unparse(node)), (path, node.lineno)
