"""The table of enforcers."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from services.node_agent.enforcers.compute_time import ComputeTime
from services.node_agent.enforcers.driver import DriverLimits
from services.node_agent.enforcers.enforcer import Enforcer
from services.node_agent.enforcers.exclusive import Exclusive
from services.node_agent.enforcers.hami_core import HamiCore
from services.node_agent.enforcers.mig import Mig
from services.node_agent.enforcers.mps import Mps, SharedMps
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.memory_limits.container_limits import ContainerLimits
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.devices.device import Device, DeviceMode
from shared.model.devices.enforcers import (
    COMPUTE_ENFORCERS,
    MEMORY_ENFORCERS,
    NOTHING_OFFERED,
    MissingEnforcer,
    Offer,
)
from shared.model.devices.enforcers import (
    Enforcer as EnforcerName,
)
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationFound
from shared.model.names import DeviceUuid, PodUid

FIND_OUT_S = 5.0
"""How long a probe of the GPUs waits for enforcers: a partitioner may hang."""

ALL_FACTS = (
    Exclusive.facts,
    Mig.facts,
    DriverLimits.facts,
    Mps.facts,
    SharedMps.facts,
    ComputeTime.facts,
    HamiCore.facts,
)


def enforcer_table(
    files: ContainerFiles,
    limits: ContainerLimits | None = None,
    compute_time: ComputeTime | None = None,
    mps: Sequence[Mps] = (),
) -> "Enforcers":
    """A new enforcer is an entry here."""
    by_time = compute_time or ComputeTime(files)
    by_mps = mps or (Mps(), SharedMps())
    return Enforcers(  # HAMi-core checks that the files of all others exist
        (Exclusive(), Mig(), DriverLimits(limits), *by_mps, by_time, HamiCore(files))
    )


async def check_held(entry: CheckpointEntry, enforcer: Enforcer) -> None:
    read = await enforcer.read_back(entry)
    if read is not None and (differences := list(enforcer.audit(entry, read))):
        raise UnavailableError("; ".join(difference.text for difference in differences))


class Enforcers:
    def __init__(self, table: Sequence[Enforcer]) -> None:
        self.by_name: Mapping[EnforcerName, Enforcer] = {
            enforcer.facts.name: enforcer for enforcer in table
        }
        self._finding_out: asyncio.Task[None] | None = None
        self._limit_s: float | None = None
        """Until all have been found out once, the GPUs are not to be believed."""

    def of(self, entry: CheckpointEntry) -> Iterator[Enforcer]:
        shares = entry.lease.shares_of(entry.allocation.container)
        names = {name for share in shares for name in (share.memory, share.compute)}
        return (enforcer for name, enforcer in self.by_name.items() if name in names)

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        """After the first call, what takes longer than `FIND_OUT_S` counts in a later one.

        Raises UnavailableError if what the GPUs report is not to be believed.
        """
        if self._finding_out is None:
            self._finding_out = asyncio.create_task(self._find_out(gpus))
        finding = self._finding_out
        try:
            await asyncio.wait({self._finding_out}, timeout=self._limit_s)
        except asyncio.CancelledError:
            finding.cancel()
            raise
        if finding.done():
            if self._finding_out is finding:
                self._finding_out = None
            self._limit_s = FIND_OUT_S
            if not finding.cancelled():
                finding.result()
        for enforcer in self.by_name.values():
            if reason := enforcer.unready_reason():
                raise UnavailableError(reason)

    async def _find_out(self, gpus: Sequence[Gpu]) -> None:
        for enforcer in self.by_name.values():
            await enforcer.find_out(gpus)

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        enforcers = self.by_name.values()
        return tuple(violation for enforcer in enforcers for violation in enforcer.findings)

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        enforcers = self.by_name.values()
        return {device: text for enforcer in enforcers for device, text in enforcer.faults.items()}

    def missing(self, name: EnforcerName, gpu: Gpu, sharing: SharingConfig) -> str:
        return self.by_name[name].missing(gpu, sharing)

    def offered(
        self, devices: Sequence[Device], gpus: Sequence[Gpu], sharing: SharingConfig
    ) -> tuple[Device, ...]:
        found = {gpu.uuid: gpu for gpu in gpus}
        return tuple(
            self._with_offer(device, found[device.uuid], sharing)
            if device.uuid in found
            else device
            for device in devices
        )

    def _with_offer(self, device: Device, gpu: Gpu, sharing: SharingConfig) -> Device:
        holds_none = device.replicas is not None and device.replicas.strategy == "time-slicing"
        if device.mode is DeviceMode.MIG or holds_none:
            return replace(device, offer=NOTHING_OFFERED, missing=())
        by_mps = device.replicas is not None
        parts = [
            enforcer
            for enforcer in self.by_name.values()
            if enforcer.facts.parts and (enforcer.facts.name == "mps" or not by_mps)
        ]
        reasons = {enforcer.facts.name: enforcer.missing(gpu, sharing) for enforcer in parts}
        usable = [enforcer.facts for enforcer in parts if not reasons[enforcer.facts.name]]
        by_memory = {facts.name for facts in usable if facts.memory}
        by_compute = {facts.name for facts in usable if facts.compute}
        return replace(
            device,
            offer=Offer(
                memory=tuple(name for name in MEMORY_ENFORCERS if name in by_memory),
                compute=tuple(name for name in COMPUTE_ENFORCERS if name in by_compute),
            ),
            missing=tuple(
                MissingEnforcer(name, reason) for name, reason in reasons.items() if reason
            ),
        )

    async def prepare(
        self, entry: CheckpointEntry, *, starting: bool = False, new: bool = False
    ) -> None:
        for enforcer in self.of(entry):
            await enforcer.prepare(entry, starting=starting, new=new)

    async def resize(self, entry: CheckpointEntry) -> None:
        """Raises UnavailableError if limits are not set, or differ: the container keeps its own."""
        for enforcer in self.of(entry):
            await enforcer.resize(entry)
            await check_held(entry, enforcer)

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """What hangs for one of them delays no other one."""
        ends = (enforcer.end(live, mounted) for enforcer in self.by_name.values())
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:
                raise error
