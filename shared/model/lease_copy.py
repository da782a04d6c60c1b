"""A lease as the text of one annotation: the copy that Kubernetes keeps of it.

The ledger is rebuilt from these copies when Redis is lost; nothing else reads them, and nothing is
granted because of them.
"""

import json
from typing import Any

from shared.model.errors import RequestError
from shared.model.lease import Lease, LeaseState, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

ANNOTATION = "leasehold.dev/lease"
FORMAT = 1


def dump_lease(lease: Lease) -> str:
    """Write a lease as compact JSON, shares as rows, to stay small beside the pod."""
    return json.dumps(
        {
            "format": FORMAT,
            "pod": lease.pod,
            "node": lease.node,
            "dialect": lease.dialect,
            "version": lease.version,
            "at": lease.created_at,
            "shares": [
                [
                    share.container,
                    share.device,
                    share.index,
                    share.memory_mib,
                    share.cores_percent,
                    share.unit_mib,
                    share.whole,
                    share.slotted,
                    share.init,
                    share.slot,
                    share.fence,
                ]
                for share in lease.shares
            ],
            "resources": dict(lease.resources),
            "tag": lease.tag,
            "trace": lease.trace,
        },
        separators=(",", ":"),
    )


def load_lease(text: str, *, namespace: Namespace, name: str) -> Lease:
    """Read a copy back as a bound lease. Raises RequestError if the text is none."""
    try:
        copy: dict[str, Any] = json.loads(text)
        if copy["format"] != FORMAT:
            raise RequestError(f"{ANNOTATION} of {namespace}/{name} has format {copy['format']}")
        return Lease(
            pod=PodUid(copy["pod"]),
            namespace=namespace,
            name=name,
            node=NodeName(copy["node"]),
            shares=tuple(_share(row) for row in copy["shares"]),
            dialect=copy["dialect"],
            resources={str(key): int(amount) for key, amount in copy["resources"].items()},
            tag=copy["tag"],
            trace=copy["trace"],
            state=LeaseState.BOUND,
            version=int(copy["version"]),
            created_at=float(copy["at"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{ANNOTATION} of {namespace}/{name} is no lease: {error!r}") from error


def _share(row: list[Any]) -> Share:
    container, device, index, memory, cores, unit, whole, slotted, init, slot, fence = row
    return Share(
        container=str(container),
        device=DeviceUuid(device),
        index=int(index),
        memory_mib=int(memory),
        cores_percent=int(cores),
        unit_mib=int(unit),
        whole=bool(whole),
        slotted=bool(slotted),
        init=bool(init),
        slot=None if slot is None else int(slot),
        fence=int(fence),
    )
