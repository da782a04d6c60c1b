"""A node that offers its GPUs as replicas, by the configuration of NVIDIA's plugin."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import yaml
from msgspec import structs

from services.node_agent import device_watcher
from services.node_agent.gpus.inventory import SharingConfig
from services.node_agent.service import NodeAgent
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.model.devices.device import DeviceMode
from shared.model.devices.replicas import Replicas
from shared.model.events.request_reply import BindRequest
from shared.model.leases.lease import ClaimAllocation, LeaseState, Share
from shared.model.names import NodeName
from simcluster.apimachinery.objects import Json
from tests.support.binder.node_binder import post, reserve
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, lease_of, one_node_cluster, share
from tests.support.node_agent.claims import claim_lease, pod_and_claim, serving_claims
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
LABEL = "nvidia.com/device-plugin.config"
STRATEGY = "nvidia.com/gpu.sharing-strategy"
REPLICAS = "nvidia.com/gpu.replicas"
PRODUCT = "nvidia.com/gpu.product"
CLAIM = ClaimAllocation(generation="1", consumers=())


def configure(cluster: OneNodeCluster, **sharing: Any) -> None:
    """Create the ConfigMap with one configuration, or replace it."""
    text = yaml.safe_dump({"version": "v1", "sharing": sharing})
    metadata = {"name": "nvidia-plugin-configs", "namespace": "leasehold-agents"}
    store = cluster.node.store
    if store.find("namespaces", None, "leasehold-agents") is None:
        store.create("namespaces", {"metadata": {"name": "leasehold-agents"}})
    if store.find("configmaps", "leasehold-agents", "nvidia-plugin-configs"):
        store.delete("configmaps", "leasehold-agents", "nvidia-plugin-configs")
    store.create("configmaps", {"metadata": metadata, "data": {"slices": text}})


def quarters(**fields: Any) -> dict[str, Any]:
    return {"timeSlicing": {"resources": [{"name": GPU, "replicas": 4}], **fields}}


def replica(index: int = 0, slot: int = 0) -> Share:
    """A quarter of a T4 by time-slicing."""
    return share(
        index,
        15_360 // 4,
        cores_percent=25,
        slot=slot,
        memory="none",
        compute="none",
        mode="time-slicing",
    )


def labels_of(cluster: OneNodeCluster) -> dict[str, str]:
    labels: dict[str, str] = cluster.node.node()["metadata"].get("labels", {})
    return labels


def condition_of(cluster: OneNodeCluster) -> Json | None:
    conditions = cluster.node.node()["status"].get("conditions", [])
    return next((it for it in conditions if it["type"] == "leasehold.dev/GpuSharing"), None)


async def test_words_23_replicas_are_allocatable_by_number_and_nothing_by_amount() -> None:
    async with one_node_cluster("2xT4") as cluster:
        configure(cluster, **quarters())
        async with cluster.running() as agent:
            amounts = [cluster.node.amount(name) for name in (GPU, NUMBER, "leasehold.dev/share")]
            devices = agent.node.devices

            assert amounts == ["8", "0", "0"]
            assert cluster.node.amount("nvidia.com/gpumem") == "0"
            assert cluster.node.amount(SHARED) is None
            assert {device.mode for device in devices} == {DeviceMode.REPLICAS}
            await until(lambda: STRATEGY in labels_of(cluster))
            labels = labels_of(cluster)
            assert (labels[STRATEGY], labels[REPLICAS]) == ("time-slicing", "4")
            assert labels[PRODUCT] == "Tesla-T4-SHARED"


async def test_words_23_renamed_replicas_are_allocatable_under_their_own_name_only() -> None:
    async with one_node_cluster("2xT4") as cluster:
        configure(cluster, **quarters(renameByDefault=True))
        async with cluster.running():
            assert cluster.node.amount(SHARED) == "8"
            assert cluster.node.amount(GPU) in {None, "0"}
            await until(lambda: STRATEGY in labels_of(cluster))
            assert PRODUCT not in labels_of(cluster)


async def test_a_pod_gets_a_turn_on_the_gpu_without_limits() -> None:
    async with one_node_cluster("1xT4") as cluster:
        configure(cluster, **quarters())
        async with cluster.running():
            for number in range(4):
                name = f"pod-{number}"
                limits = {GPU: 1}
                cluster.bind(
                    pod(name, limits=limits), replica(slot=number), name=name, dialect="nvidia"
                )
                await cluster.node.phase(name, "Running")

            environment = cluster.env("pod-3")

    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert not any(name.startswith("CUDA_") for name in environment)


async def test_words_28_a_lease_of_amounts_is_refused_where_gpus_are_replicas() -> None:
    async with one_node_cluster("1xT4") as cluster:
        configure(cluster, **quarters())
        async with cluster.running():
            cluster.bind(pod("pod", limits={GPU: 1}), share(), name="pod", dialect="nvidia")
            await cluster.node.phase("pod", "Failed")

    assert "offered as replicas by time-slicing" in cluster.message("pod")


async def test_words_27_gpus_become_replicas_once_none_is_in_use_and_amounts_again() -> None:
    async with one_node_cluster("2xT4") as cluster:
        async with cluster.running():
            lease = await cluster.run_pod("trainer", share())
        configure(cluster, **quarters())
        async with cluster.running() as agent:
            in_the_way = await until(lambda: condition_of(cluster))
            amount = cluster.node.amount(GPU)
            await cluster.delete_pod("trainer")
            await cluster.release(lease)
            await until(lambda: cluster.node.amount(GPU) == "8")
            cleared = await until(
                lambda: condition_of(cluster), lambda it: it is not None and it["status"] == "True"
            )
            shown = labels_of(cluster)
            assert agent.node.shown.sharing_problem == ""
        configure(cluster)
        async with cluster.running():
            await until(lambda: cluster.node.amount(GPU) == "20")
            await until(lambda: STRATEGY not in labels_of(cluster))

    assert amount == "20"
    assert (in_the_way["status"], in_the_way["reason"]) == ("False", "Waiting")
    assert "default/trainer hold parts of them; cordon the node" in in_the_way["message"]
    assert cleared["message"] == ""
    assert shown[REPLICAS] == "4"


async def reconfigure(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agent read a configuration with replicas at its next probe, and probe."""
    quarter = Replicas(number=4, strategy="time-slicing", resource=GPU)
    config = replace(await agent.watcher.config.load(), replicas=quarter)

    async def load() -> SharingConfig:
        return config

    monkeypatch.setattr(agent.watcher.config, "load", load)
    await agent.watcher.probe()


