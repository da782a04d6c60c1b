"""Orders that the API takes, and what it replies; pure."""

from shared.model.bounds import (
    MessageText,
    Mib,
    Percent,
    ShortText,
)
from shared.model.leases.lease import ShareSize
from shared.model.names import Namespace, PodUid
from shared.model.views.view import View


class ResizeOrder(View, frozen=True, kw_only=True):
    """Another size for the shares of a running container."""

    container: ShortText = ""
    memory_mib: Mib | None = None
    cores_percent: Percent | None = None


class ResizeView(View, frozen=True, kw_only=True):
    """What a binder replied to a resize."""

    outcome: str
    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    node: str
    devices: tuple[int, ...]
    before: ShareSize | None
    after: ShareSize | None
    pending: tuple[str, ...]
    notes: tuple[str, ...]
    reason: str
    hint: str


class GrantOrder(View, frozen=True, kw_only=True):
    """GPU time to grant to a namespace."""

    minutes: ShortText
    reason: MessageText
    key: ShortText


class GrantView(View, frozen=True, kw_only=True):
    """What was granted, and what the namespace has left."""

    namespace: Namespace
    granted_minutes: str
    remaining_minutes: str | None
    missing_minutes: str | None = None
    """To be back in budget; None if it is."""


class VersionView(View, frozen=True, kw_only=True):
    """The versions of Leasehold that run."""

    version: str
    services: dict[str, tuple[str, ...]]
    """Of the replicas of each service: during an upgrade there may be two."""
    user: str = ""
    """Empty if the viewer has not signed in."""
