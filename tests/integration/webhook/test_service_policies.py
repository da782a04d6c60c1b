"""The services work with the rights, and under the policies, that confine them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.binder.bind.volume_client import VolumeClient
from services.binder.clients import PodClient
from services.binder.report.explanations import KubernetesEvent, count_patch, event_body
from services.node_agent.views.advertisement import advertisement_of
from services.node_agent.views.node_views import ViewWriter
from services.watcher.quota_sources import CONFIG_MAPS
from shared.dialects import DIALECTS
from shared.dialects.advertised import NodeSoftware, Strategy
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.errors import RequestError
from shared.model.names import BUDGET_GATE, Namespace, NodeName, PodUid
from tests.support.build import device, lease, share
from tests.support.node_agent.node import node_of
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import created, install_rights, token_of
from tests.support.waiting import until

NODE = NodeName("gpu-1")
DEVICES = "devices.scheduling.koordinator.sh"
PODS = "/api/v1/namespaces/team-a/pods"


@asynccontextmanager
async def client_of(api: ApiUnderTest, account: str) -> AsyncIterator[KubernetesClient]:
    async with api.client() as admin:
        token = await token_of(admin, account, NODE)
    credentials = ClusterCredentials(server=api.url, ca_pem=api.ca.read_text(), token=token)
    async with KubernetesClient(credentials) as client:
        yield client


async def pod(api: ApiUnderTest, **spec: Any) -> Any:
    async with api.client() as client:
        containers = [{"name": "main", "image": "app"}]
        body = {"metadata": {"name": "train"}, "spec": {"containers": containers, **spec}}
        return await created(client, PODS, body)


async def test_an_agent_writes_the_views_of_its_node_and_of_its_pods() -> None:
    software = NodeSoftware(driver_version="550.1", isolation_available=True)
    shown = advertisement_of(DIALECTS.values(), [device("GPU-a", 0)], Strategy.AUTO, software)
    async with api_server() as api:
        api.store.create("nodes", {"metadata": {"name": NODE}, "status": {"phase": "Running"}})
        await install_rights(api)
        made = await pod(api, nodeName=NODE)
        held = lease(
            made["metadata"]["uid"], NODE, share(), namespace="team-a", name="train",
            dialect="volcano-vgpu",
        )  # fmt: skip
        async with client_of(api, "node-agent") as client:
            views = ViewWriter(node_of(name=NODE, kubernetes=client))
            views.set_advertisement(shown)
            views.show_allocated(held, frozenset({"main"}))
            writing = asyncio.create_task(views.run())
            await until(lambda: api.store.find(DEVICES, None, NODE))
            await until(
                lambda: api.store.read("pods", "team-a", "train")["metadata"].get("annotations")
            )
            writing.cancel()
        node = api.store.read("nodes", None, NODE)

    assert shown.node_status.keys() <= node["status"]["allocatable"].keys()
    assert {key for key, text in shown.annotations.items() if text} <= node["metadata"][
        "annotations"
    ].keys()
    assert {key for key, text in shown.labels.items() if text} <= node["metadata"]["labels"].keys()


async def test_the_binder_annotates_pods_removes_gates_and_reports_conditions() -> None:
    async with api_server() as api:
        await install_rights(api)
        meta = (await pod(api, schedulingGates=[{"name": BUDGET_GATE}]))["metadata"]
        async with client_of(api, "binder") as client:
            pods = PodClient(client)
            await pods.remove_gate("team-a", "train", meta["uid"], BUDGET_GATE)
            read = await pods.get("team-a", "train")
            assert read is not None
            notes = {"leasehold.dev/lease": "{}", "volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,1,1:"}
            await pods.annotate(
                "team-a", "train", read.pod, notes, resource_version=read.resource_version
            )
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            await pods.patch_status("team-a", "train", {"status": {"conditions": [condition]}})
        found = api.store.read("pods", "team-a", "train")

    assert found["metadata"]["annotations"] == notes
    assert not found["spec"].get("schedulingGates")
    assert "Unschedulable" in str(found["status"]["conditions"])


async def test_the_binder_changes_only_what_binds_claims() -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim_path = "/api/v1/namespaces/team-a/persistentvolumeclaims/data"
    async with api_server() as api:
        await install_rights(api)
        meta = {"name": "data", "namespace": "team-a"}
        api.store.create("persistentvolumeclaims", {"metadata": meta, "spec": spec})
        for name in ("pv", "taken"):
            api.store.create("persistentvolumes", {"metadata": {"name": name}, "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                "local": {"path": "/x"},
                **({"claimRef": {"namespace": "team-b", "name": "own"}} if name == "taken" else {}),
            }})  # fmt: skip
        async with client_of(api, "binder") as client:
            volumes = VolumeClient(client)
            claim = await volumes.get_claim("team-a", "data")
            assert claim is not None
            selected = await volumes.select_node(claim, NODE)
            volume = await volumes.get_volume("pv")
            assert volume is not None
            await volumes.reserve_volume(volume, selected)
            assert await volumes.last_warning("team-a", "data") == ""
            assert await volumes.version()
            for path, change, word in (
                (claim_path, {"spec": {"volumeName": "taken"}}, "spec of a claim"),
                (claim_path, {"metadata": {"labels": {"a": "b"}}}, "only annotations"),
                (claim_path, {"metadata": {"annotations": {"a": "b"}}}, "only the annotation"),
                (
                    "/api/v1/persistentvolumes/taken",
                    {"spec": {"claimRef": {"name": "data"}}},
                    "only reserve a volume that is not reserved",
                ),
                (
                    "/api/v1/persistentvolumes/pv",
                    {"spec": {"persistentVolumeReclaimPolicy": "Delete"}},
                    "only reserve a volume",
                ),
            ):
                with pytest.raises(RequestError, match=word):
                    await client.patch_merge(path, change)
        stored = api.store.read("persistentvolumes", None, "pv")
        final = api.store.read("persistentvolumeclaims", "team-a", "data")

    assert stored["spec"]["claimRef"]["uid"] == final["metadata"]["uid"]
    assert final["metadata"]["annotations"] == {"volume.kubernetes.io/selected-node": NODE}


async def test_the_binder_counts_an_event_that_another_binder_wrote() -> None:
    async with api_server() as api:
        await install_rights(api)
        event = KubernetesEvent(
            pod=PodUid("u"),
            namespace=Namespace("team-a"),
            name="train",
            reason="FailedScheduling",
            message="it is full",
        )
        name = event.event_name
        async with client_of(api, "binder") as client:
            pods = PodClient(client)
            await pods.create_event("team-a", event_body(event, count=2, first_at=1, last_at=2))
            count = await pods.get_event_count("team-a", name)
            await pods.patch_event("team-a", name, count_patch(count + 1, 3))
        found = api.store.read("events", "team-a", name)

    assert found["count"] == 3


async def test_the_watcher_lists_the_one_config_map_that_has_quotas() -> None:
    async with api_server() as api:
        await install_rights(api)
        async with client_of(api, "watcher") as client:
            assert b"items" in await client.read(
                f"{CONFIG_MAPS}?fieldSelector=metadata.name=gpuquota"
            )
            for more in ("", "?fieldSelector=metadata.name!=gpuquota"):
                with pytest.raises(RequestError, match="cannot list"):
                    await client.read(f"{CONFIG_MAPS}{more}")
