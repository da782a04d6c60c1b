"""The pods of a gang that hold a lease or wait, as `explain` shows them; pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.cli.snapshot.snapshot import Snapshot
from shared.model.names import PodUid

NAMED_PODS = 8
"""Pods of a gang that are listed by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSummary:
    """One gang at one moment."""

    name: str
    min_member: int | None
    """Members that run together; None: no member waits."""
    holding: tuple[str, ...]
    """Names of its pods that hold a lease."""
    waiting: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that `explain` prints."""
        rule = f", at least {self.min_member} run together or none" if self.min_member else ""
        head = f"gang        {self.name}{rule}: {len(self.holding)} of its pods hold a lease, "
        lines = [f"{head}{len(self.waiting)} wait"]
        for title, names in (("hold", self.holding), ("wait", self.waiting)):
            if names:
                more = f" and {len(names) - NAMED_PODS} more" if len(names) > NAMED_PODS else ""
                lines.append(f"            {title}: {', '.join(names[:NAMED_PODS])}{more}")
        return tuple(lines)

    @property
    def shape(self) -> Mapping[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "min_member": self.min_member,
            "holding": list(self.holding),
            "waiting": list(self.waiting),
        }


def gang_of(pod: PodUid, snapshot: Snapshot) -> GangSummary | None:
    """Return the gang of a pod that holds a lease or waits; None: it has none."""
    name = _gang_name(pod, snapshot)
    if not name:
        return None
    waiting = [
        (waiting.queued.name, gang.min_member)
        for waiting in snapshot.waiting
        if (gang := waiting.queued.request.gang) and gang.name == name
    ]
    return GangSummary(
        name=name,
        min_member=max((min_member for _, min_member in waiting), default=None),
        holding=tuple(sorted(lease.name for lease in snapshot.leases if lease.gang == name)),
        waiting=tuple(sorted(pod_name for pod_name, _ in waiting)),
    )


def _gang_name(pod: PodUid, snapshot: Snapshot) -> str:
    leased = next((lease.gang for lease in snapshot.leases if lease.pod == pod), "")
    queued = (waiting.queued for waiting in snapshot.waiting if waiting.queued.pod == pod)
    return leased or next((q.request.gang.name for q in queued if q.request.gang), "")
