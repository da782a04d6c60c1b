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

import services.cli.commands  # noqa: F401 - declares the commands
from services.api.reports.prometheus import AMOUNT_METRICS, LEASED, SENSOR_METRICS, WAITING_PODS
from services.cli.arguments import COMMANDS
from tests.contract.test_pages import anchors
from tools.generate import grafana
from tools.generate.pages import ROOT
from tools.generate.reference import OURS
from tools.generate.reference_metrics import BOUNDS, Row, node_page, registered, scheduler_page

MONITORING = ROOT / "k8s" / "monitoring"
RULES_FILE = MONITORING / "rules.yaml"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
INCREASE = re.compile(r"increase\((\w+)\{(\w+)=~?\"([^\"]+)\"")
NAME = re.compile(r"(?<![\w:])((?:\w+:)?(?:leasehold|hw|hami|vGPU|Host|Device)_?\w+(?::\w+)?)\b")
NOT_BASE_UNIT = re.compile(r"_(percent|minutes|hours|ms|milli\w*|mib|gib|mhz|milliwatts)(_|$)")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def all_rows() -> list[Row]:
    return [
        *node_page(),
        *scheduler_page(),
        *(row for rows in registered().values() for row in rows),
    ]


def test_hami_core_44_our_metrics_have_base_units_and_labels_with_a_stated_bound() -> None:
    ours = [(name, labels) for name, _, labels, _ in all_rows() if name.startswith(OURS)]
    used = {label for _, labels in ours for label in labels.strip("{}").split(",") if label}

    assert used == {label for labels in BOUNDS.values() for label in labels.split()}
    assert [name for name, _ in ours if NOT_BASE_UNIT.search(name)] == []


@cache
def existing() -> frozenset[str]:
    """The names under which Prometheus stores what our processes expose."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    exported = {
        f"{name}{end}" for name, kind, *_ in all_rows() for end in suffixes.get(kind, ("",))
    }
    return frozenset(exported | {rule["record"] for rule in RULES if "record" in rule})


def metrics_in(expression: str) -> set[str]:
    return set(NAME.findall(expression))


RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_uses_existing_metrics_and_names_a_remedy(alert: dict[str, Any]) -> None:
    assert metrics_in(alert["expr"]) <= existing()
    assert alert["annotations"].keys() == {"summary", "next", "runbook"}
    page, _, section = alert["annotations"]["runbook"].partition("#")
    assert page == "docs/troubleshooting.md"
    assert section in anchors(ROOT / page)
    assert alert["labels"]["severity"] in {"critical", "warning"}
    named = re.findall(r"\bleasehold ([a-z][a-z-]*)", alert["annotations"]["next"])
    assert COMMANDS.keys() >= set(named)


def test_each_scraped_service_has_an_alert_when_it_is_down() -> None:
    scraped = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    (down,) = (rule["expr"] for rule in ALERTS if rule["alert"] == "LeaseholdServiceDown")
    (jobs,) = re.findall(r'up\{job=~"([^"]+)"\}', down)

    others = {"api", "old-schedulers", "node-monitor"}
    assert {*jobs.split("|")} == {config["job_name"] for config in scraped} - others


def test_recording_rules_and_the_queries_of_the_api_use_existing_metrics() -> None:
    queries = (*AMOUNT_METRICS.values(), *LEASED.values(), *SENSOR_METRICS.values(), WAITING_PODS)
    for expression in (*queries, *(rule["expr"] for rule in RULES)):
        assert metrics_in(expression) <= existing(), expression


def test_the_autoscalers_of_the_examples_read_recorded_metrics() -> None:
    hpa, keda, adapter = (
        yaml.safe_load((ROOT / path).read_text())
        for path in (
            "examples/inference-hpa.yaml",
            "examples/inference-keda.yaml",
            "k8s/monitoring/prometheus-adapter.yaml",
        )
    )
    (rule,) = adapter["rules"]["custom"]
    (series,) = re.findall(r'__name__=~"(.+)"', rule["seriesQuery"])
    shown = {
        re.sub(rule["name"]["matches"], r"\1", each)
        for each in existing()
        if re.fullmatch(series, each)
    }

    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] in shown
    assert metrics_in(keda["spec"]["triggers"][0]["metadata"]["query"]) <= existing()


def test_counters_in_alerts_with_increase_are_exported_before_their_first_increase() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    program = (
        "from tools.generate.reference_metrics import registered; registered();"
        "import prometheus_client as p; print(p.generate_latest().decode())"
    )
    fresh = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    wanted = [
        (name, f'{label}="{value}"')
        for alert in ALERTS
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


def labels_of(name: str) -> set[str]:
    """The labels that a stored metric has, with those of Prometheus."""
    if name == "up":
        return {"instance", "job"}
    base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    (found,) = {labels for each, _, labels, _ in all_rows() if each in {name, base}}
    return {*filter(None, found.strip("{}").split(",")), "instance", "job", "le"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_panels_of_a_dashboard_group_and_select_by_labels_of_their_metrics(path: Path) -> None:
    """Prometheus evaluates an unknown label as empty: the panel would show one line, or none."""
    for panel in json.loads(path.read_text())["panels"]:
        for expression in (target["expr"] for target in panel["targets"]):
            metrics = [name for name in metrics_in(expression) if ":" not in name]
            known = set.intersection(*map(labels_of, metrics)) if metrics else {"model"}
            used = re.findall(r"by \(([\w, ]+)\)", expression)
            named = {label for each in used for label in each.split(", ")}
            named |= set(re.findall(r"[{,](\w+)=~?\"", expression))
            assert named <= known, (panel["title"], expression)


GROUPED = re.compile(r"by \(([\w, ]+)\)")
SELECTED = re.compile(r"(\w+)\{([^}]*)\}")
BESIDE = re.compile(r" (?:unless|and) on \(\) ")
"""What follows decides whether an alert fires, and gives it no labels."""


def grouped(expression: str) -> set[str]:
    return {label for labels in GROUPED.findall(expression) for label in labels.split(", ")}


def labels_in(expression: str) -> set[str]:
    """The labels that all metrics of an expression have, recorded ones among them."""
    recorded = {rule["record"]: grouped(rule["expr"]) for rule in RULES if "record" in rule}
    names = metrics_in(expression) or {"up"}
    return set.intersection(*(recorded.get(name) or labels_of(name) for name in names))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.get("alert", rule.get("record"))))
def test_a_rule_groups_selects_and_shows_labels_of_its_metrics(rule: dict[str, Any]) -> None:
    """An unknown label is empty: the rule would have one series, or none, or a text with a gap."""
    for expression in BESIDE.split(rule["expr"]):
        assert grouped(expression) <= labels_in(expression)
        for name, matchers in SELECTED.findall(expression):
            assert set(re.findall(r"(\w+)[=!]~?\"", matchers)) <= labels_of(name)
    expression, *_ = BESIDE.split(rule["expr"])
    of_series = grouped(expression) or labels_in(expression)
    texts = " ".join(rule.get("annotations", {}).values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= of_series - {"le"}


CASES = """
LeaseholdDeviceUnhealthy 6m device_uuid=GPU-1 index=1 state=cordoned severity=warning
  leasehold_device_health{device_uuid="GPU-1",index="1",state="cordoned"} 1+0x20
  leasehold_device_health{device_uuid="GPU-1",index="1",state="healthy"} 0+0x20
