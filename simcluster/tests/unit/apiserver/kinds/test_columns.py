"""The columns that `kubectl get` shows."""

import pytest

from simcluster.apimachinery.objects import Json
from simcluster.apimachinery.pods import status_summary
from simcluster.apimachinery.printer_columns import format_age, format_duration
from simcluster.apiserver.kinds.columns import COLUMNS
from simcluster.apiserver.kinds.disruption_budgets import budget_causes, budget_status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (150, "2m30s"),
        (3600, "60m"),
        (4 * 3600 + 300, "4h5m"),
        (30 * 3600, "30h"),
        (3 * 86400 + 3600, "3d1h"),
        (100 * 86400, "100d"),
        (800 * 86400, "2y70d"),
    ],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("pod", "word"),
    [
        ({"status": {"phase": "Running"}}, "Running"),
        ({"status": {"phase": "Failed", "reason": "UnexpectedAdmissionError"}},
         "UnexpectedAdmissionError"),
        ({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running"}}, "Terminating"),
        ({"status": {"phase": "Pending", "containerStatuses": [
            {"state": {"waiting": {"reason": "ContainerCreating"}}}]}}, "ContainerCreating"),
        ({"status": {"phase": "Failed", "containerStatuses": [
            {"state": {"terminated": {"exitCode": 3}}}]}}, "ExitCode:3"),
        ({"spec": {"initContainers": [{}, {}]}, "status": {"phase": "Pending",
          "initContainerStatuses": [{"state": {"running": {}}}]}}, "Init:0/2"),
    ],
)  # fmt: skip
def test_the_status_column_of_pods(pod: Json, word: str) -> None:
    assert status_summary(pod) == word


def test_the_status_column_of_nodes() -> None:
    node = {
        "metadata": {"name": "n", "labels": {"node-role.kubernetes.io/gpu": ""}},
        "spec": {"unschedulable": True},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }

    cells = {column.name: column.cell(node, 0.0) for column in COLUMNS["nodes"]}

    assert cells["Status"] == "Ready,SchedulingDisabled"
    assert cells["Roles"] == "gpu"


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({"minAvailable": 2}, 1),
        ({"minAvailable": "50%"}, 1),
        ({"maxUnavailable": 1}, 1),
        ({"maxUnavailable": 0}, 0),
        ({"minAvailable": 5}, 0),
    ],
)
def test_disruptions_allowed_follow_the_budget(spec: Json, allowed: int) -> None:
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    pods = [{"metadata": {}, "status": ready} for _ in range(3)]

    assert budget_status({"metadata": {}, "spec": spec}, pods)["disruptionsAllowed"] == allowed


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"minAvailable": "some"}, "spec.minAvailable"),
        ({"minAvailable": 1, "maxUnavailable": 1}, "spec"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}, "spec.selector"),
    ],
)
def test_invalid_budgets_are_refused(spec: Json, field: str) -> None:
    assert [cause.field for cause in budget_causes({"spec": spec})] == [field]


def test_a_malformed_time_has_an_unknown_age() -> None:
    assert format_age("yesterday", 0.0) == format_age(None, 0.0) == "<unknown>"
