"""A node: its machine, and the product's agent as far as it allocates and keeps records."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.grants import Grants
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.device_watcher import PROBE_S
from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.enforcers.limit_audit import LimitAudit
from services.node_agent.gpus.device_health import HealthPolicy
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import SharingConfig, as_offered
from services.node_agent.gpus.memory_limits import Accounting
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.memory_limits.container_limits import limited_shares
from services.node_agent.node import Node as AgentNode
from services.node_agent.offered_mode import OfferedMode
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.reconcile.leftovers import Leftovers
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import close_devices, close_unrecorded
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.resize.limit_updates import LimitUpdater
from services.node_agent.service import LEASE_SYNC_RETRY_S
from services.node_agent.time_slices.time_slices import TimeSlices
from shared.dialects.advertised import PluginDeviceId
from shared.dialects.dialect import Paths
from shared.dialects.hami_core import MEMORY_LIMIT
from shared.model.devices.device import Device, DeviceMode
from shared.model.devices.replicas import Replicas
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.model.api_server import ApiServer, Pod
from tests.model.claims import Claims
from tests.model.kubelet import CONTAINER, Kubelet, KubeletRecord
from tests.model.memory_limits import (
    LimitClient,
    LimitDriver,
    ModelContainerLimits,
    ModelProgram,
    ModelSetter,
    make_cgroups,
    model_enforcers,
)
from tests.model.mig import ModelDriver, PartitionerProcess, parse_instance
from tests.model.virtual_time import ActorClock
from tests.support.build import TRIGGER

RESTARTED_S = 1.0
"""The runtime restarts a loop that has raised after about this time."""
HEALTH = HealthPolicy(first_backoff_s=5.0, max_backoff_s=10.0)
ADVERTISING_S = 0.5
"""An agent takes so long from the choice of another mode until it advertises the devices in it."""
PATHS = Paths(library="/lib", preload="/preload", containers="/containers")


class _Host:
    """The agent's disk, views and metrics, of no interest here."""

    async def _do_nothing(self, *_: object, **__: object) -> None:
        """There are no files."""

    def _ignore(self, *_: object) -> None:
        """Nobody looks."""

    @contextlib.contextmanager
    def traced(self, *_: object) -> Iterator[str]:
        """Nothing is traced."""
        yield ""

    unwritable_reason = ""

    prepare = _do_nothing
    ensure_named = _do_nothing
    remove_unused = _do_nothing
    show_allocated = _ignore
    show_failed = _ignore
    count_allocation = _ignore
    count_overcommit = _ignore
    partitioned = _ignore


class ModelPods(NodePods):
    """The agent's sight of the pods; it is on the node's PID namespace."""

    def __init__(self, node: AgentNode, kubelet: Kubelet) -> None:
        super().__init__(node, Path("unused"))
        self._kubelet = kubelet
        self._finds_processes = True

    async def list_processes(self) -> dict[int, PodUid]:
        return dict(enumerate(sorted(self._kubelet.processes())))

    async def _find_processes(self) -> Mapping[PodUid, Set[str]]:
        return {uid: {CONTAINER} for uid in self._kubelet.processes()}


class ModelLimits(LimitUpdater):
    """Each container says what it uses, as far as its library counts it."""

    def __init__(self, node: "Node", agent: "Agent") -> None:
        monitor: Any = None
        super().__init__(agent.known, monitor, on_change=lambda: None)
        self.kubelet = node.kubelet

    async def restore_altered(self) -> None:
        """Write the library's limits anew, as a scan of usage does where they differ."""
        library = self.node.enforcers.by_name["hami-core"]
        for entry in self.checkpoint.entries:
            await library.resize(entry)

    async def _check_use(self, entry: CheckpointEntry) -> None:
        record = self.kubelet.records.get(entry.allocation.pod)
        limit = entry.limits.environment.get(f"{MEMORY_LIMIT}_0")
        if limit is None and limited_shares(entry):
            return
        if limit is None:
            raise RequestError("the library does not hold it")
        if record is not None and record.counted_mib > int(limit.removesuffix("m")):
            raise RequestError(
                f"{record.counted_mib} MiB are in use, and the limit would be {limit}"
            )


