"""Workers of a thread that has computed are gone once it says so. In a process of its own: they are counted."""

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import os, time
import torch
from hortus.rose.openmp import give_up_workers

torch.set_num_threads(3)

def threads():
    return len(os.listdir("/proc/self/task"))

def until(wanted):
    end = time.monotonic() + 20
    while threads() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == wanted, (threads(), wanted)

x = torch.ones(1 << 20).exp_()
working = threads()
for _ in range(2):
    give_up_workers()
    until(working - 2)  # beside the thread itself
    x.exp_()
    until(working)  # the next loop makes new ones
assert torch.get_num_threads() == 3
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_workers_are_given_up_and_come_back():
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
