"""Regions that a killed process left locked or half-written; pure.

Processes that start, end or allocate wait for them: HAMi-core frees the lock of a dead process only
if its record names it, and no record.
"""

from collections.abc import Iterator, Mapping

from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.usage.leased_containers import ContainerKey

STUCK_S = 30.0
"""The library itself looks for a dead holder of the lock after 10 s."""

_Fact = tuple[str, int]
"""What is held, and by which process or in which slot."""
_LOCK, _SLOT = "lock", "slot"


class StuckRegions:
    """Since when each region has been seen locked by the same process, or a slot half-written."""

    def __init__(self) -> None:
        self._since: dict[tuple[ContainerKey, _Fact], float] = {}

    def observe(
        self, regions: Mapping[ContainerKey, Region | Tampered | None], now: float
    ) -> dict[ContainerKey, str]:
        """Return why processes of a container hang; `now` is in seconds of a steady clock."""
        seen = [
            (key, fact)
            for key, region in regions.items()
            if isinstance(region, Region)
            for fact in _facts(region)
        ]
        self._since = {one: self._since.get(one, now) for one in seen}
        return {
            key: _reason(fact)
            for (key, fact), since in self._since.items()
            if now - since >= STUCK_S
        }


def _facts(region: Region) -> Iterator[_Fact]:
    if region.locked:
        yield _LOCK, region.lock_owner
    for slot in region.slots:
        if slot.torn:
            yield _SLOT, slot.index


def _reason(fact: _Fact) -> str:
    what, number = fact
    if what == _LOCK:
        holder = f"PID {number} in the container" if number else "a process that was killed"
        return f"the lock of its region has been held for more than {STUCK_S:g} s by {holder}"
    return f"record {number} of its region has been half-written for more than {STUCK_S:g} s"
