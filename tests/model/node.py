"""A node: a small kubelet, and the product's agent as far as it allocates and keeps records."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.allocate.reporter import AllocationReporter
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod, PodResources
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.device_guard import close_unrecorded
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseRequester, LeaseSync
from shared.dialects.advertised import PluginDeviceId
from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.hami_core import MEMORY_LIMIT
from shared.model.device import Device
from shared.model.errors import LeaseholdError
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.model.api_server import NAMESPACE, ApiServer, Pod
from tests.model.limits import ModelLimits
from tests.model.virtual_time import ActorClock
from tests.support.build import TRIGGER

CONTAINER = "main"
PATHS = Paths(library="/lib", preload="/preload", containers="/containers")


@dataclass(slots=True)
class KubeletRecord:
    """A pod that the kubelet has admitted, or is admitting."""

    pod: Pod
    device_ids: tuple[str, ...] = ()
    given: Mapping[str, str] | None = None
    """The environment of its container, which runs, with its limits now; None: it does not run."""
    used_mib: int = 0


def limit_mib(record: KubeletRecord) -> int:
    """Return what a running container may use at most."""
    return int((record.given or {})[f"{MEMORY_LIMIT}_0"].removesuffix("m"))


class _Span:
    context = ""

    def end(self, error: str = "") -> None:
        """Tracing is of no interest."""


class _Host:
    """The agent's disk, views and metrics, of no interest here."""

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        """There are no files."""

    async def ensure_named(self, setup: ContainerSetup) -> None:
        """There are no CDI files."""

    async def remove_unused(self, live: set[PodUid], mounted: set[str] | None) -> None:
        """There are no files."""

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        """There are no views."""

    def show_failed(self, lease: Lease) -> None:
        """There are no views."""

    def begin(self, lease: Lease, facts: Mapping[str, str]) -> _Span:
        return _Span()

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        """Count nothing."""

    def count_overcommit(self) -> None:
        """Count nothing."""


async def _no_instances(*_: Any) -> dict[Any, Any]:
    return {}


class Agent:
    """One life of a node's agent: its checkpoint is on disk, all else is in memory."""

    def __init__(self, node: "Node") -> None:
        clock = node.clock
        host: Any = _Host()
        self.node = node
        self.checkpoint = Checkpoint(node.folder / f"{node.name}.json", node.name)
        self.leases = KnownLeases(node.name)
        self.lease_sync = LeaseSync(node.name, self.leases, node.requester)
        self.reporter = AllocationReporter(node.name, leases=self.leases, views=host)
        self.resolver = PodResolver(
            self.lease_sync, pods=node.kubelet, pod_resources=node.kubelet, clock=clock
        )
        self.window = AdmissionWindow(
            self.leases,
            self.checkpoint,
            refused=self.reporter.refused,
            get_snapshot=node.snapshot,
            ticks=clock.ticks,
        )
        self.reconciler = CheckpointReconciler(
            self.checkpoint,
            self.leases,
            pods=node.kubelet,
            pod_resources=node.kubelet,
            list_mig_instances=_no_instances,
            retain_refused=self.reporter.retain_refused,
            files=host,
            clock=clock,
        )
        self.handler = AllocationHandler(
            node.name,
            require_snapshot=node.snapshot,
            resolver=self.resolver,
            pod_resources=node.kubelet,
            checkpoint=self.checkpoint,
            forget_ended=self.reconciler.forget_ended,
            files=host,
            name_cdi_devices=host.ensure_named,
            mig_instances_of=_no_instances,
            reporter=self.reporter,
            metrics=host,
            clock=clock,
        )

        self.limits = ModelLimits(node, self)

    def admit_binds(self, leases: Sequence[Lease]) -> BindReply:
        unready = "its records are lost" if self.checkpoint.lost else None
        return self.window.admit_binds(leases, unready, unreadable_reason="")

    def observe(self, event: LeaseChanged) -> None:
        self.leases.observe([event.lease])
        self.limits.wake()

    async def sync(self) -> None:
        """Request all leases, and write a lost checkpoint anew, as the agent's loop does."""
        await self.lease_sync.sync()
        self.limits.wake()
        if self.checkpoint.lost:
            await self.reconciler.rebuild(self.node.snapshot())

    async def publish_outcomes(self, publish: Callable[[Sequence[Event]], None]) -> None:
        while True:
            publish(await self.reporter.outbox.take())


