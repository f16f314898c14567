"""The Helm chart: valid Kubernetes, consistent in itself, and true to Hortus's flags, ports, metrics and health service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
from chart_render import (
    CASES,
    CHART,
    NAMESPACE,
    Object,
    container,
    notes,
    of_kind,
    pod,
    read,
    render,
    workloads,
)

from hortus import __version__, cli, config
from hortus.errors import StartError
from hortus.metrics import Metrics
from hortus.protocol import wire

# Kinds that operators bring; their parts that the chart uses, closed, so that a misspelt field is found.
_META = {"type": "object", "required": ["name", "labels"]}
_TEXT = {"type": "string", "minLength": 1}


def _closed(required: tuple[str, ...], **properties: Object) -> Object:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


_CUSTOM = {
    "ServiceMonitor": (
        "monitoring.coreos.com/v1",
        _closed(
            ("selector", "endpoints"),
            selector=_closed(("matchLabels",), matchLabels={"type": "object"}),
            endpoints={"type": "array", "items": _closed(("port",), port=_TEXT, path=_TEXT, interval=_TEXT)},
        ),
    ),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        _closed(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_closed(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount={"type": "integer"},
            maxReplicaCount={"type": "integer"},
            advanced=_closed((), horizontalPodAutoscalerConfig=_closed((), behavior={"type": "object"})),
            triggers={
                "type": "array",
                "items": _closed(
                    ("type", "metadata"),
                    type={"const": "prometheus"},
                    metricType={"const": "AverageValue"},
                    metadata=_closed(
                        ("serverAddress", "query", "threshold"), serverAddress=_TEXT, query=_TEXT, threshold=_TEXT
                    ),
                ),
            },
        ),
    ),
}

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())


def settings(objects: list[Object], component: str, tmp_path: Path) -> config.Config:
    """What Hortus reads in that component's pod: command line, environment and file, by its own parsers."""
    box = container(workloads(objects)[component])
    args = vars(cli.parser().parse_args(box["args"]))
    assert args["command"] == component
    volumes = {v["name"]: v for v in pod(workloads(objects)[component])["volumes"]}
    mount = next(m for m in box["volumeMounts"] if str(args["config"]).startswith(m["mountPath"] + "/"))
    name = volumes[mount["name"]]["configMap"]["name"]
    (file,) = (o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == name)
    path = tmp_path / f"{component}.toml"
    path.write_text(file["data"][args["config"].name])
    environ = {e["name"]: "3" for e in box.get("env", ()) if e["name"].startswith("HORTUS_")}
    return config.load(file=path, environ=environ, flags={})


@each_case
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_every_object_is_valid(values: Object, version: str) -> None:
    for thing in render(values):
        kind = thing["kind"]
        if kind in _CUSTOM:
            api, schema = _CUSTOM[kind]
            assert thing["apiVersion"] == api
            jsonschema.validate(thing, _closed(("spec",), apiVersion=_TEXT, kind=_TEXT, metadata=_META, spec=schema))
        else:
            kubernetes_validate.validate(thing, version, strict=True)


