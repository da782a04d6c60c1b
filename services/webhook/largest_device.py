"""The largest device of the cluster, by the placers' recent reports; pure."""

from services.webhook.pod_admission import DeviceMaximum
from shared.model.events.pod_events import LargestDeviceReported

MOST_REPORTS = 1_000
STALE_S = 30.0
"""How long a report counts: a node that is briefly absent does not lower the maximum."""


class LargestDevice:
    """The most MiB and the most units may be of different devices."""

    def __init__(self) -> None:
        self._reported_at: dict[DeviceMaximum, float] = {}

    def note(self, report: LargestDeviceReported, received_at: float) -> None:
        if len(self._reported_at) >= MOST_REPORTS:
            self._forget_old(received_at)
        maximum = DeviceMaximum(report.memory_mib, report.memory_units)
        self._reported_at[maximum] = received_at

    def now(self, now: float) -> DeviceMaximum | None:
        self._forget_old(now)
        if not self._reported_at:
            return None
        return DeviceMaximum(
            memory_mib=max(maximum.memory_mib for maximum in self._reported_at),
            memory_units=max(maximum.memory_units for maximum in self._reported_at),
        )

    def _forget_old(self, now: float) -> None:
        self._reported_at = {
            maximum: at for maximum, at in self._reported_at.items() if now - at <= STALE_S
        }
