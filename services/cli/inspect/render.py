"""Leases, devices, explanations and the rows of `top` as text for a terminal; pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import FittedTable, age, notes, used_texts
from shared.model.devices.device import END_LEFTOVERS, DeviceMode, Hardware
from shared.model.devices.enforcers import HAMI_CORE_ALONE
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import RESIZE_WAITING
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import peak, peaks, timestamp
from shared.model.views.gpus import (
    DeviceDetails,
    DeviceView,
    GpusView,
    GpuTotals,
    HeldShare,
    MeasuredView,
    ShareView,
)
from shared.model.views.leases import LeasesView, LeaseView, WaitingView
from shared.model.views.view import View

if TYPE_CHECKING:
    from services.cli.inspect.explanation import Explanation

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def gpus(
    view: GpusView, width: int, *, wide: bool = False, narrowed: bool = False
) -> RenderableType:
    """`narrowed` means that there are other devices."""
    blocks: list[RenderableType] = []
    shown = [device for node in view.nodes for device in node.devices]
    for node in view.nodes:
        blocks.append(Text(node.node, style="bold"))
        if node.cordoned:
            blocks.append(Text(f"  gets no pods: {node.cordoned}", style="yellow"))
        blocks += [Text(f"  {line}") for line in _offered_lines(node.devices, wide=wide)]
        for device in node.devices:
            blocks += _device_lines(device, width, view.read_at)
            if wide:
                blocks.append(
                    Text("; ".join([f"      {device.uuid}", *_state(device)]), style="dim")
                )
    if not blocks:
        if narrowed:
            return Text("no such node has reported a device")
        return Text("no node has reported a device yet: are the node agents running?")
    return Group(*blocks, Text(GpuTotals.of(shown).text), *notes(view))


def _offered_lines(devices: Sequence[DeviceView], *, wide: bool) -> Iterator[str]:
    indices: dict[str, list[int]] = {}
    for device in devices:
        if (wide or device.replicas) and (offered := _offered(device)):
            indices.setdefault(offered, []).append(device.index)
    for offered, alike in indices.items():
        if len(alike) == len(devices) > 1:
            yield f"all GPUs: {offered}"
        else:
            yield f"GPU {', '.join(map(str, alike))}: {offered}"


def _state(device: DeviceDetails) -> Iterator[str]:
    if device.sharing_mode:
        yield f"shared in mode {device.sharing_mode}"
    if device.hardware:
        yield from _sensors(device.hardware)


def _sensors(hardware: Hardware) -> Iterator[str]:
    readings = {
        "{:.0f} °C": hardware.temperature_c,
        "{:.0f} W": hardware.power_w,
        "{:.0f} MHz": hardware.sm_clock_mhz,
    }
    yield from (text.format(value) for text, value in readings.items() if value is not None)
    if hardware.throttle:
        yield f"slowed down by {', '.join(hardware.throttle)}"
    yield from (f"Xid {xid.number}: {xid.meaning}" for xid in hardware.xids)


def ps(
    view: LeasesView,
    *,
    namespace: str = "",
    wide: bool = False,
    narrowed: bool = False,
    headers: bool = True,
) -> RenderableType:
    """Unless `wide`, a gang's pods with one reason are one row."""
    leases = FittedTable(
        *("POD", "NODE", "GPUS", "MIB", "USED MIB", "CORES", "USED CORES", "STATE", "AGE"),
        *("SYSTEM", "UNTIL", "POD UID", "DEVICE UUIDS"),
        least=("SYSTEM", "USED CORES", "CORES", "USED MIB", "AGE", "GPUS"),
        of_wide=("UNTIL", "POD UID", "DEVICE UUIDS"),
        wide=wide,
        headers=headers,
    )
    for lease in view.leases:
        leases.add_row(*_lease_row(lease, view.read_at))
    blocks: list[RenderableType] = [leases if view.leases else _no_lease(namespace, narrowed)]
    blocks += [Text(line, style="red") for line in dict.fromkeys(_fault_lines(view))]
    blocks += [
        Text(f"{lease.namespace}/{lease.name} {lease.waiting_text}", style="yellow")
        for lease in view.leases
        if lease.waiting_size
    ]
    if view.waiting:
        titles = ("WAITING", "FOR", "START", "REASON")
        waiting = FittedTable(
            *titles, wrapped="REASON", of_wide=("START",), wide=wide, headers=headers
        )
        alike: dict[str, list[WaitingView]] = {}
        for waiting_pod in view.waiting:
            key = waiting_pod.pod if wide else waiting_pod.first_alike
            alike.setdefault(key, []).append(waiting_pod)
        for first, *others in alike.values():
            pod = f"{first.namespace}/{first.name}" + (f" and {len(others)} more" if others else "")
            start = first.start.short if first.start else "-"
            waiting.add_row(pod, age(view.read_at - first.since), start, first.text)
        blocks += [Text(), waiting]
    return Group(*blocks, *notes(view))