def test_validation_finds_faults() -> None:
    (service,) = of_kind(render(CASES["default"]), "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "prots": []}}, "1.30", strict=True)


@each_case
def test_lint(values: Object) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_versions_agree() -> None:
    (chart,) = read((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@each_case
def test_hortus_takes_the_settings(values: Object, tmp_path: Path) -> None:
    objects = render(values)
    for component, workload in workloads(objects).items():
        got, box = settings(objects, component, tmp_path), container(workload)
        ports = {p["name"]: p["containerPort"] for p in box["ports"]}
        assert got.link.metrics_port == ports["metrics"]
        assert got.ivy.host == values.get("config", {}).get("ivy", {}).get("host", "0.0.0.0")
        if component == "tulip":
            assert got.link.listen.rpartition(":")[2] == str(ports["grpc"])
            assert got.link.listen.startswith("[::]" if got.ivy.host == "::" else "0.0.0.0")
        else:
            assert got.ivy.port == ports["http"]
        for section, wanted in values.get("config", {}).items():
            for name, value in wanted.items():
                assert getattr(getattr(got, section), name) == value
        # The grace period covers what the pod does with it: preStop, the drain time, and closing (at most 7.2 s).
        pause = box.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert got.ivy.drain_s == values.get("drainS", 30)
        assert pod(workload)["terminationGracePeriodSeconds"] >= pause + got.ivy.drain_s + 8


@pytest.mark.parametrize("name", ["split-plain", "split-gpu", "split-cpu"])
def test_gateways_find_schedulers(name: str, tmp_path: Path) -> None:
    objects = render(CASES[name])
    replica = settings(objects, "ivy", tmp_path).link.replica
    assert replica is not None
    host, _, port = replica.partition(":")
    service, namespace, last = host.split(".")
    assert (namespace, last) == (NAMESPACE, "svc")
    (found,) = (o for o in of_kind(objects, "Service") if o["metadata"]["name"] == service)
    assert found["spec"]["clusterIP"] == "None"
    assert workloads(objects)["tulip"]["spec"]["serviceName"] == service
    assert int(port) in [p["port"] for p in found["spec"]["ports"]]


@each_case
def test_everything_refers_to_something(values: Object) -> None:
    objects = render(values)
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))
    made = {name for kind, name in names if kind == "ConfigMap"}
    pods = {c: w["spec"]["template"]["metadata"]["labels"] for c, w in workloads(objects).items()}
    ports = {c: {p["name"] for p in container(w)["ports"]} for c, w in workloads(objects).items()}

    def selected(labels: dict[str, str]) -> str:
        (component,) = (c for c, has in pods.items() if labels.items() <= has.items())
        return component

    for component, workload in workloads(objects).items():
        assert selected(workload["spec"]["selector"]["matchLabels"]) == component
        volumes = {v["name"] for v in pod(workload)["volumes"]}
        volumes |= {t["metadata"]["name"] for t in workload["spec"].get("volumeClaimTemplates", ())}
        assert {m["name"] for m in container(workload)["volumeMounts"]} == volumes
        assert {v["configMap"]["name"] for v in pod(workload)["volumes"] if "configMap" in v} <= made
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container(workload)[probe].get("httpGet", {}).get("port")
            assert asked is None or asked in ports[component]
    for thing in of_kind(objects, "Service"):
        component = selected(thing["spec"]["selector"])
        assert {p["targetPort"] for p in thing["spec"]["ports"]} <= ports[component]
    for thing in of_kind(objects, "ServiceMonitor"):
        wanted = thing["spec"]["selector"]["matchLabels"]
        (service,) = (o for o in of_kind(objects, "Service") if wanted.items() <= o["metadata"]["labels"].items())
        offered = {p["name"] for p in service["spec"]["ports"]}
        assert {e["port"] for e in thing["spec"]["endpoints"]} <= offered
    for thing in of_kind(objects, "PodDisruptionBudget"):
        selected(thing["spec"]["selector"]["matchLabels"])
    for thing in of_kind(objects, "NetworkPolicy"):
        component = selected(thing["spec"]["podSelector"]["matchLabels"])
        opened = {p["port"] for rule in thing["spec"]["ingress"] for p in rule["ports"]}
        assert opened == ports[component]
    for thing in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = thing["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
        (scaled,) = (o for o in of_kind(objects, target["kind"]) if o["metadata"]["name"] == target["name"])
        assert "replicas" not in scaled["spec"], "an upgrade would undo the autoscaler's number"


@each_case
def test_pods_are_confined(values: Object) -> None:
    for workload in workloads(render(values)).values():
        spec, box = pod(workload), container(workload)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        assert box["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"/tmp", "/cache"} <= {m["mountPath"] for m in box["volumeMounts"] if not m.get("readOnly")}


@each_case
def test_no_variables_of_other_services(values: Object) -> None:
    for workload in workloads(render(values)).values():
        assert pod(workload)["enableServiceLinks"] is False


def test_why_no_variables_of_other_services() -> None:
    with pytest.raises(StartError, match="HORTUS_SERVICE_HOST"):
        config.load(environ={"HORTUS_SERVICE_HOST": "10.0.0.1"})


@each_case
def test_probes(values: Object) -> None:
    for component, workload in workloads(render(values)).items():
        box = container(workload)
        ready, live, start = (box[p] for p in ("readinessProbe", "livenessProbe", "startupProbe"))
        if component == "tulip" and "link" not in values:
            assert ready["grpc"] == {"port": 50051, "service": wire.SERVICE}
        elif component == "tulip":
            assert wire.SERVICE in ready["exec"]["command"]
            assert f"embed-hortus-tulip.{NAMESPACE}.svc" in ready["exec"]["command"]
        else:
            assert ready["httpGet"]["path"] == "/ready"
        # The engine's own probe takes up to 5.5 s.
        assert min(ready["timeoutSeconds"], live["timeoutSeconds"] if component != "ivy" else 6) >= 6
        if component != "ivy":
            assert start["periodSeconds"] * start["failureThreshold"] >= 900
            assert live["periodSeconds"] * live["failureThreshold"] >= 120
        else:
            assert live["httpGet"]["path"] == "/health"  # replicas that are away are no reason to restart a gateway


def test_a_gpu_pod_never_serves_from_its_cpu(tmp_path: Path) -> None:
    objects = render(CASES["single-gpu"])
    assert container(workloads(objects)["serve"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert settings(objects, "serve", tmp_path).rose.device == "cuda"
    assert settings(render(CASES["default"]), "serve", tmp_path).rose.device == "cpu"


@pytest.mark.parametrize(
    ("name", "component", "tag"),
    [
        ("default", "serve", f"hortus:{__version__}-cpu"),
        ("single-gpu", "serve", f"hortus:{__version__}-cuda"),
        ("split-gpu", "ivy", f"hortus:{__version__}-gateway"),
        ("single-everything", "serve", "example/hortus:t"),
    ],
)
def test_images(name: str, component: str, tag: str) -> None:
    assert container(workloads(render(CASES[name]))[component])["image"] == tag


def test_threads_follow_the_cpu_request() -> None:
    def names(values: Object) -> set[str]:
        return {e["name"] for e in container(workloads(render(values))["serve"]).get("env", ())}

    assert "HORTUS_THREADS" in names({"model": "demo"})
    assert "HORTUS_THREADS" not in names({"model": "demo", "config": {"rose": {"threads": 2}}})
    assert "HORTUS_THREADS" not in names({"model": "demo", "engine": {"gpu": 1}})


def test_secrets_stay_out_of_config_maps_and_go_where_needed() -> None:
    objects = render(CASES["split-gpu"])
    env = {c: {e["name"] for e in container(w)["env"]} for c, w in workloads(objects).items()}
    assert env == {"ivy": {"HORTUS_LINK_TOKEN"}, "tulip": {"HORTUS_LINK_TOKEN", "HORTUS_HUB_TOKEN"}}
    assert not any("_token =" in o["data"]["hortus.toml"] for o in of_kind(objects, "ConfigMap"))


def test_a_changed_setting_rolls_the_pods() -> None:
    def total(**more: Any) -> str:
        made = workloads(render({"model": "demo", **more}))["serve"]["spec"]["template"]["metadata"]["annotations"]
        return made["hortus/config-sum"]

    assert total() == total()
    assert total() != total(config={"tulip": {"in_flight": 1}})


def test_scaling_reads_a_metric_that_exists() -> None:
    exposed = Metrics().render().decode()
    assert "\nhortus_queue_tokens " in exposed
    assert "hortus_tokens_total" in exposed
    for name in ("single-everything", "split-gpu"):
        scaler = next(o for o in of_kind(render(CASES[name]), "HorizontalPodAutoscaler") if "hortus" in str(o["spec"]))
        assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == "hortus_queue_tokens"
    (keda,) = of_kind(render(CASES["split-cpu"]), "ScaledObject")
    query = keda["spec"]["triggers"][0]["metadata"]["query"]
    assert f'hortus_queue_tokens{{namespace="{NAMESPACE}",pod=~"embed-hortus-tulip-.*"}}' in query


def test_large_numbers_stay_whole() -> None:
    values = {"model": "demo", "engine": {"autoscaling": {"kind": "hpa", "queueTokens": 20_000_000}}}
    (scaler,) = of_kind(render(values), "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "20000000"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "model is required"),
        ({"model": "demo", "replicas": 2}, "replicas"),
        ({"model": "demo", "engine": {"gpus": 1}}, "gpus"),
        ({"model": "demo", "engine": {"gpu": 8}}, "gpu"),
        ({"model": "demo", "mode": "both"}, "mode"),
        ({"model": "demo", "config": {"rose": {"hub_token": "s"}}}, "hub_token"),
        ({"model": "demo", "config": {"link": {"link_token": "s"}}}, "link_token"),
        ({"model": "demo", "config": {"link": {"gateways": 2}}}, "gateways"),
        ({"model": "demo", "config": {"ivy": {"port": 1}}}, "port"),
        ({"model": "demo", "config": {"ivy": {"max-inputs": 1}}}, "max-inputs"),
        ({"model": "demo", "cache": {"kind": "claim"}}, "claimName"),
        ({"model": "demo", "cache": {"kind": "perPod"}}, "perPod"),
        ({"model": "demo", "mode": "split", "link": {"tls": {"ivySecret": "a"}}}, "belong together"),
        ({"model": "demo", "secrets": {"link_token": {"name": "a"}}}, "key"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(values: Object, words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render(values)


def test_names_that_the_chart_sets_or_refuses_are_fields() -> None:
    known = {section: set(cls.__dataclass_fields__) for section, cls in config.SECTIONS.items()}
    sections = helm_python.Chart.load(CHART).schema["properties"]["config"]["properties"]
    assert sections.keys() <= known.keys()
    for section, schema in sections.items():
        assert set(schema["propertyNames"].get("not", {}).get("enum", ())) <= known[section]


@pytest.mark.parametrize("name", CASES)
def test_notes_name_what_was_made(name: str) -> None:
    told = notes(CASES[name])
    objects = render(CASES[name])
    for thing in workloads(objects).values():
        assert f"{thing['kind'].lower()}/{thing['metadata']['name']}" in told


def test_long_release_names_still_fit() -> None:
    for thing in render(CASES["split-gpu"], release="r" * 53):
        assert len(thing["metadata"]["name"]) <= 63
