"""Gives devices the MIG layouts of their leases, and finds the instances of containers.

An instance is destroyed only after the kubelet has released its pod and the driver shows no process
on it. A device that cannot be given a layout gets no new share until it, or a newer lease's layout,
succeeds.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence, Set

from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.allocate.failed_grants import AGAIN_S, MAX_AGAIN_S
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import RunningPods
from services.node_agent.mig.instances import (
    InstanceProfile,
    InUseError,
    ListInstances,
    MigInstance,
    find_layout,
    instance_at,
    is_laid_out,
)
from services.node_agent.mig.partitioner import Partitioner
from services.node_agent.node import Node
from services.node_agent.partition.partition_client import RemotePartitioner
from services.node_agent.reconcile.pod_end import NodeObservation, PodEnd, ends_of_pods
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.bounds import cut
from shared.model.devices.device import MigLayout
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, PodUid
from shared.model.quantity import timestamp

logger = logging.getLogger(__name__)

RELEASE_S = 5.0
"""How long the kubelet may list containers that have ended: it polls the runtime every 2 s."""
RETRY_S = 0.25
"""Pause before a layout's next step is tried again."""
LIST_TIMEOUT_S = 5.0
"""Time limit of reading the kubelet's pods and devices before a layout changes."""
DRIVER_SLOW = "the driver takes longer"
NOT_LAID_OUT = "LayoutFailed"


Partitioners = Partitioner | RemotePartitioner


