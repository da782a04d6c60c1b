"""The general predicates of a kubelet."""

from collections.abc import Mapping

import pytest

from simcluster.apimachinery.objects import Json
from simcluster.kubelet.pods.predicates import KubeletNodeFacts, check_predicates
from tests.support.simcluster.pod_specs import container, pod_spec


def node_facts(labels: Mapping[str, str] | None = None, **allocatable: int) -> KubeletNodeFacts:
    room = {"cpu": 4000, "memory": 1 << 30, "pods": 2, **allocatable}
    return KubeletNodeFacts(name="n", labels=labels or {}, allocatable=room, managed=frozenset())


def test_the_pod_count_is_checked_too() -> None:
    rejection = check_predicates(
        pod_spec(container()), [pod_spec(container()), pod_spec(container())], node_facts()
    )

    assert rejection is not None
    assert rejection.reason == "OutOfpods"


def affinity(operator: str, *values: str) -> Json:
    expression = {"key": "size", "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


@pytest.mark.parametrize(
    ("operator", "values", "admitted"),
    [
        ("In", ("8",), True),
        ("NotIn", ("8",), False),
        ("Exists", (), True),
        ("DoesNotExist", (), False),
        ("Gt", ("7",), True),
        ("Lt", ("7",), False),
        ("Unheard", (), False),
    ],
)
def test_node_affinity_operators_match_as_in_kubernetes(
    operator: str, values: tuple[str, ...], admitted: bool
) -> None:
    wanted = pod_spec(container(), affinity=affinity(operator, *values))

    assert (check_predicates(wanted, [], node_facts({"size": "8"})) is None) is admitted


def test_two_pods_cannot_share_a_host_port() -> None:
    spec = pod_spec(container() | {"ports": [{"containerPort": 80, "hostPort": 80}]})
    rejection = check_predicates(spec, [spec], node_facts())

    assert rejection is not None
    assert rejection.reason == "NodePorts"
