"""What an agent does while something cannot be seen: it waits, and fails no pod with a lease."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.handler import RESOLVE_S
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.partition import layout_reconciler
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.service import NodeAgent
from shared.kubernetes.errors import UnreachableError
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import BindRequest
from shared.model.leases.lease import Lease
from shared.model.names import NodeName, PodUid
from simcluster.ports import Outage
from tests.support.binder.node_binder import Binder, reserve
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, lease_of, one_node_cluster, share
from tests.support.node_agent.mig import mig_share
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

FULL_MIB = 15_000
"""Two shares of this size do not fit on a device."""
RUN_FOR = "sim.leasehold.dev/run-for"


@asynccontextmanager
async def full_node(**changes: Any) -> AsyncIterator[tuple[OneNodeCluster, NodeAgent]]:
    """Yield a node with one device, which a pod holds that ends within a second.

    Processes of pods are visible, as with `hostPID`: another pod has one. A pod that started less
    than two seconds of the machine's clock ago may have no process yet.
    """
    async with one_node_cluster("1xT4", proc_dir=None, **changes) as cluster:
        show_processes(cluster)
        async with cluster.running() as agent:
            yield await first_pod(cluster), agent


def show_processes(cluster: OneNodeCluster) -> None:
    cluster.changes["proc_dir"] = cluster.root / "proc"
    add_process(cluster, PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b"), pid=16)


def add_process(cluster: OneNodeCluster, pod: PodUid, *, pid: int) -> None:
    cgroup = cluster.root / "proc" / str(pid) / "cgroup"
    cgroup.parent.mkdir(parents=True)
    cgroup.write_text(f"0::/kubepods/pod{pod}/{'a' * 64}\n")


async def first_pod(cluster: OneNodeCluster) -> OneNodeCluster:
    cluster.bind(short("first"), share(0, FULL_MIB))
    await cluster.node.phase("first", "Running")
    return cluster


def short(name: str) -> dict[str, Any]:
    return pod(name, limits={NUMBER: 1}, annotations={RUN_FOR: "700ms"}, restartPolicy="Never")


def first_lease(cluster: OneNodeCluster) -> Lease:
    [lease] = (one for one in cluster.ledger.leases.values() if one.name == "first")
    return lease


async def end_first(cluster: OneNodeCluster) -> None:
    """Let the first pod end, and its lease, as the ledger does."""
    await cluster.node.phase("first", "Succeeded")
    await cluster.release(first_lease(cluster))


def next_share() -> Any:
    return share(0, FULL_MIB, slot=1, fence=2)


@pytest.mark.parametrize("denied_s", [0.0, 20.0])
async def test_a_full_device_is_given_out_again_after_an_outage_of_the_api_server(
    denied_s: float,
) -> None:
    """The kubelet lists the new pod and the end of the old one at once, and admits first."""
    async with full_node() as (cluster, agent):
        outage = Outage(for_s=1.5, denied_s=denied_s, relist_s=1.0)
        cluster.node.kubelet.miss_api_server(outage)
        await end_first(cluster)
        cluster.bind(short("second"), next_share())
        await cluster.node.phase("second", "Running")

        assert not cluster.refused
        assert "grant the agent" not in agent.pods.unreadable_reason or agent.pods.is_passing
        assert {one.name for one in agent.checkpoint.allocations} == {"second"}


@pytest.mark.parametrize("code", [401, 403, 500, 503])
async def test_pods_are_served_by_their_leases_whatever_the_kubelet_answers(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_node() as (cluster, agent):
        monkeypatch.setattr(
            type(cluster.node.kubelet.endpoint),
            "_check_allowed",
            lambda *_: (_ for _ in ()).throw(failing(code)),
        )
        await end_first(cluster)
        cluster.bind(short("second"), next_share())
        await cluster.node.phase("second", "Running")

        assert not cluster.refused
        assert f"failed: {code}" in agent.pods.unreadable_reason
        assert agent.pods.is_passing


def failing(code: int) -> web.HTTPException:
    found = {401: web.HTTPUnauthorized, 403: web.HTTPForbidden, 500: web.HTTPInternalServerError}
    return found.get(code, web.HTTPServiceUnavailable)(text="no")


@pytest.mark.parametrize(("code", "sees_processes"), [(403, True), (500, False)])
async def test_a_mig_layout_is_made_whatever_the_kubelet_answers(
    code: int, sees_processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_node_cluster("1xA100-40GB:mig", proc_dir=None) as cluster:
        cluster.changes["proc_dir"] = cluster.root / "proc"
        if sees_processes:
            show_processes(cluster)
        async with cluster.running() as agent:
            monkeypatch.setattr(
                type(cluster.node.kubelet.endpoint),
                "_check_allowed",
                lambda *_: (_ for _ in ()).throw(failing(code)),
            )
            await cluster.run_pod("one", mig_share("group1", 0))

            assert not cluster.refused
            assert f"failed: {code}" in agent.pods.unreadable_reason


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_an_instance_whose_pod_has_ended_is_given_out_although_an_old_list_shows_the_pod(
    is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given to a pod that comes later, or to one that waits for it while the lease ends."""
    second = pod("second", limits={NUMBER: 1})
    listed = KubeletPods.list_pods
    before = dict[PodUid, KubeletPod]()

    async def list_pods(self: KubeletPods) -> tuple[KubeletPod, ...]:
        now = {pod.uid: pod for pod in await listed(self)}
        return tuple((now | before).values())

    monkeypatch.setattr(KubeletPods, "list_pods", list_pods)
    monkeypatch.setattr(layout_reconciler, "RELEASE_S", 30.0)
    monkeypatch.setattr(layout_reconciler, "RETRY_S", 2.0)  # the record is removed before
    was_seen = asyncio.Event()
    look = LayoutReconciler._running_pods

    async def running_pods(self: LayoutReconciler) -> dict[PodUid, str]:
        running = await look(self)
        if first.pod in running:
            was_seen.set()
        return running

    monkeypatch.setattr(LayoutReconciler, "_running_pods", running_pods)
    async with one_node_cluster("1xA100-40GB:mig", proc_dir=None) as cluster:
        show_processes(cluster)
        async with cluster.running() as agent:
            first = cluster.bind(short("first"), mig_share("group1", 0))
            await cluster.node.phase("first", "Running")
            before |= {pod.uid: pod for pod in await agent.node.kubelet.list_pods()}
            await cluster.node.phase("first", "Succeeded")
            if is_waiting:
                was_seen.clear()
                cluster.bind(second, mig_share("group1", 0, fence=2))
                await was_seen.wait()
            await cluster.release(first)
            if not is_waiting:
                cluster.bind(second, mig_share("group1", 0, fence=2))
            await cluster.node.phase("second", "Running")

            assert not cluster.refused


