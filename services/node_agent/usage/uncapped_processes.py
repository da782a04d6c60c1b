"""Processes whose use of the cores HAMi-core cannot limit; pure.

The library limits a process by the utilization that the driver reports for its PID on the node. A
process whose PID it has not found when it allocates memory is never limited.
"""

from collections.abc import Iterable, Iterator, Mapping, Set

from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.usage.leased_containers import ContainerKey

UNCAPPED_S = 30.0
"""The library looks for the PID before the process can allocate; this is ample."""
ALL_CORES = 100

_Process = tuple[ContainerKey, int]
"""A container, and the PID of a process in it."""


class UncappedProcesses:
    """Since when processes with memory on a device with a limit of cores have no PID."""

    def __init__(self) -> None:
        self._since: dict[_Process, float] = {}

    def observe(
        self,
        regions: Mapping[ContainerKey, Region | Tampered | None],
        living: Mapping[ContainerKey, Set[int]] | None,
        now: float,
    ) -> frozenset[ContainerKey]:
        """Return the containers with such a process; `now` is in seconds of a steady clock.

        `living` has the PIDs of each container's processes in its own namespace; None: not known.
        """
        seen = [
            (key, pid)
            for key, region in regions.items()
            if isinstance(region, Region)
            for pid in _uncapped(region, None if living is None else living.get(key, frozenset()))
        ]
        self._since = {one: self._since.get(one, now) for one in seen}
        return frozenset(
            key for (key, _), since in self._since.items() if now - since >= UNCAPPED_S
        )


def _uncapped(region: Region, living: Set[int] | None) -> Iterator[int]:
    capped = [at for at, percent in enumerate(region.core_limits) if 0 < percent < ALL_CORES]
    for slot in region.processes(living):
        if slot.host_pid == 0 and _holds_memory(slot.total, capped):
            yield slot.pid


def _holds_memory(totals: tuple[int, ...], positions: Iterable[int]) -> bool:
    return any(totals[position] for position in positions)
