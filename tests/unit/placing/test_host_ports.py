"""Ports of nodes: as kube-scheduler's plugin NodePorts decides, with pods in flight."""

from typing import Any

import msgspec
import pytest

from services.placer.rounds.decisions import DecisionContext, decide
from services.watcher.pod_tracker import PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import LedgerNode
from shared.model.names import NodeName, PodUid
from shared.model.requests.host_ports import HOST_PORT_PARTS, TOO_MANY, HostPorts, ports_in_use
from shared.model.requests.placement import Refusal
from shared.model.requests.request import NodeRequirements
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.support.build import devices, dice, facts, gpu, ledger_node, pod_queued, request
from tests.support.placer.placing import index_of

PARSER = PodParser(frozenset({"leasehold"}), Rules())


def parsed(*ports: str, node: str = "", uid: str = "u", **spec: Any) -> ObservedPod:
    """Parse a pod with ports such as `TCP/127.0.0.1/8080`."""
    listed = []
    for port in ports:
        protocol, address, number = port.split("/")
        listed.append({"protocol": protocol, "hostIP": address, "hostPort": int(number)})
    meta = {"name": "p", "namespace": "ns", "uid": uid}
    where = {"nodeName": node} if node else {"schedulerName": "leasehold"}
    whole = {"containers": [{"name": "c", "ports": listed}], **where, **spec}
    raw = msgspec.json.encode({"metadata": meta, "spec": whole})
    return PARSER.parse(msgspec.json.decode(raw, type=ApiPod))


def wanted(*ports: str) -> HostPorts:
    observed = parsed(*ports)
    assert observed.request is not None
    return observed.request.node_requirements.host_ports


def queued(pod: str, *ports: str) -> PodQueued:
    needs = NodeRequirements(host_ports=wanted(*ports))
    return pod_queued(pod, request(gpu(memory=1_000), node_requirements=needs))


def node(name: str, *running: str) -> LedgerNode:
    """A node on which a pod of another scheduler reserves these ports."""
    pods = PodTracker()
    if running:
        pods.update(parsed(*running, node=name), None)
    used = pods.with_usage(facts(name)).used_by_others
    return ledger_node(name, *devices(2, name), used_by_others=used)


CASES: list[tuple[str, list[str], list[str], bool]] = [
    ("no ports", [], [], True),
    ("another port", ["UDP/127.0.0.1/8080"], ["UDP/127.0.0.1/9090"], True),
    ("the same port", ["UDP/127.0.0.1/8080"], ["UDP/127.0.0.1/8080"], False),
    ("the same port of TCP", ["TCP/127.0.0.1/8080"], ["TCP/127.0.0.1/8080"], False),
    ("another address", ["TCP/127.0.0.1/8080"], ["TCP/127.0.0.2/8080"], True),
    ("another protocol", ["UDP/127.0.0.1/8080"], ["TCP/127.0.0.1/8080"], True),
    ("the second of two", ["UDP/127.0.0.1/8080"], ["TCP/127.0.0.1/8080", "UDP/127.0.0.1/8080"],
     False),
    ("one of two that run", ["TCP/127.0.0.1/8001", "UDP/127.0.0.1/8080"],
     ["TCP/127.0.0.1/8001", "UDP/127.0.0.1/8081"], False),
    ("all addresses beside one", ["TCP/127.0.0.1/8001"], ["TCP/0.0.0.0/8001"], False),
    ("one address beside all", ["TCP/0.0.0.0/8001"], ["TCP/127.0.0.1/8001"], False),
    ("all addresses twice", ["TCP/0.0.0.0/8001"], ["TCP/0.0.0.0/8001"], False),
    ("no address is all addresses", ["TCP//8001"], ["TCP/0.0.0.0/8001"], False),
    ("all of another protocol", ["TCP/127.0.0.1/8001"], ["UDP/0.0.0.0/8001"], True),
    ("all addresses of another port", ["TCP/0.0.0.0/8002"], ["TCP/127.0.0.1/8001"], True),
    ("three addresses", ["TCP/10.0.0.1/80", "TCP/10.0.0.2/80"], ["TCP/10.0.0.3/80"], True),
    ("SCTP", ["SCTP//80"], ["SCTP//80"], False),
]  # fmt: skip
NAMES = [name for name, *_ in CASES]


@pytest.mark.parametrize(("running", "ports", "fits"), [case[1:] for case in CASES], ids=NAMES)
def test_ports_conflict_as_for_kube_scheduler(
    running: list[str], ports: list[str], fits: bool
) -> None:
    context = DecisionContext(index_of(node("n1", *running)), dice(1))

    result = context.choose(queued("p", *ports))

    assert isinstance(result, Refusal) != fits
    if isinstance(result, Refusal):
        assert result.counts == (("NodePorts", 1),)
        assert "1 node(s) didn't have free ports for the requested pod ports" in result.reason
        assert not result.permanent


@pytest.mark.parametrize(("running", "ports", "fits"), [case[1:] for case in CASES], ids=NAMES)
def test_ports_of_pods_that_are_being_placed_conflict_too(
    running: list[str], ports: list[str], fits: bool
) -> None:
    context = DecisionContext(index_of(node("n1")), dice(1))

    first = decide([queued("first", *running)], context)
    second = decide([queued("second", *ports)], context)
    context.mirror.drop(PodUid("first"))
    context.mirror.drop(PodUid("second"))
    third = context.choose(queued("third", *ports))

    assert not first.refused
    assert bool(second.refused) != fits
    assert not isinstance(third, Refusal)


def test_pods_with_one_port_get_a_node_each() -> None:
    context = DecisionContext(index_of(node("n1"), node("n2", "TCP//80"), node("n3")), dice(1))

    decisions = decide([queued(f"p{number}", "TCP//80") for number in range(3)], context)

    nodes = {candidates[0].node for _, candidates in decisions.chosen}
    assert nodes == {NodeName("n1"), NodeName("n3")}
    assert [event.pod for event, _ in decisions.refused] == ["p2"]


def test_a_node_with_too_many_ports_in_use_gets_no_pod_with_ports() -> None:
    pods = PodTracker()
    for number in range(3):
        ports = [f"TCP//{100 * number + port}" for port in range(1, 51)]
        pods.update(parsed(*ports, node="n1", uid=f"u{number}"), None)
    used = pods.with_usage(facts("n1")).used_by_others
    crowded = ledger_node("n1", *devices(1), used_by_others=used)
    context = DecisionContext(index_of(crowded), dice(1))

    assert ports_in_use(used) == {TOO_MANY: HOST_PORT_PARTS}
    assert isinstance(context.choose(queued("p", "TCP//9000")), Refusal)
    assert not isinstance(context.choose(queued("q")), Refusal)


def test_ports_of_init_containers_do_not_count_and_those_of_sidecars_do() -> None:
    init = {"name": "init", "ports": [{"hostPort": 80}]}
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "ports": [{"hostPort": 81}]}

    observed = parsed(initContainers=[init, sidecar])

    port = ("host port TCP/81", HOST_PORT_PARTS)
    assert observed.request is not None
    assert observed.request.node_requirements.host_ports == (port,)
    assert ports_in_use(observed.resources) == dict([port])
    assert not ports_in_use(observed.request.resources)


def test_a_pod_with_more_ports_than_are_counted_is_refused() -> None:
    observed = parsed(*(f"TCP//{number}" for number in range(1, 66)))

    assert observed.request is None
    assert observed.request_error == "the pod reserves 65 ports of its node: 64 at most"
