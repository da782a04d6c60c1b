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


def pod_spec(*containers: Json, **spec: Any) -> PodSpec:
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


def node_facts(labels: Mapping[str, str] | None = None, **allocatable: int) -> NodeFacts:
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
def test_the_command_decides_how_long_a_container_runs(
    command: tuple[str, ...], expected: ContainerBehaviour
) -> None:
    (one,) = pod_spec(container("main", *command)).containers

    assert parse_behaviour(one, {}) == expected


def test_annotations_take_precedence_over_the_command() -> None:
    (one,) = pod_spec(container("main", "sleep", "100")).containers
    annotations = {"sim.leasehold.dev/run-for": "150ms", "sim.leasehold.dev/exit-code": "7"}

    assert parse_behaviour(one, annotations) == ContainerBehaviour(0.15, 7)


def test_an_init_container_succeeds_at_once() -> None:
    first, _ = pod_spec(container(), initContainers=[container("first")]).containers

    assert parse_behaviour(first, {}) == ContainerBehaviour(0)


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("150ms", 0.15), ("3m", 180), ("4", 4)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_a_sidecar_counts_with_init_containers_and_for_the_whole_run() -> None:
    sidecar = container("side", cpu="1") | {"restartPolicy": "Always"}
    init = [sidecar, container("first", cpu="3")]

    assert pod_requests(pod_spec(container(cpu="2"), initContainers=init)) == {"cpu": 4000}


@pytest.mark.parametrize(
    "name", ["example.com/slot", "volcano.sh/vgpu-number", "tencent.com/vcuda-core"]
)
def test_a_domain_and_a_name_make_an_extended_resource(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name", ["cpu", "kubernetes.io/x", "a.kubernetes.io/x", "UPPER.com/x", "a/"]
)
def test_other_names_are_no_extended_resources(name: str) -> None:
    assert not is_extended_resource(name)


def allocation(pod_uid: str, *devices: str) -> DeviceAllocation:
    return DeviceAllocation(pod_uid, "main", SLOT, frozenset(devices), b"answer")


def device_state(*allocations: DeviceAllocation, healthy: str = "abcd") -> DeviceState:
    made = DeviceState()
    made.update(SLOT, dict.fromkeys(healthy, "Healthy"))
    for each in allocations:
        made.record(each)
    return made


def test_devices_in_use_are_not_available() -> None:
    with pytest.raises(AllocationError, match="Requested: 3, Available: 2"):
        choose_devices(device_state(allocation("p", "a", "b")), SLOT, 3, ())


def test_reused_devices_come_first() -> None:
    choice = choose_devices(device_state(allocation("p", "a", "b")), SLOT, 2, ["a", "b"])

    assert (choice.needed, pick_devices(choice, [])) == (0, frozenset("ab"))


@given(st.sets(st.sampled_from("abcd")), st.lists(st.sampled_from("abcdxyz")), st.integers(0, 4))
def test_a_container_gets_free_devices_in_the_requested_number(
    used: set[str], preferred: list[str], required: int
) -> None:
    made = device_state(allocation("p", *used))
    if len(used) + required > 4:
        with pytest.raises(AllocationError):
            choose_devices(made, SLOT, required, ())
        return

    devices = pick_devices(choose_devices(made, SLOT, required, ()), preferred)

    assert len(devices) == required
    assert not devices & used


def test_the_capacity_of_a_lost_plugin_stays_listed() -> None:
    made = device_state()
    made.mark_unhealthy(SLOT)

    assert (made.capacity(), made.allocatable()) == ({SLOT: 4}, {SLOT: 0})


def test_a_checkpoint_has_allocations_and_resources_without_devices() -> None:
    restored = decode_checkpoint(encode_checkpoint(device_state(allocation("p", "a", "b"))))

    assert restored.allocations == device_state(allocation("p", "a", "b")).allocations
    assert restored.capacity() == {SLOT: 0}


def test_a_checkpoint_that_was_changed_is_refused() -> None:
    content = encode_checkpoint(device_state(allocation("p", "a"))).replace(b'"PodUID":"p"', b'"PodUID":"q"')

    with pytest.raises(ValueError, match="checksum"):
        decode_checkpoint(content)


def test_the_pod_count_is_checked_too() -> None:
    rejection = check_predicates(pod_spec(container()), [pod_spec(container()), pod_spec(container())], node_facts())

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
    wanted = pod_spec(container(), affinity=affinity(operator, *values))

    assert (check_predicates(wanted, [], node_facts({"size": "8"})) is None) is admitted


def test_two_pods_cannot_share_a_host_port() -> None:
    one = pod_spec(container() | {"ports": [{"containerPort": 80, "hostPort": 80}]})
    rejection = check_predicates(one, [one], node_facts())

    assert rejection is not None
    assert rejection.reason == "NodePorts"


def pod_state(*phases: tuple[ContainerPhase, int | None]) -> PodState:
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


def terminated(code: int) -> tuple[ContainerPhase, int]:
    return ContainerPhase.TERMINATED, code


@pytest.mark.parametrize(
    ("policy", "first", "second", "expected"),
    [
        ("Always", WAITING, RUNNING, "Pending"),
        ("Always", RUNNING, RUNNING, "Running"),
        ("Always", terminated(0), terminated(0), "Running"),
        ("OnFailure", terminated(0), terminated(0), "Succeeded"),
        ("OnFailure", terminated(0), terminated(1), "Running"),
        ("Never", terminated(0), terminated(1), "Failed"),
        ("Never", terminated(0), RUNNING, "Running"),
    ],
)
def test_the_phase_follows_from_the_containers_and_the_restart_policy(
    policy: str,
    first: tuple[ContainerPhase, int | None],
    second: tuple[ContainerPhase, int | None],
    expected: str,
) -> None:
    two = pod_spec(container("c0"), container("c1"), restartPolicy=policy)

    assert phase(two, pod_state(first, second)) == expected


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    one, running = pod_spec(container("c0")), pod_state(RUNNING)
    before = pod_status(one, running, {}, "127.0.0.1", now=10.0)
    after = pod_status(one, running, before, "127.0.0.1", now=99.0)

    assert after == before


def test_patched_capacity_stays_and_patched_allocatable_does_not() -> None:
    previous = {"capacity": {"example.com/mib": "5"}, "allocatable": {"example.com/other": "1"}}
    slot = "example.com/slot"
    status = node_status(
        "n", NodeSettings(), port=1, previous=previous, counts=({slot: 3}, {slot: 2}), now=0.0
    )

    assert (status["capacity"][slot], status["allocatable"][slot]) == ("3", "2")
    assert status["allocatable"]["example.com/mib"] == "5"
    assert "example.com/other" not in status["allocatable"]


def test_pod_resources_allows_a_burst_and_then_100_calls_per_second() -> None:
    now = [0.0]
    limit = TokenBucket(lambda: now[0])

    assert [limit.allows() for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    now[0] = 0.011
    assert limit.allows()


def test_an_invalid_duration_in_an_annotation_is_named() -> None:
    assert "run-for is 'soon'" in str(annotation_error({"sim.leasehold.dev/run-for": "soon"}))
    assert annotation_error({"sim.leasehold.dev/stop-after": "3s"}) is None
