"""An agent that is replaced while pods arrive: the kubelet refuses none of them."""

import asyncio

import pytest
from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.admission_window import DRAINING
from services.node_agent.drain import GRACE_S
from shared.model.events.request_reply import BindRequest
from shared.model.lease import LeaseState, Share
from shared.model.names import NodeName
from tests.support.binder.node_binder import Binder, post, reserve
from tests.support.node_agent.agent import NUMBER, Site, lease_of, share, site
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until


async def test_fifty_pods_arrive_while_the_agent_is_restarted_and_none_is_refused() -> None:
    async with site("8xA100-80GB", timing=AgentTiming(drain_s=60.0)) as at:
        binder = Binder(at)
        async with at.running() as agent:
            warm = reserve(at, 50, _part(50))
            await binder.bind(warm)
            await at.node.phase("p50", "Running")
            await agent.drain()
        burst = asyncio.create_task(_burst(at, binder))
        try:
            for _ in range(4):
                async with at.running(registered=False) as agent:
                    await served_one_more(at, burst)
                    await agent.drain()
            async with at.running():
                await burst
                for n in range(50):
                    await at.node.phase(f"p{n}", "Running")
        finally:
            burst.cancel()

        assert not at.refused
        assert binder.waits
        assert all(
            at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m" for n in range(50)
        )


def _part(n: int) -> Share:
    return share(n % 8, 1000 + n, slot=n // 8, fence=n // 8 + 1)


async def served_one_more(at: Site, burst: asyncio.Task[None]) -> None:
    before = len(at.activated)
    await until(lambda: len(at.activated) > before or burst.done(), limit_s=60)


async def _burst(at: Site, binder: Binder) -> None:
    async with asyncio.TaskGroup() as group:
        for n in range(50):
            group.create_task(binder.bind(reserve(at, n, _part(n))))
            await asyncio.sleep(0.05)


async def test_an_agent_that_leaves_says_so_and_serves_who_is_on_the_way() -> None:
    async with site() as at, at.running() as agent:
        obj = pod("late", limits={NUMBER: 1}, node=None)
        uid = at.node.create(obj)["metadata"]["uid"]
        lease = at.ledger.grant(lease_of(uid, share(0, 2000), name="late"))
        leaving = asyncio.create_task(agent.drain())
        await until(lambda: at.reported and at.reported[-1].served == ())
        told = await agent.admit_binds(BindRequest(node=NodeName(NODE), leases=(lease,)))
        await asyncio.sleep(0.7)
        assert not leaving.done(), "a pod with a bound lease has not come yet"
        post(at, "late")
        await at.node.phase("late", "Running")
        async with asyncio.timeout(30):
            await leaving

    assert told.deferred_pods == (uid,)
    assert told.reason == DRAINING


@pytest.mark.parametrize("binders_answer", [True, False])
async def test_an_agent_that_leaves_waits_for_whom_it_let_through_though_nobody_has_committed(
    binders_answer: bool,
) -> None:
    async with site() as at, at.running() as agent:
        obj = pod("slow", limits={NUMBER: 1}, node=None)
        uid = at.node.create(obj)["metadata"]["uid"]
        bound = lease_of(uid, share(0, 2000), name="slow")
        reserved = structs.replace(bound, state=LeaseState.RESERVED, version=bound.version - 1)
        told = await agent.admit_binds(BindRequest(node=NodeName(NODE), leases=(reserved,)))
        at.ledger.silent = not binders_answer
        leaving = asyncio.create_task(agent.drain())
        await asyncio.sleep(2 * GRACE_S)
        still_there = not leaving.done()
        await at.tell(at.ledger.grant(bound))
        post(at, "slow")
        await at.node.phase("slow", "Running")
        async with asyncio.timeout(5):
            await leaving

    assert told.deferred_pods == ()
    assert still_there, "a binder commits and posts when it gets round to it"


async def test_pods_are_held_back_until_the_kubelet_has_taken_the_agents_list() -> None:
    async with site() as at, at.running() as agent:
        lease = lease_of("some-uid")
        asked = BindRequest(node=NodeName(NODE), leases=(lease,))
        before = await agent.admit_binds(asked)
        await at.node.kubelet._stop()
        await until(lambda: agent.plugins.unready_reason() is not None)
        without = await agent.admit_binds(asked)
        await at.node.kubelet._start()
        await until(lambda: agent.plugins.unready_reason() is None)
        after = await agent.admit_binds(asked)

    assert before.deferred_pods == after.deferred_pods == ()
    assert without.deferred_pods == (lease.pod,)
    assert "not registered with the kubelet" in without.reason


async def test_an_agent_whose_binders_are_gone_does_not_wait_for_them() -> None:
    async with site() as at, at.running() as agent:
        at.ledger.silent = True
        at.ledger.grant(lease_of("some-uid"))
        began = asyncio.get_running_loop().time()
        await agent.drain()
        took_s = asyncio.get_running_loop().time() - began

    assert took_s < 3
