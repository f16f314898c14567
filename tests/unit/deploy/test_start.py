"""The pods' commands and files, run here: they start with a fake engine, pass their probes, show metrics, end with status 0."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from chart_render import CASES, Object, container, of_kind, render, workloads
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hortus.protocol import wire

DEADLINE_S = 100.0


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def running(
    objects: list[Object], component: str, ports: dict[str, int], folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """The component's command with its file, moved to these ports of this machine; killed at the end if it still runs."""
    box = container(workloads(objects)[component])
    (file,) = (o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"].endswith(f"-{component}"))
    text = file["data"]["hortus.toml"].replace('"0.0.0.0', '"127.0.0.1')
    text = re.sub(r'replica = ".+:', 'replica = "127.0.0.1:', text)
    for name, port in (("metrics", 9090), ("grpc", 50051), ("http", 8080)):
        text = text.replace(str(port), str(ports.get(f"{component}-{name}", ports.get(name, port))))
    path = folder / f"{component}.toml"
    path.write_text(text)
    args = [str(path) if word.startswith("/etc/hortus") else word for word in box["args"]]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")} | {"HORTUS_FAKE_DELAY_MS": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hortus.cli", *args], env=environ, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_ready(port: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=8, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, told


@pytest.mark.parametrize("name", ["default", "split-plain"])
def test_pods_start_serve_and_stop(name: str, tmp_path: Path) -> None:
    objects = render(CASES[name])
    components = sorted(workloads(objects), reverse=True)  # tulip before ivy
    ports = {"http": free_port(), "grpc": free_port()} | {f"{c}-metrics": free_port() for c in components}
    with ExitStack() as stack:
        processes = {c: stack.enter_context(running(objects, c, ports, tmp_path)) for c in components}
        wait_ready(ports["http"], processes[components[-1]])
        for component in components:
            metrics = httpx.get(f"http://127.0.0.1:{ports[f'{component}-metrics']}/metrics", timeout=8, trust_env=False)
            assert "hortus_queue_tokens" in metrics.text
        if name != "default":
            with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
                asked = health_pb2.HealthCheckRequest(service=wire.SERVICE)
                answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=8)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for component in reversed(components):
            stop(processes[component])
