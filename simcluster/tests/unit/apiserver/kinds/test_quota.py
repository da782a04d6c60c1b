"""What pods count against quotas, and how amounts are written."""

import pytest

from simcluster.apimachinery.objects import Json
from simcluster.apiserver.kinds.quantities import Quantity, add_amounts, parse_amounts, quantity
from simcluster.apiserver.kinds.quota_usage import missing_amounts, pod_usage, quota_matches


def a_pod(*containers: Json, **spec: object) -> Json:
    whole = {"containers": list(containers), **spec}
    return {"metadata": {"name": "p"}, "spec": whole, "status": {"phase": "Pending"}}


def container_with(limits: Json | None = None, **requests: str) -> Json:
    claim: Json = {"name": "c", "resources": {"requests": {**requests, **(limits or {})}}}
    if limits:
        claim["resources"]["limits"] = limits
    return claim


@pytest.mark.parametrize(
    ("text", "written"),
    [("1000m", "1"), ("1500m", "1500m"), ("1024Mi", "1Gi"), ("1536Mi", "1536Mi"), ("2000", "2k"),
     ("1000000", "1M"), ("0", "0"), ("512", "512"), ("0.1", "100m"), ("1073741824", "1073741824"),
     ("0.5Gi", "512Mi"), ("1e3", "1k"), ("100u", "100u")],
)  # fmt: skip
def test_quantities_are_written_as_kubernetes_writes_them(text: str, written: str) -> None:
    assert str(quantity(text)) == written


def test_a_sum_has_the_suffix_form_of_its_first_summand() -> None:
    assert str(Quantity() + quantity("1Gi") + quantity("1073741824")) == "2Gi"
    assert add_amounts(parse_amounts({"a": "1"}), parse_amounts({"b": "2"})) == parse_amounts(
        {"a": "1", "b": "2"}
    )


def test_init_containers_count_by_their_peak_and_sidecars_are_added() -> None:
    pod = a_pod(
        container_with(cpu="1"),
        container_with(cpu="1"),
        initContainers=[
            {**container_with(cpu="500m"), "restartPolicy": "Always"},
            container_with(cpu="4"),
        ],
        overhead={"cpu": "100m"},
    )

    counted = pod_usage(pod)

    assert str(counted["requests.cpu"]) == str(counted["cpu"]) == "4600m"
    assert "limits.cpu" not in counted


def test_extended_resources_count_as_requests_only() -> None:
    counted = pod_usage(
        a_pod(container_with({"nvidia.com/gpu": "2"}), container_with({"nvidia.com/gpu": "1"}))
    )

    assert {name: str(quantity) for name, quantity in counted.items()} == {
        "count/pods": "1", "pods": "1", "requests.nvidia.com/gpu": "3"}  # fmt: skip


def test_a_pod_that_has_ended_counts_as_an_object_only() -> None:
    pod = a_pod(container_with(cpu="1"))
    pod["status"]["phase"] = "Succeeded"

    assert set(pod_usage(pod)) == {"count/pods"}


@pytest.mark.parametrize(
    ("spec", "counted"),
    [
        ({"scopes": ["BestEffort"]}, False),
        ({"scopes": ["NotBestEffort"]}, True),
        ({"scopes": ["Terminating"]}, False),
        ({"scopes": ["NotTerminating", "NotBestEffort"]}, True),
        ({"scopes": ["PriorityClass"]}, True),
        ({"scopes": ["CrossNamespacePodAffinity"]}, False),
        ({"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}, True),
        ({"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "NotIn", "values": ["high"]}]}}, False),
        ({"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "DoesNotExist"}]}}, False),
    ],
)  # fmt: skip
def test_scopes_select_pods(spec: Json, counted: bool) -> None:
    pod = a_pod(container_with(cpu="1"), priorityClassName="high")

    assert quota_matches({"spec": {"hard": {"pods": "1"}, **spec}}, pod) is counted


def test_a_quota_on_cpu_requires_cpu_of_every_container() -> None:
    unlimited = {"name": "unlimited"}

    assert missing_amounts(["limits.cpu", "cpu"], a_pod(container_with(cpu="1"), unlimited)) == (
        "must specify cpu for: unlimited; limits.cpu for: c,unlimited"
    )
    assert missing_amounts(["requests.nvidia.com/gpu"], a_pod(unlimited)) == ""