def _no_lease(namespace: str, narrowed: bool) -> Text:
    where = f" in namespace {namespace}; -A shows all namespaces" if namespace else ""
    return Text(f"no {'such ' if narrowed else ''}pod holds a lease{where}")


def _fault_lines(view: LeasesView) -> Iterator[str]:
    for lease in view.leases:
        for share in lease.shares:
            if fault := lease.unhealthy_devices.get(share.device):
                yield f"{lease.node} device {share.index}: {fault}"


def explanation(explained: "Explanation", *, wide: bool = False) -> RenderableType:
    shown = (*explained.lines, *(explained.details if wide else ()))
    lines = (Text(f"  {line}") for line in shown)
    return Group(
        Text(explained.text, style="bold"),
        *lines,
        Text(f"next: {explained.next}", style="cyan"),
    )


def _device_lines(device: DeviceView, width: int, now: float) -> list[RenderableType]:
    lines: list[RenderableType] = []
    shares = [(share.pod or str(n), share) for n, share in enumerate(device.shares)]
    pods = list(dict.fromkeys(pod for pod, _ in shares))
    style = {pod: COLOURS[number % len(COLOURS)] for number, pod in enumerate(pods)}
    letter = {pod: _letter(number) for number, pod in enumerate(pods)}
    head = f"  {device.index} {device.model}  "
    tail = _tail(device)
    bar_width = max(min(width - len(head) - len(tail) - 4, 48), 10)
    line = Text(head)
    line.append("[")
    free = bar_width
    for pod in pods:
        memory = max(peak(((s.memory_mib, s.init) for x, s in shares if x == pod), 0), 1)
        cells = min(max(round(memory * bar_width / device.memory_mib), 1), free)
        line.append(letter[pod] * cells, style=style[pod])
        free -= cells
    line.append("." * free + "]" + tail, style=None if device.healthy else "red")
    lines.append(line)
    for pod, share in shares:
        text = f"      {letter[pod]} {_share_text(share, now)}"
        lines.append(Text(text, style=style[pod]))
    if device.reservation:
        lines.append(Text(f"      {device.reservation.text}", style="yellow"))
    if device.excluded:
        lines.append(Text(f"      closed to new pods: {device.excluded}", style="yellow"))
    if device.fault:
        lines.append(Text(f"      {device.fault}", style="red"))
    left = [leftover.text("it") for leftover in device.leftovers]
    lines += [
        Text(f"      {text}", style="yellow") for text in (*left, *[END_LEFTOVERS] * bool(left))
    ]
    return lines


def _offered(device: DeviceView) -> str:
    if device.replicas is not None:
        return _replicas_text(device.replicas)
    if device.mode == DeviceMode.MIG or (device.offer == HAMI_CORE_ALONE and not device.missing):
        return ""
    words = {"memory": device.offer.memory, "cores": device.offer.compute}
    offers = ", ".join(f"{what} by {' or '.join(by)}" for what, by in words.items() if by)
    missing = "".join(f"; no {enforcer.name}: {enforcer.reason}" for enforcer in device.missing)
    return f"parts are held: {offers or 'nothing'}{missing}"


