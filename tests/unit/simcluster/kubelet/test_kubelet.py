"""The simulated kubelet's decisions: devices, predicates, commands, phases, the checkpoint."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.container_spec import (
    ContainerBehaviour,
    PodSpec,
    annotation_error,
    parse_behaviour,
    parse_duration_s,
    parse_pod,
    pod_requests,
)
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState, PodState
from simcluster.kubelet.containers.container_status import phase, pod_status
from simcluster.kubelet.devices.checkpoint import decode_checkpoint, encode_checkpoint
from simcluster.kubelet.devices.device_state import (
    AllocationError,
    DeviceAllocation,
    DeviceState,
    choose_devices,
    pick_devices,
)
from simcluster.kubelet.devices.pod_resources import BURST, TokenBucket
from simcluster.kubelet.devices.registration import is_extended_resource
from simcluster.kubelet.node import node_status
from simcluster.kubelet.pods.predicates import NodeFacts, check_predicates
from simcluster.kubelet.settings import NodeSettings

SLOT = "example.com/slot"


def pod(*containers: Json, **spec: Any) -> PodSpec:
    meta = {
        "uid": "u",
        "namespace": "default",
        "name": "one",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": spec.pop("annotations", {}),
    }
    return parse_pod({"metadata": meta, "spec": {"containers": list(containers), **spec}})


def container(name: str = "main", *command: str, **requests: str) -> Json:
    return {"name": name, "command": list(command), "resources": {"requests": requests}}


def node(labels: Mapping[str, str] | None = None, **allocatable: int) -> NodeFacts:
    room = {"cpu": 4000, "memory": 1 << 30, "pods": 2, **allocatable}
    return NodeFacts(name="n", labels=labels or {}, allocatable=room, managed=frozenset())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((), ContainerBehaviour(None)),
        (("sleep", "3"), ContainerBehaviour(3.0)),
        (("/bin/sleep", "infinity"), ContainerBehaviour(None)),
        (("sh", "-c", "sleep 2"), ContainerBehaviour(2.0)),
        (("sh", "-c", "sleep 2; false"), ContainerBehaviour(None)),
        (("false",), ContainerBehaviour(0, 1)),
        (("env",), ContainerBehaviour(0)),
        (("python", "train.py"), ContainerBehaviour(None)),
    ],
)
def test_a_command_says_how_long_a_container_runs(
    command: tuple[str, ...], expected: ContainerBehaviour
) -> None:
    (one,) = pod(container("main", *command)).containers

    assert parse_behaviour(one, {}) == expected


def test_annotations_decide_over_the_command() -> None:
    (one,) = pod(container("main", "sleep", "100")).containers
    told = {"sim.leasehold.dev/run-for": "150ms", "sim.leasehold.dev/exit-code": "7"}

    assert parse_behaviour(one, told) == ContainerBehaviour(0.15, 7)


def test_an_init_container_succeeds_at_once() -> None:
    first, _ = pod(container(), initContainers=[container("first")]).containers

    assert parse_behaviour(first, {}) == ContainerBehaviour(0)


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("150ms", 0.15), ("3m", 180), ("4", 4)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_a_sidecar_counts_beside_init_containers_and_for_the_whole_run() -> None:
    sidecar = container("side", cpu="1") | {"restartPolicy": "Always"}
    init = [sidecar, container("first", cpu="3")]

    assert pod_requests(pod(container(cpu="2"), initContainers=init)) == {"cpu": 4000}


@pytest.mark.parametrize(
    "name", ["example.com/slot", "volcano.sh/vgpu-number", "tencent.com/vcuda-core"]
)
def test_a_domain_and_a_name_make_an_extended_resource(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name", ["cpu", "kubernetes.io/x", "a.kubernetes.io/x", "UPPER.com/x", "a/"]
)
def test_other_names_do_not(name: str) -> None:
    assert not is_extended_resource(name)


def holding(pod_uid: str, *devices: str) -> DeviceAllocation:
    return DeviceAllocation(pod_uid, "main", SLOT, frozenset(devices), b"answer")


def ledger(*holdings: DeviceAllocation, healthy: str = "abcd") -> DeviceState:
    made = DeviceState()
    made.update(SLOT, dict.fromkeys(healthy, "Healthy"))
    for each in holdings:
        made.record(each)
    return made


def test_devices_in_use_are_not_available() -> None:
    with pytest.raises(AllocationError, match="Requested: 3, Available: 2"):
        choose_devices(ledger(holding("p", "a", "b")), SLOT, 3, ())


def test_reused_devices_come_first_and_need_no_others() -> None:
    choice = choose_devices(ledger(holding("p", "a", "b")), SLOT, 2, ["a", "b"])

    assert (choice.needed, pick_devices(choice, [])) == (0, frozenset("ab"))


@given(st.sets(st.sampled_from("abcd")), st.lists(st.sampled_from("abcdxyz")), st.integers(0, 4))
def test_what_a_container_gets_is_free_and_exactly_enough(
    used: set[str], preferred: list[str], required: int
) -> None:
    made = ledger(holding("p", *used))
    if len(used) + required > 4:
        with pytest.raises(AllocationError):
            choose_devices(made, SLOT, required, ())
        return

    devices = pick_devices(choose_devices(made, SLOT, required, ()), preferred)

    assert len(devices) == required
    assert not devices & used


def test_a_plugin_that_has_gone_leaves_its_capacity_listed() -> None:
    made = ledger()
    made.mark_unhealthy(SLOT)

    assert (made.capacity(), made.allocatable()) == ({SLOT: 4}, {SLOT: 0})


def test_a_checkpoint_keeps_holdings_and_expects_the_plugins_back() -> None:
    restored = decode_checkpoint(encode_checkpoint(ledger(holding("p", "a", "b"))))

    assert restored.allocations == ledger(holding("p", "a", "b")).allocations
    assert restored.capacity() == {SLOT: 0}


def test_a_checkpoint_that_was_changed_is_refused() -> None:
    content = encode_checkpoint(ledger(holding("p", "a"))).replace(b'"PodUID":"p"', b'"PodUID":"q"')

    with pytest.raises(ValueError, match="checksum"):
        decode_checkpoint(content)


def test_the_pod_count_is_checked_too() -> None:
    rejection = check_predicates(pod(container()), [pod(container()), pod(container())], node())

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
def test_node_affinity_operators(operator: str, values: tuple[str, ...], admitted: bool) -> None:
    wanted = pod(container(), affinity=affinity(operator, *values))

    assert (check_predicates(wanted, [], node({"size": "8"})) is None) is admitted


def test_two_pods_cannot_share_a_host_port() -> None:
    one = pod(container() | {"ports": [{"containerPort": 80, "hostPort": 80}]})
    rejection = check_predicates(one, [one], node())

    assert rejection is not None
    assert rejection.reason == "NodePorts"


def state(*phases: tuple[ContainerPhase, int | None]) -> PodState:
    containers = {}
    for number, (where, code) in enumerate(phases):
        made = ContainerState()
        if where is not ContainerPhase.WAITING:
            made.set_running("id", 1.0, None)
        if code is not None:
            made.set_terminated(code, 2.0)
        containers[f"c{number}"] = made
    return PodState("u", "default", "one", "10.0.0.1", 1.0, containers)


WAITING = (ContainerPhase.WAITING, None)
RUNNING = (ContainerPhase.RUNNING, None)


def ended(code: int) -> tuple[ContainerPhase, int]:
    return ContainerPhase.TERMINATED, code


@pytest.mark.parametrize(
    ("policy", "first", "second", "expected"),
    [
        ("Always", WAITING, RUNNING, "Pending"),
        ("Always", RUNNING, RUNNING, "Running"),
        ("Always", ended(0), ended(0), "Running"),
        ("OnFailure", ended(0), ended(0), "Succeeded"),
        ("OnFailure", ended(0), ended(1), "Running"),
        ("Never", ended(0), ended(1), "Failed"),
        ("Never", ended(0), RUNNING, "Running"),
    ],
)
def test_the_phase_follows_from_the_containers_and_the_restart_policy(
    policy: str,
    first: tuple[ContainerPhase, int | None],
    second: tuple[ContainerPhase, int | None],
    expected: str,
) -> None:
    two = pod(container("c0"), container("c1"), restartPolicy=policy)

    assert phase(two, state(first, second)) == expected


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    one, running = pod(container("c0")), state(RUNNING)
    before = pod_status(one, running, {}, "127.0.0.1", now=10.0)
    after = pod_status(one, running, before, "127.0.0.1", now=99.0)

    assert after == before


def test_capacity_decides_about_amounts_that_others_patched() -> None:
    previous = {"capacity": {"example.com/mib": "5"}, "allocatable": {"example.com/other": "1"}}
    status = node_status(
        "n", NodeSettings(), port=1, previous=previous, counts=({SLOT: 3}, {SLOT: 2}), now=0.0
    )

    assert (status["capacity"][SLOT], status["allocatable"][SLOT]) == ("3", "2")
    assert status["allocatable"]["example.com/mib"] == "5"
    assert "example.com/other" not in status["allocatable"]


def test_pod_resources_allows_a_burst_and_then_a_hundred_a_second() -> None:
    now = [0.0]
    limit = TokenBucket(lambda: now[0])

    assert [limit.allows() for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    now[0] = 0.011
    assert limit.allows()


def test_an_annotation_that_is_no_duration_is_named() -> None:
    assert "run-for is 'soon'" in str(annotation_error({"sim.leasehold.dev/run-for": "soon"}))
    assert annotation_error({"sim.leasehold.dev/stop-after": "3s"}) is None
