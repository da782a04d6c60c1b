"""Pods with committed leases whose Bindings may not have been sent: they wait, or start again."""

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from services.binder.bind.agent_presence import TRUSTED_S
from services.binder.bind.pod_binder import ADMITTED_S, CORDONED_S, UNSENT_S
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, PodBound
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import NodeName
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import N1, away
from tests.support.binder.world import NewWorld, chosen, lease, running


async def test_a_committed_pod_waits_while_its_agent_would_refuse_it_unless_its_binding_was_sent(
    new_world: NewWorld,
) -> None:
    """A binder was stopped between the commit of `p1` and its Binding."""
    world = await new_world(lease("p1", state=LeaseState.BOUND), lease("p2"), batch_wait_s=0.05)
    batch = chosen(lease("p1"), lease("p2"))
    world.pods.hanging["p2"] = asyncio.Event()
    refusals = {each.lease.pod: "GPU-0 gets no new share" for each in batch}

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match="no response yet"):
            await world.binder.pods.bind_pods(chosen(lease("p2")))
        world.clock.advance(TRUSTED_S)
        world.agents.replies = {N1: BindReply(window_open=False, refusals=refusals)}
        world.pods.hanging["p2"].set()
        with pytest.raises(UnavailableError, match=r"1 of 2 .* GPU-0 gets no new share"):
            await world.binder.pods.bind_pods(batch)
        bound = [event.lease.name for event in world.bus.published if isinstance(event, PodBound)]
        sent = [name for name, *_ in world.pods.bindings]
        world.agents.replies = {N1: BindReply()}
        await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert bound == sent == ["p2"]
    assert [name for name, *_ in world.pods.bindings] == ["p2", "p1"]


@pytest.mark.parametrize("node", [None, N1], ids=["unbound", "bound"])
async def test_a_committed_pod_that_is_refused_is_placed_again_if_it_is_certainly_not_bound(
    new_world: NewWorld, node: NodeName | None
) -> None:
    committed = lease("p1", state=LeaseState.BOUND)
    world = await new_world(committed)
    world.pods.seen["p1"] = PodSnapshot(committed.pod, node)
    refusals = {committed.pod: "GPU-0 gets no new share"}
    world.agents.replies = {N1: BindReply(window_open=False, refusals=refusals)}

    with pytest.raises(UnavailableError, match="GPU-0"):
        await world.binder.pods.bind_pods(chosen(committed))
    world.clock.advance(UNSENT_S + 1.0)
    if node is None:
        events = await world.binder.pods.bind_pods(chosen(committed))
        assert [event.reason for event in events if isinstance(event, BindingFailed)] == [
            "GPU-0 gets no new share"
        ]
    else:
        with pytest.raises(UnavailableError, match="GPU-0"):
            await world.binder.pods.bind_pods(chosen(committed))

    assert list(await world.leases()) == ([committed.pod] if node else [])


async def test_a_gang_that_has_begun_goes_on_while_one_of_its_committed_pods_waits(
    new_world: NewWorld,
) -> None:
    gang = "ns/red-2"
    world = await new_world(lease("p1", gang=gang, state=LeaseState.BOUND), lease("p2", gang=gang))
    world.pods.seen["p1"] = PodSnapshot(lease("p1").pod, None)
    refusals = {lease("p1").pod: "GPU-0 gets no new share"}
    world.agents.replies = {N1: BindReply(window_open=False, refusals=refusals)}

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match=r"1 of 2 .* GPU-0 gets no new share"):
            await world.binder.pods.bind_pods(
                chosen(lease("p1", gang=gang), lease("p2", gang=gang))
            )

    assert [name for name, *_ in world.pods.bindings] == ["p2"]


async def test_a_committed_lease_is_not_given_up_however_long_its_node_is_cordoned(
    new_world: NewWorld,
) -> None:
    bound = lease("p1", state=LeaseState.BOUND)
    world = await new_world(bound)
    world.agents.replies = {N1: away("p1")}

    for _ in range(3):
        with pytest.raises(UnavailableError, match="being stopped"):
            await world.binder.pods.bind_pods(chosen(bound))
        world.clock.advance(CORDONED_S)

    assert list(await world.leases()) == [bound.pod]


async def test_no_binding_is_sent_long_after_the_agent_admitted_the_pod(
    new_world: NewWorld,
) -> None:
    """The agent may have admitted another pod to the same GPU since."""
    world = await new_world(lease("p1"))
    commit = world.ledger.bind

    async def commit_late(leases: Sequence[Lease]) -> Any:
        world.clock.advance(ADMITTED_S + 0.1)
        return await commit(leases)

    async with running(world.binder.sender.send_bindings):
        with (
            patch.object(world.ledger, "bind", commit_late),
            pytest.raises(UnavailableError, match="admitted it too long ago"),
        ):
            await world.binder.pods.bind_pods(chosen(lease("p1")))
        assert await world.states() == {"p1": LeaseState.BOUND}
        assert world.pods.bindings == []
        await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert [name for name, *_ in world.pods.bindings] == ["p1"]