def _replicas_text(replicas: Replicas) -> str:
    held = "held" if replicas.strategy == "mps" else "not held"
    return (
        f"offered as {replicas.number} replicas by {replicas.strategy}, as {replicas.resource}: "
        f"memory and cores of each are {held}"
    )


def _share_text(share: HeldShare, now: float) -> str:
    held = f"  {share.held_text}" if share.held_text else ""
    text = f"{_holder(share)}  {share.memory_mib} MiB  {_place(share)}  {share.state}"
    if not share.namespace:
        return f"{text}{held}"
    measured = share.measured
    if measured is None:
        return f"{text}  not measured{held}"
    used_mib, used_cores = used_texts(measured)
    idle = _idle(measured.idle_since if measured.idle else None, now)
    differs = f"  DIFFERS: {measured.held_difference}" if measured.held_difference else ""
    return f"{text}  in use: {used_mib} MiB, {used_cores}{idle}{held}{differs}"


def _holder(share: HeldShare) -> str:
    if not share.namespace:
        return "in use by another namespace"
    kind = "claim " if share.claim else ""
    return f"{kind}{share.namespace}/{share.name} {share.container}"


def _idle(since: float | None, now: float) -> str:
    return "" if since is None else f", idle {age(now - since)}"


def _place(share: ShareView) -> str:
    if share.mig is not None:
        return f"{share.mig.profile}  position {share.mig.position}"
    return f"{share.cores_percent} % cores" if share.cores_percent else "any cores"


def _tail(device: DeviceView) -> str:
    health = "" if device.healthy else "  UNHEALTHY"
    memory = f" {device.used_memory_mib}/{device.memory_mib} MiB  "
    if device.mode == DeviceMode.MIG:
        return f"{memory}MIG: {_layout(device)}{health}"
    cores = f"{device.used_cores_percent} % cores"
    return f"{memory}{cores}  {device.used_shares}/{device.slots} shares{health}"


def _layout(device: DeviceView) -> str:
    if not device.instances:
        return f"idle, {device.layouts} possible layouts"
    leased = f"{device.used_shares}/{device.slots} instances"
    return f"{device.layout} ({device.instances}), {leased}"


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 26]


def _lease_row(lease: LeaseView, now: float) -> tuple[str, ...]:
    shares = [share for share in lease.shares if not share.init] or list(lease.shares)
    used = [used_texts(share.measured) for share in shares]
    unhealthy = ", on an unhealthy device" if lease.unhealthy_devices else ""
    waiting = f", {RESIZE_WAITING}" if lease.waiting_size else ""
    return (
        f"{lease.namespace}/{lease.name}",
        lease.node,
        _device_indices(lease.shares),
        _sum_text(_leased_texts(lease.shares, _memory_of, lambda share: str(share.memory_mib), "")),
        _sum_text(memory for memory, _ in used),
        _sum_text(_leased_texts(lease.shares, _cores_of, cores_text, "%")),
        _sum_text(cores for _, cores in used),
        f"{lease.state}{unhealthy}{waiting}{_idle(lease.idle_since, now)}",
        age(now - lease.created_at),
        "claim" if lease.claim else lease.dialect or "-",
        "-" if lease.ends_by is None else timestamp(lease.ends_by),
        lease.pod,
        ",".join(sorted({share.device for share in lease.shares})),
    )


def _leased_texts(
    shares: Sequence[ShareView],
    amount: Callable[[ShareView], int],
    text: Callable[[ShareView], str],
    unit: str,
) -> Iterator[str]:
    """Yield what containers have of devices; the most, where an init container has more.

    These amounts add up to what the pod takes of its devices, as in totals and budgets.
    """
    running = [share for share in shares if not share.init] or shares
    lasting = peaks((share.device, amount(share), False) for share in running)
    most = peaks((share.device, amount(share), share.init) for share in shares)
    larger = {device: taken for device, taken in most.items() if taken != lasting.get(device, 0)}
    yield from (text(share) for share in running if share.device not in larger)
    yield from (f"{taken}{unit}" for taken in larger.values())


