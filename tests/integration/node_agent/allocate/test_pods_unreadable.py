"""Without the kubelet's list, pods are known by what they ask for, and never guessed."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from shared.model.events.request_reply import TerminationRequest
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.binder.node_binder import Binder, post, reserve
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

WHY = "the kubelet's list of pods cannot be read"


def take_rights(at: Site, *left: str) -> None:
    at.node.kubelet.endpoint.allowed_resources = set(left)


@pytest.mark.parametrize("right", ["nodes/pods", "nodes/proxy"])
async def test_either_right_is_enough(right: str) -> None:
    async with site() as at:
        take_rights(at, right)
        async with at.running() as agent:
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")

            assert not agent.pods.unreadable_reason
            assert not at.reported[-1].pods_unreadable


async def test_equal_pods_are_bound_one_after_the_other_and_each_gets_its_own() -> None:
    async with site("4xA100-80GB") as at:
        take_rights(at)
        async with at.running():
            binder = Binder(at)
            await until(lambda: at.reported and at.reported[-1].pods_unreadable)
            async with asyncio.TaskGroup() as group:
                for n in range(8):
                    part = share(n % 4, 1000 + n, slot=n // 4, fence=n // 4 + 1)
                    group.create_task(binder.bind(reserve(at, n, part)))
            for n in range(8):
                await at.node.phase(f"p{n}", "Running")
            limits = [at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] for n in range(8)]

        assert limits == [f"{1000 + n}m" for n in range(8)]
        assert not at.refused
        assert any(
            "a pod with the same request must be served first" in why for why in binder.waits
        )


async def test_pods_that_ask_for_different_amounts_do_not_wait_for_each_other() -> None:
    two = [share(0, 500, slot=1), share(1, 500, slot=0)]
    async with site() as at:
        take_rights(at)
        async with at.running() as agent:
            await until(lambda: agent.pods.unreadable_reason and agent.leases.synced)
            one, other = reserve(at, 0, share(0, 1000)), reserve(at, 1, *two, limits={NUMBER: 2})
            told = agent.window.admit_binds(
                [one, other], None, unreadable_reason="it cannot be read"
            )
            for lease in (one, other):
                await Binder(at).bind(lease)
            for n in range(2):
                await at.node.phase(f"p{n}", "Running")

        assert told.deferred_pods == ()
        assert at.env("p1")["CUDA_DEVICE_MEMORY_LIMIT_1"] == "500m"


async def test_what_cannot_be_told_apart_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(timing=AgentTiming(resolve_s=0.3)) as at:
        take_rights(at)
        async with at.running() as agent:
            leases = [reserve(at, n, share(n, 1000 + n)) for n in range(2)]
            for lease in leases:
                bound = at.ledger.grant(structs.replace(lease, state=LeaseState.BOUND, version=2))
                await at.tell(bound)
            both = {("default", lease.name) for lease in leases}
            listing = agent.resolver.pod_resources.list_holdings

            async def both_active() -> object:
                shown = await listing()
                return replace(shown, pods=shown.pods | both)

            monkeypatch.setattr(agent.resolver.pod_resources, "list_holdings", both_active)
            post(at, "p0")
            await at.node.phase("p0", "Failed")
            text = at.message("p0")

        assert "2 containers are possible" in text
        assert WHY in text
        assert "nodes/pods" in text


async def test_a_pod_without_a_lease_does_not_get_that_of_another_which_asks_for_the_same() -> None:
    async with site() as at:
        take_rights(at)
        async with at.running():
            lease = reserve(at, 0, share(0, 1000))
            await at.tell(
                at.ledger.grant(structs.replace(lease, state=LeaseState.BOUND, version=2))
            )
            at.node.create(pod("stray", limits={NUMBER: 1}))
            await at.node.phase("stray", "Failed")
            text = at.message("stray")
            post(at, "p0")
            await at.node.phase("p0", "Running")

        assert WHY in text
        assert not at.annotation("stray", "volcano.sh/bind-phase")


async def test_containers_of_one_pod_are_known_by_their_order() -> None:
    init = container("first", limits={NUMBER: 1}, restartPolicy="Always")
    apps = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    names = ["first", "a", "b"]
    async with site() as at:
        take_rights(at)
        async with at.running():
            parts = [share(0, 1000 + n, container=c, slot=n) for n, c in enumerate(names)]
            await Binder(at).bind(reserve(at, 0, *parts, containers=apps, initContainers=[init]))
            await at.node.phase("p0", "Running")

        for n, name in enumerate(names):
            assert at.env("p0", name)["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"


async def test_a_lease_that_no_news_told_of_is_asked_for_by_node() -> None:
    async with site() as at:
        take_rights(at)
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000), told=False)
            await at.node.phase("one", "Running")

            assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_when_the_right_is_granted_the_list_is_read_again() -> None:
    async with (
        site(timing=AgentTiming(cleanup_s=0.1, pod_list_retry_s=0.1)) as at,
        at.running() as agent,
    ):
        await until(lambda: at.reported and not at.reported[-1].pods_unreadable)
        take_rights(at)
        await until(lambda: at.reported[-1].pods_unreadable)
        blind = agent.pods.unreadable_reason
        take_rights(at, "nodes/pods")
        await until(lambda: not at.reported[-1].pods_unreadable)

    assert "Forbidden" in blind
    assert "grant the agent's account" in blind


async def test_a_kubelet_that_only_restarts_is_no_reason_to_go_by_signature() -> None:
    async with site() as at, at.running() as agent:
        await at.node.kubelet.restart()
        await until(lambda: agent.plugins.unready_reason() is None)
        await agent.pods.list_pods()

        assert not agent.pods.unreadable_reason


async def test_whether_a_vanished_pod_has_ended_is_told_without_the_list() -> None:
    async with site(proc_dir=None) as at:
        at.changes["proc_dir"] = at.root / "proc"
        take_rights(at)
        async with at.running() as agent:
            lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            asked = TerminationRequest(node=NodeName(NODE), pod=lease.pod)
            runs = await agent.report_terminated(asked)
            lingering = PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
            cgroup = at.root / "proc" / "17" / "cgroup"
            cgroup.parent.mkdir(parents=True)
            cgroup.write_text(f"0::/kubepods/pod{lingering}/{'a' * 64}\n")
            lingers = await agent.report_terminated(
                TerminationRequest(node=NodeName(NODE), pod=lingering)
            )
            cgroup.unlink()
            over = await agent.report_terminated(
                TerminationRequest(node=NodeName(NODE), pod=lingering)
            )

    assert [told.terminated for told in (runs, lingers, over)] == [False, False, True]
