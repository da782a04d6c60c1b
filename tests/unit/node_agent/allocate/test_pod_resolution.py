"""Resolution of the pod and container of an Allocate call."""

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


def resolved(
    *pods: KubeletPod,
    count: int = 1,
    pod_resources: PodResources | None = None,
    allocated_ids: Mapping[tuple[str, str], tuple[str, ...]] | None = None,
    refused: tuple[str, ...] = (),
    device_ids: tuple[str, ...] | None = None,
) -> str:
    history = AllocationHistory(
        allocated={(PodUid(uid), name): ids for (uid, name), ids in (allocated_ids or {}).items()},
        refused={PodUid(uid) for uid in refused},
    )
    found = resolve_container(
        GPU,
        count,
        pods=pods,
        pod_resources=pod_resources or PodResources(),
        history=history,
        device_ids=device_ids,
    )
    match found:
        case ContainerCandidate():
            return f"{found.pod.name}/{found.container.name}"
        case Ambiguous():
            return f"ambiguous: {len(found.candidates)}"


def test_the_only_waiting_pod_is_resolved() -> None:
    assert resolved(pod("a"), pod("plain", KubeletContainer(name="main"))) == "a/main"


def test_a_container_with_devices_in_pod_resources_is_skipped() -> None:
    assert resolved(pod("a"), pod("b"), pod_resources=pod_resources_of(("a", "main"))) == "b/main"


def test_an_allocated_container_is_skipped_before_pod_resources_lists_it() -> None:
    assert resolved(pod("a"), pod("b"), allocated_ids={("uid-a", "main"): ("x",)}) == "b/main"


def test_finished_and_running_pods_are_skipped() -> None:
    ended = pod("ended", phase="Failed")
    running = pod("running", container_wanting("init", init=True), phase="Running")

    assert resolved(ended, running, pod("new")) == "new/main"
    assert resolved(ended, running) == "ambiguous: 0"


def test_containers_are_resolved_in_spec_order() -> None:
    both = pod("a", container_wanting("one"), container_wanting("two"))

    assert resolved(both) == "a/one"
    assert resolved(both, pod_resources=pod_resources_of(("a", "one"))) == "a/two"


def test_an_init_container_counts_as_allocated_once_a_later_one_is_listed() -> None:
    both = pod(
        "a",
        container_wanting("init", init=True),
        container_wanting("one"),
        container_wanting("two"),
    )

    assert resolved(both) == "a/init"
    assert resolved(both, allocated_ids={("uid-a", "init"): ("x",)}) == "a/one"
    assert resolved(both, pod_resources=pod_resources_of(("a", "one"))) == "a/two"


def test_the_requested_count_distinguishes_two_pods() -> None:
    assert (
        resolved(
            pod("a", container_wanting(count=1)), pod("b", container_wanting(count=2)), count=2
        )
        == "b/main"
    )


def test_two_equal_pods_are_ambiguous() -> None:
    assert resolved(pod("a"), pod("b")) == "ambiguous: 2"


def test_a_pod_that_pod_resources_does_not_list_is_skipped() -> None:
    assert (
        resolved(pod("rejected"), pod("b"), pod_resources=pod_resources_of(pods=("b",))) == "b/main"
    )


def test_a_refused_pod_is_resolved_only_if_there_is_no_other() -> None:
    assert resolved(pod("a"), pod("b"), refused=("uid-a",)) == "b/main"
    assert resolved(pod("a"), refused=("uid-a",)) == "a/main"


def test_a_repeated_call_is_resolved_by_its_device_ids() -> None:
    allocated_ids = {("uid-a", "main"): ("x",), ("uid-b", "main"): ("y",)}

    assert resolved(pod("a"), pod("b"), allocated_ids=allocated_ids, device_ids=("y",)) == "b/main"
    assert (
        resolved(pod("a"), pod("b"), allocated_ids=allocated_ids, device_ids=("z",))
        == "ambiguous: 2"
    )


def test_a_repeated_call_without_its_ids_is_for_the_first_container_that_is_not_shown() -> None:
    two = pod("a", container_wanting("one"), container_wanting("two"))
    allocated = {("uid-a", "one"): ("id-1",), ("uid-a", "two"): ("id-2",)}

    assert resolved(two, allocated_ids=allocated) == "a/one"
    assert resolved(two, allocated_ids=allocated, device_ids=("id-9",)) == "a/one"
    shown = pod_resources_of(("a", "one"))
    assert resolved(two, allocated_ids=allocated, pod_resources=shown) == "a/two"


def test_a_repeated_call_may_be_for_an_init_container_that_is_never_shown() -> None:
    two = pod("a", container_wanting("first", init=True), container_wanting("main"))
    allocated = {("uid-a", "first"): ("id-1",), ("uid-a", "main"): ("id-2",)}

    assert resolved(two, allocated_ids=allocated) == "ambiguous: 2"
    assert resolved(two, allocated_ids=allocated, device_ids=("id-2",)) == "a/main"


def test_a_repeated_call_takes_precedence_over_a_refused_pod() -> None:
    allocated_ids = {("uid-a", "main"): ("x",)}

    found = resolved(
        pod("a"), pod("b"), allocated_ids=allocated_ids, refused=("uid-b",), device_ids=("x",)
    )

    assert found == "a/main"


def test_an_ambiguous_result_names_its_candidates() -> None:
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
