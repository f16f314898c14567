"""The GPU's kernel tests on a machine without one: Triton's interpreter runs the kernels' Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", ["test_kernels", "test_encoders", "test_fp8_kernels", "test_attend"])
def test_fused_kernels_agree_with_their_twins_under_the_interpreter(file):
    # A process of its own: Triton reads the variable once, when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{file}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
