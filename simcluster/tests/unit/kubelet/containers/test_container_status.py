"""The status of a pod, derived from its containers."""

import pytest

from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState, PodState
from simcluster.kubelet.containers.container_status import (
    phase,
    pod_status,
    with_foreign_conditions,
)
from tests.support.simcluster.pod_specs import container, pod_spec


def pod_state(*phases: tuple[ContainerPhase, int | None]) -> PodState:
    containers = {}
    for number, (where, code) in enumerate(phases):
        container_state = ContainerState()
        if where is not ContainerPhase.WAITING:
            container_state.set_running("id", 1.0, None)
        if code is not None:
            container_state.set_terminated(code, 2.0)
        containers[f"c{number}"] = container_state
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
    spec = pod_spec(container("c0"))
    running = pod_state(RUNNING)
    before = pod_status(spec, running, {}, "127.0.0.1", now=10.0)
    after = pod_status(spec, running, before, "127.0.0.1", now=99.0)

    assert after == before


def test_what_schedulers_and_controllers_write_stays() -> None:
    claims = [{"name": "gpu", "resourceClaimName": "one-gpu-1"}]
    gate = {"type": "example.com/ready", "status": "True"}
    own = pod_status(pod_spec(container("c0")), pod_state(RUNNING), {}, "127.0.0.1", now=10.0)

    written = with_foreign_conditions(
        own, {"phase": "Pending", "resourceClaimStatuses": claims, "conditions": [gate]}
    )

    assert written["resourceClaimStatuses"] == claims
    assert written["phase"] == "Running"
    assert gate in written["conditions"]
