"""One case at a time on a real API server, once kube-scheduler has seen its nodes and pods."""

import json
from collections.abc import Sequence

from shared.kubernetes.errors import NotFoundError
from tests.real.control_plane import ControlPlane, Json
from tests.real.recording_extender import Answer, Recorder, scheduler_answer
from tests.support.waiting import until

NODES = "/api/v1/nodes"
NAMESPACES = "/api/v1/namespaces"
FENCE = "fence"
"""A namespace, and a label of its pods."""
GATES = [{"name": "example.com/not-yet"}]
HOST = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def path_of(pod: Json) -> str:
    meta = pod["metadata"]
    return f"{NAMESPACES}/{meta['namespace']}/pods/{meta['name']}"


async def create_node(plane: ControlPlane, manifest: Json) -> Json:
    status = {"capacity": manifest["status"]["allocatable"], **manifest["status"]}
    return await plane.create(NODES, {**manifest, "status": status})


async def create_pod(plane: ControlPlane, manifest: Json) -> Json:
    """Create a pod; one without a node is not scheduled until its gate is opened."""
    spec = dict(manifest["spec"])
    if not spec.get("nodeName"):
        spec["schedulingGates"] = GATES
    path = f"{NAMESPACES}/{manifest['metadata']['namespace']}/pods"
    return await plane.create(path, {**manifest, "spec": spec})


async def answer_for(plane: ControlPlane, notes: Recorder, pod: Json, newest_node: str) -> Answer:
    """Open the gate of a pod, and return kube-scheduler's answer."""
    await _until_seen(plane, notes, newest_node)
    await _open_gate(plane, pod)
    answer: Answer = await until(lambda: scheduler_answer(plane, notes, path_of(pod)))
    return answer


async def remove(plane: ControlPlane, pods: Sequence[Json], nodes: Sequence[Json]) -> None:
    for pod in pods:
        try:
            await plane.kube.delete(path_of(pod), grace_s=0)
        except NotFoundError:
            continue
    for node in nodes:
        await plane.kube.delete(f"{NODES}/{node['metadata']['name']}")


async def _until_seen(plane: ControlPlane, notes: Recorder, newest_node: str) -> None:
    """Wait until kube-scheduler has seen all nodes and pods.

    It sees each kind in the order of the changes. So once a pod fits the newest node, by affinity
    to the newest pod there, it has seen those before; and it sees that both pods are deleted before
    the gate of another one is opened.
    """
    metadata = {"namespace": FENCE, "labels": {FENCE: ""}}
    spec = {"containers": [{"name": "c", "image": "pause"}]}
    there = {
        "metadata": {**metadata, "name": "there"},
        "spec": {**spec, "nodeName": newest_node},
    }
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": {FENCE: ""}}}
    near = {
        "metadata": {"namespace": FENCE, "name": "near"},
        "spec": {
            **spec,
            "nodeSelector": {HOST: newest_node},
            "affinity": {"podAffinity": {REQUIRED: [term]}},
            "tolerations": [{"operator": "Exists"}],
        },
    }
    await create_pod(plane, there)
    waiting = await create_pod(plane, near)
    await _open_gate(plane, waiting)
    await until(lambda: waiting["metadata"]["uid"] in notes.feasible)
    await remove(plane, (near, there), ())


async def _open_gate(plane: ControlPlane, pod: Json) -> None:
    await plane.kube.patch_merge(path_of(pod), {"spec": {"schedulingGates": None}})


async def stored(plane: ControlPlane, pod: Json) -> Json:
    read: Json = json.loads(await plane.kube.read(path_of(pod)))
    return read
