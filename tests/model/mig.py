"""MIG instances of the model's devices: a driver that refuses what NVML refuses, and its server.

Every device has four memory slices. An instance's UUID says what it is: `MIG-DEVICE@START+SLICES`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from services.node_agent.gpus.device_faults import no_response
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.memory_limits.limit_setter import LimitSetter
from services.node_agent.mig.instances import InstanceProfile, MigInstance, MigState
from services.node_agent.partition.partition_client import RemotePartitioner
from services.node_agent.partition.partition_protocol import (
    GoodReply,
    InstancesReply,
    InstancesRequest,
    PartitionRequest,
    Request,
    decode_reply,
    encode_line,
)
from services.node_agent.partition.partition_server import PartitionServer
from shared.model.devices.device import Device, DeviceMode, MigLayout, MigProfile, UnreadDevice
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid
from tests.model.virtual_time import ActorClock

SLICES = 4
SLICE_MIB = 25
SLOW_S = {"slow": 8.0, "stuck": 40.0}
"""How long a change takes; the agent waits 20 s for a layout, and the partitioner 15 s for it."""
PROBE_LIMIT_S = 10.0
"""How long the agent waits for what the driver says of a device."""
HANGS = no_response("the driver did not respond")
LIFE = ContextVar("LIFE", default=0)
"""The life of the partitioner in which a call is made."""
T = TypeVar("T")
R = TypeVar("R", bound=GoodReply)

PROFILES = tuple(
    InstanceProfile(
        id=slices,
        name=f"{slices}g",
        memory_mib=slices * SLICE_MIB,
        compute_slices=slices,
        memory_slices=slices,
        count=SLICES // slices,
        starts=tuple(range(0, SLICES, slices)),
    )
    for slices in (1, 2, 4)
)
LAYOUTS: Mapping[str, tuple[int, ...]] = {
    "quarters": (1, 1, 1, 1),
    "mixed": (2, 1, 1),
    "halves": (2, 2),
    "whole": (4,),
}
"""The slices of the instance at each position."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What an instance's UUID says."""

    device: str
    start: int
    slices: int

    @property
    def memory_mib(self) -> int:
        return self.slices * SLICE_MIB


def parse_instance(visible: str) -> Instance | None:
    """Return the instance that a container sees, or None if it sees a device."""
    device, is_instance, place = visible.removeprefix("MIG-").partition("@")
    if not is_instance:
        return None
    start, _, slices = place.partition("+")
    return Instance(device, int(start), int(slices))


def instance_mode(device: Device, *names: str) -> Device:
    """Return the device in MIG mode, with these layouts in order of preference."""
    return replace(device, mode=DeviceMode.MIG, layouts=tuple(map(_layout, names)))


def _layout(name: str) -> MigLayout:
    sizes = LAYOUTS[name]
    profiles = [
        MigProfile(name=f"{size}g", memory_mib=size * SLICE_MIB, count=sizes.count(size))
        for size in dict.fromkeys(sizes)
    ]
    return MigLayout(name=name, profiles=tuple(profiles))


@dataclass(frozen=True, slots=True)
class Hang:
    """A device about which no call of the driver returns."""

    since_s: float
    end: asyncio.Event


