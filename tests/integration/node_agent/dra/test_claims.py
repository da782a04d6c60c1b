"""Claims are prepared with the limits of their lease, kept over restarts, and released."""

import asyncio
import json
from dataclasses import replace

import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.cdi import qualified_name
from services.node_agent.records.device_guard import OvercommitError
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.leases.lease import ClaimAllocation
from shared.model.names import PodUid
from shared.model.requests.claim import DRIVER, LEASED, RETRIED_AT
from tests.support.node_agent.agent import OneNodeCluster, share
from tests.support.node_agent.claims import (
    ALLOCATED_AT,
    claim_lease,
    cluster_with_claims,
    create_claim,
    instance_result,
    pod_and_claim,
    pod_with_claim,
    prepare,
    registered,
    result,
    serving_claims,
    slices_of,
)
from tests.support.node_agent.mig import instances_by_start, mig_share
from tests.support.simcluster.kubelet import FAST
from tests.support.waiting import until

pytestmark = pytest.mark.servers


def events(cluster: OneNodeCluster, reason: str) -> list[str]:
    return [e["message"] for e in cluster.api.store.list("events") if e["reason"] == reason]


async def test_a_container_gets_the_limits_of_its_claims_lease() -> None:
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster)
        own = share(container="gpu", memory_mib=3000, cores_percent=30, share_id="share-gpu-0")
        lease = cluster.ledger.grant(claim_lease(claim, own))

        await cluster.node.phase("one", "Running")

        env = cluster.env("one")
        assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        assert env["CUDA_DEVICE_SM_LIMIT"] == "30"
        mounts = {mount.container_path for mount in cluster.node.container("one").mounts}
        assert {"/etc/ld.so.preload", "/tmp/vgpu"} <= mounts
        activated = [event.allocation for event in cluster.activated]
        assert [(a.pod, a.container, a.resource) for a in activated] == [(lease.pod, "gpu", DRIVER)]


async def test_a_claim_waits_for_its_lease_and_is_refused_with_a_sentence_without_one() -> None:
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster)

        await until(lambda: events(cluster, "FailedPrepareDynamicResources"))
        [message, *_] = events(cluster, "FailedPrepareDynamicResources")
        cluster.ledger.grant(claim_lease(claim))
        await cluster.node.phase("one", "Running")

        assert "ResourceClaim default/shares has no lease on node node-0 after 40 s" in message
        assert not cluster.refused


async def test_a_kubelet_that_could_not_read_a_claim_is_made_to_try_again() -> None:
    """On its own it tries again after a minute."""
    async with serving_claims(kubelet=FAST) as (cluster, _):
        pod = cluster.node.create(pod_with_claim("one", "shares"))
        await until(lambda: events(cluster, "FailedPrepareDynamicResources"))

        claim = create_claim(cluster, "shares", result(), pods=(pod,))
        allocation = claim_lease(claim).claim
        assert allocation is not None
        held = replace(allocation, consumers=(PodUid(pod["metadata"]["uid"]),))
        await cluster.push_lease(cluster.ledger.grant(claim_lease(claim, claim=held)))

        running = await cluster.node.phase("one", "Running")
        assert RETRIED_AT in running["metadata"]["annotations"]


async def test_a_lease_that_the_ledger_has_lost_is_restored_for_its_claim() -> None:
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster)
        lease = claim_lease(claim)
        cluster.ledger.lost[lease.pod] = lease

        await cluster.node.phase("one", "Running")

        [named] = {request.claim for request in cluster.ledger.restored}
        assert (named.namespace, named.name) == ("default", "shares")


@pytest.mark.parametrize("conditions", [[], [LEASED]])
async def test_administrative_access_is_prepared_without_a_lease(conditions: list[str]) -> None:
    async with serving_claims() as (cluster, _):
        pod_and_claim(cluster, result(adminAccess=True, bindingConditions=conditions))

        await cluster.node.phase("one", "Running")

        assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in cluster.env("one")
        assert not cluster.activated


async def test_all_devices_of_a_request_are_named_by_its_first_in_order_of_their_index() -> None:
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster, result(0), result(1))
        shares = [
            share(index, 1000 + index, container="gpu", share_id=f"share-gpu-{index}")
            for index in (0, 1)
        ]
        cluster.ledger.grant(claim_lease(claim, *shares))

        await cluster.node.phase("one", "Running")

        env = cluster.env("one")
        limits = [env[f"CUDA_DEVICE_MEMORY_LIMIT_{number}"] for number in (0, 1)]
        assert limits == ["1000m", "1001m"]


