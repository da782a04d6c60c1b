"""The node's ResourceSlice says what pods leave for claims; it is written again when it is lost."""

import pytest

from services.node_agent.dra.slice_writer import COLLECTION
from shared.model.events.request_reply import SlicesRequest
from shared.model.leases.lease import LeaseState
from shared.model.names import NodeName
from shared.model.requests.claim import TaintEffect
from simcluster.apimachinery.objects import Json
from tests.support.node_agent.agent import OneNodeCluster, lease_of, share
from tests.support.node_agent.claims import (
    claim_lease,
    cluster_with_claims,
    create_claim,
    registered,
    result,
    serving_claims,
    slices_of,
)
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

pytestmark = pytest.mark.servers
CLAIM = ("resourceclaims", "default", "claim")


def devices(cluster: OneNodeCluster) -> list[Json]:
    return [device for found in slices_of(cluster) for device in found["spec"]["devices"]]


def memory(cluster: OneNodeCluster) -> list[str]:
    return [device["capacity"]["memory"]["value"] for device in devices(cluster)]


async def test_devices_are_offered_with_what_leases_of_pods_leave() -> None:
    async with serving_claims() as (cluster, _):
        assert memory(cluster) == ["15Gi", "15Gi"]

        lease = cluster.ledger.grant(lease_of("a-pod", share(memory_mib=5000)))
        await cluster.push_lease(lease)
        await until(lambda: memory(cluster) == ["10360Mi", "15Gi"])
        [found] = slices_of(cluster)
        assert found["spec"]["pool"]["name"] == found["spec"]["nodeName"] == NODE

        ended = lease_of("a-pod", share(), state=LeaseState.RELEASED, version=3)
        await cluster.push_lease(ended)
        await until(lambda: memory(cluster) == ["15Gi", "15Gi"])


async def test_a_claim_that_is_leased_before_its_allocation_is_written_counts_once() -> None:
    async with serving_claims() as (cluster, agent):
        stored = create_claim(cluster, "claim", result())
        cluster.ledger.grant(claim_lease(stored, share(container="gpu", memory_mib=5000)))
        status = stored["status"]
        cluster.api.store.patch(*CLAIM, {"status": {"allocation": None}}, subresource="status")
        reply = await agent.write_slices(SlicesRequest(node=NodeName(NODE)))
        assert reply.written
        assert memory(cluster) == ["10360Mi", "15Gi"]

        cluster.api.store.patch(*CLAIM, {"status": status}, subresource="status")

        await until(lambda: memory(cluster) == ["15Gi", "15Gi"])


async def test_slices_that_have_not_changed_are_written_if_they_are_to_be_renewed() -> None:
    async with serving_claims() as (cluster, agent):
        generations = []
        for renewed in (False, True):
            await agent.write_slices(SlicesRequest(node=NodeName(NODE), renewed=renewed))
            [written] = slices_of(cluster)
            generations.append(written["spec"]["pool"]["generation"])

        first, then = generations
        assert then == first + 1
        assert memory(cluster) == ["15Gi", "15Gi"]


async def test_a_slice_that_is_deleted_changed_or_lost_to_a_starting_kubelet_is_written_again() -> (
    None
):
    async with serving_claims() as (cluster, _):
        [first] = slices_of(cluster)
        name = first["metadata"]["name"]

        cluster.api.store.delete("resourceslices", None, name)
        await until(lambda: len(devices(cluster)) == 2)
        cluster.api.store.patch("resourceslices", None, name, {"spec": {"devices": []}})
        await until(lambda: len(devices(cluster)) == 2)
        [second] = slices_of(cluster)
        await cluster.node.kubelet.restart()
        await until(lambda: [s for s in slices_of(cluster) if uid_of(s) != uid_of(second)])

        await registered(cluster)
        [third] = slices_of(cluster)
        assert len({uid_of(each) for each in (first, second, third)}) == 3
        assert len(devices(cluster)) == 2
        assert third["metadata"]["ownerReferences"][0]["uid"] == uid_of(cluster.node.node())


def uid_of(obj: Json) -> str:
    return str(obj["metadata"]["uid"])


async def test_an_unhealthy_device_is_tainted_with_the_effect_of_the_settings() -> None:
    async with serving_claims(dra_taint_effect=TaintEffect.NO_EXECUTE) as (cluster, _):
        cluster.inject(gpu0="xid-79")
        await until(lambda: devices(cluster)[0].get("taints"))

        [taint] = devices(cluster)[0]["taints"]
        assert taint["effect"] == "NoExecute"
        assert "taints" not in devices(cluster)[1]


@pytest.mark.parametrize("field", ["bindingConditions", "allowMultipleAllocations"])
@pytest.mark.parametrize("only_when_stored", [False, True])
async def test_slices_whose_fields_the_api_server_drops_are_not_published(
    field: str, *, only_when_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server of an older version stores them without a word, maybe one of several."""
    async with cluster_with_claims() as cluster:
        create = cluster.api.store.create
        stored = 0

        def without_field(resource: str, obj: Json, *, dry_run: bool = False) -> Json:
            nonlocal stored
            if resource == "resourceslices" and not (dry_run and only_when_stored):
                for device in obj["spec"]["devices"]:
                    device.pop(field)
                    for capacity in device["capacity"].values():
                        if field == "allowMultipleAllocations":  # of the same feature gate
                            del capacity["requestPolicy"]
            if resource == "resourceslices" and not dry_run:
                stored += 1
            return create(resource, obj, dry_run=dry_run)

        monkeypatch.setattr(cluster.api.store, "create", without_field)
        async with cluster.running() as agent:
            await until(lambda: "has dropped" in (agent.probes["dra"]() or ""))

            reason = agent.probes["dra"]()
            assert reason is not None
            assert field in reason
            assert not slices_of(cluster)
            assert stored == only_when_stored


async def test_a_cluster_without_resource_claims_is_named_as_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "services.node_agent.dra.slice_writer.COLLECTION", COLLECTION.replace("v1", "v0")
    )
    async with cluster_with_claims() as cluster, cluster.running() as agent:
        await until(lambda: "does not serve resource.k8s.io/v1" in (agent.probes["dra"]() or ""))