class LayoutReconciler:
    def __init__(
        self,
        node: Node,
        pods: NodePods,
        list_device: ListInstances,
        partitioner: Partitioners | None,
    ) -> None:
        self.node = node
        self.pods = pods
        self.list_device = list_device
        self.partitioner = partitioner
        self.profiles: Mapping[DeviceUuid, tuple[InstanceProfile, ...]] = {}
        self._wake = asyncio.Event()
        node.on_devices.append(self._wake.set)
        self._locks: dict[DeviceUuid, asyncio.Lock] = {}
        self._handled_fences: dict[DeviceUuid, int] = {}
        self._blocked_by: dict[DeviceUuid, str] = {}
        self._failed: dict[DeviceUuid, tuple[str, float]] = {}
        """The layout, and since when in Unix seconds."""

    def leases_changed(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        again: dict[DeviceUuid, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for lease, share in self._newest_shares():
                    if self._handled_fences.get(share.device, -1) < share.fence:
                        self._handled_fences[share.device] = share.fence
                        group.create_task(self._lay_out_early(lease, share))
                again = {device: task for device, task in again.items() if not task.done()}
                for device in self._failed.keys() - again.keys():
                    again[device] = group.create_task(self._lay_out_again(device))

    async def instance_uuids(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        """Raises RequestError or UnavailableError if the container cannot have an instance."""
        return {
            (share.device, share.mig.position): await self._instance(
                lease, share, share.mig.position
            )
            for share in lease.shares_of(container)
            if share.mig is not None
        }

    async def list_instances(self) -> dict[DeviceUuid, tuple[MigInstance, ...]]:
        return {
            device: await self._list(device)
            for device, profiles in self.profiles.items()
            if profiles
        }

    async def _instance(self, lease: Lease, share: Share, position: int) -> str:
        layout = self._layout(share)
        await self._check_newest(lease, share)
        instances = await self._lay_out_in_time(share.device, layout)
        uuid = instance_at(layout, position, instances).uuid
        await self._wait_until_released(uuid, lease.pod)
        return uuid

    def _layout(self, share: Share) -> MigLayout:
        snapshot = self.node.snapshot
        device = None if snapshot is None else snapshot.devices.get(share.device)
        if device is None or share.mig is None:
            raise UnavailableError(f"device {share.device} is not known yet")
        return find_layout(share.mig, share.device, device)

    async def _wait_until_released(self, instance: str, pod: PodUid) -> None:
        """A pod whose record is removed meanwhile has ended, whatever an old list shows.

        Raises InUseError after `RELEASE_S`.
        """
        until = self.node.clock.ticks() + RELEASE_S
        while self._holders(instance, pod):
            running = await self._running_pods()
            users = [
                entry for entry in self._holders(instance, pod) if entry.allocation.pod in running
            ]
            if not users:
                return
            if self.node.clock.ticks() >= until:
                raise InUseError(f"instance {instance} is in use by {users[0].holder}")
            await self.node.clock.sleep(RETRY_S)

    def _holders(self, instance: str, pod: PodUid) -> list[CheckpointEntry]:
        return [
            entry
            for entry in self.node.checkpoint.entries
            if instance in entry.instances and entry.allocation.pod != pod
        ]

    async def _check_newest(self, lease: Lease, share: Share) -> None:
        """The end of a newer lease may have been lost with the ledger: all are requested first."""
        if self._find_newer(lease, share) is not None:
            await self.node.lease_sync.sync()
        newer = self._find_newer(lease, share)
        if newer is not None:
            other, layout = newer
            raise RequestError(
                f"its lease of GPU {share.device} is outdated: pod {other.namespace}/{other.name} "
                f"was given an instance of layout {layout} there later"
            )

    def _find_newer(self, lease: Lease, share: Share) -> tuple[Lease, str] | None:
        for other, newest in self._newest_shares():
            if (
                newest.device == share.device
                and other.pod != lease.pod
                and newest.fence > share.fence
                and newest.mig is not None
                and share.mig is not None
                and newest.mig.layout != share.mig.layout
            ):
                return other, newest.mig.layout
        return None

    def _newest_shares(self) -> list[tuple[Lease, Share]]:
        newest: dict[DeviceUuid, tuple[Lease, Share]] = {}
        for lease in self.node.leases.leases.values():
            for share in lease.shares if lease.state in HONOURED_STATES else ():
                newest_there = newest.get(share.device)
                if share.mig is not None and (
                    newest_there is None or newest_there[1].fence < share.fence
                ):
                    newest[share.device] = (lease, share)
        uuids = {device.uuid for device in self.node.devices}
        return [pair for device, pair in newest.items() if device in uuids]

    async def _lay_out_early(self, lease: Lease, share: Share) -> None:
        try:
            await self._lay_out_in_time(share.device, self._layout(share))
        except LeaseholdError as error:
            logger.warning(
                "device %s is not ready for pod %s/%s: %s",
                *(share.device, lease.namespace, lease.name, error),
            )

    async def _lay_out_again(self, device: DeviceUuid) -> None:
        pause_s = AGAIN_S
        while device in self._failed:
            await self.node.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_AGAIN_S)
            async with self._lock(device):
                layout = self._needed_layout(device)
                if layout is None:
                    self._open(device)
                    return
                with contextlib.suppress(LeaseholdError):  # the device's fault has it
                    async with self._in_time(device, layout):
                        await self._lay_out(device, layout)

    def _needed_layout(self, device: DeviceUuid) -> MigLayout | None:
        if device not in self._failed or self.node.snapshot is None:
            return None
        name, _ = self._failed[device]
        for _, share in self._newest_shares():
            if share.device == device and share.mig is not None:
                name = share.mig.layout
        described = self.node.snapshot.devices.get(device)
        layouts = () if described is None else described.layouts
        return next((layout for layout in layouts if layout.name == name), None)

    async def _lay_out_in_time(
        self, device: DeviceUuid, layout: MigLayout
    ) -> tuple[MigInstance, ...]:
        async with self._in_time(device, layout), self._lock(device):
            return await self._lay_out(device, layout)

    @contextlib.asynccontextmanager
    async def _in_time(self, device: DeviceUuid, layout: MigLayout) -> AsyncIterator[None]:
        limit_s = self.node.timing.instances_ready_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            reason = (
                f"device {device} was not laid out as {layout.name} within {limit_s:g} s: "
                f"{self._blocked_by.get(device, DRIVER_SLOW)}"
            )
            self._close(device, layout, reason)
            raise UnavailableError(reason) from error
        except LeaseholdError as error:
            self._close(device, layout, str(error))
            raise
        self._open(device)
        self.node.laid_out[device] = layout.name

    def _lock(self, device: DeviceUuid) -> asyncio.Lock:
        return self._locks.setdefault(device, asyncio.Lock())

    def _close(self, device: DeviceUuid, layout: MigLayout, reason: str) -> None:
        name, since = self._failed.get(device, ("", 0.0))
        if name != layout.name:
            since = self.node.clock.now()
        self._failed[device] = layout.name, since
        self.node.laid_out.pop(device, None)
        fault = cut(
            f"{NOT_LAID_OUT}: it could not be given MIG layout {layout.name} since "
            f"{timestamp(since)}: {reason}; it is tried again at least every {MAX_AGAIN_S:g} s: "
            "check `nvidia-smi`, and the kernel log for Xids"
        )
        if fault != self.node.layout_faults.get(device):
            logger.error("device %s gets no new share: %s", device, fault)
            self.node.layout_faults[device] = fault
            self.node.report_due.set()
        self._wake.set()

    def _open(self, device: DeviceUuid) -> None:
        if self._failed.pop(device, None) is not None:
            logger.info("device %s gets shares again", device)
            del self.node.layout_faults[device]
            self.node.report_due.set()

    async def _lay_out(self, device: DeviceUuid, layout: MigLayout) -> tuple[MigInstance, ...]:
        instances = await self.list_device(device)
        if is_laid_out(layout, instances):
            self._blocked_by.pop(device, None)
            return instances
        self.node.laid_out.pop(device, None)
        if self.partitioner is None:
            raise RequestError(
                f"device {device} is not laid out as {layout.name}, and this agent may not "
                "change that: it runs with --no-partition, or without --partition-socket"
            )
        began = self.node.clock.ticks()
        outcome = "failed"
        try:
            instances = await self._partition(self.partitioner, device, layout)
            outcome = "done"
            self._blocked_by.pop(device, None)
        finally:
            self.node.metrics.partitioned(outcome, self.node.clock.ticks() - began)
        return instances

    async def _partition(
        self, partitioner: Partitioners, device: DeviceUuid, layout: MigLayout
    ) -> tuple[MigInstance, ...]:
        while True:
            in_use = await self._used_instances(device)
            try:
                profiles = self.profiles.get(device, ())
                return await partitioner.partition(device, layout, profiles, in_use)
            except InUseError as error:
                self._blocked_by[device] = str(error)
            await self.node.clock.sleep(RETRY_S)

    async def _used_instances(self, device: DeviceUuid) -> frozenset[str]:
        """While there are pods without a record on a device, all its instances may be in use."""
        running = await self._running_pods()
        instances = await self._list(device)
        if self.node.checkpoint.lost or device in self.node.checkpoint.unrecorded:
            return frozenset(instance.uuid for instance in instances if instance.uuid)
        in_use = {
            uuid
            for entry in self.node.checkpoint.entries
            if entry.allocation.pod in running
            for uuid in entry.instances
        }
        started = {pod for pod, phase in running.items() if phase != "Pending"}
        return frozenset(in_use) | self._leased_instances(device, instances, started)

    def _leased_instances(
        self, device: DeviceUuid, instances: Sequence[MigInstance], pods: Set[PodUid]
    ) -> frozenset[str]:
        return frozenset(
            instance_at(layout, share.mig.position, instances).uuid
            for pod in pods & self.node.leases.leases.keys()
            for share in self.node.leases.leases[pod].shares
            if share.mig is not None and share.device == device
            if is_laid_out(layout := self._layout(share), instances)
        )

    async def _running_pods(self) -> dict[PodUid, str]:
        """Return the phase of each pod, or prepared claim, that may still use an instance.

        An old list of the kubelet may still show ended pods. Waits while it may be restarting.
        """
        running: RunningPods | None = None
        while True:
            try:
                pods = await self.pods.list_pods()
                pod_resources = await self.node.pod_resources.list_holdings()
                break
            except UnavailableError as error:
                logger.debug("which pods use MIG instances cannot be seen: %s", error)
            await self.node.clock.sleep(RETRY_S)
        with contextlib.suppress(UnavailableError):  # then all that may run count
            running = await self.pods.find_running()
        sight = NodeObservation(pods=pods, pod_resources=pod_resources, running=running)
        ends = ends_of_pods(self.node.checkpoint.entries, sight, self.node.leases)
        ended = {pod for pod, end in ends.items() if end is PodEnd.ENDED}
        ended |= {pod.uid for pod in pods if pod.terminal}
        phases = {pod.uid: pod.phase for pod in pods}
        may_run = ends.keys() if running is None else running.uids
        shown = {**dict.fromkeys((*may_run, *self.node.checkpoint.claims), "Running"), **phases}
        return {pod: phase for pod, phase in shown.items() if pod not in ended}

    async def _list(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await self.list_device(device)
        except TimeoutError as error:
            raise UnavailableError(
                f"the driver did not list the instances of device {device} within "
                f"{LIST_TIMEOUT_S:g} s"
            ) from error
