"""Dashboards and alerts ask only for metrics that exist; alerts fire for their series only."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import services.cli.commands  # noqa: F401 - declares the commands
from services.api.reports.prometheus import AMOUNT_METRICS, LEASED, SENSOR_METRICS, WAITING_PODS
from services.cli.arguments import COMMANDS
from tests.contract.test_pages import anchors
from tests.support.servers.prometheus import MISSING, PROMTOOL
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
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)


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
LeaseholdServiceDown 2m job=binder instance=1 severity=critical
  up{job="binder",instance="1"} 0+0x20
  up{job="placer",instance="1"} 1+0x20
  up{job="app",instance="1"} 0+0x20
LeaseholdServiceDown never
  up{job="binder",instance="1"} 0+0x20
  leasehold_missing_components{service="binder"} 1+0x20
LeaseholdApiDown never
  leasehold_agent_leases{instance="1"} 0+0x20
  leasehold_handling_seconds_count{service="api"} 0+1x20
LeaseholdEventHandlingFails 11m service=binder handler=bind severity=warning
  leasehold_events_handled_total{service="binder",handler="bind",outcome="bug"} 0+1x20
  leasehold_events_handled_total{service="binder",handler="report",outcome="bug"} 3+0x20
  leasehold_events_handled_total{service="placer",handler="place",outcome="ok"} 0+1x20
LeaseholdWorkNotReceived 4m service=binder subject=a severity=warning
  leasehold_resent_messages_total{service="binder",subject="a",instance="1"} 0+24x20
  leasehold_resent_messages_total{service="binder",subject="a",instance="2"} 0+24x20
  leasehold_resent_messages_total{service="binder",subject="b"} 0+24x20
LeaseholdWorkNotReceived never
  leasehold_resent_messages_total{service="binder",subject="a"} 0+60x20
  leasehold_missing_components{service="placer"} 1+0x20
LeaseholdHandlingSlow 16m service=placer handler=place severity=warning
  leasehold_handling_seconds_bucket{service="placer",handler="place",le="1"} 0+50x20
  leasehold_handling_seconds_bucket{service="placer",handler="place",le="5"} 0+60x20
  leasehold_handling_seconds_bucket{service="placer",handler="place",le="+Inf"} 0+60x20
  leasehold_handling_seconds_bucket{service="binder",handler="bind",le="1"} 0+60x20
  leasehold_handling_seconds_bucket{service="binder",handler="bind",le="+Inf"} 0+60x20
LeaseholdPlacerWithoutNodes 3m instance=1 severity=critical
  leasehold_placer_nodes{instance="1"} 0+0x20
  leasehold_placer_nodes{instance="2"} 3+0x20
LeaseholdLedgerMismatch 4m kind=lost_leases severity=critical
  leasehold_binder_anomalies_total{kind="lost_leases"} 0 0 0 2+0x20
  leasehold_binder_anomalies_total{kind="deleted_nodes"} 0 0 0 2+0x20
LeaseholdBudgetAccountInvalid 4m kind=clock-ahead instance=1 severity=critical
  leasehold_ledger_invariant_violations_total{kind="clock-ahead",instance="1"} 0 0 0 1+0x20
  leasehold_ledger_invariant_violations_total{kind="journal-cut",instance="1"} 2+0x20
LeaseholdAllocationsRefused 11m instance=1 severity=warning
  leasehold_allocations_total{instance="1",resource="a",outcome="refused"} 0+5x20
  leasehold_allocations_total{instance="1",resource="b",outcome="refused"} 0+5x20
  leasehold_allocations_total{instance="2",resource="a",outcome="refused"} 0+5x20
  leasehold_allocations_total{instance="2",resource="a",outcome="granted"} 0+60x20
LeaseholdOvercommitRefused 4m instance=1 severity=critical
  leasehold_overcommits_refused_total{instance="1"} 0 0 0 1+0x20
  leasehold_overcommits_refused_total{instance="2"} 2+0x20
LeaseholdAgentUnregistered 3m instance=1 severity=warning
  leasehold_agent_unregistered{instance="1"} 1+0x20
  leasehold_agent_unregistered{instance="2"} 0+0x20
LeaseholdWebhookCertificateExpires 62m instance=1 severity=critical
  leasehold_webhook_certificate_expiration_timestamp_seconds{instance="1"} 2592000+0x70
  leasehold_webhook_certificate_expiration_timestamp_seconds{instance="2"} 2600000+0x70
LeaseholdAuthCertificateExpires 62m instance=1 severity=critical
  leasehold_auth_certificate_expiration_timestamp_seconds{instance="1"} 5184000+0x70
  leasehold_auth_certificate_expiration_timestamp_seconds{instance="2"} 5200000+0x70
LeaseholdMigPartitioningFails 4m instance=1 outcome=failed severity=warning
  leasehold_mig_partitions_total{instance="1",outcome="failed"} 0 0 0 1+0x20
  leasehold_mig_partitions_total{instance="1",outcome="created"} 0 0 0 1+0x20
LeaseholdIsolationLost 2m pod=p instance=1 severity=critical
  leasehold_container_isolation_lost{pod="p",instance="1"} 1+0x20
  leasehold_container_isolation_lost{pod="q",instance="1"} 0+0x20
LeaseholdGpuHot 6m device_uuid=GPU-1 instance=1 reason=temperature severity=warning
  leasehold_gpu_throttled{device_uuid="GPU-1",instance="1",reason="temperature"} 1+0x20
  leasehold_gpu_throttled{device_uuid="GPU-2",instance="1",reason="power limit"} 1+0x20
LeaseholdNodeClosed 3m value=2 severity=warning
  leasehold_closed_nodes{instance="1"} 2+0x20
  leasehold_closed_nodes{instance="2"} 2+0x20
LeaseholdNodeClosed never
  leasehold_closed_nodes{instance="1"} 2+0x20
  leasehold_missing_components{service="node-agent"} 2+0x20
LeaseholdServerSlow 3m service=redis value=2.5s severity=warning
  leasehold_server_reply_seconds{service="redis",instance="1"} 2.5+0x20
  leasehold_server_reply_seconds{service="redis",instance="2"} 1+0x20
  leasehold_server_reply_seconds{service="nats",instance="1"} 0.1+0x20
LeaseholdClocksDiffer 2m service=binder value=6s severity=warning
  leasehold_clock_difference_seconds{service="binder",instance="1"} 6+0x20
  leasehold_clock_difference_seconds{service="binder",instance="2"} 5+0x20
  leasehold_clock_difference_seconds{service="placer",instance="1"} 1+0x20
LeaseholdGpuHeldByEndedPod 2m instance=1 value=1 severity=warning
  leasehold_agent_leftovers{instance="1"} 1+0x20
  leasehold_agent_leftovers{instance="2"} 0+0x20
LeaseholdDeviceUnhealthy 6m device_uuid=GPU-1 index=1 state=cordoned severity=warning
  leasehold_device_health{device_uuid="GPU-1",index="1",state="cordoned"} 1+0x20
  leasehold_device_health{device_uuid="GPU-1",index="1",state="healthy"} 0+0x20
LeaseholdGpuWithoutLease 2m reason=GpuVisibleWithoutLease instance=1 value=2 severity=critical
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
"""An alert, when it must fire, and with which labels and value; or `never`, also after 20 minutes.
Then its series, with a sample each minute."""
LATE = "20m"


@dataclass(frozen=True)
class Case:
    alert: str
    at: str
    labels: dict[str, str]
    """Of the alert that fires, and its `value`; none if it never fires."""
    inputs: list[dict[str, str]]


def cases() -> Iterator[Case]:
    for block in re.split(r"\n(?=\w)", CASES):
        head, *series = block.splitlines()
        alert, at, *labels = head.split()
        yield Case(
            alert=alert,
            at=LATE if at == "never" else at,
            labels=dict(label.split("=") for label in labels),
            inputs=input_series(series),
        )


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    assert {case.alert for case in cases() if case.labels} == {rule["alert"] for rule in ALERTS}


def input_series(lines: list[str]) -> list[dict[str, str]]:
    parts = [line.strip().partition("} ")[::2] for line in lines]
    return [{"series": name + "}", "values": values} for name, values in parts]


def promtool(*arguments: str) -> None:
    """Run promtool, which must succeed."""
    command = [str(PROMTOOL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_rules(folder: Path, *tests: dict[str, Any]) -> None:
    """Run promtool's tests of our rules, with a sample each minute."""
    file = folder / "tests.yaml"
    each_minute = [{"interval": "1m", **test} for test in tests]
    text = {"rule_files": [str(RULES_FILE)], "tests": each_minute}
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


