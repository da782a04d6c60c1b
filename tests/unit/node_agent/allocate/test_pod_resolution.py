"""Resolution of the pod and container of an Allocate call."""

from typing import Any

import pytest

from services.node_agent.allocate.pod_resolution import (
    AllocationHistory,
    AmbiguousContainer,
    ContainerCandidate,
    resolve_container,
)
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod, PodResources
from shared.model.names import Namespace, PodUid

GPU = "volcano.sh/vgpu-number"


def container_wanting(
    name: str = "main", count: int = 1, *, init: bool = False
) -> KubeletContainer:
    return KubeletContainer(name=name, limits={GPU: count}, init=init)


def pod(name: str, *containers: KubeletContainer, phase: str = "Pending") -> KubeletPod:
    return KubeletPod(
        uid=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        phase=phase,
        containers=containers or (container_wanting(),),
    )


def pod_resources_of(*held: tuple[str, str], pods: tuple[str, ...] = ()) -> PodResources:
    return PodResources(
        holdings=tuple(
            Holding("default", name, container, GPU, frozenset({f"{name}-{container}"}))
            for name, container in held
        ),
        pods=frozenset(("default", name) for name in (*pods, *(name for name, _ in held))),
    )


A, B = pod("a"), pod("b")
TWO = pod("a", container_wanting("one"), container_wanting("two"))
INIT = pod("a", container_wanting("init", init=True), *TWO.containers)
FIRST = pod("a", container_wanting("first", init=True), container_wanting())
RUNNING = pod("running", container_wanting("init", init=True), phase="Running")


def allocated(**ids: str) -> dict[tuple[PodUid, str], tuple[str, ...]]:
    """Return the device IDs of containers, named `pod_container`."""
    places = {tuple(place.split("_")): found for place, found in ids.items()}
    return {(PodUid(f"uid-{pod}"), name): (found,) for (pod, name), found in places.items()}


def resolved(
    *pods: KubeletPod, count: int = 1, refused: tuple[str, ...] = (), **facts: Any
) -> ContainerCandidate | AmbiguousContainer:
    history = AllocationHistory(
        allocated=facts.pop("given", {}), refused={PodUid(f"uid-{name}") for name in refused}
    )
    facts = {"pod_resources": PodResources(), **facts}
    return resolve_container(GPU, count, pods=pods, history=history, **facts)


BOTH_GIVEN = allocated(a_main="x", b_main="y")
TWO_GIVEN = allocated(a_one="id-1", a_two="id-2")
ONE_SHOWN = pod_resources_of(("a", "one"))


@pytest.mark.parametrize(
    ("pods", "facts", "found"),
    [
        pytest.param((A, pod("plain", KubeletContainer(name="main"))), {}, "a/main", id="only"),
        pytest.param(
            (A, B),
            {"pod_resources": pod_resources_of(("a", "main"), pods=("b",))},
            "b/main",
            id="shown",
        ),
        pytest.param((A, B), {"given": allocated(a_main="x")}, "b/main", id="not shown yet"),
        pytest.param((pod("ended", phase="Failed"), RUNNING, pod("new")), {}, "new/main", id="new"),
        pytest.param((pod("ended", phase="Failed"), RUNNING), {}, "0", id="ended and running"),
        pytest.param((TWO,), {}, "a/one", id="in order of the spec"),
        pytest.param((TWO,), {"pod_resources": ONE_SHOWN}, "a/two", id="the following one"),
        pytest.param((INIT,), {}, "a/init", id="init container"),
        pytest.param((INIT,), {"given": allocated(a_init="x")}, "a/one", id="after the init one"),
        pytest.param((INIT,), {"pod_resources": ONE_SHOWN}, "a/two", id="init ones are not shown"),
        pytest.param(
            (A, pod("b", container_wanting(count=2))), {"count": 2}, "b/main", id="by its count"
        ),
        pytest.param((A, B), {}, "2", id="equal pods"),
        pytest.param(
            (A, B), {"pod_resources": pod_resources_of(pods=("b",))}, "b/main", id="active"
        ),
        pytest.param(
            (A,), {"pod_resources": pod_resources_of(pods=("b",))}, "0", id="in an old list only"
        ),
        pytest.param((A, B), {"refused": ("a",)}, "b/main", id="another was refused"),
        pytest.param((A,), {"refused": ("a",)}, "a/main", id="refused and alone"),
        pytest.param((A, B), {"given": BOTH_GIVEN, "device_ids": ("y",)}, "b/main", id="repeated"),
        pytest.param((A, B), {"given": BOTH_GIVEN, "device_ids": ("z",)}, "2", id="other IDs"),
        pytest.param((TWO,), {"given": TWO_GIVEN}, "a/one", id="repeated without IDs"),
        pytest.param(
            (TWO,), {"given": TWO_GIVEN, "device_ids": ("id-9",)}, "a/one", id="with other IDs"
        ),
        pytest.param(
            (TWO,), {"given": TWO_GIVEN, "pod_resources": ONE_SHOWN}, "a/two", id="the rest"
        ),
        pytest.param(
            (FIRST,), {"given": allocated(a_first="1", a_main="2")}, "2", id="init or main"
        ),
        pytest.param(
            (FIRST,),
            {"given": allocated(a_first="1", a_main="2"), "device_ids": ("2",)},
            "a/main",
            id="main by its IDs",
        ),
        pytest.param(
            (A, B),
            {"given": allocated(a_main="x"), "refused": ("b",), "device_ids": ("x",)},
            "a/main",
            id="repeated before refused",
        ),
    ],
)
def test_a_container_is_resolved(
    pods: tuple[KubeletPod, ...], facts: dict[str, Any], found: str
) -> None:
    match resolved(*pods, **facts):
        case ContainerCandidate() as one:
            assert f"{one.pod.name}/{one.container.name}" == found
        case AmbiguousContainer(candidates):
            assert str(len(candidates)) == found


def test_an_ambiguous_result_names_its_candidates() -> None:
    assert str(resolved(A, B)) == (
        "2 containers are possible (default/a, container main; default/b, container main)"
    )
    assert str(AmbiguousContainer(())) == "no pod in the kubelet's list waits for these devices"
