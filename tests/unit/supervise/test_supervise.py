"""The pure half of supervision: what is started, where, with which settings, and how long between two lives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hortus import config
from hortus.config import Config, IvyConfig, LinkConfig, RoseConfig, TulipConfig
from hortus.errors import StartError
from hortus.ivy.server import bind
from hortus.supervise import PAUSES_S, _reserved, _sockets, as_toml, gpus, pause, plan

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
    assert [c.environ for c in got] == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}, {}]
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
        ivy=IvyConfig(served_model_name='a "b" \\ ü', auto_truncate=True),
        tulip=TulipConfig(fake_delay_ms=0.25),
        rose=RoseConfig(device="cpu"),
        link=LinkConfig(link_token="x'y", metrics_port=3),
    )
    file = tmp_path / "c.toml"
    file.write_text(as_toml(whole))
    assert config.load(file=file) == whole
    file.write_text(as_toml(Config()))
    assert dataclasses.asdict(config.load(file=file)) == dataclasses.asdict(Config())
