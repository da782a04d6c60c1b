"""Violations and unhealthy devices become Events of pods and nodes."""

from dataclasses import replace
from typing import Any

import pytest

from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ViolationFound,
)
from shared.model.events.pod_events import LeaseChanged
from shared.model.lease import ClaimAllocation, LeaseState
from shared.model.names import DeviceUuid, Namespace, NodeName
from tests.support.binder.events import in_state, terminated
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.waiting import until


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

    async with running(world.binder.write_events):
        await world.binder.report_violations([found(), found("x" * 2000)])
        await until(lambda: len(world.pods.events) == 2)

    bodies = list(world.pods.events.values())
    assert {(body["type"], body["reason"]) for body in bodies} == {("Warning", "GpuIsolationLost")}
    assert all(body["involvedObject"]["uid"] == lease().pod for body in bodies)
    assert bodies[0]["message"] == "node n1: container c has no region file any more"
    assert len(bodies[1]["message"]) <= 1024


async def test_an_invalid_device_configuration_is_a_warning_event_of_its_node(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    valid = DeviceReported(node=NodeName("n1"), devices=(), served=())

    async with running(world.binder.write_events):
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
        async with running(world.binder.write_events):
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

    async with running(world.binder.write_events):
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

    async with running(world.binder.write_events):
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

    async with running(world.binder.write_events):
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

    async with running(world.binder.write_events):
        await world.binder.end_leases(
            [
                terminated(phase="Failed", rejection=refused),
                terminated("p2", phase="Failed", rejection="NodeAffinity: none"),
            ]
        )
        await until(lambda: world.pods.events)

    assert [body["involvedObject"]["name"] for body in bodies(world)] == ["p2"]