async def test_a_claim_is_kept_over_restarts_and_released_after_its_pod() -> None:
    async with cluster_with_claims() as cluster:
        async with cluster.running():
            await registered(cluster)
            _, claim = pod_and_claim(cluster)
            lease = cluster.ledger.grant(claim_lease(claim))
            await cluster.node.phase("one", "Running")
            await cluster.node.kubelet.restart()
        async with cluster.running() as agent:
            await registered(cluster)
            await agent.node.lease_sync.sync()
            await agent.reconciler.remove_ended()
            assert agent.checkpoint.claims == {lease.pod}
            assert not await cluster.terminated(lease.pod)

            await cluster.delete_pod("one")
            await until(lambda: not agent.checkpoint.claims)
            await until(lambda: not cluster.reported[-1].allocations)

            await until(lambda: not list(cluster.node.kubelet.files.cdi.glob("*claim*")))


async def test_an_agent_killed_before_its_answer_prepares_the_same_devices_again() -> None:
    async with cluster_with_claims() as cluster:
        claim = create_claim(cluster, "shares", result())
        lease = cluster.ledger.grant(claim_lease(claim))
        async with cluster.running() as agent:
            await registered(cluster)
            first = await prepare(agent, lease)
        [file] = cluster.node.kubelet.files.cdi.glob("*claim*")
        written = file.read_bytes()
        file.unlink()

        async with cluster.running() as agent:
            await registered(cluster)
            second = await prepare(agent, lease)

        assert second == first
        assert file.read_bytes() == written
        assert len(agent.checkpoint.entries) == 1


async def test_claims_are_known_again_after_the_checkpoint_is_lost() -> None:
    async with cluster_with_claims() as cluster:
        async with cluster.running() as agent:
            await registered(cluster)
            _, claim = pod_and_claim(cluster, result(), result(1, request="other"))
            shares = (
                share(container="gpu", share_id="share-gpu-0"),
                share(1, container="other", share_id="share-other-1"),
            )
            lease = cluster.ledger.grant(claim_lease(claim, *shares))
            await cluster.node.phase("one", "Running")
            before = {entry.key: entry.setup for entry in agent.checkpoint.entries}
        for file in cluster.settings.state_dir.glob("checkpoint*"):
            file.unlink()

        async with cluster.running() as agent:
            await registered(cluster)
            await until(lambda: agent.checkpoint.claims == {lease.pod})

            assert {entry.key: entry.setup for entry in agent.checkpoint.entries} == before
            assert not await cluster.terminated(lease.pod)


async def test_a_claim_gets_the_mig_instance_at_its_position_until_it_is_unprepared() -> None:
    """Its instances stay meanwhile, whatever layout a later lease requires."""
    async with serving_claims("1xA100-40GB:mig") as (cluster, agent):
        [offered] = slices_of(cluster)
        large = instance_result("3g.20gb")
        assert large["device"] in {device["name"] for device in offered["spec"]["devices"]}
        _, claim = pod_and_claim(cluster, large)
        place = mig_share("group3", 1, container="gpu", share_id=large["shareID"])
        lease = cluster.ledger.grant(claim_lease(claim, place))
        await cluster.push_lease(lease)

        await cluster.node.phase("one", "Running")

        instances = await instances_by_start(cluster)
        assert [one.profile for one in instances.values()] == ["3g.20gb", "3g.20gb"]
        [state] = cluster.root.rglob("dra_manager_state")
        prepared = json.loads(state.read_text())[lease.pod]
        assert prepared["cdi_names"] == {"gpu": [qualified_name(instances[4].uuid)]}
        await until(
            lambda: (
                [device["name"] for device in slices_of(cluster)[0]["spec"]["devices"]]
                == [large["device"]]
            )
        )
        other = create_claim(cluster, "other", instance_result("1g.5gb"))
        late = claim_lease(other, mig_share("group1", 0, container="gpu", fence=2))
        cluster.ledger.grant(late)
        agent.node.timing = AgentTiming(instances_ready_s=2.0)
        with pytest.raises(UnavailableError, match=r"3g\.20gb at slice 4 of the device is in use"):
            await prepare(agent, late)
        assert await instances_by_start(cluster) == instances


