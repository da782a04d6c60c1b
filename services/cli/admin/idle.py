"""The command report --idle: what idle shares hold, by namespace and owner."""

from collections.abc import Mapping

from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.api_client import ApiClient
from services.cli.commands import Report
from services.cli.formats import FittedTable, age, notes
from shared.kubernetes.paths import objects_path
from shared.model.budget import IdleHolder, IdleView
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.views import View


class IdleReport(View, frozen=True, kw_only=True):
    """What idle shares hold, by namespace and owner."""

    report: str = "idle"
    read_at: float
    idle_after_s: float
    holders: tuple[IdleHolder, ...]
    """The most GPU-hours first."""
    total: IdleHolder
    unmeasured_nodes: tuple[NodeName, ...] = ()


def by_owner(view: IdleView, owners: Mapping[PodUid, str]) -> IdleReport:
    """Add up what the pods of each owner hold."""
    grouped: dict[tuple[Namespace, str], list[IdleHolder]] = {}
    for pod in view.pods:
        grouped.setdefault((pod.namespace, owners.get(pod.pod) or pod.owner), []).append(pod)
    holders = [
        IdleHolder.total(held, view.read_at, namespace=namespace, owner=owner)
        for (namespace, owner), held in grouped.items()
    ]
    holders.sort(key=lambda one: (-one.gpu_hours, one.namespace, one.owner))
    return IdleReport(
        read_at=view.read_at,
        idle_after_s=view.idle_after_s,
        holders=tuple(holders),
        total=view.total,
        unmeasured_nodes=view.unmeasured_nodes,
    )


def idle_table(found: IdleReport, view: IdleView, *, wide: bool = False) -> RenderableType:
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
    api = ApiClient(flags)
    view = api.get("/api/v1/reports/idle", IdleView, idle_after_s=flags.idle_after_s)
    namespaces = sorted({pod.namespace for pod in view.pods})
    owners = {
        PodUid(pod.uid): f"{owner.kind}/{owner.name}"
        for name in namespaces
        for pod in api.server.selected(objects_path(name, "pods"))
        for owner in pod.owner_references
        if owner.controller
    }
    terminal.show(
        flags.output,
        by_owner(view, owners),
        lambda found: idle_table(found, view, wide=flags.output == "wide"),
    )
    return 0