class ModelDriver:
    """The devices of a machine. Changes of a device are made one by one, also slow ones.

    Like NVML's, a call that was begun is carried out, whether or not its caller still waits.
    """

    def __init__(
        self,
        clock: ActorClock,
        get_devices: Callable[[], Iterable[Device]],
        is_busy: Callable[[str], bool],
        on_destroy: Callable[[str], None],
    ) -> None:
        self.clock = clock
        self.get_devices = get_devices
        self.is_busy = is_busy
        self.on_destroy = on_destroy
        self.existing: dict[DeviceUuid, dict[int, MigInstance]] = {}
        """By the ID of the GPU instance."""
        self.fault = ""
        """Of the next change: it `fails`, or takes a time of `SLOW_S`."""
        self.hanging: dict[DeviceUuid, Hang] = {}
        self.hangs: Counter[DeviceUuid] = Counter()
        """How often each device has begun to hang."""
        self.calls: dict[DeviceUuid, asyncio.Task[Any]] = {}
        """The latest of each device."""
        self.unreadable: dict[int, str] = {}
        self.unread: tuple[UnreadDevice, ...] = ()
        self.life = 0
        """Calls of a killed partitioner's earlier lives are not made."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the devices in MIG mode."""
        return tuple(
            replace(_gpu(device), instances=self._list(device.uuid))
            for device in self.get_devices()
            if device.mode is DeviceMode.MIG
        )

    def probe(self, since_s: float) -> tuple[Gpu, ...]:
        """Return what an agent finds that has probed the devices since then.

        A device that hangs has a fault; one that has hung for all that time is not found, but
        listed.
        """
        instances = []
        self.unreadable = {}
        for device in self.get_devices():
            hang = self.hanging.get(device.uuid)
            if hang is None or hang.since_s > since_s:
                is_silent = hang and self.clock.ticks() >= hang.since_s + PROBE_LIMIT_S
                instances.append(replace(_gpu(device), fault=HANGS if is_silent else None))
            else:
                self.unreadable[device.index] = HANGS.text
        return tuple(instances)

    def hang(self, device: DeviceUuid) -> None:
        """Let no call about a device return that is made from now on."""
        self.hangs[device] += 1
        self.hanging[device] = Hang(self.clock.ticks(), asyncio.Event())

    def respond(self, device: DeviceUuid) -> None:
        """End that: what was requested meanwhile is carried out."""
        hang = self.hanging.pop(device, None)
        if hang is not None:
            hang.end.set()

    def profiles(self) -> dict[DeviceUuid, tuple[InstanceProfile, ...]]:
        return dict.fromkeys((gpu.uuid for gpu in self.gpus()), PROFILES)

    def xids(self) -> tuple[Any, ...]:
        return ()

    async def discover(self) -> tuple[Gpu, ...]:
        """Return the devices in MIG mode, without waiting for a change that is slow."""
        return self.gpus()

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        return await self._call(device, lambda: self._list(device))

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        return await self._call(device, lambda: self._create(device, profile, start), changes=True)

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        await self._call(device, lambda: self._complete(device, gi), changes=True)

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        def destroy() -> None:
            instance = self._find(device, gi)
            if self.is_busy(instance.uuid):
                raise UnavailableError("NVML: In use by another client")
            self.on_destroy(instance.uuid)
            self.existing[device][gi] = replace(instance, compute_ids=(), uuid="")

        await self._call(device, destroy, changes=True)

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        def destroy() -> None:
            if self._find(device, gi).compute_ids:
                raise UnavailableError("NVML: In use by another client")
            del self.existing[device][gi]

        await self._call(device, destroy, changes=True)

    def reset(self, device: DeviceUuid) -> None:
        """Reset a device that no process uses: its instances are gone."""
        self.existing.pop(device, None)

    def _list(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        return tuple(
            replace(instance, busy=self.is_busy(instance.uuid))
            for instance in self.existing.get(device, {}).values()
        )

    def _find(self, device: DeviceUuid, gi: int) -> MigInstance:
        instance = self.existing.get(device, {}).get(gi)
        if instance is None:
            raise UnavailableError("NVML: Not Found")
        return instance

    def _create(self, device: DeviceUuid, profile: int, start: int) -> int:
        there = self.existing.setdefault(device, {})
        taken = {n for instance in there.values() for n in _slices(instance)}
        if taken.intersection(range(start, start + profile)):
            raise UnavailableError("NVML: Insufficient Resources")
        gi = next(number for number in range(SLICES) if number not in there)
        there[gi] = MigInstance(
            gi=gi,
            profile=f"{profile}g",
            start=start,
            memory_slices=profile,
            compute_slices=profile,
        )
        return gi

    def _complete(self, device: DeviceUuid, gi: int) -> None:
        instance = self._find(device, gi)
        if instance.compute_ids:
            raise UnavailableError("NVML: Insufficient Resources")
        uuid = f"MIG-{device}@{instance.start}+{instance.memory_slices}"
        self.existing[device][gi] = replace(instance, compute_ids=(0,), uuid=uuid)

    async def _call(self, device: DeviceUuid, work: Callable[[], T], *, changes: bool = False) -> T:
        if LIFE.get() != self.life:
            raise asyncio.CancelledError
        fault = ""
        if changes:
            fault, self.fault = self.fault, ""
        before = self.calls.get(device)
        call = self.clock.loop.create_task(self._carry_out(device, before, fault, work))
        call.add_done_callback(_retrieve)
        self.calls[device] = call
        await asyncio.wait([call])
        if LIFE.get() != self.life:
            raise asyncio.CancelledError
        return call.result()

    async def _carry_out(
        self,
        device: DeviceUuid,
        before: asyncio.Task[Any] | None,
        fault: str,
        work: Callable[[], T],
    ) -> T:
        if before is not None:
            await asyncio.wait([before])
        while device in self.hanging:
            await self.hanging[device].end.wait()
        if fault == "fails":
            raise UnavailableError("NVML: Unknown Error")
        if fault:
            await self.clock.sleep(SLOW_S[fault])
        return work()


class PartitionerProcess(RemotePartitioner):
    """The agent's client of the partitioner, a process that outlives the agent."""

    def __init__(self, driver: Any, make_setter: Callable[[], LimitSetter]) -> None:
        super().__init__(driver, Path("unused"))
        self.driver = driver
        self.make_setter = make_setter
        self.requests: list[asyncio.Task[Any]] = []
        self.restart()

    def restart(self) -> None:
        """Kill the partitioner and start it: what it requested of the driver is carried out."""
        for request in self.requests:
            request.cancel()
        self.driver.life += 1
        self.server = PartitionServer(self.driver, agent_uid=0, limits=self.make_setter())

    async def _request(
        self, request: InstancesRequest | PartitionRequest, limit_s: float
    ) -> InstancesReply:
        return await self.exchange(request, InstancesReply, limit_s)

    def is_changing(self, device: DeviceUuid) -> bool:
        """Whether a request about the device is not answered yet: others of it wait."""
        lock = self.server._locks.get(device)
        return lock is not None and lock.locked()

    async def exchange(self, request: Request, kind: type[R], limit_s: float) -> R:
        """Return the reply; raises its error, or UnavailableError without one in time."""
        LIFE.set(self.driver.life)
        reply = asyncio.create_task(self.server.reply_to(encode_line(request), 0))
        self.requests = [*(request for request in self.requests if not request.done()), reply]
        await asyncio.wait([reply], timeout=limit_s)
        if not reply.done() or reply.cancelled():
            raise UnavailableError("no reply of the partitioner")
        return decode_reply(encode_line(reply.result()), kind)


def _gpu(device: Device) -> Gpu:
    is_mig = device.mode is DeviceMode.MIG
    return Gpu(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        memory_mib=device.memory_mib,
        mig=MigState(enabled=True, pending=True, profiles=PROFILES) if is_mig else None,
    )


def _slices(instance: MigInstance) -> range:
    return range(instance.start, instance.start + instance.memory_slices)


def _retrieve(call: asyncio.Task[Any]) -> None:
    if not call.cancelled():
        call.exception()
