"""Dashboards and alerts ask only for metrics that exist, and every service is scraped."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from services.node_agent.usage.snapshot import UsageSnapshot
from services.node_agent.usage.usage_metrics import usage_metrics
from shared.model.names import NodeName
from tools.generate import grafana

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
SPEAKING = (
    "services.binder.metrics",
    "services.auth.metrics",
    "services.api.cluster_metrics",
    "services.node_agent.metrics",
    "services.placer.metrics",
    "services.timekeeper.metrics",
    "services.watcher.quota_sources",
    "services.webhook.metrics",
    "shared.nats.inbox",
    "shared.runtime.runner",
)
"""Modules that register metrics when they are imported."""
INCREASE = re.compile(r"increase\((\w+)\{(\w+)=~?\"([^\"]+)\"")
NAME = re.compile(r"\b((?:leasehold|hami|vGPU|Host|Device)_?[A-Za-z_]+)\b")


def existing() -> set[str]:
    """The names under which Prometheus stores what our processes expose."""
    for module in SPEAKING:
        importlib.import_module(module)
    exposed = [
        *REGISTRY.collect(),
        *usage_metrics(UsageSnapshot(), NodeName("n"), now=0.0, idle_since={}),
    ]
    names: set[str] = set()
    for family in exposed:
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ("",))
        names.update(f"{family.name}{suffix}" for suffix in suffixes)
    return names


def metrics_in(expression: str) -> set[str]:
    return set(NAME.findall(expression))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_every_alert_uses_existing_metrics_and_names_a_remedy(alert: dict[str, Any]) -> None:
    assert metrics_in(alert["expr"]) <= existing()
    assert alert["annotations"].keys() == {"summary", "next", "runbook"}
    assert alert["annotations"]["runbook"] == "docs/reference.md#alerts"
    assert alert["labels"]["severity"] in {"critical", "warning"}


def test_counters_in_alerts_with_increase_are_exported_before_their_first_increase() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    program = f"import importlib\nfor module in {SPEAKING}: importlib.import_module(module)\n"
    program += "import prometheus_client as p; print(p.generate_latest().decode())"
    fresh = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    wanted = [
        (name, f'{label}="{value}"')
        for alert in alerts()
        for name, label, values in INCREASE.findall(alert["expr"])
        for value in values.split("|")
    ]

    assert len(wanted) > 2
    for name, label in wanted:
        assert re.search(rf"^{name}\{{.*{label}.*\}} 0\.0$", fresh, re.MULTILINE), (name, label)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.name))
def test_every_panel_uses_existing_metrics(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]

    wanted = set().union(*map(metrics_in, expressions))
    assert wanted
    assert wanted <= existing()


def test_each_dashboard_has_a_variable_that_its_panels_use() -> None:
    generated = grafana.dashboards()

    assert sorted(generated) == DASHBOARDS
    for text in generated.values():
        dashboard = json.loads(text)
        (variable,) = dashboard["templating"]["list"]
        assert metrics_in(variable["query"]) <= existing()
        used = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
        assert any(f"${variable['name']}" in expression for expression in used)
