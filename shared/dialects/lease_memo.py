"""The memo: facts of the pod that a lease stores for a dialect's annotations; pure.

Dialects whose annotations number containers by their index in the pod need it, and only for pods
with a container that has no GPU, is an init container, or requests a priority. For all others the
shares are enough.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.dialects.dialect import PodManifest
from shared.model.lease import Lease
from shared.model.request import GpuRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMemo:
    """The facts of a pod that its lease stores."""

    init: tuple[str, ...] = ()
    """Names of all its init containers, in spec order."""
    containers: tuple[str, ...] = ()
    """Names of all its other containers, in spec order."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority within a device by container, if requested."""


def encode_memo(
    pod: PodManifest, requests: tuple[GpuRequest, ...], priorities: Mapping[str, int] | None = None
) -> str:
    """Encode the memo of a pod; empty if its shares are enough."""
    init = [container.name for container in pod.containers if container.init]
    containers = [container.name for container in pod.containers if not container.init]
    if not priorities and not init and containers == [request.container for request in requests]:
        return ""
    memo = {"init": init, "containers": containers, "priorities": dict(priorities or {})}
    return json.dumps({key: value for key, value in memo.items() if value}, separators=(",", ":"))


def decode_memo(lease: Lease) -> PodMemo:
    """Decode the memo of a lease."""
    if not lease.memo:
        return PodMemo(containers=lease.containers)
    memo = json.loads(lease.memo)
    return PodMemo(
        init=tuple(memo.get("init", ())),
        containers=tuple(memo.get("containers", ())),
        priorities=memo.get("priorities", {}),
    )
