"""The chart rendered by Helm's own engine, offline, and read back with a YAML reader that refuses a key given twice."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/hortus"
NAMESPACE = "search"

Object = dict[str, Any]


class Strict(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; Kubernetes refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in own if own.count(key) > 1}
        assert not twice, f"{twice} given twice{node.start_mark}"
        return super().construct_mapping(node, deep)


def read(text: str) -> list[Object]:
    return [o for o in yaml.load_all(text, Strict) if o]


def example(name: str) -> Object:
    return read((CHART / f"examples/{name}.yaml").read_text())[0]


CASES: dict[str, Object] = {
    "default": {"model": "demo"},
    "single-everything": {
        "model": "demo",
        "config": {"ivy": {"host": "::", "auto_truncate": True}, "tulip": {"max_queue_tokens": 3_000_000}},
        "image": {"repository": "example/hortus", "tag": "t", "pullSecrets": [{"name": "pull"}]},
        "drainS": 90,
        "cache": {"kind": "claim", "claimName": "models"},
        "engine": {"autoscaling": {"kind": "hpa"}, "nodeSelector": {"a": "b"}, "podAnnotations": {"a": "b"}},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"enabled": True},
        "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    },
    "split-plain": {"model": "demo", "mode": "split", "disruptionBudget": False, "fullnameOverride": "hortus"},
    "split-ipv6": {"model": "demo", "mode": "split", "config": {"ivy": {"host": "::"}}},
    **{name: example(name) for name in ("single-gpu", "split-gpu", "split-cpu")},
}


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


@functools.cache
def _rendered(values: str, release: str) -> dict[str, str]:
    return _chart().render(json.loads(values), name=release, namespace=NAMESPACE)


def render(values: Object, release: str = "embed") -> list[Object]:
    """All objects; a fault of values or templates is a HelmError."""
    parts = _rendered(json.dumps(values), release)
    return [o for path, text in parts.items() if path.endswith(".yaml") for o in read(text)]


def notes(values: Object) -> str:
    return _rendered(json.dumps(values), "embed")["hortus/templates/NOTES.txt"]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def workloads(objects: list[Object]) -> dict[str, Object]:
    """Component -> Deployment or StatefulSet."""
    found = of_kind(objects, "Deployment", "StatefulSet")
    return {o["metadata"]["labels"]["app.kubernetes.io/component"]: o for o in found}


def pod(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]


def container(workload: Object) -> Object:
    (only,) = pod(workload)["containers"]
    return only
