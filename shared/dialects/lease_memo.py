"""A dialect's note in the lease: where the pod's containers stand, and what was asked besides.

Only dialects whose annotations count containers by their place in the pod need it, and only for
pods in which some container has no GPU, or is an init container, or asked for something besides:
for all others the shares themselves tell.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.dialects.dialect import PodAsks
from shared.model.lease import Lease
from shared.model.request import GpuRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """What the lease remembers of the pod."""

    init: tuple[str, ...] = ()
    """Names of all its init containers, in spec order."""
    containers: tuple[str, ...] = ()
    """Names of all its other containers, in spec order."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority inside a device, by container, where one was asked for."""


def memo_text(
    asks: PodAsks, requests: tuple[GpuRequest, ...], priorities: Mapping[str, int] | None = None
) -> str:
    """Write the memo of a pod; empty if its shares tell all of it."""
    init = [asked.name for asked in asks.containers if asked.init]
    containers = [asked.name for asked in asks.containers if not asked.init]
    if not priorities and not init and containers == [request.container for request in requests]:
        return ""
    said = {"init": init, "containers": containers, "priorities": dict(priorities or {})}
    return json.dumps({key: value for key, value in said.items() if value}, separators=(",", ":"))


def memo_of(lease: Lease) -> Memo:
    """Read the memo of a lease."""
    if not lease.memo:
        return Memo(containers=tuple(dict.fromkeys(share.container for share in lease.shares)))
    said = json.loads(lease.memo)
    return Memo(
        init=tuple(said.get("init", ())),
        containers=tuple(said.get("containers", ())),
        priorities=said.get("priorities", {}),
    )
