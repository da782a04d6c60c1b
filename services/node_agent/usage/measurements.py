"""Device usage of each leased container; pure.

The container can forge the region that HAMi-core writes in it, and the driver does not include
memory held in reserve. The larger value counts.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from services.node_agent.isolation.region import DeviceSums, InvalidRegion, Region, Slot, sums
from services.node_agent.isolation.region_image import altered_limits
from services.node_agent.mig.instances import MigInstance
from services.node_agent.usage.attribution import AttributedProcess
from services.node_agent.usage.leased_containers import LeasedContainer, Scan
from shared.model.bounds import MOST_MIB
from shared.model.leases.lease import MIB, Share, ShareKey, share_key


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShare:
    share: Share
    position: int
    limit_bytes: int | None = None
    region: DeviceSums | None = None
    driver_bytes: int | None = None
    driver_percent: int | None = None
    processes: int = 0
    running: tuple[AttributedProcess, ...] = ()
    instance: MigInstance | None = None

    @property
    def measured_bytes(self) -> int:
        return max(self.driver_bytes or 0, self.region.total if self.region else 0)

    @property
    def is_measured(self) -> bool:
        return self.driver_bytes is not None or self.region is not None

    @property
    def cores_percent(self) -> int | None:
        """What the driver reports, or else HAMi-core, which a container can forge."""
        if self.driver_percent is not None:
            return self.driver_percent
        return None if self.region is None else self.region.sm_percent

    @property
    def overrun_bytes(self) -> int:
        return max(0, self.measured_bytes - self.share.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnidentifiedProcess:
    """A process that HAMi-core did not find among the driver's, or took another one for it.

    Processes of other containers that start when it makes a context mislead the library. Then it
    limits the cores by the usage of another process, or not at all, and does not count the memory
    of the context.
    """

    slot: Slot
    host_pid: int
    contexts: Mapping[int, int]
    """By position of a device: bytes that the driver reports beyond the counted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredContainer:
    container: LeasedContainer
    region: Region | InvalidRegion | None
    shares: tuple[MeasuredShare, ...]
    uncounted_pids: tuple[int, ...] = ()
    """On the node; of processes on leased devices that HAMi-core does not count."""
    lost_pids: tuple[int, ...] = ()
    """In the container; of processes whose new allocations HAMi-core does not count."""
    stuck: str = ""
    unidentified: tuple[UnidentifiedProcess, ...] = ()
    uncapped: bool = False
    altered: tuple[str, ...] = ()

    def key_of(self, share: MeasuredShare) -> ShareKey:
        return share_key(self.container.lease.pod, share.share)

    @property
    def lacks_limits(self) -> bool:
        limited = self.container.region_path is not None
        return limited and (bool(self.altered) or not isinstance(self.region, Region))

    @property
    def isolation_lost(self) -> bool:
        unlimited = bool(self.uncounted_pids or self.lost_pids)
        limited = self.container.region_path is not None
        return limited and (not isinstance(self.region, Region) or unlimited)


def measure_container(
    container: LeasedContainer, processes: Sequence[AttributedProcess], scan: Scan
) -> MeasuredContainer:
    region = scan.regions.get(container.key)
    living = scan.living_in(container.key)
    readable = region if isinstance(region, Region) else None
    sampled = {sample.device for sample in scan.devices}
    shares = container.shares
    seed = container.seed
    used = region_sums(readable, shares, living) if readable is not None else []
    measured = []
    for position, share in enumerate(shares):
        instance = scan.instances.get(container.instance_of(share))
        running = _processes_of(share, processes, instance) if share.device in sampled else None
        measured_share = _by_driver(share, position, running, instance)
        if readable is not None:
            limit = readable.memory_limits[position]
            measured_share = replace(measured_share, limit_bytes=limit, region=used[position])
        measured.append(measured_share)
    return MeasuredContainer(
        container=container,
        region=region,
        shares=tuple(measured),
        uncounted_pids=_uncounted_pids(readable, processes, living),
        lost_pids=()
        if readable is None
        else tuple(sorted(slot.pid for slot in readable.lost(living))),
        unidentified=()
        if readable is None
        else tuple(_unidentified(readable, shares, processes, living)),
        stuck=scan.stuck.get(container.key, ""),
        uncapped=container.key in scan.uncapped,
        altered=altered_limits(readable, seed) if readable is not None and seed else (),
    )


def _by_driver(
    share: Share,
    position: int,
    processes: Sequence[AttributedProcess] | None,
    instance: MigInstance | None,
) -> MeasuredShare:
    running = [attributed.process for attributed in processes or ()]
    memory = [process.memory_bytes for process in running if process.memory_bytes is not None]
    busy = [process.busy_percent for process in running if process.busy_percent is not None]
    has_memory = processes is not None and len(memory) == len(running)
    has_percent = processes is not None and len(busy) == len(running)
    return MeasuredShare(
        share=share,
        position=position,
        driver_bytes=min(sum(memory), MOST_MIB * MIB) if has_memory else None,
        driver_percent=min(sum(busy), 100) if has_percent else None,
        processes=len(running),
        running=tuple(processes or ()),
        instance=instance,
    )


def _processes_of(
    share: Share, processes: Sequence[AttributedProcess], instance: MigInstance | None
) -> list[AttributedProcess]:
    on_device = [process for process in processes if process.device == share.device]
    if instance is None:
        return on_device
    of_instance = {None, instance.gi}
    return [process for process in on_device if process.process.instance in of_instance]


def region_sums(
    region: Region, shares: Sequence[Share], living: Set[int] | None
) -> list[DeviceSums]:
    """Shares come in the order in which the container numbers its devices."""
    return [sums(region, place, living) for place in _positions(region, shares)]


def _positions(region: Region, shares: Sequence[Share]) -> Sequence[int]:
    named = region.uuids[: len(shares)]
    if len(set(named)) == len(shares) and set(named) == {share.device for share in shares}:
        return [named.index(share.device) for share in shares]
    return range(len(shares))


def _unidentified(
    region: Region,
    shares: Sequence[Share],
    processes: Sequence[AttributedProcess],
    living: Set[int] | None,
) -> Iterator[UnidentifiedProcess]:
    by_inner: dict[int, list[AttributedProcess]] = {}
    for process in processes:
        by_inner.setdefault(process.origin.inner_pid, []).append(process)
    positions = _positions(region, shares)
    for slot in region.processes(living):
        listed = by_inner.get(slot.pid, [])
        if len({process.process.pid for process in listed}) != 1:
            continue  # the driver does not list it, or several containers of a claim have the PID
        used = {process.device: process.process.memory_bytes or 0 for process in listed}
        contexts = {
            place: used.get(share.device, 0) - slot.total[place]
            for share, place in zip(shares, positions, strict=True)
            if not slot.context[place] and used.get(share.device, 0) > slot.total[place]
        }
        host_pid = listed[0].process.pid
        if contexts or slot.host_pid != host_pid:
            yield UnidentifiedProcess(slot=slot, host_pid=host_pid, contexts=contexts)


def _uncounted_pids(
    region: Region | None, processes: Sequence[AttributedProcess], living: Set[int] | None
) -> tuple[int, ...]:
    slots = region.processes(living) if region is not None else ()
    inner_pids = {slot.pid for slot in slots}
    host_pids = {slot.host_pid for slot in slots if slot.host_pid > 0}
    pids = {
        process.process.pid
        for process in processes
        if not (process.origin.inner_pid in inner_pids or process.process.pid in host_pids)
    }
    return tuple(sorted(pids))
