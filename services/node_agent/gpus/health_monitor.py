"""Keeps the health of the node's devices, and tells the owners of leases when it changes."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from services.node_agent.gpus.device_faults import Fault, Xid, XidRules
from services.node_agent.gpus.device_health import (
    DeviceHealth,
    HealthPolicy,
    HealthState,
    probe_results,
)
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.metrics import health_shown
from services.node_agent.records.known_leases import KnownLeases
from shared.model.clock import Clock
from shared.model.device import Device
from shared.model.events.node_events import HealthChanged, LeaseHolder
from shared.model.names import DeviceUuid, NodeName

logger = logging.getLogger(__name__)

MAX_QUEUED = 256


class XidSource(Protocol):
    """The driver's own news."""

    def xids(self) -> tuple[Xid, ...]:
        """Return the XID events since the last call."""
        ...


class HealthMonitor:
    """The health of one node's devices."""

    def __init__(
        self,
        node: NodeName,
        *,
        xids: XidSource,
        rules: XidRules,
        policy: HealthPolicy,
        leases: KnownLeases,
        clock: Clock,
    ) -> None:
        self.node = node
        self.xids = xids
        self.rules = rules
        self.policy = policy
        self.leases = leases
        self.clock = clock
        self.devices: dict[DeviceUuid, DeviceHealth] = {}
        self._indices: dict[DeviceUuid, int] = {}
        self._new: asyncio.Queue[list[HealthChanged]] = asyncio.Queue(MAX_QUEUED)

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        """What is wrong with devices that are not healthy."""
        return {
            uuid: one.record.message for uuid, one in self.devices.items() if one.record.message
        }

    def as_served(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """Return devices as the kubelet should see them: pods may start on a suspect one.

        What the placer must not choose any more may have been chosen a moment ago, and the kubelet
        fails a pod for good that comes to a device it was told is sick.
        """
        suspect = {
            uuid
            for uuid, patient in self.devices.items()
            if patient.record.state is HealthState.SUSPECT
        }
        return tuple(
            replace(device, healthy=True, fault="") if device.uuid in suspect else device
            for device in devices
        )

    def update(self, gpus: Sequence[Gpu], driver_fault: Fault | None = None) -> None:
        """Take what a look has shown; with `silence`, why it has shown nothing."""
        self._indices |= {gpu.uuid: gpu.index for gpu in gpus}
        now, before = self.clock.now(), self.devices
        self.devices = probe_results(
            before,
            gpus,
            self.xids.xids(),
            rules=self.rules,
            policy=self.policy,
            now=self.clock.ticks(),
            driver_fault=driver_fault,
        )
        told: list[HealthChanged] = []
        for uuid, patient in sorted(self.devices.items()):
            was = before[uuid].record.state if uuid in before else None
            if patient.record.state is not was:
                health_shown(uuid, self._indices.get(uuid, -1), patient.record.state)
                told += self._change_events(uuid, was, patient, now)
        if told:
            with contextlib.suppress(asyncio.QueueFull):  # nobody listens; reports say it, too
                self._new.put_nowait(told)

    async def changes(self) -> list[HealthChanged]:
        """Wait until devices are cordoned, or have become healthy again."""
        return await self._new.get()

    def _change_events(
        self, uuid: DeviceUuid, was: HealthState | None, patient: DeviceHealth, now: float
    ) -> list[HealthChanged]:
        record = patient.record
        index = self._indices.get(uuid, -1)
        if was is not None or record.fault is not None:
            level = logging.INFO if record.fault is None else logging.WARNING
            logger.log(level, "GPU %d (%s) is %s", index, uuid, record.message or record.state)
        cordoned = record.state is HealthState.CORDONED and was is not HealthState.PROBING
        healed = record.state is HealthState.HEALTHY and was is HealthState.PROBING
        if not cordoned and not healed:
            return []
        holders = [
            LeaseHolder(pod=lease.pod, namespace=lease.namespace, name=lease.name)
            for lease in self.leases.leases.values()
            if any(share.device == uuid for share in lease.shares)
        ]
        return [
            HealthChanged(
                node=self.node,
                device=uuid,
                index=index,
                healthy=healed,
                fault="" if record.fault is None else str(record.fault),
                holders=tuple(holders),
                changed_at=now,
            )
        ]