class Agent:
    """One life of a node's agent: its checkpoint is on disk, all else is in memory."""

    def __init__(self, node: "Node") -> None:
        host: Any = _Host()
        kubelet: Any = node.kubelet
        api: Any = node.claims
        self.node = node
        self.checkpoint = Checkpoint(node.folder / f"{node.name}.json", node.name)
        self.leases = KnownLeases(node.name)
        self.lease_sync = LeaseSync(self.leases, node.requester)
        self.driver_limits = ModelContainerLimits(node, self.checkpoint)
        self.known = AgentNode(
            name=node.name,
            kubernetes=api,
            kubelet=kubelet,
            pod_resources=kubelet,
            checkpoint=self.checkpoint,
            lease_sync=self.lease_sync,
            files=host,
            enforcers=model_enforcers(node, host, self.driver_limits),
            cdi=host,
            metrics=host,
            clock=node.clock,
        )
        self.audit = LimitAudit(self.known)
        self.pods = ModelPods(self.known, node.kubelet)
        self.health = HealthMonitor(
            node.name,
            xids=node.driver.xids,
            environ={},
            policy=HEALTH,
            leases=self.leases,
            checkpoint=self.checkpoint,
            clock=node.clock,
        )
        self.health.remember(
            device for device in node.devices if device.uuid in node.driver.hanging
        )
        self.began_s = node.clock.ticks()
        self.window = AdmissionWindow(self.known)
        self.mode = OfferedMode(self.known, self.window)
        self.mig = LayoutReconciler(
            self.known, self.pods, node.partitioner.instances, node.partitioner
        )
        self.mig.profiles = node.driver.profiles()
        self.reconciler = CheckpointReconciler(self.known, self.pods, self.mig)
        self.leftovers = Leftovers(self.known, self.reconciler)
        grants = Grants(self.known, self.mig, self.reconciler)
        self.failed = grants.failed
        self.handler = AllocationHandler(self.known, self.pods, grants, host)
        self.preparation = ClaimPreparation(
            self.known,
            grants,
            TimeSlices(self.known, None, node.folder / f"{node.name}-time-slices.json"),
            node.folder / f"{node.name}-cdi",
        )
        self.limits = ModelLimits(node, self)

    async def probe(self, *, config: SharingConfig) -> None:
        """Look at the devices; the kubelet sees those that are only suspect as healthy."""
        node = self.node
        in_machine = node.devices
        probed = node.driver.probe(self.began_s)
        self.health.update(probed, node.driver.unreadable)
        await self.known.enforcers.find_out(probed)
        before = self.known.devices or self.checkpoint.devices
        config = await self.mode.choose(config, probed, before)
        offers = {device.uuid: device.offer for device in self.known.devices}
        devices = tuple(
            replace(
                as_offered(device, config),
                healthy=not fault,
                fault=fault,
                offer=offers.get(device.uuid, device.offer),
            )
            for device in in_machine
            for fault in [self.health.faults.get(device.uuid, "")]
        )
        devices = self.known.enforcers.offered(devices, probed, config)
        snapshot = self.known.snapshot
        if snapshot is None or devices != self.known.devices:
            if snapshot is not None and _modes(devices) != _modes(self.known.devices):
                await node.clock.sleep(ADVERTISING_S)
            if in_machine is not node.devices or not self.mode.advertise(config.replicas):
                return
            present = {gpu.uuid for gpu in probed}
            served = self.health.as_served(devices)
            self.known.snapshot = _snapshot(node.name, devices, served, present)
            self.known.report_due.set()
            for notify in self.known.on_devices:
                notify()
        await self.checkpoint.record_devices(devices)

    async def probe_again(self) -> None:
        while True:
            await self.node.clock.sleep(PROBE_S)
            await self.probe(config=self.node.sharing)

    async def audit_limits(self) -> None:
        """Audit as the runtime does, which restarts what raises."""
        while True:
            try:
                await self.audit.run()
            except LeaseholdError as error:
                self.node.note(f"the audit of {self.node.name} ends: {error}")
                await self.node.clock.sleep(RESTARTED_S)

    async def admit_binds(self, leases: Sequence[Lease]) -> BindReply:
        lost = "its records are lost" if self.checkpoint.lost else None
        unready = self.known.unresolved_reason or lost or await self.pods.blind_reason()
        return self.window.admit_binds(
            leases,
            unready,
            unreadable_reason=self.pods.unreadable_reason,
            is_serving=self.handler.patience.is_serving,
        )

    def observe(self, event: LeaseChanged) -> None:
        self.leases.observe([event.lease])
        self._leases_changed()

    async def sync_first(self) -> None:
        """Request all leases until they are known, as the agent's loop does."""
        while not self.leases.synced:
            with contextlib.suppress(UnavailableError):
                await self.sync()
                return
            await self.node.clock.sleep(LEASE_SYNC_RETRY_S)

    async def sync(self) -> None:
        """Request all leases, and write a lost checkpoint anew, as the agent's loop does."""
        await self.lease_sync.sync()
        self._leases_changed()
        if self.checkpoint.lost:
            await self.reconciler.rebuild()
            self.node.report()

    def _leases_changed(self) -> None:
        self.known.compare_due.set()
        self.mig.leases_changed()
        self.limits.wake()

    async def publish_outcomes(self, publish: Callable[[Sequence[Event]], None]) -> None:
        while True:
            publish(await self.known.outbox.take())

    async def report_when_due(self) -> None:
        while True:
            await self.known.report_due.wait()
            self.known.report_due.clear()
            self.node.report()


