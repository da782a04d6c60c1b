"""The health of the node's devices."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.node_agent.gpus.device_faults import (
    DISABLE_VARIABLE,
    ENABLE_VARIABLE,
    NOT_LISTED,
    Fault,
    Xid,
    XidRules,
    missing_fault,
)
from services.node_agent.gpus.device_health import (
    DeviceHealth,
    HealthPolicy,
    HealthState,
    update_health,
)
from services.node_agent.gpus.driver import TakeXids
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.metrics import ERRORS, HEALTH
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from shared.model.bounds import cut
from shared.model.clock import Clock
from shared.model.devices.device import MOST_XIDS, Device, UnreadDevice, XidEvent
from shared.model.events.node_events import HealthChanged, LeaseHolder
from shared.model.names import DeviceUuid, NodeName

logger = logging.getLogger(__name__)

MAX_QUEUED = 256
NONE_UNREADABLE: Mapping[int, str] = {}


class HealthMonitor:
    def __init__(
        self,
        node: NodeName,
        *,
        xids: TakeXids,
        environ: Mapping[str, str],
        policy: HealthPolicy,
        leases: KnownLeases,
        checkpoint: Checkpoint,
        clock: Clock,
    ) -> None:
        self.node = node
        self.xids = xids
        self.rules = XidRules.from_environment(environ)
        self.policy = policy
        self.leases = leases
        self.checkpoint = checkpoint
        self.clock = clock
        self.devices: dict[DeviceUuid, DeviceHealth] = {}
        self.latest_xids: dict[DeviceUuid, dict[int, XidEvent]] = {}
        self._gpus: Sequence[Gpu] = ()
        self._indices: dict[DeviceUuid, int] = {}
        self._queue: asyncio.Queue[list[HealthChanged]] = asyncio.Queue(MAX_QUEUED)
        if self.rules.invalid_words:
            logger.warning(
                "%s and %s list XIDs by number, not %s",
                DISABLE_VARIABLE,
                ENABLE_VARIABLE,
                ", ".join(self.rules.invalid_words),
            )

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        return {uuid: health.message for uuid, health in self.devices.items() if health.message}

    def as_served(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """A pod on an unhealthy device permanently fails, so a suspect one stays healthy there."""
        suspect = {
            uuid for uuid, health in self.devices.items() if health.state is HealthState.SUSPECT
        }
        return tuple(
            replace(device, healthy=True, fault="") if device.uuid in suspect else device
            for device in devices
        )

    def remember(self, devices: Iterable[Device]) -> None:
        """Add the devices of an earlier run; one that the next probe does not find is cordoned."""
        found_before = DeviceHealth(
            state=HealthState.SUSPECT,
            since=self.clock.ticks(),
            fault=NOT_LISTED,
            streak=self.policy.failure_threshold - 1,
        )
        for device in devices:
            self._indices[device.uuid] = device.index
            self.devices[device.uuid] = replace(
                found_before, memory_mib=device.memory_mib, mode=device.mode
            )

    def forget(self, devices: Iterable[DeviceUuid]) -> None:
        for uuid in devices:
            self.devices.pop(uuid, None)
            self._indices.pop(uuid, None)
            self.latest_xids.pop(uuid, None)
            HEALTH.remove_by_labels({"device_uuid": uuid})

    def update(
        self,
        gpus: Sequence[Gpu],
        unreadable: Mapping[int, str] = NONE_UNREADABLE,
        unread: Sequence[UnreadDevice] = (),
        *,
        driver_fault: Fault | None = None,
    ) -> None:
        xids = self.xids()
        self._keep(xids)
        if gpus == self._gpus and not (xids or driver_fault or self.faults):
            return
        self._gpus = gpus
        self._indices |= {gpu.uuid: gpu.index for gpu in gpus}
        now = self.clock.now()
        before = self.devices
        self.devices = update_health(
            before,
            gpus,
            xids,
            rules=self.rules,
            policy=self.policy,
            now=self.clock.ticks(),
            missing_fault=lambda uuid: driver_fault or missing_fault(uuid, unreadable, unread),
        )
        events: list[HealthChanged] = []
        for uuid, record in sorted(self.devices.items()):
            state_before = before[uuid].state if uuid in before else None
            if record.state is not state_before:
                index = self._indices.get(uuid, -1)
                for state in HealthState:
                    HEALTH.labels(uuid, str(index), state).set(float(state is record.state))
                _log_change(uuid, index, state_before, record)
                if _is_reported(state_before, record.state):
                    events.append(self._event(uuid, index, record, now))
        if events:
            with contextlib.suppress(asyncio.QueueFull):  # no consumer; device reports suffice
                self._queue.put_nowait(events)

    def _keep(self, xids: Iterable[Xid]) -> None:
        for xid in xids:
            ERRORS.labels(xid.device, "gpu", f"xid {xid.number}").inc()
            kept = self.latest_xids.setdefault(xid.device, {})
            kept.pop(xid.number, None)
            event = XidEvent(number=xid.number, at=self.clock.now(), meaning=xid.meaning)
            kept[xid.number] = event
            while len(kept) > MOST_XIDS:
                del kept[next(iter(kept))]

    async def changes(self) -> list[HealthChanged]:
        return await self._queue.get()

    def _event(
        self, uuid: DeviceUuid, index: int, record: DeviceHealth, now: float
    ) -> HealthChanged:
        recorded = (entry.lease for entry in self.checkpoint.entries)  # known before the leases
        holders = {
            lease.pod: LeaseHolder(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                claim=lease.claim is not None,
            )
            for lease in (*recorded, *self.leases.leases.values())
            if any(share.device == uuid for share in lease.shares)
        }
        return HealthChanged(
            node=self.node,
            device=uuid,
            index=index,
            healthy=record.state is HealthState.HEALTHY,
            fault="" if record.fault is None else cut(str(record.fault)),
            holders=tuple(holders.values()),
            changed_at=now,
        )


def _is_reported(before: HealthState | None, state: HealthState) -> bool:
    cordoned = state is HealthState.CORDONED and before is not HealthState.PROBING
    recovered = state is HealthState.HEALTHY and before is HealthState.PROBING
    return cordoned or recovered


def _log_change(
    uuid: DeviceUuid, index: int, before: HealthState | None, record: DeviceHealth
) -> None:
    if before is not None or record.fault is not None:
        level = logging.INFO if record.fault is None else logging.WARNING
        logger.log(level, "GPU %d (%s) is %s", index, uuid, record.message or record.state)