class Kubelet:
    """Admits bound pods one after the other, runs their containers and ends them."""

    unreadable_reason = ""

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.records: dict[PodUid, KubeletRecord] = {}
        self.ended: set[PodUid] = set()
        self.admission: asyncio.Task[None] | None = None

    def sync(self) -> None:
        """End what the API server has no more, and begin to admit what it has bound."""
        self.end_deleted()
        if self.admission is None or self.admission.done():
            self.admission = self.node.clock.loop.create_task(self._admit())

    def end_deleted(self) -> None:
        for uid in list(self.records):
            if self.node.api.find(uid) is None:
                self.end(uid)
        for pod in list(self.node.api.pods.values()):
            if pod.node == self.node.name and pod.deleting:
                if pod.uid in self.records:
                    self.end(pod.uid)
                self.node.api.finish_deleted(pod)

    def end(self, uid: PodUid, phase: str = "") -> None:
        """End the pod's container; with a `phase`, report it."""
        record = self.records.pop(uid)
        self.ended.add(uid)
        if phase:
            self.node.api.finish(record.pod, phase)

    def abort_admission(self) -> None:
        """Fail the pod that is being admitted: its Allocate got no reply."""
        if self.admission is not None:
            self.admission.cancel()
        for uid, record in list(self.records.items()):
            if record.given is None:
                self.end(uid, "Failed")

    def fail_users(self, device: DeviceUuid) -> None:
        """Fail the containers of a device that is gone."""
        self.abort_admission()
        for uid, record in list(self.records.items()):
            if (record.given or {}).get("NVIDIA_VISIBLE_DEVICES") == device:
                self.end(uid, "Failed")

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        container = KubeletContainer(name=CONTAINER, limits={TRIGGER: 1})
        return tuple(
            KubeletPod(
                uid=uid,
                namespace=NAMESPACE,
                name=record.pod.name,
                phase="Pending" if record.given is None else "Running",
                containers=(container,),
            )
            for uid, record in self.records.items()
        )

    async def list_running(self) -> frozenset[PodUid]:
        return frozenset(uid for uid, record in self.records.items() if record.given is not None)

    async def list_holdings(self) -> PodResources:
        return PodResources(
            holdings=tuple(
                Holding(NAMESPACE, r.pod.name, CONTAINER, TRIGGER, frozenset(r.device_ids))
                for r in self.records.values()
                if r.device_ids
            ),
            pods=frozenset((NAMESPACE, r.pod.name) for r in self.records.values()),
        )

    async def _admit(self) -> None:
        for pod in list(self.node.api.pods.values()):
            waits = pod.node == self.node.name and not (pod.is_terminal or pod.deleting)
            if waits and pod.uid not in self.records and pod.uid not in self.ended:
                record = self.records[pod.uid] = KubeletRecord(pod)
                try:
                    await self._allocate(record)
                except LeaseholdError as error:
                    self.node.note(f"kubelet {self.node.name} fails pod {pod.uid}: {error}")
                    if pod.uid in self.records:
                        self.end(pod.uid, "Failed")

    async def _allocate(self, record: KubeletRecord) -> None:
        handler = self.node.agent.handler
        used = {each for other in self.records.values() for each in other.device_ids}
        free = [each for each in self.node.snapshot().served[TRIGGER] if each not in used]
        preferred = await handler.get_preferred_allocation(TRIGGER, free, [], 1)
        ids = tuple(preferred or free[:1])
        setup = await handler.allocate(TRIGGER, ids)
        record.device_ids = ids
        if record.pod.uid in self.records:
            record.given = dict(setup.environment)
            self.node.on_given(self.node.name, record)


@dataclass(slots=True, eq=False)
class Node:
    """The machine: devices, kubelet, and an agent that can be killed."""

    name: NodeName
    api: ApiServer
    clock: ActorClock
    requester: LeaseRequester
    folder: Path
    devices: list[Device]
    note: Callable[[str], None]
    publish: Callable[[Sequence[Event]], None]
    on_given: Callable[[NodeName, KubeletRecord], None]
    kubelet: Kubelet = field(init=False)
    agent: Agent = field(init=False)
    silent: bool = False
    """The agent answers no request of binders, and they answer none of its."""
    was_silent: bool = False
    loses_reply: bool = False
    """To the next request about limits."""
    lost_records: bool = False
    """Its checkpoint was lost at least once."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    reported_at: float = 0.0

    def __post_init__(self) -> None:
        self.kubelet = Kubelet(self)

    def snapshot(self) -> NodeSnapshot:
        ids = {
            f"{device.uuid}-{slot}": PluginDeviceId(
                id=f"{device.uuid}-{slot}", healthy=True, device=device.uuid
            )
            for device in self.devices
            for slot in range(device.slots)
        }
        return NodeSnapshot(
            name=self.name,
            devices={device.uuid: device for device in self.devices},
            served={TRIGGER: ids},
            paths=PATHS,
        )

    async def start_agent(self) -> None:
        """Begin a new life of the agent; the kubelet fails the pod that it is admitting."""
        self.stop_agent()
        self.reported_at = 0.0
        self.agent = Agent(self)
        await self.agent.checkpoint.load()
        if self.agent.checkpoint.lost and not self.kubelet.records:
            self.agent.checkpoint.lost = False
        self.tasks.append(asyncio.create_task(self.agent.publish_outcomes(self.publish)))
        self.tasks.append(asyncio.create_task(self.agent.limits.run()))

    def stop_agent(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self.kubelet.abort_admission()

    def report(self) -> None:
        """Publish the node's devices and allocations."""
        self.reported_at = max(self.clock.now(), self.reported_at + 0.001)
        self.publish(
            [
                DeviceReported(
                    node=self.name,
                    devices=close_unrecorded(self.devices, self.agent.checkpoint.unrecorded),
                    served=(TRIGGER,),
                    allocations=self.agent.checkpoint.allocations,
                    reported_at=self.reported_at,
                    fences=self.agent.checkpoint.device_fences,
                )
            ]
        )