@dataclass(slots=True, eq=False)
class Node:
    """The machine: devices, kubelet, and an agent that can be killed."""

    name: NodeName
    api: ApiServer
    claims: Claims
    clock: ActorClock
    requester: Any
    folder: Path
    devices: list[Device]
    accounting: Accounting
    has_old_driver: bool
    note: Callable[[str], None]
    publish: Callable[[Sequence[Event]], None]
    on_allocated: Callable[[NodeName, PodUid], None]
    on_created: Callable[[NodeName, KubeletRecord], None]
    on_given: Callable[[NodeName, KubeletRecord], None]
    on_destroy: Callable[[NodeName, str], None]
    on_refused: Callable[[NodeName, Pod, str, float], None]
    kubelet: Kubelet = field(init=False)
    driver: ModelDriver = field(init=False)
    partitioner: PartitionerProcess = field(init=False)
    limit_driver: LimitDriver = field(init=False)
    limit_client: LimitClient = field(init=False)
    hook_program: ModelProgram = field(init=False)
    agent: Agent = field(init=False)
    replicas: Replicas | None = None
    """As which the configuration of NVIDIA's plugin has its devices, or None for amounts."""
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
        self.driver = ModelDriver(
            self.clock,
            lambda: self.devices,
            is_busy=lambda uuid: any(
                record.visible == uuid and (record.used_mib or record.pod.uid in self.kubelet.left)
                for record in (*self.kubelet.records.values(), *self.kubelet.left.values())
            ),
            on_destroy=lambda uuid: self.on_destroy(self.name, uuid),
        )
        self.limit_driver = LimitDriver(
            self.accounting, is_old=self.has_old_driver, used_mib=self.kubelet.used_mib
        )
        make_cgroups(self)
        self.partitioner = PartitionerProcess(self.driver, lambda: ModelSetter(self))
        self.limit_client = LimitClient(self.partitioner)
        self.hook_program = ModelProgram(self)

    @property
    def sharing(self) -> SharingConfig:
        return SharingConfig(replicas=self.replicas)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that a restart of the agent interrupts."""
        self.tasks = [*(task for task in self.tasks if not task.done())]
        self.tasks.append(self.clock.loop.create_task(work))

    async def start_agent(self) -> None:
        """Begin a new life of the agent; the kubelet fails the pod that it is admitting."""
        self.stop_agent()
        self.reported_at = 0.0
        self.agent = Agent(self)
        await self.agent.checkpoint.load()
        if self.agent.checkpoint.lost and not self.kubelet.records:
            self.agent.checkpoint.lost = False
        await self.agent.probe(config=self.sharing)
        self.tasks.append(asyncio.create_task(self.agent.sync_first()))
        self.tasks.append(asyncio.create_task(self.agent.publish_outcomes(self.publish)))
        self.tasks.append(asyncio.create_task(self.agent.report_when_due()))
        self.tasks.append(asyncio.create_task(self.agent.leftovers.run()))
        self.tasks.append(asyncio.create_task(self.agent.limits.run()))
        self.tasks.append(asyncio.create_task(self.agent.mig.run()))
        self.tasks.append(asyncio.create_task(self.agent.failed.run()))
        self.tasks.append(asyncio.create_task(self.agent.probe_again()))
        self.tasks.append(asyncio.create_task(self.agent.audit_limits()))

    def stop_agent(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        self.kubelet.abort_admission()

    def change_devices(self, devices: list[Device]) -> None:
        """Replace the devices, as the agent finds them when it looks again."""
        changed = [device.uuid for device in self.devices if device not in devices]
        self.devices = devices
        self.agent.mig.profiles = self.driver.profiles()
        self.agent.health.forget(changed)
        [in_force] = _modes(self.agent.known.devices) or {None}
        config = SharingConfig(replicas=in_force)
        probe = self.clock.loop.create_task(self.agent.probe(config=config))
        self.clock.loop.settle()
        if not probe.done():  # they are advertised in another mode first
            self.clock.loop.advance(ADVERTISING_S)
        probe.result()
        self.report()

    def reboot(self, *, other_driver: bool = False) -> None:
        """Restart the machine: its containers start again, on what the driver has after that.

        `other_driver` is the one that sets limits, or the last one that sets none.
        """
        for uuid in list(self.driver.hanging):
            self.respond(uuid)
        self.kubelet.restart_machine()
        for device in self.devices:
            self.driver.reset(device.uuid)
        self.limit_driver.lose()
        self.limit_driver.is_old ^= other_driver
        self.partitioner.restart()
        self.clock.loop.run_until_complete(self.start_agent())

    def limit_mib(self, record: KubeletRecord) -> int:
        """Return what a running container may use at most, vanished limits of the driver included.

        The smaller one of the library's and the driver's counts.
        """
        instance = parse_instance(record.visible)
        if instance is not None:
            return instance.memory_mib
        limit = (record.given or {}).get(f"{MEMORY_LIMIT}_0")
        if limit is not None:
            return int(limit.removesuffix("m"))
        last_mib = self.limit_driver.last_mib(
            DeviceUuid(record.device), record.user, record.container_id
        )
        return self.devices[0].memory_mib if last_mib is None else last_mib

    def respond(self, device: DeviceUuid) -> None:
        """End that a device hangs, and its processes that could not be killed."""
        if device in self.driver.hanging:
            self.driver.respond(device)
            self.kubelet.end_processes(device)

    def reported_devices(self) -> tuple[Device, ...]:
        closed = close_unrecorded(self.agent.known.devices, self.agent.checkpoint.unrecorded)
        closed = close_devices(closed, self.agent.known.closed)
        return self.agent.leftovers.described(closed)

    def report(self) -> None:
        """Publish the node's devices and allocations."""
        self.reported_at = max(self.clock.now(), self.reported_at + 0.001)
        self.publish(
            [
                DeviceReported(
                    node=self.name,
                    devices=self.reported_devices(),
                    served=(TRIGGER,),
                    allocations=self.agent.checkpoint.reported,
                    reported_at=self.reported_at,
                    fences=self.agent.checkpoint.device_fences,
                )
            ]
        )


def _modes(devices: Sequence[Device]) -> set[Replicas | None]:
    return {device.replicas for device in devices if device.mode is not DeviceMode.MIG}


def _snapshot(
    name: NodeName, devices: Sequence[Device], served: Sequence[Device], present: Set[DeviceUuid]
) -> NodeSnapshot:
    ids = [
        PluginDeviceId(id=f"{device.uuid}::{slot}", healthy=device.healthy, device=device.uuid)
        for device in served
        for slot in range(device.slots)
    ]
    return NodeSnapshot(
        name=name,
        devices={device.uuid: device for device in devices},
        served={TRIGGER: {device_id.id: device_id for device_id in ids}},
        paths=PATHS,
        absent=frozenset(
            device.uuid for device in served if not (device.healthy or device.uuid in present)
        ),
    )
