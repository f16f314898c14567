"""Ctrl-C, SIGTERM and SIGHUP at any time: what was measured is told, and nothing that was started lives on."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hortus import bench
from hortus.bench import started
from hortus.errors import StartError
from tests.patience import until_seen


def below(process):
    """Processes under this one, by id."""
    found = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *below(child)]
    return found


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "seen", "number"),
    [
        ("short --most-clients 2 --rounds 1 --seconds 1", "clients ", signal.SIGTERM),
        ("concurrency --seconds 60", "opening", signal.SIGINT),
        ("concurrency --seconds 60", "concurrency: ", signal.SIGHUP),
    ],
)
def test_nothing_is_left_behind(tmp_path, words, seen, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup")
    out = tmp_path / "out"
    suite, *flags = [
        *words.split(),
        "--target",
        "serve:--fake-delay-ms 0",
        "--reference",
        "none",
        "--out",
        str(tmp_path / "lines"),
    ]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with out.open("w") as f:
        process = subprocess.Popen(
            [sys.executable, "-m", "hortus.cli", "bench", suite, *flags],
            stdout=f, stderr=f, env=os.environ | {"TMPDIR": str(temporary)}, process_group=0,
        )  # fmt: skip
    try:
        until_seen(lambda: seen in out.read_text() and below(process.pid))
        started = below(process.pid)
        if number == signal.SIGINT:  # as a terminal sends it: to all of the group, clients too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(60) == 128 + number, out.read_text()
        until_seen(lambda: not any(map(alive, started)), 10)
    finally:
        process.kill()
    told = out.read_text()
    assert "hortus bench: stopped" in told
    assert not any(words in told for words in ("Traceback", "SpawnProcess", "KeyboardInterrupt"))
    lines = (tmp_path / "lines").read_text() if (tmp_path / "lines").exists() else ""
    assert ("| short " in told) == ('"short"' in lines) == (suite == "short"), "what was measured until then"
    assert [*temporary.iterdir()] == []


def test_what_a_server_started_here_leaves_behind_is_ended(tmp_path, monkeypatch):
    """A wrapper that dies of SIGTERM and leaves its server, or one that does not die of it."""
    monkeypatch.setattr(started, "_ready", lambda port, path: (tmp_path / "child").exists())
    monkeypatch.setattr(started, "STOP_S", 0.5)
    for trap in ("", "trap '' TERM;"):
        (tmp_path / "child").unlink(missing_ok=True)
        script = f"{trap} sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/child; wait; wait"
        with started.started(["sh", "-c", script], 1) as running:
            child = int((tmp_path / "child").read_text())
            assert alive(child)
        assert not alive(running.process)
        until_seen(lambda child=child: not alive(child), 10)


def test_another_server_on_the_port_is_not_taken_for_the_one_that_was_started(monkeypatch):
    monkeypatch.setattr(started, "_ready", lambda port, path: time.sleep(0.5) or True)
    with (
        pytest.raises(StartError, match=r"the server ended by itself .*address in use"),
        started.started(["sh", "-c", "echo address in use; exit 1"], 1),
    ):
        raise AssertionError("it was taken for ready")


@pytest.mark.parametrize("flag", ["--out", "--raw"])
def test_what_cannot_be_written_is_named_and_no_target_blamed(capsys, flag):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    words = ["cases", "--cases", "1x8", "--target", "engine", "--reference", "none", "--rounds", "1", "--seconds", "0"]
    assert bench.main([*words, flag, "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "/dev/full cannot be written: No space left" in said.err
    assert ("| cases | engine" in said.out) == (flag == "--out")
    assert "LEFT OUT" not in said.out


@pytest.mark.parametrize("reader", ["gone", "full"])
def test_output_that_cannot_be_written_is_said_and_costs_no_result(tmp_path, reader):
    if reader == "full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    lines = tmp_path / "lines"
    words = [
        "cases,parity",
        "--cases",
        "1x8",
        "--target",
        "engine",
        "--reference",
        "none",
        "--rounds",
        "1",
        "--seconds",
        "0",
    ]
    kept = subprocess.PIPE if reader == "gone" else os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(
        [sys.executable, "-m", "hortus.cli", "bench", *words, "--out", str(lines)],
        stdout=kept, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if reader == "gone":
        while "cases  " not in process.stdout.readline():
            pass
        process.stdout.close()
    else:
        os.close(kept)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1
    assert re.search(r"hortus bench: \[Errno \d+\] (Broken pipe|No space left)", said), said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert lines.exists() == (reader == "gone"), "what was measured until then"


def test_a_run_that_measures_nothing_is_no_success(capsys):
    assert bench.main(["concurrency", "--target", "engine", "--reference", "none", "--tokens", "8"]) == 1
    said = capsys.readouterr()
    assert "concurrency: engine is no server; passed over" in said.out
    assert "nothing was measured" in said.err
