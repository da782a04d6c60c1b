"""Nodes of a real API server without machines: their kubelets and node agents, simulated."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.binder.bind.claim_progress import BIND_COMPLETED
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.reflector import follow
from shared.kubernetes.storage_objects import ApiVolumeClaim
from shared.kubernetes.types import ApiPod
from shared.model.devices.device import Device
from shared.model.devices.node import AGENT_ANNOTATION
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.events.request_reply import BindReply, BindRequest
from shared.model.names import GPU_LABEL, NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.real.control_plane import ControlPlane
from tests.support.build import TRIGGER, devices
from tests.support.storage import HOSTNAME, ZONE

REPORT_S = 10.0
RETRY_S = 1.0
KUBELETS = "system:kube-controller-manager"
"""Kubelets and the control plane end pods, which Leasehold's policies deny to others."""
GPUS = 4
GPU_MIB = 81_920
SLOTS = 40
SERVED = (TRIGGER, "leasehold.dev/share", "nvidia.com/gpu")
"""Resources of the device plugin."""
ROOM = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "250"}


def nodes_of_zones(**zones: int) -> dict[str, dict[str, str]]:
    """Return labels by node. For example, `nodes_of_zones(a=2)` has nodes a-0 and a-1 in zone a."""
    return {
        f"{zone}-{number}": {ZONE: zone, HOSTNAME: f"{zone}-{number}", GPU_LABEL: "true"}
        for zone, count in zones.items()
        for number in range(count)
    }


NODES = nodes_of_zones(a=2, b=2)


async def create_nodes(plane: ControlPlane, nodes: Mapping[str, Mapping[str, str]]) -> None:
    amounts = ROOM | dict.fromkeys(SERVED, str(GPUS * SLOTS))
    amounts["volcano.sh/vgpu-memory"] = str(GPUS * GPU_MIB)
    for name, labels in nodes.items():
        metadata = {"name": name, "labels": dict(labels), "annotations": {AGENT_ANNOTATION: "1"}}
        status = {
            "allocatable": amounts,
            "capacity": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await plane.create("/api/v1/nodes", {"metadata": metadata, "status": status})


def gpus_of(node: str) -> tuple[Device, ...]:
    return devices(GPUS, node, model="NVIDIA A100-SXM4-80GB", memory_mib=GPU_MIB, slots=SLOTS)


async def run_agents(nats_url: str, nodes: Mapping[str, object]) -> None:
    """Report the GPUs of all nodes, and admit every pod."""
    reports = {
        name: DeviceReported(
            node=NodeName(name),
            devices=gpus_of(name),
            served=SERVED,
        )
        for name in nodes
    }

    async def admit(_: BindRequest) -> BindReply:
        return BindReply()

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for name, report in reports.items():
            user = subjects.user_of("node-agent", name)
            bus = await stack.enter_async_context(Bus.connect(nats_url, name=user))
            await bus.reply(BindRequest, "agent", NodeName(name), admit, concurrency=64)
            tasks.create_task(_report(bus, report))
            tasks.create_task(_resync(bus, report))


async def _report(bus: Bus, report: DeviceReported) -> None:
    beat = Heartbeat(service="node-agent", instance=f"agent-{report.node}", node=report.node)
    while True:
        await _publish(bus, report)
        for _ in range(round(REPORT_S / beat.interval_s)):
            await _publish(bus, beat)
            await asyncio.sleep(beat.interval_s)


async def _resync(bus: Bus, report: DeviceReported) -> None:
    requests = await bus.observe([ResyncRequested])
    while True:
        await requests.batch()
        await _publish(bus, report)


async def _publish(bus: Bus, event: DeviceReported | Heartbeat) -> None:
    if isinstance(event, DeviceReported):
        event = replace(event, reported_at=time.time())
    with contextlib.suppress(UnavailableError):
        await bus.publish([event])


@dataclass(slots=True)
class Kubelets:
    """Runs pods that are bound, and ends those that are deleted.

    It notes pods that were bound before their claims: resource versions show which write was first.
    A claim is bound as for kube-scheduler, by the annotation; its phase follows in another write.
    """

    kube: KubernetesClient
    bound_at: dict[tuple[str, str], int] = field(default_factory=dict)
    """Resource version at which a claim, by namespace and name, was first seen bound."""
    pods: dict[str, tuple[ApiPod, int]] = field(default_factory=dict)
    """Pods with claims by UID, and the resource version at which each was first seen on a node."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_pods())
            tasks.create_task(self._follow_claims())

    async def _follow_claims(self) -> None:
        path = "/api/v1/persistentvolumeclaims"
        async for batch in follow(self.kube, path, ApiVolumeClaim, retry_s=RETRY_S):
            for _, claim in batch.changed:
                if claim is not None and BIND_COMPLETED in claim.metadata.annotations:
                    meta = claim.metadata
                    version = int(meta.resource_version)
                    self.bound_at.setdefault((meta.namespace, meta.name), version)

    async def _follow_pods(self) -> None:
        async for batch in follow(self.kube, "/api/v1/pods", ApiPod, retry_s=RETRY_S):
            async with asyncio.TaskGroup() as tasks:
                for _, pod in batch.changed:
                    if pod is not None and pod.spec.node_name:
                        version = int(pod.metadata.resource_version)
                        self.pods.setdefault(pod.metadata.uid, (pod, version))
                        tasks.create_task(self._run_pod(pod))

    async def _run_pod(self, pod: ApiPod) -> None:
        meta = pod.metadata
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"
        with contextlib.suppress(NotFoundError, KubernetesConflictError):
            if meta.deletion_timestamp is not None:
                await self.kube.delete(path, uid=meta.uid, grace_s=0)
            elif pod.status.phase == "Pending":
                conditions = [{"type": "Ready", "status": "True"}]
                status = {"phase": "Running", "conditions": conditions}
                await self.kube.patch_strategic(f"{path}/status", {"status": status})

    def bound_without_volume(self) -> list[str]:
        """Return the pods that were bound before one of their claims was."""
        return [
            f"{pod.metadata.namespace}/{pod.metadata.name} at {version}, and {name} at "
            f"{self.bound_at.get((pod.metadata.namespace, name))}"
            for pod, version in self.pods.values()
            for name in claims_of(pod)
            if self.bound_at.get((pod.metadata.namespace, name), version) >= version
        ]


def claims_of(pod: ApiPod) -> list[str]:
    """Return the names of a pod's claims; that of an ephemeral volume has the names of both."""
    meta = pod.metadata
    volumes = pod.spec.volumes
    named = [volume.persistent_volume_claim for volume in volumes]
    return [
        *(str(source["claimName"]) for source in named if source),
        *(f"{meta.name}-{volume.name}" for volume in volumes if volume.ephemeral),
    ]