SELECTOR = re.compile(r"([\w:]+)\{([^}]*)\}")


def one_series_each(expression: str) -> list[dict[str, str]]:
    """A series of each metric that an expression reads, with a label for each that it can have."""
    matched = {
        name: dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))
        for name, matchers in SELECTOR.findall(expression)
    }
    inputs: list[dict[str, str]] = []
    for name in sorted(metrics_in(expression) or {"up"}):
        if rule := next((rule for rule in RULES if rule.get("record") == name), None):
            inputs += one_series_each(rule["expr"])
            continue
        wanted = matched.get(name, {})
        ends = ("1", "+Inf") if name.endswith("_bucket") else ("",)
        for end in ends:
            labels = {label: wanted.get(label, "x") for label in labels_of(name)} | {"le": end}
            pairs = ",".join(f'{label}="{text}"' for label, text in labels.items() if text)
            inputs.append({"series": f"{name}{{{pairs}}}", "values": "1+0x20"})
    return inputs


@needs_promtool
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_panel_shows_one_series_of_one_series_of_its_metrics(
    path: Path, tmp_path: Path
) -> None:
    """Metrics whose labels do not match would give none, and a default of 0 a second one."""
    expressions = [
        re.sub(r'=~"\$\w+"', '=~"x"', target["expr"].replace("$instance:.*", "x"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    tests = [
        {
            "input_series": one_series_each(expression),
            "promql_expr_test": [
                {
                    "expr": f"count({expression})",
                    "eval_time": "15m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for expression in expressions
    ]

    run_rules(tmp_path, *tests)


@needs_promtool
@pytest.mark.parametrize("case", [*cases()], ids=lambda case: f"{case.alert} {case.at}")
def test_an_alert_fires_for_its_series_only(case: Case, tmp_path: Path) -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == case.alert)
    texts = filled(rule["annotations"], case.labels)
    labels = {name: text for name, text in case.labels.items() if name != "value"}
    fires = [{"exp_labels": labels, "exp_annotations": texts}] if case.labels else []
    is_later = "for" in rule or "increase(" in rule["expr"]
    checks = [
        {"eval_time": "0s", "alertname": case.alert, "exp_alerts": [] if is_later else fires},
        {"eval_time": case.at, "alertname": case.alert, "exp_alerts": fires},
    ]

    run_rules(tmp_path, {"input_series": case.inputs, "alert_rule_test": checks})


VALUE = re.compile(r"\{\{ \$value(?: \| \w+)? \}\}")


def filled(annotations: dict[str, str], labels: dict[str, str]) -> dict[str, str]:
    return {
        key: VALUE.sub(
            labels.get("value", ""),
            re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda name: labels.get(name[1], ""), text),
        )
        for key, text in annotations.items()
    }