LeaseholdGpuWithoutLease 2m reason=GpuVisibleWithoutLease instance=1 severity=critical
  leasehold_violations{reason="GpuVisibleWithoutLease",instance="1"} 2+0x20
  leasehold_violations{reason="GpuVisibleToPrivileged",instance="1"} 1+0x20
LeaseholdContainerRuntimeOpen 16m setting=nri instance=1 severity=warning
  leasehold_agent_open_runtime{setting="nri",instance="1"} 1+0x20
LeaseholdApiDown 3m service=api severity=critical
  leasehold_agent_leases{instance="1"} 0+0x20
  leasehold_handling_seconds_count{service="binder"} 0+1x20
LeaseholdPodsWaitLong 10m system=hami reason=A severity=warning
  leasehold_waiting_oldest_seconds{system="hami",reason="A",instance="1"} 3540+60x20
  leasehold_waiting_oldest_seconds{system="hami",reason="B",instance="1"} 0+60x20
  leasehold_waiting_oldest_seconds{system="hami",reason="A",instance="2"} 3540+60x20
LeaseholdEnforcerLost 3m node=a enforcer=hami-core severity=warning
  leasehold_lost_enforcers{node="a",enforcer="hami-core",instance="1"} 1+0x20
  leasehold_lost_enforcers{node="a",enforcer="hami-core",instance="2"} 1+0x20
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
LeaseholdLedgerRebuilt 4m kind=ledger_rebuilt severity=warning
  leasehold_binder_anomalies_total{kind="ledger_rebuilt"} 0 0 0 1+0x20
  leasehold_binder_anomalies_total{kind="deleted_nodes"} 0 0 0 2+0x20
LeaseholdEventsRefused 4m job=binder subject=a severity=warning
  leasehold_events_refused_total{job="binder",subject="a"} 0 0 0 2+0x20
  leasehold_events_refused_total{job="binder",subject="b"} 3+0x20
LeaseholdMessagesUnreadable 4m job=binder severity=warning
  leasehold_nats_unreadable_messages_total{job="binder",instance="1"} 0 0 0 2+0x20
  leasehold_nats_unreadable_messages_total{job="api",instance="1"} 3+0x20
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
  leasehold_waiting_pods{system="hami",reason="A"} 1+0x90
