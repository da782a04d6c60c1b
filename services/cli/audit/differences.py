"""A difference that an audit finds, and how long it may last; pure.

Leases, pods and agents are read one after the other while the system works, so only a difference
that stays is wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.cli.pod_summary import PodSummary
from shared.model.device import Device
from shared.model.lease import Lease

BIND_S = 3.0
"""A lease or a claim may be in one reading and not in the next for this long."""
EXPIRE_S = 5.0
REPORT_S = 12.0
"""A node agent reports its devices every 10 s."""
EXPLAIN_S = 15.0
OUTLIVE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One violation of an invariant."""

    invariant: str
    subject: str
    text: str
    """Description, with both numbers."""
    settles_s: float = 0.0
    """How long it may last in a healthy system."""


def lasting_differences(
    found: Iterable[Difference], first_seen: Mapping[Difference, float], now: float
) -> tuple[tuple[Difference, ...], dict[Difference, float]]:
    """Return the differences that have lasted too long, and when each was first seen."""
    seen = {difference: first_seen.get(difference, now) for difference in found}
    lasting = tuple(d for d, first in seen.items() if now - first >= d.settles_s)
    return lasting, seen


def device_difference(invariant: str, device: Device, text: str) -> Difference:
    """Return a difference of a device, which lasts at most until its node reports the device.

    After a rebuild leases have a device whose size the ledger does not know before that.
    """
    is_reported = device.index >= 0
    return Difference(
        invariant=invariant,
        subject=f"device {device.uuid}",
        text=text,
        settles_s=0.0 if is_reported else REPORT_S,
    )


def pod_name(pod: PodSummary | Lease) -> str:
    """Return the subject of a difference of a pod or of its lease."""
    return f"pod {pod.namespace}/{pod.name}"
