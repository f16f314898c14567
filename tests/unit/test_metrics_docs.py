"""docs/metrics.md and the dashboard against the metrics that there are."""

import json
import re
from pathlib import Path

from hortus.metrics import Metrics

ROOT = Path(__file__).parents[2]


def names() -> set[str]:
    return {f.name + ("_total" if f.type == "counter" else "") for f in Metrics().registry.collect()}


def test_every_metric_is_documented_and_no_other():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(hortus_\w+)`", text, re.M)) == names()


def test_the_dashboard_shows_metrics_that_exist():
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "hortus.json").read_text())
    used = {n.removesuffix("_bucket") for n in re.findall(r"hortus_\w+", json.dumps(dashboard["panels"]))}
    assert used <= names()
    assert len(used) > 15
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