@pytest.mark.parametrize("admitted", ["before", "meanwhile"])
async def test_gpus_to_which_a_pod_was_admitted_change_once_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, admitted: str
) -> None:
    """Its binder commits its lease after that, and the agent reads of the lease later still."""
    changing = threading.Event()
    may_change = threading.Event()

    def advertised(*args: Any) -> NodeAdvertisement:
        changing.set()
        assert may_change.wait(30)
        return advertisement_of(*args)

    async with one_node_cluster("1xT4") as cluster, cluster.running() as agent:
        reserved = reserve(cluster, 1, share())
        request = BindRequest(node=NodeName(NODE), leases=(reserved,))

        async def admit() -> None:
            await until(lambda: agent.admit_binds(request), lambda reply: not reply.deferred_pods)

        if admitted == "before":
            await admit()
            await reconfigure(agent, monkeypatch)
        else:
            monkeypatch.setattr(device_watcher, "advertisement_of", advertised)
            change = asyncio.create_task(reconfigure(agent, monkeypatch))
            await until(changing.is_set)
            await admit()
            may_change.set()
            await change
        lease = cluster.ledger.grant(structs.replace(reserved, state=LeaseState.BOUND, version=2))
        await cluster.push_lease(lease)
        post(cluster, lease.name)
        await cluster.node.phase(lease.name, "Running")
        amount = cluster.node.amount(GPU)
        await cluster.delete_pod(lease.name)
        await cluster.release(lease)
        await until(agent.watcher.probe, lambda _: cluster.node.amount(GPU) == "4")

    assert amount == "10"


@pytest.mark.parametrize("state", [LeaseState.RESERVED, LeaseState.BOUND])
async def test_gpus_with_a_claims_lease_that_the_agent_has_not_read_of_change_once_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, state: LeaseState
) -> None:
    """The webhook has it reserved while its allocation is written, and the kubelet comes later."""
    async with one_node_cluster("1xT4") as cluster, cluster.running() as agent:
        lease = cluster.ledger.grant(lease_of("claim", share(), claim=CLAIM, state=state))
        await reconfigure(agent, monkeypatch)
        amount = cluster.node.amount(GPU)
        problem = agent.watcher.mode.problem
        del cluster.ledger.leases[lease.pod]
        await agent.node.lease_sync.sync()
        await until(agent.watcher.probe, lambda _: cluster.node.amount(GPU) == "4")

    assert amount == "10"
    assert "default/pod hold parts of them" in problem


async def test_gpus_do_not_change_while_the_ledger_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster("1xT4") as cluster, cluster.running() as agent:
        cluster.ledger.unavailable = True
        await reconfigure(agent, monkeypatch)
        # A probe of the agent itself, which has read the former configuration, may end last.
        await until(agent.watcher.probe, lambda _: "not known yet" in agent.watcher.mode.problem)

        assert cluster.node.amount(GPU) == "10"


async def test_a_claims_lease_that_was_on_its_way_gets_its_share_and_gpus_change_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger had not read of the change when it leased the claim."""
    async with serving_claims("1xT4") as (cluster, agent):
        await reconfigure(agent, monkeypatch)
        await until(lambda: cluster.node.amount(GPU) == "4")
        _, claim = pod_and_claim(cluster)
        lease = cluster.ledger.grant(claim_lease(claim))
        await cluster.node.phase("one", "Running")
        await until(lambda: cluster.node.amount(GPU) == "10")
        refused = cluster.refused
        await cluster.delete_pod("one")
        await cluster.release(lease)
        await until(lambda: cluster.node.amount(GPU) == "4")

    assert not refused


@pytest.mark.parametrize("gpus", ["1xT4", "1xT4+1xA100-40GB:mig"])
async def test_words_29_mps_that_the_node_cannot_have_is_refused_there(gpus: str) -> None:
    async with one_node_cluster(gpus) as cluster:
        configure(cluster, mps={"resources": [{"name": GPU, "replicas": 4}]})
        async with cluster.running() as agent:
            refused = await until(lambda: condition_of(cluster))

            assert {device.replicas for device in agent.node.devices} == {None}
            assert "the configuration shares GPUs by mps, and GPU" in refused["message"]
