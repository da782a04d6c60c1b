"""Conditions and Events explain what happens to pods and nodes: soon, once, and never too often."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from services.binder.report.event_writer import (
    MAX_QUEUED,
    REPEAT_S,
    RETRY_S,
    ConditionWriter,
    EventWriter,
    NoEvents,
    TokenBucket,
)
from services.binder.report.explanations import (
    PLANNED,
    WITHDRAWN,
    KubernetesEvent,
    bound_event,
    condition_patch,
    event_of,
    explain,
)
from services.binder.service import FORMING_S
from shared.kubernetes.types import Condition
from shared.model.errors import ConflictError
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ViolationFound,
)
from shared.model.events.pod_events import (
    LeaseChanged,
    PlacementRefused,
    PodRejected,
    message_digest,
)
from shared.model.leases.lease import ClaimAllocation, LeaseState
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import in_state, terminated
from tests.support.binder.world import (
    NOW,
    Counts,
    FakePods,
    NewWorld,
    World,
    chosen,
    lease,
    running,
)
from tests.support.clock import FakeClock
from tests.support.waiting import until


def refused(text: str = "0/3 nodes are available: 3 full.", name: str = "p1") -> PlacementRefused:
    return PlacementRefused(
        pod=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        refusal=Refusal(reason=text, hint="Ask for at most 4000 MiB."),
    )


def seen(name: str = "p1", node: NodeName | None = None, **condition: Any) -> PodSnapshot:
    return PodSnapshot(
        PodUid(f"uid-{name}"), node, resource_version="7", scheduled=Condition(**condition)
    )


def event(text: str = "no room", name: str = "p1", *, warning: bool = True) -> KubernetesEvent:
    return KubernetesEvent(
        pod=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        reason="FailedScheduling",
        message=text,
        warning=warning,
    )


async def test_a_refusal_is_in_the_condition_and_in_an_event(world: World) -> None:
    world.pods.seen["p1"] = seen()

    async with running(world.binder.events.write_events, world.binder.conditions.write_conditions):
        await world.binder.explain_waiting([refused()])
        await until(lambda: world.pods.patches and world.pods.events)

    ((_, patch),) = world.pods.patches
    (condition,) = patch["status"]["conditions"]
    (event,) = world.pods.events.values()
    assert condition["reason"] == "Unschedulable"
    assert condition["message"] == "0/3 nodes are available: 3 full. Ask for at most 4000 MiB."
    assert (event["reason"], event["message"]) == ("FailedScheduling", condition["message"])


async def test_pods_of_a_gang_that_is_being_created_are_explained_later_and_as_they_wait_then(
    world: World,
) -> None:
    world.pods.seen |= {name: seen(name) for name in ("p1", "p2", "p3", "other")}
    forming = [
        replace(refused(name=name), refusal=Refusal(reason=f"{count} of 3 exist", forming=True))
        for count in (1, 2)
        for name in ("p1", "p2", "p3")
    ]
    now = [refused(name="other"), refused(name="p3")]

    async with running(world.binder.events.write_events, world.binder.conditions.write_conditions):
        await world.binder.explain_waiting([*forming, *now])
        await until(lambda: len(world.pods.events) == 2)
        assert {name for name, _ in world.pods.patches} == {"other", "p3"}
        world.binder.conditions.forget(PodUid("uid-p1"))
        world.clock.advance(FORMING_S)
        await world.binder.explain_waiting([refused(name="other")])
        await until(lambda: len(world.pods.events) == 3)

    assert world.pods.patches[-1][0] == "p2"
    (event,) = (each for each in world.pods.events.values() if "exist" in each["message"])
    assert event["message"] == "2 of 3 exist"


async def test_a_pod_of_another_scheduler_gets_one_event_and_no_condition(world: World) -> None:
    world.pods.seen |= {"p1": seen(), "p": seen("p")}
    foreign = PodRejected(
        pod=PodUid("uid-p"),
        namespace=Namespace("default"),
        name="p",
        resource_version="1",
        reason="no node of this cluster has nvidia.com/GPU: did you mean nvidia.com/gpu?",
        foreign=True,
    )

    async with running(world.binder.events.write_events, world.binder.conditions.write_conditions):
        await world.binder.explain_waiting([foreign, refused(), foreign])
        await until(lambda: world.pods.patches and len(world.pods.events) == 2)

    assert [patch["metadata"]["uid"] for _, patch in world.pods.patches] == ["uid-p1"]
    (event,) = (each for each in world.pods.events.values() if "GPU:" in each["message"])
    assert (event["reason"], event["message"], event["count"]) == (
        "UnknownResource",
        foreign.reason,
        1,
    )


def test_an_equal_condition_is_not_written_again() -> None:
    why = explain(refused())
    same = seen(status="False", reason="Unschedulable", message=why.message)

    assert condition_patch(why, same, NOW) is None


def test_a_bound_pod_is_never_called_unschedulable() -> None:
    assert condition_patch(explain(refused()), seen(node=NodeName("n1")), NOW) is None


def test_the_patch_names_the_resource_version_that_was_read() -> None:
    patch = condition_patch(explain(refused()), seen(), NOW)

    assert patch is not None
    assert patch["metadata"] == {"uid": "uid-p1", "resourceVersion": "7"}


async def test_a_planned_start_stays_behind_each_new_reason_until_it_is_withdrawn() -> None:
    pods = FakePods()
    clock = FakeClock()
    writer = ConditionWriter(pods, clock)
    message = ""

    async def write(explanation: KubernetesEvent) -> str:
        nonlocal message
        clock.advance(5.0)
        count = len(pods.patches)
        pods.seen["p1"] = seen(status="False", reason="Unschedulable", message=message)
        writer.explain(explanation)
        await until(lambda: len(pods.patches) > count)
        message = str(pods.patches[-1][1]["status"]["conditions"][0]["message"])
        return message

    full = explain(refused("full."))
    cordoned = explain(refused("cordoned."))
    planned = event_of(refused(), PLANNED, "starts by T at the latest")
    async with running(writer.write_conditions):
        assert await write(planned) == "Planned start: starts by T at the latest"
        await write(full)
        assert await write(cordoned) == (
            f"{cordoned.message} Planned start: starts by T at the latest"
        )
        assert message_digest(message) == message_digest(cordoned.message)
        assert await write(event_of(refused(), WITHDRAWN, "no longer")) == cordoned.message


async def test_a_condition_is_decided_afresh_after_a_conflict() -> None:
    pods = FakePods()
    clock = FakeClock()
    writer = ConditionWriter(pods, clock)
    pods.seen["p1"] = seen()
    pods.errors["p1"] = [ConflictError("moved on")]

    async with running(writer.write_conditions):
        writer.explain(explain(refused()))
        await until(lambda: not pods.errors["p1"])
        clock.advance(1.0)
        writer.explain(explain(refused(name="other")))
        await until(lambda: pods.patches)

    assert [name for name, _ in pods.patches] == ["p1"]


async def test_a_changing_message_is_written_every_5_s_only() -> None:
    pods = FakePods()
    clock = FakeClock()
    writer = ConditionWriter(pods, clock)
    pods.seen["p1"] = seen()

    async with running(writer.write_conditions):
        writer.explain(explain(refused("first")))
        await until(lambda: len(pods.patches) == 1)
        for text in ("second", "third", "fourth"):
            writer.explain(explain(refused(text)))
        assert len(pods.patches) == 1
        clock.advance(5.0)
        writer.explain(explain(refused(name="other")))
        await until(lambda: len(pods.patches) == 2)

    assert "fourth" in pods.patches[1][1]["status"]["conditions"][0]["message"]


async def test_the_last_of_alternating_messages_stays_whichever_replica_writes_it() -> None:
    pods = FakePods()
    clock = FakeClock()
    writers = [ConditionWriter(pods, clock) for _ in range(2)]
    pods.seen["p1"] = seen()

    async def write(writer: ConditionWriter, text: str) -> None:
        count = len(pods.patches)
        writer.explain(explain(refused(text)))
        clock.advance(5.0)
        writer.explain(explain(refused(name="other")))
        await until(lambda: len(pods.patches) > count)

    async with running(*(writer.write_conditions for writer in writers)):
        await write(writers[0], "full")
        await write(writers[1], "cordoned")
        await write(writers[0], "full")

    assert "full" in pods.patches[-1][1]["status"]["conditions"][0]["message"]


async def test_a_message_that_is_repeated_often_is_read_and_written_once_a_minute() -> None:
    pods = FakePods()
    clock = FakeClock()
    writer = ConditionWriter(pods, clock)
    pods.seen["p1"] = seen()

    def written(count: int) -> Callable[[], bool]:
        return lambda: len(pods.patches) == count

    async with running(writer.write_conditions):
        for advanced, count in ((0.0, 1), (REPEAT_S / 2, 1), (REPEAT_S / 2, 2)):
            clock.advance(advanced)
            writer.repeat(explain(refused()), NoEvents())
            writer.explain(explain(refused(name="other")))
            pods.seen["other"] = seen("other")
            await until(written(2 * count))


class Conflicting(FakePods):
    """An API server whose first reply about an Event that does not exist is a conflict."""

    refused = 1

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        if self.refused:
            self.refused -= 1
            raise ConflictError("try again")
        await super().create_event(namespace, body)


async def test_an_event_that_met_a_conflict_and_does_not_exist_is_written_later() -> None:
    pods = Conflicting()
    clock = FakeClock()
    writer = EventWriter(pods, clock)

    async with running(writer.write_events):
        writer.record(event())
        await until(lambda: not pods.refused)
        clock.advance(RETRY_S)
        await until(lambda: pods.events)

    (written,) = pods.events.values()
    assert written["count"] == 1


async def test_equal_events_are_one_event_with_a_count() -> None:
    pods = FakePods()
    writer = EventWriter(pods, FakeClock())

    async with running(writer.write_events):
        writer.record(event())
        await until(lambda: pods.event_writes == 1)
        writer.record(event())
        writer.record(event())
        await until(lambda: pods.event_writes == 2)

    (written,) = pods.events.values()
    assert written["count"] == 3


async def test_an_event_that_another_replica_wrote_is_counted_on() -> None:
    pods = FakePods()
    for _ in range(2):
        writer = EventWriter(pods, FakeClock())
        writes = pods.event_writes
        async with running(writer.write_events):
            writer.record(event())
            await until(lambda before=writes: pods.event_writes > before)  # type: ignore[misc]

    (written,) = pods.events.values()
    assert written["count"] == 2


async def test_events_are_written_once_the_api_server_is_back() -> None:
    pods = FakePods()
    clock = FakeClock()
    pods.away = True
    writer = EventWriter(pods, clock)

    async with running(writer.write_events):
        writer.record(event())
        await until(lambda: clock.sleepers)
        pods.away = False
        clock.advance(1.0)
        await until(lambda: pods.events)


async def test_warnings_go_before_the_rest() -> None:
    pods = FakePods()
    clock = FakeClock()
    writer = EventWriter(pods, clock, per_s=1, burst=1)
    for number in range(10):
        writer.record(event(name=f"bound-{number}", warning=False))
    writer.record(event(name="waits"))

    async with running(writer.write_events):
        await until(lambda: pods.events)

    assert next(iter(pods.events)).startswith("waits.")


async def test_events_of_3000_bound_pods_are_written_within_10_s_and_few_while_bindings_wait() -> (
    None
):
    pods = FakePods()
    clock = FakeClock()
    waiting_bindings = [True]
    writer = EventWriter(pods, clock, is_busy=lambda: bool(waiting_bindings))
    for number in range(3000):
        writer.record(event(name=f"bound-{number}", warning=False), once=True)

    async with running(writer.write_events):
        await until(lambda: clock.sleepers)
        while_busy = len(pods.events)
        waiting_bindings.clear()
        for _ in range(40):
            clock.advance(0.25)
            await until(lambda: clock.sleepers or len(pods.events) == 3000)

    assert (while_busy, len(pods.events)) == (10, 3000)


def test_too_many_events_of_one_pod_are_dropped_and_counted() -> None:
    metrics = Counts()
    writer = EventWriter(FakePods(), FakeClock())

    for number in range(30):
        writer.record(event(f"reason {number}"))

    assert metrics.anomalies["events_dropped"] == 5


def test_too_many_events_are_dropped_and_counted() -> None:
    metrics = Counts()
    writer = EventWriter(FakePods(), FakeClock())

    for number in range(MAX_QUEUED + 7):
        writer.record(event(name=f"p{number}"))

    assert metrics.anomalies["events_dropped"] == 7


async def test_a_bound_pod_gets_its_scheduled_event_once(new_world: NewWorld) -> None:
    world = await new_world(lease())

    async with running(world.binder.sender.send_bindings, world.binder.events.write_events):
        await world.binder.pods.bind_pods(chosen(lease()))
        await world.binder.pods.bind_pods(chosen(lease()))
        await until(lambda: world.pods.events)

    (event,) = world.pods.events.values()
    assert event["message"] == "Successfully assigned default/p1 to n1"
    assert (event["type"], event["count"]) == ("Normal", 1)
    assert event["metadata"]["name"] == bound_event(lease()).event_name


@pytest.mark.parametrize("name", ["p" * 253, f"{'p' * 234}--{'p' * 17}"])
def test_the_event_of_a_pod_with_a_long_name_has_a_name_that_the_api_server_accepts(
    name: str,
) -> None:
    made = event(name=name).event_name

    assert len(made) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", made)


def test_a_token_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(per_s=2, burst=3, at=0)

    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s(0) == 0.5
    assert bucket.take(0.5)


def found(message: str = "container c has no region file any more") -> ViolationFound:
    return ViolationFound(
        node=NodeName("n1"),
        pod=lease().pod,
        namespace=Namespace("default"),
        name="p1",
        container="c",
        reason="GpuIsolationLost",
        message=message,
    )


async def test_a_violation_is_a_warning_event_of_its_pod(new_world: NewWorld) -> None:
    world = await new_world(lease())

    async with running(world.binder.events.write_events):
        await world.binder.report_violations([found(), found("x" * 2000)])
        await until(lambda: len(world.pods.events) == 2)

    bodies = list(world.pods.events.values())
    assert {(body["type"], body["reason"]) for body in bodies} == {("Warning", "GpuIsolationLost")}
    assert all(body["involvedObject"]["uid"] == lease().pod for body in bodies)
    assert bodies[0]["message"] == "node n1: container c has no region file any more"
    assert len(bodies[1]["message"]) <= 1024


async def test_an_invalid_device_configuration_is_a_warning_event_of_its_node(world: World) -> None:
    valid = DeviceReported(node=NodeName("n1"), devices=(), served=())

    async with running(world.binder.events.write_events):
        await world.binder.save_devices([valid, replace(valid, config_errors="x is -4")])
        await until(lambda: world.pods.events)

    (body,) = bodies(world)
    assert (body["type"], body["reason"]) == ("Warning", "DeviceConfigInvalid")
    assert (body["involvedObject"]["kind"], body["involvedObject"]["name"]) == ("Node", "n1")
    assert body["message"] == "x is -4"


async def test_cores_that_cannot_be_limited_are_one_event_whoever_reports_them_again(
    new_world: NewWorld,
) -> None:
    first, second = await new_world(lease()), await new_world(lease())
    second.pods.events = first.pods.events  # another replica, or this one after a restart
    again = replace(found("container c has a process"), reason="GpuCoresNotLimited")

    for number, world in enumerate((first, second)):
        async with running(world.binder.events.write_events):
            await world.binder.report_violations([again, again, found(f"written last {number}")])
            await until(lambda: len(first.pods.events), lambda count: count == 2 + number)  # noqa: B023

    (body,) = (one for one in bodies(first) if one["reason"] == "GpuCoresNotLimited")
    assert (body["type"], body["count"]) == ("Warning", 1)


def bodies(world: World) -> list[dict[str, Any]]:
    return list(world.pods.events.values())


def health(*, healthy: bool) -> HealthChanged:
    held = lease()
    return HealthChanged(
        node=NodeName("n1"),
        device=DeviceUuid("GPU-n1-0"),
        index=3,
        healthy=healthy,
        fault="" if healthy else "XidError: Xid 79, the GPU has fallen off the bus",
        holders=(LeaseHolder(pod=held.pod, namespace=held.namespace, name=held.name),),
    )


async def test_an_unhealthy_device_is_an_event_of_its_node_and_of_each_pod_on_it(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease())

    async with running(world.binder.events.write_events):
        await world.binder.report_health([health(healthy=False), health(healthy=True)])
        await until(lambda: len(world.pods.events) == 4)

    bodies = list(world.pods.events.values())
    found = {(body["involvedObject"]["kind"], body["type"], body["reason"]) for body in bodies}
    node = next(body["involvedObject"] for body in bodies if body["involvedObject"]["uid"] == "n1")
    assert found == {
        ("Node", "Warning", "GpuCordoned"),
        ("Pod", "Warning", "GpuCordoned"),
        ("Node", "Normal", "GpuRecovered"),
        ("Pod", "Normal", "GpuRecovered"),
    }
    assert node == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}
    assert any("Xid 79" in body["message"] and "GPU 3" in body["message"] for body in bodies)


async def test_what_concerns_a_claim_is_an_event_of_the_claim(new_world: NewWorld) -> None:
    world = await new_world(lease("gpu", claim=ClaimAllocation(generation="g1"), pod=lease().pod))
    holder = LeaseHolder(pod=lease().pod, namespace=lease().namespace, name="gpu", claim=True)
    unhealthy = replace(health(healthy=False), holders=(holder,))

    async with running(world.binder.events.write_events):
        await world.binder.report_violations([replace(found(), name="gpu", claim=True)])
        await world.binder.report_health([unhealthy])
        await until(lambda: len(world.pods.events) == 3)

    involved = [body["involvedObject"] for body in bodies(world)]
    assert [one for one in involved if one["kind"] != "Node"] == 2 * [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "namespace": "default",
            "name": "gpu",
            "uid": lease().pod,
        }
    ]


@pytest.mark.parametrize("state", [LeaseState.BOUND, LeaseState.ACTIVE])
@pytest.mark.parametrize(
    ("rejection", "told"),
    [
        ("OutOfcpu: Node didn't have enough resource: cpu", "which took its last cpu"),
        ("NodeAffinity: Predicate NodeAffinity failed", "kubectl describe node n1"),
        ("UnexpectedAdmissionError: Allocate failed: no healthy devices", "kubectl describe node"),
        (f"OutOf{'x' * 1_000}", "a controller creates another pod"),
    ],
)
async def test_the_lease_of_a_pod_that_its_kubelet_rejected_ends_at_once_with_an_event(
    new_world: NewWorld, rejection: str, told: str, state: LeaseState
) -> None:
    world = await new_world(in_state(state))
    gone = terminated(phase="Failed", rejection=rejection)

    async with running(world.binder.events.write_events):
        (changed,) = await world.binder.end_leases([gone, gone])
        await until(lambda: world.pods.events)

    assert isinstance(changed, LeaseChanged)
    assert changed.lease.state is LeaseState.RELEASED
    assert not world.agents.requested_pods
    (body,) = bodies(world)
    assert (body["type"], body["reason"]) == ("Warning", "RejectedByKubelet")
    assert told in body["message"]
    assert len(body["message"]) <= 1024


async def test_a_pod_that_its_nodes_agent_refused_has_no_second_event(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))
    refused = "UnexpectedAdmissionError: Allocate failed: Leasehold refuses 1 of a/b on node n1"

    async with running(world.binder.events.write_events):
        await world.binder.end_leases(
            [
                terminated(phase="Failed", rejection=refused),
                terminated("p2", phase="Failed", rejection="NodeAffinity: none"),
            ]
        )
        await until(lambda: world.pods.events)

    assert [body["involvedObject"]["name"] for body in bodies(world)] == ["p2"]