async def silent(_: KubeletPods) -> Any:
    raise UnreachableError("GET", "/pods", "it took longer than the timeout")


async def nothing(_: KubeletPods) -> Any:
    return ()


@pytest.mark.parametrize("listing", [silent, nothing])
async def test_pods_are_served_by_their_leases_while_the_list_is_silent_or_empty(
    listing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_node(rate=4) as (cluster, _):
        monkeypatch.setattr(KubeletPods, "list_pods", listing)
        await end_first(cluster)
        cluster.bind(short("second"), next_share())
        await cluster.node.phase("second", "Running")

        assert not cluster.refused


async def test_a_pod_waits_for_a_binder_that_does_not_answer() -> None:
    async with full_node(rate=8) as (cluster, _):
        await end_first(cluster)
        cluster.ledger.unavailable = True
        cluster.bind(short("second"), next_share(), lease_known=False)
        await until(lambda: len(cluster.ledger.requests) > 40)
        assert cluster.node.pod("second")["status"].get("phase", "Pending") == "Pending"
        cluster.ledger.unavailable = False
        await cluster.node.phase("second", "Running")

        assert not cluster.refused


async def test_a_pod_waits_for_silent_pod_resources_and_others_are_not_bound_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_silent = True
    listed = KubeletPodResources.list_holdings

    async def list_holdings(self: KubeletPodResources) -> PodResources:
        if is_silent:
            self.silent_reason = "the kubelet's PodResources: no answer within 10 s"
            raise UnavailableError(self.silent_reason)
        self.silent_reason = ""
        return await listed(self)

    async with full_node(rate=8) as (cluster, agent):
        await end_first(cluster)
        monkeypatch.setattr(KubeletPodResources, "list_holdings", list_holdings)
        cluster.bind(short("second"), next_share())
        await until(lambda: agent.plugins.handler.patience.is_serving)
        asked_at = agent.node.clock.ticks()
        await until(lambda: agent.node.clock.ticks() > asked_at + 3 * RESOLVE_S)
        little = share(0, 100, slot=2, fence=3)
        others = BindRequest(
            node=NodeName(NODE), leases=(lease_of("uid-third", little, name="third"),)
        )
        reply = await agent.admit_binds(others)
        is_silent = False
        await cluster.node.phase("second", "Running")
        admitted = await agent.admit_binds(others)

        assert reply.deferred_pods == ("uid-third",)
        assert "no answer within 10 s" in reply.reason
        assert admitted.deferred_pods == ()
        assert not cluster.refused


async def test_a_pod_that_waited_for_as_long_as_the_kubelet_allows_fails_with_what_was_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def list_holdings(_: KubeletPodResources) -> PodResources:
        raise UnavailableError("the kubelet's PodResources: no answer within 10 s")

    async with full_node(rate=8, timing=AgentTiming(sight_s=6.0)) as (cluster, _):
        await end_first(cluster)
        monkeypatch.setattr(KubeletPodResources, "list_holdings", list_holdings)
        cluster.bind(short("second"), next_share())
        await cluster.node.phase("second", "Failed")

        assert (
            "the container that the kubelet asks for cannot be seen: the kubelet's PodResources: "
            "no answer within 10 s"
        ) in cluster.message("second")


async def test_one_pod_is_bound_to_a_kubelet_that_does_not_read_its_pods_yet() -> None:
    """An agent that is killed then costs that pod, and no other."""
    async with one_node_cluster(rate=20) as cluster, asyncio.TaskGroup() as bindings:
        binder = Binder(cluster)
        api = cluster.node.kubelet.api
        leases = [reserve(cluster, n, share(n % 2, 1000, slot=n // 2)) for n in range(6)]
        async with cluster.running():
            api.lose()
            api.there.set()
            for lease in leases:
                bindings.create_task(binder.bind(lease))
            await until(lambda: len(binder.waits) > 100 or len(bound(cluster, leases)) > 1)
            [lost] = bound(cluster, leases)
        await cluster.node.allocatable(NUMBER, 0)
        api.find()
        await cluster.node.phase(lost.name, "Failed")
        async with cluster.running(registered=False):
            await cluster.release(lost)
            for lease in leases:
                if lease != lost:
                    await cluster.node.phase(lease.name, "Running")

    assert any(
        why.startswith(f"pod default/{lost.name} is bound to the node") for why in binder.waits
    )


def bound(cluster: OneNodeCluster, leases: Iterable[Lease]) -> list[Lease]:
    return [lease for lease in leases if "nodeName" in cluster.node.pod(lease.name)["spec"]]


async def test_a_process_that_is_left_is_no_blindness() -> None:
    async with full_node() as (cluster, _):
        first = first_lease(cluster)
        await end_first(cluster)
        add_process(cluster, first.pod, pid=17)
        cluster.node.store.delete("pods", "default", "first", grace_s=0)
        await until(lambda: not cluster.node.exists("first"))
        cluster.bind(short("second"), next_share())
        await cluster.node.phase("second", "Failed")

        assert "over-committed" in cluster.message("second")
