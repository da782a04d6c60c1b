"""Dashboards and alerts ask only for metrics that exist; alerts fire for their series only."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.generate import grafana
from tools.generate.pages import ROOT
from tools.generate.reference import OURS
from tools.generate.reference_metrics import BOUNDS, Row, node_page, registered, scheduler_page

MONITORING = ROOT / "k8s" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
INCREASE = re.compile(r"increase\((\w+)\{(\w+)=~?\"([^\"]+)\"")
NAME = re.compile(r"\b((?:leasehold|hw|hami|vGPU|Host|Device)_?[A-Za-z_]+)\b")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def all_rows() -> list[Row]:
    return [
        *node_page(),
        *scheduler_page(),
        *(row for rows in registered().values() for row in rows),
    ]


def test_the_bound_of_every_label_of_our_metrics_is_stated() -> None:
    ours = (labels for name, _, labels, _ in all_rows() if name.startswith(OURS))
    used = {label for labels in ours for label in labels.strip("{}").split(",") if label}

    assert used == {label for labels in BOUNDS.values() for label in labels.split()}


@cache
def existing() -> frozenset[str]:
    """The names under which Prometheus stores what our processes expose."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return frozenset(
        f"{name}{end}" for name, kind, *_ in all_rows() for end in suffixes.get(kind, ("",))
    )


def metrics_in(expression: str) -> set[str]:
    return set(NAME.findall(expression))


RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]


@pytest.mark.parametrize("alert", RULES, ids=lambda alert: str(alert["alert"]))
def test_every_alert_uses_existing_metrics_and_names_a_remedy(alert: dict[str, Any]) -> None:
    assert metrics_in(alert["expr"]) <= existing()
    assert alert["annotations"].keys() == {"summary", "next", "runbook"}
    assert alert["annotations"]["runbook"] == "docs/reference.md#alerts"
    assert alert["labels"]["severity"] in {"critical", "warning"}


def test_counters_in_alerts_with_increase_are_exported_before_their_first_increase() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    program = (
        "from tools.generate.reference_metrics import registered; registered();"
        "import prometheus_client as p; print(p.generate_latest().decode())"
    )
    fresh = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    wanted = [
        (name, f'{label}="{value}"')
        for alert in RULES
        for name, label, values in INCREASE.findall(alert["expr"])
        for value in values.split("|")
    ]

    assert len(wanted) > 2
    for name, label in wanted:
        assert re.search(rf"^{name}\{{.*{label}.*\}} 0\.0$", fresh, re.MULTILINE), (name, label)


def test_each_dashboard_uses_existing_metrics_and_its_variable() -> None:
    assert sorted(grafana.dashboards()) == DASHBOARDS
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        (variable,) = dashboard["templating"]["list"]
        used = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
        assert set().union(*map(metrics_in, [*used, variable["query"]])) <= existing(), path
        assert any(f"${variable['name']}" in expression for expression in used)


CASES = """
LeaseholdDeviceUnhealthy 6m device=GPU-1 index=1 state=cordoned severity=warning
  leasehold_device_health{device="GPU-1",index="1",state="cordoned"} 1+0x20
  leasehold_device_health{device="GPU-1",index="1",state="healthy"} 0+0x20
LeaseholdPodsWaitLong 10m dialect=hami reason=A severity=warning
  leasehold_waiting_oldest_seconds{dialect="hami",reason="A",instance="1"} 3540+60x20
  leasehold_waiting_oldest_seconds{dialect="hami",reason="B",instance="1"} 0+60x20
  leasehold_waiting_oldest_seconds{dialect="hami",reason="A",instance="2"} 3540+60x20
LeaseholdComponentMissing 3m service=binder severity=critical
  leasehold_missing_components{service="binder"} 1+0x20
LeaseholdBudgetNearlyUsed 1m namespace=a severity=warning
  leasehold_budget_state{namespace="a",state="warning"} 1+0x20
  leasehold_budget_state{namespace="b",state="ok"} 1+0x20
  leasehold_budget_state{namespace="b",state="warning"} 0+0x20
LeaseholdBudgetExhausted 1m namespace=a severity=critical
  leasehold_budget_state{namespace="a",state="overdrawn"} 1+0x20
  leasehold_budget_state{namespace="a",state="exhausted"} 0+0x20
LeaseholdNodeMessagesRefused 4m kind=refused_of_nodes severity=critical
  leasehold_binder_anomalies_total{kind="refused_of_nodes"} 0 0 0 2+0x20
  leasehold_binder_anomalies_total{kind="deleted_nodes"} 0 0 0 2+0x20
LeaseholdEventsRefused 4m job=binder subject=a severity=warning
  leasehold_events_refused_total{job="binder",subject="a"} 0 0 0 2+0x20
  leasehold_events_refused_total{job="binder",subject="b"} 3+0x20
LeaseholdBudgetInvalid 2m namespace=a severity=warning
  leasehold_budget_invalid{namespace="a",instance="1"} 1+0x20
  leasehold_budget_invalid{namespace="a",instance="2"} 1+0x20
  leasehold_budget_invalid{namespace="b",instance="1"} 0+0x20
LeaseholdQuotaInvalid 2m name=a severity=warning
  leasehold_quota_invalid{name="a"} 1+0x20
  leasehold_quota_invalid{name="b"} 0+0x20
LeaseholdDeviceConfigInvalid 2m config=a instance=1 severity=warning
  leasehold_agent_config_errors{config="a",instance="1"} 3+0x20
  leasehold_agent_config_errors{config="a",instance="2"} 0+0x20
LeaseholdLeasesIdle 70m namespace=a severity=warning
  leasehold_idle_leases{namespace="a"} 2+0x90
  leasehold_waiting_pods{dialect="hami",reason="A"} 1+0x90
""".strip()
"""An alert, when it must fire and with which labels; then its series, with a sample each minute."""


def cases() -> dict[str, tuple[str, dict[str, str], list[dict[str, str]]]]:
    found: dict[str, tuple[str, dict[str, str], list[dict[str, str]]]] = {}
    for block in re.split(r"\n(?=\w)", CASES):
        head, *series = block.splitlines()
        alert, at, *labels = head.split()
        inputs = [line.strip().partition("} ")[::2] for line in series]
        found[alert] = (
            at,
            dict(label.split("=") for label in labels),
            [{"series": name + "}", "values": values} for name, values in inputs],
        )
    return found


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, check=False)


@needs_promtool
def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", str(ALERTS))

    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("alert", cases())
def test_an_alert_fires_for_its_series_only(alert: str, tmp_path: Path) -> None:
    at, labels, inputs = cases()[alert]
    (rule,) = (each for each in RULES if each["alert"] == alert)
    expected = {"exp_labels": labels, "exp_annotations": filled(rule["annotations"], labels)}
    is_later = "for" in rule or "increase(" in rule["expr"]
    checks = [
        {"eval_time": "0s", "alertname": alert, "exp_alerts": [] if is_later else [expected]},
        {"eval_time": at, "alertname": alert, "exp_alerts": [expected]},
    ]
    test = {"interval": "1m", "input_series": inputs, "alert_rule_test": checks}
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))

    done = promtool("test", "rules", str(file))

    assert done.returncode == 0, done.stdout + done.stderr


def filled(annotations: dict[str, str], labels: dict[str, str]) -> dict[str, str]:
    return {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
        for key, text in annotations.items()
    }
