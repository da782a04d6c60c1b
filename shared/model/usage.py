"""Measured usage of a leased share; pure."""

from dataclasses import dataclass

from shared.model.bounds import (
    Amount,
    Count,
    Mib,
    NameText,
    Percent,
    Seconds,
    ShortText,
)
from shared.model.lease import Share
from shared.model.names import DeviceUuid, Namespace, PodUid

ShareKey = tuple[PodUid, str, DeviceUuid, int | None]
"""Pod, name of a container, device, and the position of a MIG instance in its layout."""
IDLE_AFTER_S = 600.0
"""A share that has not been used for this long is marked as idle, by default."""


def share_key(pod: PodUid, share: Share) -> ShareKey:
    """Return the key of a pod's share."""
    position = None if share.mig is None else share.mig.position
    return pod, share.container, share.device, position


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMeasurement:
    """A container's usage of one device, as the agent of its node measured it last."""

    pod: PodUid
    namespace: Namespace
    name: NameText
    container: ShortText
    device: DeviceUuid
    memory_mib: Mib | None = None
    """None: neither the driver nor HAMi-core reports it."""
    cores_percent: Percent | None = None
    """Percent of the device's cores in use; None: it is not reported."""
    position: Count | None = None
    """Of its MIG instance in the device's layout; None: the share is no instance."""
    processes: Amount = 0
    """Processes on the device, as the driver lists them."""
    idle_since: Seconds | None = None
    """Unix seconds of the last use, by kernels or a change of memory; None: it is in use."""

    @property
    def key(self) -> ShareKey:
        """What distinguishes the share."""
        return self.pod, self.container, self.device, self.position

    def is_idle(self, now: float, *, after_s: float = IDLE_AFTER_S) -> bool:
        """Whether it has not been used for `after_s` seconds; `now` is in Unix seconds."""
        return self.idle_since is not None and now - self.idle_since >= after_s