""".strip()
"""An alert, when it must fire and with which labels; then its series, with a sample each minute."""


def cases() -> dict[str, tuple[str, dict[str, str], list[dict[str, str]]]]:
    found: dict[str, tuple[str, dict[str, str], list[dict[str, str]]]] = {}
    for block in re.split(r"\n(?=\w)", CASES):
        head, *series = block.splitlines()
        alert, at, *labels = head.split()
        found[alert] = (at, dict(label.split("=") for label in labels), input_series(series))
    return found


def input_series(lines: list[str]) -> list[dict[str, str]]:
    parts = [line.strip().partition("} ")[::2] for line in lines]
    return [{"series": name + "}", "values": values} for name, values in parts]


def promtool(*arguments: str) -> None:
    """Run promtool, which must succeed."""
    command = [str(PROMTOOL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_rules(folder: Path, test: dict[str, Any]) -> None:
    """Run promtool's test of our rules, with a sample each minute."""
    file = folder / "tests.yaml"
    text = {"rule_files": [str(RULES_FILE)], "tests": [{"interval": "1m", **test}]}
    file.write_text(yaml.safe_dump(text))
    promtool("test", "rules", str(file))


@needs_promtool
def test_the_rules_and_the_expressions_of_dashboards_are_valid(tmp_path: Path) -> None:
    rules = [{"record": "a", "expr": each.replace("$", "")} for each in sorted(panel_expressions())]
    file = tmp_path / "dashboards.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}))

    promtool("check", "rules", "--lint=none", str(file))
    promtool("check", "rules", str(RULES_FILE))
    promtool("check", "config", "--syntax-only", str(MONITORING / "prometheus.yaml"))


def panel_expressions() -> set[str]:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    return {
        target["expr"]
        for dashboard in dashboards
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


RECORDED = """
  leasehold_container_cores_measured_ratio{namespace="a",pod="p",container="1"} 0.2
  leasehold_container_cores_leased_ratio{namespace="a",pod="p",container="1"} 0.5
  leasehold_container_cores_measured_ratio{namespace="a",pod="p",container="2"} 0.1
  leasehold_container_cores_leased_ratio{namespace="a",pod="p",container="2"} 0.5
  leasehold_container_cores_measured_ratio{namespace="b",pod="whole",container="1"} 0.7
  leasehold_container_cores_leased_ratio{namespace="b",pod="whole",container="1"} 0
"""


@needs_promtool
def test_the_recorded_use_of_cores_is_that_of_the_lease_or_of_the_device(tmp_path: Path) -> None:
    expression = "round(namespace_pod:leasehold_cores_used:ratio, 0.001)"
    samples = [
        {"labels": '{namespace="a",pod="p"}', "value": 0.3},
        {"labels": '{namespace="b",pod="whole"}', "value": 0.7},
    ]
    check = {"expr": expression, "eval_time": "0s", "exp_samples": samples}

    inputs = input_series(RECORDED.strip().splitlines())
    run_rules(tmp_path, {"input_series": inputs, "promql_expr_test": [check]})


PODS = """
  leasehold_container_gpus_leased{namespace="a",pod="busy",container="1"} 0.25
  leasehold_container_idle_seconds{namespace="a",pod="busy",container="1"} 900
  leasehold_container_gpus_leased{namespace="a",pod="busy",container="2"} 0.25
  leasehold_container_idle_seconds{namespace="a",pod="busy",container="2"} 0
  leasehold_container_gpus_leased{namespace="a",pod="idle",container="1"} 0.125
  leasehold_container_idle_seconds{namespace="a",pod="idle",container="1"} 900
  leasehold_container_gpus_leased{namespace="a",pod="idle",container="2"} 0.125
  leasehold_container_idle_seconds{namespace="a",pod="idle",container="2"} 700
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="1"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="2"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="0"} 5242880
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="1"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="2"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="0"} 1048576
"""
"""Two pods whose containers 0 are init containers."""


@needs_promtool
@pytest.mark.parametrize(("column", "value"), [("idle", 25), ("memory", 7)])
def test_the_history_has_the_most_of_a_pod_and_is_idle_once_all_its_containers_are(
    column: str, value: float, tmp_path: Path
) -> None:
    expression = AMOUNT_METRICS[column].replace("@", "").replace("$", "600")
    samples = [{"labels": "{}", "value": value}]
    check = {"expr": expression, "eval_time": "0s", "exp_samples": samples}

    inputs = input_series(PODS.strip().splitlines())
    run_rules(tmp_path, {"input_series": inputs, "promql_expr_test": [check]})


@needs_promtool
@pytest.mark.parametrize("alert", cases())
def test_an_alert_fires_for_its_series_only(alert: str, tmp_path: Path) -> None:
    at, labels, inputs = cases()[alert]
    (rule,) = (each for each in ALERTS if each["alert"] == alert)
    expected = {"exp_labels": labels, "exp_annotations": filled(rule["annotations"], labels)}
    is_later = "for" in rule or "increase(" in rule["expr"]
    checks = [
        {"eval_time": "0s", "alertname": alert, "exp_alerts": [] if is_later else [expected]},
        {"eval_time": at, "alertname": alert, "exp_alerts": [expected]},
    ]

    run_rules(tmp_path, {"input_series": inputs, "alert_rule_test": checks})


def filled(annotations: dict[str, str], labels: dict[str, str]) -> dict[str, str]:
    return {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
        for key, text in annotations.items()
    }
