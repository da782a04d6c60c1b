"""A real API server and kube-scheduler, where claims are leased, on nodes without machines."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from services.claims.clients import ClaimAgentClient, ClaimClient
from services.claims.service import Claims
from services.claims.wiring import ClaimPorts, build_claims
from services.node_agent.dra.slice_writer import COLLECTION, slice_path
from services.node_agent.dra.slices import ClaimableNode, HeldAllocation, build_slices
from services.watcher.claim_sources import ClaimReflector
from services.watcher.service import ClaimTracker
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import node_path
from shared.kubernetes.types import ApiObject
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock, in_background
from shared.model.devices.device import Device
from shared.model.errors import LeaseholdError
from shared.model.events.claim_events import ClaimAllocated, ClaimDeallocated
from shared.model.events.event import Event
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import (
    SlicesReply,
    SlicesRequest,
    TerminationReply,
    TerminationRequest,
)
from shared.model.leases.lease import Lease
from shared.model.names import NodeName, PodUid
from tests.real.control_plane import ControlPlane, Json, control_plane
from tests.real.node_parts import create_nodes
from tests.support.placer.ledger import assert_sound, facts, ledger, report
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

API = "/apis/resource.k8s.io/v1"
DEBOUNCE_S = 0.2
AFTER_S = 180.0
RETRY_S = 1.0
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(eq=False)
class SliceNodes:
    """Nodes without kubelets: nothing is ever prepared there."""

    kube: KubernetesClient
    ledger: RedisLeases
    claims: ClaimClient
    devices: Mapping[NodeName, Sequence[Device]]
    generations: Counter[NodeName] = field(default_factory=Counter)
    due: set[NodeName] = field(default_factory=set)
    refused: list[NodeName] = field(default_factory=list)
    """Nodes whose slices were lowered before a refusal."""
    reported_at: float = 0.0

    def __post_init__(self) -> None:
        self._locks: defaultdict[NodeName, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def save(self) -> None:
        """Report the nodes to the ledger, and write their first slices."""
        for node, devices in self.devices.items():
            await self.ledger.save_nodes([facts(node)])
            await self.report_devices(node, devices)
            await self._write(node)

    async def report_devices(self, node: NodeName, devices: Sequence[Device]) -> None:
        """Report devices to the ledger, whatever the slices have."""
        self.reported_at += 1.0
        await self.ledger.save_devices([report(node, devices, at=self.reported_at)])

    async def list_terminated(self, _: NodeName, claims: Sequence[PodUid]) -> set[PodUid]:
        return set(claims)

    async def write_slices(self, node: NodeName) -> str:
        self.refused.append(node)
        await self._write(node)
        return ""

    async def follow(self) -> None:
        """Write the slices of nodes whose leases have changed."""
        while True:
            await asyncio.sleep(DEBOUNCE_S)
            due, self.due = self.due, set()
            await asyncio.gather(*map(self._write, due))

    async def follow_ledger(self) -> None:
        """Write the slices of all nodes, again whenever their leases have changed."""
        written: dict[NodeName, tuple[Lease, ...]] = {}
        while True:
            for totals in await self.ledger.totals.of_nodes([*self.devices]):
                node = totals.node.facts.name
                if written.get(node) != totals.leases:
                    await self._write(node)
                    written[node] = totals.leases
            await asyncio.sleep(DEBOUNCE_S)

    async def reply_slices(self, request: SlicesRequest) -> SlicesReply:
        await self.write_slices(request.node)
        return SlicesReply(written=True)

    async def reply_terminated(self, request: TerminationRequest) -> TerminationReply:
        return TerminationReply(terminated=True, terminated_pods=request.more_pods)

    async def _write(self, node: NodeName) -> None:
        async with self._locks[node]:
            [totals] = await self.ledger.totals.of_nodes([node])
            gone = [held for lease in totals.leases if (held := await self._gone(lease))]
            stored = await self.kube.read(node_path(node), ApiObject)
            self.generations[node] += 1
            claimable = ClaimableNode(
                name=node,
                uid=stored.metadata.uid,
                devices=tuple(self.devices[node]),
                leases=totals.leases,
            )
            [built] = build_slices(
                claimable, generation=self.generations[node], deallocated=frozenset(gone)
            )
            try:
                await self.kube.patch_merge(slice_path(built["metadata"]["name"]), built)
            except NotFoundError:
                await self.kube.create(COLLECTION, built)

    async def _gone(self, lease: Lease) -> HeldAllocation | None:
        held = lease.claim.generation if lease.claim else ""
        now = await self.claims.get_allocation(lease.namespace, lease.name)
        return (lease.pod, held) if now is None or now.generation != held else None


@dataclass(eq=False)
class ClaimService:
    """What watchers and binders do with claims, in this process."""

    kube: KubernetesClient
    ledger: RedisLeases
    nodes: SliceNodes
    tracker: ClaimTracker = field(default_factory=ClaimTracker)

    def __post_init__(self) -> None:
        self.claims: Claims = build_claims(
            ClaimPorts(
                ledger=self.ledger,
                claims=self.nodes.claims,
                agents=cast(ClaimAgentClient, self.nodes),
                publish=self.publish,
                clock=SystemClock(),
                host_clock=SystemClock(),
            )
        )

    async def publish(self, events: Sequence[Event]) -> None:
        self.nodes.due |= {event.lease.node for event in events if isinstance(event, LeaseChanged)}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.nodes.follow())
            tasks.create_task(self._retry())
            async for batch in ClaimReflector(self.kube).batches():
                events = [
                    event
                    for change in batch
                    for event in self.tracker.update(change.claim, change.allocation)
                ]
                tasks.create_task(self._handle(events))

    async def _handle(self, events: Sequence[Event]) -> None:
        allocated = [event for event in events if isinstance(event, ClaimAllocated)]
        ended = [event for event in events if isinstance(event, ClaimDeallocated)]
        with contextlib.suppress(LeaseholdError):  # they are published again
            await self.publish(await self.claims.ender.end_claims(ended))
        with contextlib.suppress(LeaseholdError):
            await self.publish(await self.claims.leaser.lease_claims(allocated))

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            await self._handle(self.tracker.resync_unanswered())


@dataclass(slots=True)
class ClaimCluster:
    plane: ControlPlane
    ledger: RedisLeases
    nodes: SliceNodes

    async def add_pod(
        self, namespace: str, name: str, devices: Json, labels: Mapping[str, str] = NONE
    ) -> None:
        """Create a pod, and its claim of the same name for `devices`."""
        claim = {"metadata": {"name": name}, "spec": {"devices": devices}}
        await self.plane.create(f"{API}/namespaces/{namespace}/resourceclaims", claim)
        container = {"name": "c", "image": "pause", "resources": {"claims": [{"name": "gpu"}]}}
        spec = {
            "schedulerName": "default-scheduler",
            "automountServiceAccountToken": False,
            "containers": [container],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "terminationGracePeriodSeconds": 0,
        }
        metadata = {"name": name, "labels": dict(labels)}
        await self.plane.create(
            f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": spec}
        )

    async def pods(self, namespace: str) -> dict[str, Json]:
        items = await self.plane.objects(f"/api/v1/namespaces/{namespace}/pods")
        return {pod["metadata"]["name"]: pod for pod in items}

    async def bound_pods(self, namespace: str) -> dict[str, Json]:
        """Return the pods that have a node."""
        pods = await self.pods(namespace)
        return {name: pod for name, pod in pods.items() if pod["spec"].get("nodeName")}

    async def leases(self, namespace: str) -> dict[str, Lease]:
        """Return the leases by the name of their claim; no device has more than it has room for."""
        leases = await assert_sound(self.ledger)
        return {lease.name: lease for lease in leases if lease.namespace == namespace}

    async def clear(self, namespace: str) -> None:
        """Delete all pods and claims, and wait until their leases have ended."""
        for pod in await self.pods(namespace):
            await self.plane.kube.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", grace_s=0)
        await self.plane.kube.delete(f"{API}/namespaces/{namespace}/resourceclaims")
        await until(lambda: self.leases(namespace), lambda held: not held, limit_s=AFTER_S)


@contextlib.asynccontextmanager
async def claim_cluster(
    nodes: Mapping[str, Mapping[str, str]], devices: Mapping[NodeName, Sequence[Device]]
) -> AsyncIterator[ClaimCluster]:
    """Start all of it, on nodes with these labels and devices."""
    async with contextlib.AsyncExitStack() as stack:
        plane = await stack.enter_async_context(control_plane())
        plane.start_controllers()
        plane.start_scheduler()
        valkey = stack.enter_context(valkey_server())
        await valkey.ready()
        leases = await stack.enter_async_context(ledger(valkey.url, {}))
        await create_nodes(plane, nodes)
        claims = ClaimClient(plane.kube, SystemClock())
        slice_nodes = SliceNodes(plane.kube, leases, claims, devices)
        await slice_nodes.save()
        service = ClaimService(plane.kube, leases, slice_nodes)
        await stack.enter_async_context(in_background(service.run()))
        yield ClaimCluster(plane, leases, slice_nodes)
