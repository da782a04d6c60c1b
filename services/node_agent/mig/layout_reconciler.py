"""MIG instances for leases: devices are laid out as soon as a lease is known, and who asks waits.

A device is brought to the layout of its newest lease. The ledger lets no two leases with different
layouts live on one device; nothing is removed, all the same, before the kubelet has let go of who
was given it and the driver shows no process on it.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from services.node_agent.allocate.allocation import HONOURED_STATES
from services.node_agent.allocate.pod_resolver import PodLister
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.instances import (
    InstanceProfile,
    InUseError,
    MigInstance,
    find_layout,
    instance_at,
    is_laid_out,
)
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.model.clock import Clock
from shared.model.device import Device, MigLayout
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

READY_S = 20.0
"""How long Allocate waits for instances; the kubelet admits no other pod meanwhile."""
LOOK_AGAIN_S = 0.25
LIST_S = 5.0
GONE_S = 5.0
"""So long the kubelet may still count containers that have ended: it looks every other second."""


class Instanced(Protocol):
    """The driver's list."""

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device."""
        ...


class LayoutPartitioner(Protocol):
    """Whoever may change layouts."""

    async def partition(
        self,
        device: DeviceUuid,
        layout: MigLayout,
        profiles: Sequence[InstanceProfile],
        held: Collection[str],
    ) -> tuple[MigInstance, ...]:
        """Give a device a layout; return its instances."""
        ...


class AllocatedEntries(Protocol):
    """What the kubelet was told."""

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """All that is not over."""
        ...


class Counting(Protocol):
    """Counters."""

    def partitioned(self, outcome: str, seconds: float) -> None:
        """Count one change of a layout."""
        ...


class LayoutReconciler:
    """The instances of one node's devices."""

    def __init__(
        self,
        driver: Instanced,
        partitioner: LayoutPartitioner | None,
        *,
        leases: KnownLeases,
        checkpoint: AllocatedEntries,
        pods: PodLister,
        counting: Counting,
        clock: Clock,
    ) -> None:
        self.driver = driver
        self.partitioning = partitioner
        self.leases = leases
        self.record = checkpoint
        self.pods = pods
        self.counting = counting
        self.clock = clock
        self.devices: Mapping[DeviceUuid, Device] = {}
        self.profiles: Mapping[DeviceUuid, tuple[InstanceProfile, ...]] = {}
        self._wake = asyncio.Event()
        self._locks: dict[DeviceUuid, asyncio.Lock] = {}
        self._handled_fences: dict[DeviceUuid, int] = {}
        """Fence of the newest lease for which each device was looked at."""
        self._blocked_by: dict[DeviceUuid, str] = {}
        """What was in the way when a device was last to change its layout."""

    def update_devices(self, gpus: Iterable[Gpu], devices: Iterable[Device]) -> None:
        """Take what there is."""
        self.devices = {device.uuid: device for device in devices}
        self.profiles = {gpu.uuid: gpu.mig.profiles for gpu in gpus if gpu.mig is not None}
        self._wake.set()

    def leases_changed(self) -> None:
        """Look at the leases: what they are for is made ready before somebody asks."""
        self._wake.set()

    async def run(self) -> None:
        """Lay devices out as leases want it, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for lease, share in self._newest_shares():
                    if self._handled_fences.get(share.device, -1) < share.fence:
                        self._handled_fences[share.device] = share.fence
                        group.create_task(self._lay_out_early(lease, share))

    async def instance_uuids(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        """Return the UUID of each instance of a container, by device and position.

        Waits until the devices are laid out. Raises RequestError or UnavailableError saying why
        the container cannot have one.
        """
        shares = [share for share in lease.shares_of(container) if share.mig is not None]
        uuids: dict[tuple[DeviceUuid, int], str] = {}
        for share in shares:
            instance = await self._instance(lease, share)
            uuids[share.device, _position(share)] = instance.uuid
        return uuids

    async def list_instances(self) -> dict[DeviceUuid, tuple[MigInstance, ...]]:
        """Return what each device in MIG mode has now, whatever it should have."""
        return {
            device: await self._list(device) for device, known in self.profiles.items() if known
        }

    async def _instance(self, lease: Lease, share: Share) -> MigInstance:
        layout, position = self._layout(share), _position(share)
        self._check_newest(lease, share)
        try:
            async with asyncio.timeout(READY_S):
                there = await self._lay_out(share.device, layout)
        except TimeoutError as error:
            why = self._blocked_by.get(share.device, "the driver takes longer")
            raise UnavailableError(
                f"device {share.device} was not laid out as {layout.name} within {READY_S:g} s: "
                f"{why}"
            ) from error
        instance = instance_at(layout, position, there)
        await self._check_free(instance, lease.pod)
        return instance

    def _layout(self, share: Share) -> MigLayout:
        device = self.devices.get(share.device)
        if device is None or share.mig is None:
            raise UnavailableError(f"device {share.device} is not known yet")
        return find_layout(share.mig, share.device, device)

    async def _check_free(self, instance: MigInstance, pod: PodUid) -> None:
        """Wait until the kubelet has let go of whom the instance was given to.

        Raises RequestError if it still shows that pod after GONE_S.
        """
        others = [
            entry.allocation
            for entry in self.record.entries
            if instance.uuid in entry.instances and entry.allocation.pod != pod
        ]
        until = self.clock.ticks() + GONE_S
        while others:
            going_on = await self._running_pods()
            others = [told for told in others if told.pod in going_on]
            if others and self.clock.ticks() >= until:
                raise RequestError(
                    f"instance {instance.uuid} is with pod {others[0].namespace}/{others[0].name}"
                )
            if others:
                await self.clock.sleep(LOOK_AGAIN_S)

    def _check_newest(self, lease: Lease, share: Share) -> None:
        """Raise RequestError if a newer lease has laid the device out in another way."""
        for other, newest in self._newest_shares():
            if (
                newest.device == share.device
                and other.pod != lease.pod
                and newest.fence > share.fence
                and newest.mig is not None
                and share.mig is not None
                and newest.mig.layout != share.mig.layout
            ):
                raise RequestError(
                    f"the lease's fence {share.fence} for device {share.device} is older than "
                    f"{newest.fence}, with which pod {other.namespace}/{other.name} has it laid "
                    f"out as {newest.mig.layout}"
                )

    def _newest_shares(self) -> list[tuple[Lease, Share]]:
        """Return the newest share of each device that is an instance."""
        newest: dict[DeviceUuid, tuple[Lease, Share]] = {}
        for lease in self.leases.leases.values():
            for share in lease.shares if lease.state in HONOURED_STATES else ():
                known = newest.get(share.device)
                if share.mig is not None and (known is None or known[1].fence < share.fence):
                    newest[share.device] = (lease, share)
        return [pair for device, pair in newest.items() if device in self.devices]

    async def _lay_out_early(self, lease: Lease, share: Share) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._lay_out(share.device, self._layout(share))
        except TimeoutError:
            logger.warning(
                "device %s is not laid out for pod %s/%s after %g s: %s",
                *(share.device, lease.namespace, lease.name, READY_S),
                self._blocked_by.get(share.device, "the driver takes longer"),
            )
        except LeaseholdError as error:
            logger.warning(
                "device %s is not ready for pod %s/%s: %s",
                *(share.device, lease.namespace, lease.name, error),
            )

    async def _lay_out(self, device: DeviceUuid, layout: MigLayout) -> tuple[MigInstance, ...]:
        async with self._locks.setdefault(device, asyncio.Lock()):
            there = await self._list(device)
            if is_laid_out(layout, there):
                self._blocked_by.pop(device, None)
                return there
            if self.partitioning is None:
                raise RequestError(
                    f"device {device} is not laid out as {layout.name}, and this agent may not "
                    "change that: it runs with --no-partition, or without --partition-socket"
                )
            began = self.clock.ticks()
            outcome = "failed"
            try:
                there = await self._partition(self.partitioning, device, layout)
                outcome = "done"
                self._blocked_by.pop(device, None)
            finally:
                self.counting.partitioned(outcome, self.clock.ticks() - began)
            return there

    async def _partition(
        self, partitioning: LayoutPartitioner, device: DeviceUuid, layout: MigLayout
    ) -> tuple[MigInstance, ...]:
        """Partition; while somebody uses what is in the way, again until the caller gives up."""
        while True:
            held = await self._used_instances(device)
            try:
                return await partitioning.partition(
                    device, layout, self.profiles.get(device, ()), held
                )
            except InUseError as error:
                self._blocked_by[device] = str(error)
            await self.clock.sleep(LOOK_AGAIN_S)

    async def _used_instances(self, device: DeviceUuid) -> frozenset[str]:
        """Return the UUIDs of instances whose pods the kubelet still shows."""
        going_on = await self._running_pods()
        there = await self._list(device)
        held = {
            uuid
            for entry in self.record.entries
            if entry.allocation.pod in going_on
            for uuid in entry.instances
        }
        started = {pod for pod, phase in going_on.items() if phase != "Pending"}
        for lease in self.leases.leases.values():
            for share in lease.shares if lease.pod in started else ():
                if share.mig is not None and share.device == device:
                    layout = self._layout(share)
                    if is_laid_out(layout, there):
                        held.add(instance_at(layout, _position(share), there).uuid)
        return frozenset(held)

    async def _running_pods(self) -> dict[PodUid, str]:
        """Return the phase of each pod that the kubelet has not let go of.

        What it says of the runtime's containers may be two seconds old; a pod in a final phase has
        none, and its instance may be another pod's by then.
        """
        pods = await self.pods.list_pods()
        phases = {pod.uid: pod.phase for pod in pods if not pod.terminal}
        running = await self.pods.list_running() - {pod.uid for pod in pods if pod.terminal}
        return {**dict.fromkeys(running, "Running"), **phases}

    async def _list(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        try:
            async with asyncio.timeout(LIST_S):
                return await self.driver.instances(device)
        except TimeoutError as error:
            raise UnavailableError(
                f"the driver did not list the instances of device {device} within {LIST_S:g} s"
            ) from error


def _position(share: Share) -> int:
    return share.mig.position if share.mig is not None else 0
