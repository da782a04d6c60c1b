"""The alerts, as promtool evaluates them over series like those that the services export."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ALERTS = Path(__file__).parents[2] / "k8s" / "monitoring" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

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


def evaluate(folder: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": list(tests)}))
    return subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )


def test_the_rules_are_valid() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", cases())
def test_an_alert_fires_for_its_series_only(alert: str, tmp_path: Path) -> None:
    at, labels, inputs = cases()[alert]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (rule,) = (each for each in rules if each["alert"] == alert)
    expected = {"exp_labels": labels, "exp_annotations": _filled(rule["annotations"], labels)}
    is_later = "for" in rule or "increase(" in rule["expr"]
    checks = [
        {"eval_time": "0s", "alertname": alert, "exp_alerts": [] if is_later else [expected]},
        {"eval_time": at, "alertname": alert, "exp_alerts": [expected]},
    ]

    done = evaluate(tmp_path, {"interval": "1m", "input_series": inputs, "alert_rule_test": checks})

    assert done.returncode == 0, done.stdout + done.stderr


def _filled(annotations: dict[str, str], labels: dict[str, str]) -> dict[str, str]:
    return {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
        for key, text in annotations.items()
    }
