"""What agents say of broken rules becomes an Event of the pod."""

from shared.model.events import ViolationFound
from shared.model.names import Namespace, NodeName
from tests.support.binder_world import World, lease, running, until


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


async def test_a_broken_rule_is_a_warning_of_its_pod() -> None:
    world = World()

    async with running(world.binder.write_events):
        said = await world.binder.tell_violations([found(), found("x" * 2000)])
        await until(lambda: len(world.pods.events) == 2)

    bodies = list(world.pods.events.values())
    assert said == []
    assert {(body["type"], body["reason"]) for body in bodies} == {("Warning", "GpuIsolationLost")}
    assert all(body["involvedObject"]["uid"] == lease().pod for body in bodies)
    assert bodies[0]["message"] == "node n1: container c has no region file any more"
    assert len(bodies[1]["message"]) <= 1024
