"""kube-scheduler and the placer leave the same nodes for a pod: the table of cases, one by one."""

import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.names import Namespace
from tests.real.control_plane import ControlPlane, control_plane, missing
from tests.real.recording_extender import Recorder, recorder, scheduler_answer
from tests.support.node_case_objects import NAMESPACE, fitting, node_manifests, pod_manifests
from tests.support.node_cases import HOST, LABELS, NODE_CASES, REQUIRED, Manifest, NodeCase
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

NODES = "/api/v1/nodes"
GATES = {"schedulingGates": [{"name": "example.com/not-yet"}]}
NAMESPACES: dict[Namespace, dict[str, str]] = {
    Namespace(NAMESPACE): {"team": "ml"},
    Namespace("other"): {},
    Namespace("fence"): {},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def notes() -> AsyncIterator[Recorder]:
    async with recorder() as recording:
        yield recording


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(notes: Recorder) -> AsyncIterator[ControlPlane]:
    async with control_plane() as started:
        for name, labels in NAMESPACES.items():
            metadata = {"name": name, "labels": labels}
            await started.create("/api/v1/namespaces", {"metadata": metadata})
        started.start_scheduler(extenders=[notes.configuration])
        yield started


@pytest.mark.parametrize("case", NODE_CASES.values(), ids=NODE_CASES)
async def test_pods_fit_the_nodes_that_kube_scheduler_leaves(
    plane: ControlPlane, notes: Recorder, case: NodeCase
) -> None:
    nodes = [await plane.create(NODES, manifest) for manifest in node_manifests(case)]
    *running, waiting = pod_manifests(case)
    pods = [await create_pod(plane, manifest) for manifest in running]
    train = await create_pod(plane, {**waiting, "spec": {**waiting["spec"], **GATES}})
    await until_seen(plane, notes)
    await open_gate(plane, train)
    theirs = await until(lambda: scheduler_answer(plane, notes, path_of(train)))
    stored = json.loads(await plane.kube.read(path_of(train)))
    ours = fitting(
        [msgspec.convert(pod, ApiPod) for pod in (*pods, stored)],
        [msgspec.convert(node, ApiNode) for node in nodes],
        NAMESPACES,
    )

    for pod in (*pods, train):
        await plane.kube.delete(path_of(pod), grace_s=0)
    for node in nodes:
        await plane.kube.delete(f"{NODES}/{node['metadata']['name']}")
    left = " ".join(sorted(theirs.fits & LABELS.keys()))
    assert (left, ours) == (case.fits, case.fits), theirs


async def until_seen(plane: ControlPlane, notes: Recorder) -> None:
    """Wait until kube-scheduler has seen all nodes and pods.

    It sees each kind in the order of the changes. So once a pod fits the newest node, by affinity
    to the newest pod there, it has seen those before, too.
    """
    labels = {HOST: "fence", "fence": "yes"}
    amounts = {"cpu": "1", "memory": "1Gi", "pods": "10"}
    status = {"allocatable": amounts, "capacity": amounts}
    node = {"metadata": {"name": "fence", "labels": labels}, "status": status}
    await plane.create(NODES, node)
    containers = [{"name": "c", "image": "pause"}]
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"fence": "yes"}}}
    metadata = {"namespace": "fence", "labels": {"fence": "yes"}}
    there = {
        "metadata": {**metadata, "name": "there"},
        "spec": {"containers": containers, "nodeName": "fence"},
    }
    near = {
        "metadata": {"namespace": "fence", "name": "near"},
        "spec": {
            "containers": containers,
            "nodeSelector": {"fence": "yes"},
            "affinity": {"podAffinity": {REQUIRED: [term]}},
        },
    }
    pods = [await create_pod(plane, there), await create_pod(plane, near)]
    await until(lambda: pods[1]["metadata"]["uid"] in notes.feasible)
    for pod in reversed(pods):
        await plane.kube.delete(path_of(pod), grace_s=0)
    await plane.kube.delete(f"{NODES}/fence")


async def create_pod(plane: ControlPlane, manifest: Manifest) -> Manifest:
    namespace = manifest["metadata"]["namespace"]
    return await plane.create(f"/api/v1/namespaces/{namespace}/pods", manifest)


async def open_gate(plane: ControlPlane, pod: Manifest) -> None:
    await plane.kube.patch_merge(path_of(pod), {"spec": {"schedulingGates": None}})


def path_of(pod: Manifest) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
