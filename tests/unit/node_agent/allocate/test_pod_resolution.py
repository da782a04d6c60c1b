"""Whom the kubelet asks for."""

from collections.abc import Mapping

from services.node_agent.allocate.pod_resolution import (
    Ambiguous,
    ContainerCandidate,
    resolve_container,
)
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod, PodResources
from services.node_agent.records.checkpoint_entry import AllocationHistory
from shared.model.names import Namespace, PodUid

GPU = "volcano.sh/vgpu-number"


def wants(name: str = "main", count: int = 1, *, init: bool = False) -> KubeletContainer:
    return KubeletContainer(name=name, limits={GPU: count}, init=init)


def pod(name: str, *containers: KubeletContainer, phase: str = "Pending") -> KubeletPod:
    return KubeletPod(
        uid=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        phase=phase,
        containers=containers or (wants(),),
    )


def shows(*held: tuple[str, str], pods: tuple[str, ...] = ()) -> PodResources:
    return PodResources(
        holdings=tuple(
            Holding("default", name, container, GPU, frozenset({f"{name}-{container}"}))
            for name, container in held
        ),
        pods=frozenset(("default", name) for name in (*pods, *(name for name, _ in held))),
    )


def who(
    *pods: KubeletPod,
    count: int = 1,
    shown: PodResources | None = None,
    answered: Mapping[tuple[str, str], tuple[str, ...]] | None = None,
    refused: tuple[str, ...] = (),
    device_ids: tuple[str, ...] | None = None,
) -> str:
    told = AllocationHistory(
        answered={(PodUid(uid), name): ids for (uid, name), ids in (answered or {}).items()},
        refused={PodUid(uid) for uid in refused},
    )
    found = resolve_container(
        GPU,
        count,
        pods=pods,
        pod_resources=shown or PodResources(),
        history=told,
        device_ids=device_ids,
    )
    match found:
        case ContainerCandidate():
            return f"{found.pod.name}/{found.container.name}"
        case Ambiguous():
            return f"unknown of {len(found.candidates)}"


def test_the_one_pod_that_asks_is_meant() -> None:
    assert who(pod("a"), pod("plain", KubeletContainer(name="main"))) == "a/main"


def test_a_pod_that_the_kubelet_shows_with_devices_is_not_meant() -> None:
    assert who(pod("a"), pod("b"), shown=shows(("a", "main"))) == "b/main"


def test_a_container_that_was_answered_is_not_meant_before_the_kubelet_shows_it() -> None:
    assert who(pod("a"), pod("b"), answered={("uid-a", "main"): ("x",)}) == "b/main"


def test_finished_and_running_pods_are_not_meant() -> None:
    ended = pod("ended", phase="Failed")
    running = pod("running", wants("init", init=True), phase="Running")

    assert who(ended, running, pod("new")) == "new/main"
    assert who(ended, running) == "unknown of 0"


def test_containers_are_served_in_spec_order() -> None:
    both = pod("a", wants("one"), wants("two"))

    assert who(both) == "a/one"
    assert who(both, shown=shows(("a", "one"))) == "a/two"


def test_an_init_container_counts_as_served_once_a_later_one_is_shown() -> None:
    both = pod("a", wants("init", init=True), wants("one"), wants("two"))

    assert who(both) == "a/init"
    assert who(both, answered={("uid-a", "init"): ("x",)}) == "a/one"
    assert who(both, shown=shows(("a", "one"))) == "a/two"


def test_the_count_tells_two_pods_apart() -> None:
    assert who(pod("a", wants(count=1)), pod("b", wants(count=2)), count=2) == "b/main"


def test_two_that_are_alike_are_never_guessed_between() -> None:
    assert who(pod("a"), pod("b")) == "unknown of 2"


def test_a_pod_that_the_kubelet_does_not_call_active_is_not_meant() -> None:
    assert who(pod("rejected"), pod("b"), shown=shows(pods=("b",))) == "b/main"


def test_a_refused_pod_is_meant_only_if_there_is_no_other() -> None:
    assert who(pod("a"), pod("b"), refused=("uid-a",)) == "b/main"
    assert who(pod("a"), refused=("uid-a",)) == "a/main"


def test_a_repeated_call_is_known_by_its_devices() -> None:
    answered = {("uid-a", "main"): ("x",), ("uid-b", "main"): ("y",)}

    assert who(pod("a"), pod("b"), answered=answered, device_ids=("y",)) == "b/main"
    assert who(pod("a"), pod("b"), answered=answered, device_ids=("z",)) == "unknown of 2"


def test_a_repeated_call_beats_a_refused_pod_that_lingers() -> None:
    answered = {("uid-a", "main"): ("x",)}

    found = who(pod("a"), pod("b"), answered=answered, refused=("uid-b",), device_ids=("x",))

    assert found == "a/main"


def test_what_cannot_be_told_is_named() -> None:
    unknown = resolve_container(
        GPU,
        1,
        pods=[pod("a"), pod("b")],
        pod_resources=PodResources(),
        history=AllocationHistory(),
        device_ids=None,
    )

    assert str(unknown) == (
        "2 containers are possible (default/a, container main; default/b, container main)"
    )
    assert str(Ambiguous(())) == "no pod in the kubelet's list waits for these devices"
