"""A lease as the text of one annotation: the copy that Kubernetes keeps of it.

The ledger is rebuilt from these copies when Redis is lost; nothing else reads them, and nothing is
granted because of them.
"""

import json
from typing import Any

from shared.model.errors import RequestError
from shared.model.lease import Lease, LeaseState, MigPlace, Share, Size, Terms
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.request import Company

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
            **_more(lease),
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
            shares=tuple(
                _share(row, copy.get("more", {}).get(str(number), {}))
                for number, row in enumerate(copy["shares"])
            ),
            dialect=copy["dialect"],
            resources={str(key): int(amount) for key, amount in copy["resources"].items()},
            tag=copy["tag"],
            gang=copy.get("gang", ""),
            memo=copy.get("memo", ""),
            trace=copy["trace"],
            state=LeaseState.BOUND,
            version=int(copy["version"]),
            created_at=float(copy["at"]),
            resized_at=float(copy.get("resized", 0.0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{ANNOTATION} of {namespace}/{name} is no lease: {error!r}") from error


def _more(lease: Lease) -> dict[str, Any]:
    """Write what few leases have; a reader that does not know it loses nothing it could use."""
    shares = {str(n): said for n, share in enumerate(lease.shares) if (said := _unusual(share))}
    more = {
        "more": shares,
        "gang": lease.gang,
        "memo": lease.memo,
        "resized": lease.resized_at,
    }
    return {key: said for key, said in more.items() if said}


def _unusual(share: Share) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if share.company != _usual_company(share.whole, share.cores_percent):
        said["company"] = int(share.company)
    if share.slots:
        said["slots"] = share.slots
    if share.mig:
        said["mig"] = [share.mig.layout, share.mig.position, share.mig.profile]
    if share.terms:
        terms = share.terms
        said["terms"] = [
            terms.memory_mib,
            terms.device_mib,
            terms.memory_bytes,
            terms.memory_percent,
        ]
    if share.asked:
        said["asked"] = [share.asked.memory_mib, share.asked.cores_percent]
    return said


def _share(row: list[Any], more: dict[str, Any]) -> Share:
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
        company=Company(more.get("company", _usual_company(bool(whole), int(cores)))),
        slots=int(more.get("slots", 0)),
        mig=_mig(more.get("mig")),
        terms=_terms(more.get("terms")),
        asked=_size(more.get("asked")),
    )


def _usual_company(whole: bool, cores_percent: int) -> Company:
    """Return what goes without saying: who has all the cores has them alone."""
    return Company.ALONE if whole or cores_percent == 100 else Company.ORDINARY


def _mig(row: list[Any] | None) -> MigPlace | None:
    if row is None:
        return None
    layout, position, profile = row
    return MigPlace(layout=str(layout), position=int(position), profile=str(profile))


def _terms(row: list[Any] | None) -> Terms | None:
    if row is None:
        return None
    memory_mib, device_mib, memory_bytes, percent = row
    return Terms(
        memory_mib=int(memory_mib),
        device_mib=int(device_mib),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        memory_percent=None if percent is None else int(percent),
    )


def _size(row: list[Any] | None) -> Size | None:
    if row is None:
        return None
    memory_mib, cores_percent = row
    return Size(memory_mib=int(memory_mib), cores_percent=int(cores_percent))
