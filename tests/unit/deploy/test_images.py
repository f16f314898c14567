"""Dockerfiles and the compose file: what can be said of them without a Docker engine, and that Hortus takes their settings."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from typing import Any

import pytest
from chart_render import CASES, ROOT, container, pod, read, render, workloads

from hortus import __version__, cli, config

DOCKER = ROOT / "deploy/docker"
FILES = ("Dockerfile.cpu", "Dockerfile.cuda")
# From Docker's reference; a misspelt one is refused only where there is an engine.
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
SERVICE_FIELDS = {
    "profiles", "image", "build", "command", "environment", "ports", "volumes", "healthcheck", "deploy",
    "read_only", "tmpfs", "cap_drop", "security_opt", "restart", "stop_grace_period",
}  # fmt: skip
each_file = pytest.mark.parametrize("name", FILES)


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continued lines joined, comments dropped."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def last_stage(name: str) -> list[tuple[str, str]]:
    steps = instructions(name)
    return steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]


@each_file
def test_instructions(name: str) -> None:
    steps = instructions(name)
    assert {word for word, _ in steps} <= INSTRUCTIONS
    assert next(word for word, _ in steps) == "ARG"
    assert not any(word == "ADD" or "latest" in rest for word, rest in steps)
    defined = {rest.partition("=")[0] for word, rest in steps if word == "ARG"} | {"PATH"}
    for _, rest in steps:
        assert set(re.findall(r"\$\{?([A-Z_]+)", rest)) <= defined, rest


@each_file
def test_last_stage_is_confined_as_the_chart_says(name: str) -> None:
    steps = last_stage(name)
    (user,) = (rest for word, rest in steps if word == "USER")
    context = pod(workloads(render(CASES["default"]))["serve"])["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert f"--uid {context['runAsUser']}" in " ".join(rest for word, rest in steps if word == "RUN")
    assert ("ENTRYPOINT", '["hortus"]') in steps  # as a list: the process gets SIGTERM itself
    words = [word for word, _ in steps]
    assert not any(word in ("RUN", "COPY") for word in words[words.index("USER") :])
    assert ("VOLUME", "/cache") in steps
    env = " ".join(rest for word, rest in steps if word == "ENV")
    assert "HOME=/cache" in env
    assert "HORTUS_" not in env, "the environment wins over the chart's file"


@each_file
def test_ports_are_the_charts(name: str) -> None:
    (ports,) = (rest for word, rest in last_stage(name) if word == "EXPOSE")
    split = workloads(render(CASES["split-plain"])).values()
    assert {int(p) for p in ports.split()} == {p["containerPort"] for w in split for p in container(w)["ports"]}


@each_file
def test_extras_exist(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = next(rest for word, rest in instructions(name) if word == "ARG" and rest.startswith("EXTRAS="))
    assert set(extras.partition("=")[2].split(",")) <= project["optional-dependencies"].keys()
    wanted = next(r for r in project["optional-dependencies"]["cpu"] if r.startswith("torch"))
    assert f'pip install "{wanted}"' in (DOCKER / name).read_text(), "else the next layer installs torch again"


@each_file
def test_what_is_copied_exists_and_is_let_through(name: str) -> None:
    ignored = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    assert "*" in ignored
    let = [line[1:] for line in ignored if line.startswith("!")]
    copied = [rest.split()[:-1] for word, rest in instructions(name) if word == "COPY" and "--from" not in rest]
    for path in (path for paths in copied for path in paths):
        assert (ROOT / path).exists()
        assert any(fnmatch.fnmatch(path, pattern) for pattern in let), path
    # What pyproject.toml needs to build the package is among them.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= {path for paths in copied for path in paths}


@each_file
def test_usage_lines_are_right(name: str) -> None:
    text = (DOCKER / name).read_text()
    for line in re.findall(r"^#   docker run .*?hortus:\d\S* (.*)$", text, re.M):
        assert cli.parser().parse_args(line.split())
    for version in re.findall(r"hortus:(\d[^-\s]*)-", text):
        assert version == __version__


def compose() -> dict[str, Any]:
    (whole,) = read((ROOT / "deploy/compose.yaml").read_text())
    return whole


SERVICES = compose()["services"]
each_service = pytest.mark.parametrize("name", SERVICES)


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def hortus(name: str) -> tuple[str, config.Config]:
    """(command, settings) by Hortus's own parsers."""
    service = SERVICES[name]
    args = vars(cli.parser().parse_args([re.sub(r"\$\{MODEL:-(.+)\}", r"\1", w) for w in service["command"]]))
    command = args.pop("command")
    flags = {n: v for n, v in args.items() if n not in ("model", "config", "supervised")}
    return command, config.load(environ=service["environment"], flags=flags)


def test_compose_shape() -> None:
    whole = compose()
    assert {key for key in whole if not key.startswith("x-")} == {"name", "services", "volumes"}
    profiles = {p for s in SERVICES.values() for p in s["profiles"]}
    assert profiles == {"single", "gpu", "split"}
    usage = (ROOT / "deploy/compose.yaml").read_text()
    assert set(re.findall(r"--profile (\w+)", usage)) == profiles


@each_service
def test_compose_service(name: str) -> None:
    service = SERVICES[name]
    assert service.keys() <= SERVICE_FIELDS
    build = service["build"]
    context = (ROOT / "deploy" / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).exists()
    kind = service["image"].rpartition("-")[2]
    assert service["image"] == f"hortus:{__version__}-{kind}"
    assert build["dockerfile"].endswith("cuda" if kind == "cuda" else "cpu")
    assert (build.get("args") == {"EXTRAS": "grpc"}) == (kind == "gateway")
    named = {v.partition(":")[0] for v in service.get("volumes", ())}
    assert named <= compose()["volumes"].keys()
    assert all(isinstance(v, str) for v in service["environment"].values())


@each_service
def test_hortus_takes_the_compose_settings(name: str) -> None:
    command, got = hortus(name)
    service = SERVICES[name]
    assert command == {"tulip": "tulip", "ivy": "ivy"}.get(name, "serve")
    assert got.ivy.host == "0.0.0.0"
    assert seconds(service["stop_grace_period"]) >= got.ivy.drain_s + 8
    if command == "tulip":
        assert "ports" not in service
    else:
        assert service["ports"] == [f"127.0.0.1:{got.ivy.port}:{got.ivy.port}"]
        assert f":{got.ivy.port}/ready" in service["healthcheck"]["test"][-1]
    if command == "ivy":
        assert got.link.replica == f"tulip:{hortus('tulip')[1].link.listen.rpartition(':')[2]}"
    assert got.rose.device == ("cuda" if name == "gpu" else "auto")
