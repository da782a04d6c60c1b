"""Plans of placing and preemption, as the API returns them; pure."""

from collections.abc import Iterable

from shared.model.bounds import (
    Index,
    KeyText,
    Members,
    MessageText,
    Mib,
    Percent,
    Priority,
    Seconds,
    ShortText,
    SignedAmount,
)
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid, NodeName
from shared.model.views.view import View


class PlannedShare(View, frozen=True, kw_only=True):
    """A share that a pod would get."""

    device: DeviceUuid
    index: Index
    memory_mib: Mib
    cores_percent: Percent

    @classmethod
    def of(cls, shares: Iterable[Share]) -> "tuple[PlannedShare, ...]":
        return tuple(map(cls.from_attributes, shares))


class PlannedVictim(View, frozen=True, kw_only=True):
    """A pod that would be evicted."""

    pod: KeyText
    cause: ShortText
    budget: ShortText
    priority: Priority
    bare: bool
    """No controller replaces it."""
    overdraft_permille: SignedAmount
    gpu_s_lost: Seconds
    devices: tuple[DeviceUuid, ...]


class PlanView(View, frozen=True, kw_only=True):
    """What a pod would get, and which pods would be evicted for it, or for its gang."""

    node: NodeName
    shares: tuple[PlannedShare, ...]
    pods: Members = 1
    """Of its gang that would start together, this one included."""
    victims: tuple[PlannedVictim, ...]


class ProtectedPod(View, frozen=True, kw_only=True):
    """A pod that ranks below the pending one and is not evicted, with the reason."""

    pod: KeyText
    reason: MessageText
