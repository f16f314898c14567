"""The GPU's kernel tests on a machine without one: Triton's interpreter runs the kernels' Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


FILES = ("test_fp8_kernels", "test_encoders", "test_attend", "test_kernels")  # the longest first
TOGETHER = 2


def interpreted(file: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: Triton reads the variable once, when it is imported.
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{file}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    asked = [item.callspec.params["file"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield {file: pool.submit(interpreted, file) for file in asked}


@pytest.mark.parametrize("file", FILES)
def test_fused_kernels_agree_with_their_twins_under_the_interpreter(file, runs):
    done = runs[file].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
