"""What idle shares have held in vain so far, added up by namespace and owner; pure.

`--json` prints {"report": "idle", "read_at", "idle_after_s", "holders": [{"namespace", "owner",
"shares", "gpus", "memory_mib", "gpu_hours", "mib_hours", "idle_since"}], "total": {the same sums},
"unmeasured_nodes"}. "gpus" is the larger part of a device's cores or memory, added up; "gpu_hours"
and "mib_hours" are these amounts times the hours since the last use; "idle_since" is the earliest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, timestamp
from services.cli.snapshot.snapshot import Snapshot
from services.cli.tables import new_table
from shared.model.lease import Lease, Share
from shared.model.names import Namespace, PodUid

HOUR_S = 3600.0
ALL_CORES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleShare:
    """One share that is idle now."""

    namespace: Namespace
    owner: str
    gpus: float
    """The part of its device that it holds, 0 to 1."""
    memory_mib: int
    since: float
    """Unix seconds of its last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleHolder:
    """The idle shares of one owner, or of all."""

    namespace: str
    owner: str
    shares: int
    gpus: float
    memory_mib: int
    gpu_hours: float
    mib_hours: float
    idle_since: float


def idle_shares(snapshot: Snapshot) -> Iterator[IdleShare]:
    """Return the shares that are marked as idle; init containers are left out."""
    owners = {pod.pod: pod.owner for pod in snapshot.pods}
    for lease in snapshot.leases:
        for share in lease.shares:
            since = snapshot.usage.idle_since(lease, share)
            if since is not None and not share.init:
                yield IdleShare(
                    namespace=lease.namespace,
                    owner=_owner_of(lease, owners),
                    gpus=_part_of_device(share, snapshot),
                    memory_mib=share.memory_mib,
                    since=since,
                )


def _owner_of(lease: Lease, owners: Mapping[PodUid, str]) -> str:
    return owners.get(lease.pod) or f"Pod/{lease.name}"


def _part_of_device(share: Share, snapshot: Snapshot) -> float:
    stored = snapshot.devices.get(share.device)
    memory = 1.0 if stored is None else share.memory_mib / max(stored[1].memory_mib, 1)
    return 1.0 if share.whole else min(1.0, max(share.booked_cores / ALL_CORES, memory))


def idle_holders(shares: Iterable[IdleShare], now: float) -> list[IdleHolder]:
    """Add up the shares of each owner; the most GPU-hours first."""
    grouped: dict[tuple[str, str], list[IdleShare]] = {}
    for share in shares:
        grouped.setdefault((share.namespace, share.owner), []).append(share)
    holders = [_sum(namespace, owner, held, now) for (namespace, owner), held in grouped.items()]
    return sorted(holders, key=lambda one: (-one.gpu_hours, one.namespace, one.owner))


def _sum(namespace: str, owner: str, shares: Sequence[IdleShare], now: float) -> IdleHolder:
    hours = [max(now - share.since, 0.0) / HOUR_S for share in shares]
    return IdleHolder(
        namespace=namespace,
        owner=owner,
        shares=len(shares),
        gpus=sum(share.gpus for share in shares),
        memory_mib=sum(share.memory_mib for share in shares),
        gpu_hours=sum(one * share.gpus for one, share in zip(hours, shares, strict=True)),
        mib_hours=sum(one * share.memory_mib for one, share in zip(hours, shares, strict=True)),
        idle_since=min((share.since for share in shares), default=now),
    )


def idle_table(snapshot: Snapshot) -> RenderableType:
    """List the owners of idle shares, and their sum."""
    usage, shares = snapshot.usage, list(idle_shares(snapshot))
    notes = [Text(note, style="yellow") for note in usage.notes]
    if not shares:
        text = f"no share has been idle for {age(usage.idle_after_s)}"
        return Group(Text(text), *notes)
    listed = new_table(
        "NAMESPACE", "OWNER", "SHARES", "GPUS", "MIB", "GPU-HOURS", "MIB-HOURS", "SINCE"
    )
    total = _sum("", "total", shares, usage.read_at)
    for one in (*idle_holders(shares, usage.read_at), total):
        listed.add_row(
            one.namespace,
            one.owner,
            str(one.shares),
            f"{one.gpus:.2f}",
            str(one.memory_mib),
            f"{one.gpu_hours:.2f}",
            f"{one.mib_hours:.0f}",
            timestamp(one.idle_since),
        )
    return Group(listed, *notes)


def idle_shape(snapshot: Snapshot) -> dict[str, Any]:
    """Return the JSON form."""
    usage, shares = snapshot.usage, list(idle_shares(snapshot))
    return {
        "report": "idle",
        "read_at": usage.read_at,
        "idle_after_s": usage.idle_after_s,
        "holders": [
            {"namespace": one.namespace, "owner": one.owner, **_sums(one)}
            for one in idle_holders(shares, usage.read_at)
        ],
        "total": _sums(_sum("", "", shares, usage.read_at)),
        "unmeasured_nodes": list(usage.unmeasured_nodes),
    }


def _sums(holder: IdleHolder) -> dict[str, Any]:
    return {
        "shares": holder.shares,
        "gpus": round(holder.gpus, 4),
        "memory_mib": holder.memory_mib,
        "gpu_hours": round(holder.gpu_hours, 4),
        "mib_hours": round(holder.mib_hours, 1),
        "idle_since": holder.idle_since,
    }
