"""The spec of a pod: behaviour of containers, requests, annotations."""

import pytest

from simcluster.kubelet.containers.container_spec import (
    ContainerBehaviour,
    annotation_error,
    parse_behaviour,
    parse_duration_s,
    pod_requests,
)
from tests.support.simcluster.pod_specs import container, pod_spec


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((), ContainerBehaviour(None, known=False)),
        (("sleep", "3"), ContainerBehaviour(3.0)),
        (("/bin/sleep", "infinity"), ContainerBehaviour(None)),
        (("sh", "-c", "sleep 2"), ContainerBehaviour(2.0)),
        (("sh", "-c", "sleep 2; false"), ContainerBehaviour(None, known=False)),
        (("sh", "-c", "echo $(date)"), ContainerBehaviour(None, known=False)),
        (("false",), ContainerBehaviour(0, 1)),
        (("env",), ContainerBehaviour(0)),
        (("python", "train.py"), ContainerBehaviour(None, known=False)),
    ],
)
def test_the_command_decides_how_long_a_container_runs(
    command: tuple[str, ...], expected: ContainerBehaviour
) -> None:
    (spec,) = pod_spec(container("main", *command)).containers

    assert parse_behaviour(spec, {}) == expected


def test_annotations_take_precedence_over_the_command() -> None:
    (spec,) = pod_spec(container("main", "sleep", "100")).containers
    annotations = {"sim.leasehold.dev/run-for": "150ms", "sim.leasehold.dev/exit-code": "7"}

    assert parse_behaviour(spec, annotations) == ContainerBehaviour(0.15, 7)


def test_an_init_container_succeeds_at_once() -> None:
    first, _ = pod_spec(container(), initContainers=[container("first")]).containers

    assert parse_behaviour(first, {}) == ContainerBehaviour(0, known=False)


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("150ms", 0.15), ("3m", 180), ("4", 4)])
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_a_sidecar_counts_with_init_containers_and_for_the_whole_run() -> None:
    sidecar = container("side", cpu="1") | {"restartPolicy": "Always"}
    init = [sidecar, container("first", cpu="3")]

    assert pod_requests(pod_spec(container(cpu="2"), initContainers=init)) == {"cpu": 4000}


def test_an_invalid_duration_in_an_annotation_is_named() -> None:
    assert "run-for is 'soon'" in str(annotation_error({"sim.leasehold.dev/run-for": "soon"}))
    assert annotation_error({"sim.leasehold.dev/stop-after": "3s"}) is None