def _memory_of(share: ShareView) -> int:
    return share.memory_mib


def _cores_of(share: ShareView) -> int:
    return share.booked_cores


def _device_indices(shares: Iterable[ShareView]) -> str:
    return ",".join(map(str, sorted({share.index for share in shares}))) or "-"


def _sum_text(amounts: Iterable[str]) -> str:
    counted = [(amount, len(list(equal))) for amount, equal in groupby(amounts)]
    return "+".join(f"{n}x{amount}" if n > 1 else amount for amount, n in counted) or "-"


def cores_text(share: ShareView) -> str:
    if share.mig is not None:
        return share.mig.profile
    return f"{share.cores_percent}%" if share.cores_percent else "any"


class TopRow(ShareView, frozen=True, kw_only=True):
    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName

    @property
    def usage(self) -> MeasuredView:
        """Numbers are negative where the usage is not known."""
        return self.measured or MeasuredView(memory_mib=-1, cores_percent=-1)

    @property
    def place(self) -> tuple[str, int, str, str, str]:
        return self.node, self.index, self.namespace, self.name, self.container


class TopView(View, frozen=True, kw_only=True):
    shares: tuple[TopRow, ...]
    unmeasured_nodes: tuple[NodeName, ...] = ()


def _unused_since(row: TopRow) -> float:
    since = row.usage.idle_since
    return float("inf") if since is None else since


SORT_KEYS: Mapping[str, Callable[[TopRow], Any]] = {
    "memory": lambda row: (-(row.usage.memory_mib or 0), row.place),
    "cores": lambda row: (-(row.usage.cores_percent or 0), row.place),
    "idle": lambda row: (_unused_since(row), row.place),
    "pod": lambda row: (row.namespace, row.name, row.place),
    "node": lambda row: row.place,
}


def top_rows(view: LeasesView, *, sort: str, node: str = "") -> list[TopRow]:
    rows = [
        TopRow(
            **structs.asdict(share),
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            node=lease.node,
        )
        for lease in view.leases
        for share in lease.shares
        if not share.init and node in {"", lease.node}
    ]
    return sorted(rows, key=SORT_KEYS[sort])


def top_view(rows: Sequence[TopRow], view: LeasesView) -> TopView:
    return TopView(shares=tuple(rows), unmeasured_nodes=view.unmeasured_nodes)


def top_table(
    rows: Sequence[TopRow],
    view: LeasesView,
    *,
    namespace: str = "",
    wide: bool = False,
    narrowed: bool = False,
    headers: bool = True,
) -> RenderableType:
    listed = FittedTable(
        *("POD", "CONTAINER", "NODE", "GPU", "MIB", "CORES", "PROCESSES", "NOT USED FOR"),
        "DEVICE UUID",
        least=("PROCESSES", "CONTAINER", "GPU", "NODE", "NOT USED FOR"),
        of_wide=("DEVICE UUID",),
        wide=wide,
        headers=headers,
    )
    for row in rows:
        memory, cores = used_texts(row.measured)
        listed.add_row(
            f"{row.namespace}/{row.name}",
            row.container,
            row.node,
            str(row.index),
            f"{memory} of {row.memory_mib}",
            f"{cores} of {cores_text(row)}",
            "-" if row.measured is None else str(row.measured.processes),
            _idle_text(row, view.read_at),
            row.device,
            style="yellow" if row.usage.idle else "",
        )
    return Group(listed if rows else _no_lease(namespace, narrowed), *notes(view))


def _idle_text(row: TopRow, now: float) -> str:
    since = row.usage.idle_since
    return "-" if since is None else f"{age(now - since)}{' idle' if row.usage.idle else ''}"
