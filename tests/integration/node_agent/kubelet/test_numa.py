"""GPUs aligned with CPUs: what a kubelet with a topology manager is shown, and what pods get."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs

from services.binder.bind.pod_binder import CORDONED_S
from services.node_agent.allocate.numa_alignment import CPUS_TAKEN, LIST_NOT_TAKEN
from shared.dialects.advertised import NumaNodes
from shared.model.devices.node import AGENT_STARTING
from shared.model.events.request_reply import BindReply, BindRequest
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import NodeName, PodUid
from simcluster.apiserver.kinds.binding import bind as bind_pod
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import FAST, NODE, pod
from tests.support.waiting import until

TWO_NODES = "2xT4@0+2xT4@1"
SINGLE = "single-numa-node"


@asynccontextmanager
async def cluster_with(policy: str) -> AsyncIterator[OneNodeCluster]:
    settings = replace(FAST, topology_policy=policy)
    async with one_node_cluster(TWO_NODES, settings) as cluster, cluster.running():
        yield cluster


async def bind(cluster: OneNodeCluster, name: str, *shares: Share) -> Lease:
    """Bind a pod as a binder does, once the agent admits it."""
    store = cluster.node.store
    created = store.create("pods", pod(name, limits={NUMBER: len(shares)}, node=None))
    bound = cluster.ledger.grant(lease_of(created["metadata"]["uid"], *shares, name=name))
    reserved = structs.replace(bound, state=LeaseState.RESERVED, version=1)
    request = BindRequest(node=NodeName(NODE), leases=(reserved,))

    async def admitted() -> bool:
        assert cluster.agent is not None
        return not (await cluster.agent.admit_binds(request)).deferred_pods

    await until(admitted)
    await cluster.push_lease(bound)
    bind_pod(store, "default", name, {"target": {"name": NODE}}, dry_run=False)
    return bound


def defers(*leases: Lease) -> Callable[[BindReply], bool]:
    """Of the pods of a reply, only these wait: the kubelet may be slow to take the list."""
    return lambda reply: reply.deferred_pods == tuple(each.pod for each in leases)


async def shown(cluster: OneNodeCluster) -> set[tuple[str, NumaNodes]]:
    """Return the GPUs and the NUMA nodes of their IDs, as the kubelet knows them."""
    assert cluster.agent is not None
    ids = (await cluster.agent.node.pod_resources.list_allocatable()).numa[NUMBER]
    return {(name.partition("::")[0], nodes) for name, nodes in ids.items()}


async def test_the_kubelet_chooses_the_numa_node_of_each_pods_lease() -> None:
    gpus = [3, 0, 2, 1, 3]
    async with cluster_with(SINGLE) as cluster:
        own = {(share(n).device, (n // 2,)) for n in range(4)}
        await until(lambda: shown(cluster), lambda found: found == own)
        for n, gpu in enumerate(gpus):
            await bind(cluster, f"pod-{n}", share(gpu, slot=n))
        phases = [await cluster.node.phase(f"pod-{n}", "Running") for n in range(len(gpus))]
        await until(lambda: len(cluster.activated) == len(gpus))

    assert len(phases) == len(gpus)
    assert [one.allocation.device_ids for one in cluster.activated] == [
        (f"{share(gpu).device}::{n}",) for n, gpu in enumerate(gpus)
    ]


async def test_a_pod_with_gpus_of_two_numa_nodes_is_not_rejected() -> None:
    async with cluster_with(SINGLE) as cluster:
        await bind(cluster, "both", share(1), share(2))
        await cluster.node.phase("both", "Running")
        (one,) = await until(lambda: cluster.activated)

    assert one.allocation.device_ids == tuple(sorted(f"{share(n).device}::0" for n in (1, 2)))


async def test_while_a_pod_comes_only_its_gpus_show_a_numa_node() -> None:
    async with cluster_with(SINGLE) as cluster:
        assert cluster.agent is not None
        await until(lambda: cluster.agent and cluster.agent.window.aligns_numa)
        lease = lease_of("coming", share(1), share(2), state=LeaseState.RESERVED, version=1)
        other = lease_of("other", share(0), state=LeaseState.RESERVED, version=1)
        request = BindRequest(node=NodeName(NODE), leases=(lease, other))
        await until(partial(cluster.agent.admit_binds, request), defers(other))

        expected = {(share(n).device, (0, 1) if n in {1, 2} else ()) for n in range(4)}
        assert await shown(cluster) == expected
        allocatable = await cluster.agent.node.pod_resources.list_allocatable()
        assert cluster.agent.plugins.are_shown(allocatable.numa)


async def test_pods_wait_until_the_kubelet_has_taken_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_with(SINGLE) as cluster:
        agent = cluster.agent
        assert agent is not None
        await until(lambda: agent.window.aligns_numa)
        lease = lease_of("coming", share(1), state=LeaseState.RESERVED, version=1)
        request = BindRequest(node=NodeName(NODE), leases=(lease,))
        with monkeypatch.context() as patched:
            patched.setattr(agent.plugins, "are_shown", lambda _: False)
            early = await agent.admit_binds(request)
        await until(partial(agent.admit_binds, request), defers())

    assert (early.deferred_pods, early.reason) == ((lease.pod,), LIST_NOT_TAKEN)
    assert early.retry_soon
    assert not early.node_closed


async def test_a_pod_whose_cpus_others_got_is_to_be_placed_again_and_blocks_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_with(SINGLE) as cluster:
        agent = cluster.agent
        assert agent is not None
        await until(lambda: agent.window.aligns_numa)
        first, second = (
            lease_of(name, share(n), state=LeaseState.RESERVED, version=1)
            for n, name in ((1, "first"), (2, "second"))
        )

        async def short_of_cpus(_leases: Sequence[Lease]) -> tuple[PodUid, ...]:
            return (first.pod,)

        monkeypatch.setattr(agent.numa, "short_of_cpus", short_of_cpus)
        request = BindRequest(node=NodeName(NODE), leases=(first, second))
        reply = await until(partial(agent.admit_binds, request), defers())

    assert (reply.unserved_pods, reply.unserved_reason) == ((first.pod,), CPUS_TAKEN)
    assert reply.unserved_s >= CORDONED_S


@pytest.mark.parametrize("allowed", [True, False], ids=["policy none", "policy not readable"])
async def test_nothing_is_shown_to_a_kubelet_that_does_not_align(allowed: bool) -> None:
    settings = replace(FAST, topology_policy="none" if allowed else SINGLE)
    async with one_node_cluster(TWO_NODES, settings) as cluster:
        if not allowed:
            cluster.node.kubelet.endpoint.allowed_resources = {"nodes/pods"}
        async with cluster.running() as agent:
            await agent.numa.refresh()
            await bind(cluster, "one", share(3))
            await cluster.node.phase("one", "Running")

            assert {nodes for _, nodes in await shown(cluster)} == {()}


async def test_no_pod_can_come_before_the_agent_knows_the_policy() -> None:
    async with cluster_with(SINGLE) as cluster:
        reports = await until(
            lambda: cluster.reported,
            lambda found: found and found[-1].served not in {(), (AGENT_STARTING,)},
        )

    early = [each for each in reports if not all(device.one_numa for device in each.devices)]
    assert early
    assert {each.served for each in early} == {(AGENT_STARTING,)}
