"""The command report --idle: what idle shares have held in vain, by namespace and owner."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.api_client import ApiClient, locate
from services.cli.commands import Report
from services.cli.formats import FittedTable, age, notes, timestamp
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.views import LeasesView, ShareView, View

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


class IdleHolder(View, frozen=True, kw_only=True):
    """The idle shares of one owner, or of all."""

    namespace: str
    owner: str
    shares: int
    gpus: float
    """The larger part of a device's cores or memory, added up."""
    memory_mib: int
    gpu_hours: float
    """The amount times the hours since the last use."""
    mib_hours: float
    idle_since: float
    """The earliest."""


class IdleView(View, frozen=True, kw_only=True):
    """What idle shares have held in vain so far."""

    report: str = "idle"
    read_at: float
    idle_after_s: float
    holders: tuple[IdleHolder, ...]
    """By namespace and owner; the most GPU-hours first."""
    total: IdleHolder
    unmeasured_nodes: tuple[NodeName, ...] = ()


def idle_shares(view: LeasesView, owners: Mapping[PodUid, str]) -> Iterator[IdleShare]:
    """Yield the shares that are marked as idle; init containers are left out."""
    for lease in view.leases:
        for share in lease.shares:
            measured = share.measured
            if measured and measured.idle and measured.idle_since is not None and not share.init:
                yield IdleShare(
                    namespace=lease.namespace,
                    owner=owners.get(lease.pod) or f"Pod/{lease.name}",
                    gpus=_part_of_device(share),
                    memory_mib=share.memory_mib,
                    since=measured.idle_since,
                )


def _part_of_device(share: ShareView) -> float:
    memory = share.memory_mib / max(share.device_mib, 1)
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
        gpus=round(sum(share.gpus for share in shares), 4),
        memory_mib=sum(share.memory_mib for share in shares),
        gpu_hours=round(sum(h * share.gpus for h, share in zip(hours, shares, strict=True)), 4),
        mib_hours=round(
            sum(h * share.memory_mib for h, share in zip(hours, shares, strict=True)), 1
        ),
        idle_since=min((share.since for share in shares), default=now),
    )


def idle_view(view: LeasesView, shares: Sequence[IdleShare]) -> IdleView:
    """Return what `-o json` prints."""
    return IdleView(
        read_at=view.read_at,
        idle_after_s=view.idle_after_s,
        holders=tuple(idle_holders(shares, view.read_at)),
        total=_sum("", "", shares, view.read_at),
        unmeasured_nodes=view.unmeasured_nodes,
    )


def idle_table(found: IdleView, view: LeasesView, *, wide: bool = False) -> RenderableType:
    """List the owners of idle shares, and their sum."""
    if not found.holders:
        text = f"no share has been idle for {age(found.idle_after_s)}"
        return Group(Text(text), *notes(view))
    listed = FittedTable(
        *("NAMESPACE", "OWNER", "SHARES", "GPUS", "MIB", "GPU-HOURS", "MIB-HOURS", "SINCE"),
        least=() if wide else ("MIB-HOURS", "SHARES", "MIB", "SINCE"),
    )
    for one in (*found.holders, structs.replace(found.total, owner="total")):
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
    return Group(listed, *notes(view))


def report_idle(flags: Report) -> int:
    """Add up what idle shares hold, by namespace and owner."""
    api = ApiClient(locate(flags))
    view = api.get("/api/v1/leases", LeasesView, idle_after_s=flags.idle_after_s)
    namespaces = sorted({lease.namespace for lease in view.leases})
    owners = {pod.pod: pod.owner for name in namespaces for pod in api.server.pods(name)}
    found = idle_view(view, list(idle_shares(view, owners)))
    terminal.show(
        flags.output, found, lambda found: idle_table(found, view, wide=flags.output == "wide")
    )
    return 0
