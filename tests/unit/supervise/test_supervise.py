"""The pure half of supervision: what is started, where, with which settings, and how long between two lives."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from patience import until

from hortus import config
from hortus.config import Config, IvyConfig, LinkConfig, RoseConfig, TulipConfig
from hortus.errors import StartError
from hortus.ivy.server import bind
from hortus.supervise import PAUSES_S, Child, _Family, _reserved, _sockets, as_toml, gpus, pause, plan

WHERE = Path("/run/x")


def children(link: LinkConfig, visible: list[str] | None = None, cores: int = 8, **sections):
    whole = Config(link=link, **sections)
    return plan("m", whole, where=WHERE, port=80, visible=visible or [], cores=cores)


def test_gateways_share_the_port_and_know_every_engine():
    got = children(LinkConfig(gateways=3, replicas=2))
    assert [c.name for c in got] == ["tulip-0", "tulip-1", "ivy-0", "ivy-1", "ivy-2"]
    assert [c.config.link.listen for c in got[:2]] == ["unix:/run/x/tulip-0", "unix:/run/x/tulip-1"]
    for ivy in got[2:]:
        assert ivy.command == ("ivy",)
        assert (ivy.config.ivy.port, ivy.config.ivy.reuse_port) == (80, True)
        assert ivy.config.link.replica == "unix:/run/x/tulip-0,unix:/run/x/tulip-1"


def test_replicas_alone_get_one_gateway():
    assert [c.name for c in children(LinkConfig(replicas=2))] == ["tulip-0", "tulip-1", "ivy-0"]


def test_on_the_cpu_engines_share_the_cores():
    assert [c.config.rose.threads for c in children(LinkConfig(replicas=3))[:3]] == [2, 2, 2]
    assert children(LinkConfig(replicas=3), cores=2)[0].config.rose.threads == 1
    assert children(LinkConfig(gateways=2))[0].config.rose.threads is None, "one engine keeps its own default"
    assert children(LinkConfig(replicas=2), rose=RoseConfig(threads=5))[0].config.rose.threads == 5


def test_one_gpu_an_engine():
    got = children(LinkConfig(replicas=2), ["4", "7", "9"])
    assert [c.environ for c in got[:2]] == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]
    assert got[2].environ == {"TMPDIR": "/run/x/ivy-0"}
    assert got[0].config.rose.threads is None
    assert children(LinkConfig(), ["0"], rose=RoseConfig(device="cpu"))[0].environ == {}
    assert children(LinkConfig(replicas=3), ["0"], tulip=TulipConfig(fake_delay_ms=0))[0].environ == {}


def test_too_few_gpus_are_told():
    with pytest.raises(StartError, match=r"--replicas 3: there are 2 GPUs .*CUDA_VISIBLE_DEVICES=0,0"):
        children(LinkConfig(replicas=3), ["0", "1"])


def test_gpus():
    assert gpus({}, 2) == ["0", "1"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab,3"}, 8) == ["3", "GPU-ab", "3"]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, 8) == []
    assert gpus({"CUDA_VISIBLE_DEVICES": "-1"}, 8) == []


def test_metrics_ports_follow_one_another():
    got = children(LinkConfig(gateways=2, replicas=2, metrics_port=9000))
    assert [c.config.link.metrics_port for c in got] == [9000, 9001, 9002, 9003]


@pytest.mark.parametrize(
    ("first", "port", "said"),
    [(65534, 80, "4 processes take the ports 65534 to 65537, beyond 65535"), (78, 80, "78 to 81, and 80 is --port")],
)
def test_ports_of_metrics_that_cannot_be_are_told_before_anything_starts(first, port, said):
    whole = Config(link=LinkConfig(gateways=2, replicas=2, metrics_port=first))
    with pytest.raises(StartError, match=f"^--metrics-port {first}: .*{said}"):
        plan("m", whole, where=WHERE, port=port, visible=[], cores=8)


async def test_no_child_is_started_while_the_family_ends(monkeypatch):
    """One whose pause ends then would take requests, and be killed with them."""
    home, lives = family(monkeypatch, [1, 1])
    keeping = asyncio.create_task(home._keep(home._children[0], 0.0))
    await until(lambda: lives == [1])
    home._stopping.set()
    await asyncio.wait_for(keeping, 10)
    assert lives == [1]


async def test_a_child_for_which_there_is_no_process_just_now_is_tried_again(monkeypatch):
    home, lives = family(monkeypatch, [BlockingIOError(11, "Resource temporarily unavailable"), 1])
    keeping = asyncio.create_task(home._keep(home._children[0], 0.0))
    await until(lambda: not lives)
    home._stopping.set()
    await asyncio.wait_for(keeping, 10)
    assert not home._failed.done()


async def test_a_child_for_which_there_never_was_a_process_is_the_reason(monkeypatch):
    home, _ = family(monkeypatch, [OSError(24, "Too many open files")])
    home._ready.clear()
    await asyncio.wait_for(home._keep(home._children[0], 0.0), 10)
    assert home._failed.result() == "ivy-0 cannot be started: [Errno 24] Too many open files before it was ready"


def family(monkeypatch, ends: list[int | OSError]) -> tuple[_Family, list[int | OSError]]:
    """A gateway that has been ready and lives as many lives as `ends` has entries; those that are still to come."""
    home = _Family([Child("ivy-0", ("ivy",), Config())], "http://x", 0.0)
    home._failed = asyncio.get_running_loop().create_future()
    home._ready.add("ivy-0")

    async def live(child: Child, begin: float) -> int:
        end = ends.pop(0)
        if isinstance(end, OSError):
            raise end
        return end

    monkeypatch.setattr(home, "_live", live)
    return home, ends


def test_a_folder_for_sockets_whose_names_are_too_long_is_told(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(StartError, match=r"at most 107.*TMPDIR"), _sockets():
        pass
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StartError, match=r"TMPDIR.*nowhere"), _sockets():
        pass


def test_a_port_where_other_gateways_listen_is_shared_only_when_asked_for():
    with bind("127.0.0.1", 0, reuse_port=True) as other:
        ivy = IvyConfig(port=other.getsockname()[1])
        with pytest.raises(StartError, match=r"address already in use .*--port"), _reserved(Config(ivy=ivy)):
            pass
        with _reserved(Config(ivy=dataclasses.replace(ivy, reuse_port=True))) as ours:
            assert ours.getsockname() == other.getsockname()
    with _reserved(Config(ivy=ivy)) as ours, bind("127.0.0.1", ivy.port, reuse_port=True) as gateway:
        assert gateway.getsockname() == ours.getsockname()


def test_pauses_grow_and_end():
    got = [pause(n) for n in range(1, 100)]
    assert got[0] == PAUSES_S[0]
    assert got[1] == 2 * got[0]
    assert got[-1] == PAUSES_S[1]
    assert got == sorted(got)


def test_settings_survive_the_file(tmp_path):
    whole = Config(
        ivy=IvyConfig(served_model_name='a "b" \\ ü 😀', auto_truncate=True),
        tulip=TulipConfig(fake_delay_ms=0.25),
        rose=RoseConfig(device="cpu"),
        link=LinkConfig(link_token="x'y", metrics_port=3),
    )
    file = tmp_path / "c.toml"
    file.write_bytes(as_toml(whole).encode())
    assert config.load(file=file) == whole
    file.write_text(as_toml(Config()))
    assert dataclasses.asdict(config.load(file=file)) == dataclasses.asdict(Config())