async def test_a_claim_of_the_same_name_with_another_uid_is_refused() -> None:
    async with serving_claims() as (cluster, agent):
        lease = cluster.ledger.grant(claim_lease(create_claim(cluster, "shares", result())))

        with pytest.raises(RequestError, match="with uid another was deleted: the one of that"):
            await prepare(agent, lease, uid="another")


async def test_the_device_holds_no_more_than_it_has_whatever_the_leases_say() -> None:
    """A device report follows each refusal: a holder's lease may have been lost."""
    async with serving_claims() as (cluster, agent):
        _, claim = pod_and_claim(cluster)
        other = create_claim(cluster, "other", result())
        cluster.ledger.grant(claim_lease(claim, share(container="gpu", memory_mib=10_000)))
        await cluster.node.phase("one", "Running")

        second = share(container="gpu", memory_mib=10_000, slot=1, fence=2)
        late = cluster.ledger.grant(claim_lease(other, second))
        over = "would be over-committed: it has 15360 MiB, and 20000 would be given out"
        with pytest.raises(OvercommitError, match=over):
            await prepare(agent, late)
        [refused, *_] = await until(lambda: cluster.refused)
        assert (refused.pod, refused.name, refused.claim) == (late.pod, "other", True)
        assert refused.version == late.version
        after = cluster.events.index(refused)
        await until(
            lambda: any(isinstance(e, DeviceReported) for e in cluster.events[after:]), limit_s=3
        )


async def test_a_claim_of_a_device_that_has_left_the_node_is_refused_so_that_its_lease_ends() -> (
    None
):
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster)
        cluster.ledger.grant(claim_lease(claim, share(container="gpu", device="GPU-elsewhere")))

        [refused, *_] = await until(lambda: cluster.refused)

        assert refused.pod == claim["metadata"]["uid"]
        assert "device GPU-elsewhere, which is not on this node" in refused.reason


async def test_a_claim_whose_lease_ends_while_its_device_is_full_requests_one_again() -> None:
    """It ends when a pod that runs gets back its lease, which the ledger had lost."""
    async with serving_claims(rate=1) as (cluster, agent):
        _, claim = pod_and_claim(cluster)
        cluster.ledger.grant(claim_lease(claim, share(container="gpu", memory_mib=10_000)))
        await cluster.node.phase("one", "Running")
        other = create_claim(cluster, "other", result())
        second = share(container="gpu", memory_mib=10_000, slot=1, fence=2)
        lease = cluster.ledger.grant(claim_lease(other, second))
        preparing = asyncio.create_task(prepare(agent, lease))
        await until(lambda: agent.leases.find(lease.pod))

        del cluster.ledger.leases[lease.pod]
        third = share(container="gpu", memory_mib=3000, slot=1, fence=3)
        cluster.ledger.lost[lease.pod] = claim_lease(other, third, version=4)
        await preparing

        [entry] = [each for each in agent.checkpoint.entries if each.allocation.pod == lease.pod]
        assert entry.limits.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"


async def test_a_lease_of_an_earlier_allocation_does_not_count() -> None:
    async with serving_claims() as (cluster, _):
        _, claim = pod_and_claim(cluster)
        cluster.ledger.grant(claim_lease(claim, claim=ClaimAllocation(generation="earlier")))

        await until(lambda: events(cluster, "FailedPrepareDynamicResources"))

        assert not cluster.activated


async def test_a_claim_that_is_allocated_again_does_not_wait_for_its_earlier_lease() -> None:
    async with serving_claims(rate=1) as (cluster, agent):
        claim = create_claim(cluster, "shares", result())
        preparing = asyncio.create_task(prepare(agent, claim_lease(claim)))
        await until(lambda: bool(cluster.ledger.restored))

        again = {"devices": {"results": [result(1)]}, "allocationTimestamp": ALLOCATED_AT}
        for allocation in (None, again):
            status = {"status": {"allocation": allocation}}
            claim = cluster.api.store.patch(
                "resourceclaims", "default", "shares", status, subresource="status"
            )
        lease = cluster.ledger.grant(claim_lease(claim, share(1, container="gpu")))

        with pytest.raises(UnavailableError, match="has been allocated again"):
            await preparing
        [device] = await prepare(agent, lease)
        assert device.device_name == result(1)["device"]
