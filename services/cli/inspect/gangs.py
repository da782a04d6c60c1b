"""Gangs as `explain` and `audit` see them: who of a gang holds a lease, who waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.cli.inspect.facts import Facts
from shared.model.names import PodUid

NAMED = 8
"""Pods of a gang that are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSeen:
    """One gang at one moment."""

    name: str
    min_member: int | None
    """How many run together; None: nobody who waits says it, so it is satisfied."""
    holding: tuple[str, ...]
    """Names of its pods that hold a lease."""
    waiting: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """What `explain` says of it."""
        rule = f", {self.min_member} run together or none does" if self.min_member else ""
        head = f"gang        {self.name}{rule}: {len(self.holding)} of its pods hold a lease, "
        lines = [f"{head}{len(self.waiting)} wait"]
        for title, names in (("hold", self.holding), ("wait", self.waiting)):
            if names:
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                lines.append(f"            {title}: {', '.join(names[:NAMED])}{more}")
        return tuple(lines)

    @property
    def shape(self) -> Mapping[str, Any]:
        """The same for machines."""
        return {
            "name": self.name,
            "min_member": self.min_member,
            "holding": list(self.holding),
            "waiting": list(self.waiting),
        }


def gang_of(pod: PodUid, facts: Facts) -> GangSeen | None:
    """Return the gang of a pod that holds a lease or waits; None: it has none."""
    name = next((lease.gang for lease in facts.leases if lease.pod == pod), "")
    asked = [w.queued for w in facts.waiting if w.queued.request.gang]
    name = name or next((q.request.gang.name for q in asked if q.pod == pod and q.request.gang), "")
    if not name:
        return None
    peers = [q for q in asked if q.request.gang and q.request.gang.name == name]
    sizes = [peer.request.gang.min_member for peer in peers if peer.request.gang]
    return GangSeen(
        name=name,
        min_member=max(sizes, default=None),
        holding=tuple(sorted(lease.name for lease in facts.leases if lease.gang == name)),
        waiting=tuple(sorted(peer.name for peer in peers)),
    )
