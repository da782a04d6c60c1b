"""Leases, devices and explanations as text for a terminal; pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, used_texts
from services.cli.inspect.explanation import Explanation
from services.cli.snapshot.snapshot import MeasuredUsage, Snapshot, shares_on
from services.cli.tables import keep_widths, new_table
from shared.model.device import Device, DeviceMode, DeviceUse
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.names import DeviceUuid
from shared.model.node import cordon_reason
from shared.model.quantity import peak

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def gpus(nodes: Sequence[NodeTotals], width: int, usage: MeasuredUsage) -> RenderableType:
    """Draw a bar per device in `width` columns, one letter per lease, and the leases below."""
    blocks: list[RenderableType] = []
    for totals in sorted(nodes, key=lambda totals: totals.node.facts.name):
        if totals.node.devices:
            blocks.append(Text(totals.node.facts.name, style="bold"))
            if reason := cordon_reason(totals.node.served):
                blocks.append(Text(f"  gets no pods: {reason}", style="yellow"))
            blocks += _device_lines(totals, width, usage)
    if not blocks:
        return Text("no node has reported a device yet: are the node agents running?")
    return Group(*blocks, *usage_notes(usage))


def ps(snapshot: Snapshot, *, wide: bool = False) -> RenderableType:
    """List leases, then waiting pods with the reason; `wide`: with UIDs and UUIDs."""
    leases = new_table(
        *("POD", "NODE", "DEVICES", "MIB", "USED", "CORES", "USED", "STATE", "AGE", "DIALECT"),
        *(("POD UID", "DEVICE UUIDS") if wide else ()),
    )
    device_faults = snapshot.device_faults
    for lease in snapshot.leases:
        identities = lease.pod, ",".join(sorted({share.device for share in lease.shares}))
        row = _lease_row(lease, snapshot, device_faults)
        leases.add_row(*row, *(identities if wide else ()))
    keep_widths(leases, "POD", "DIALECT")
    blocks: list[RenderableType] = [leases if snapshot.leases else Text("no pod holds a lease")]
    blocks += _fault_lines(snapshot)
    if snapshot.waiting:
        waiting = new_table("WAITING", "FOR", "VERDICT")
        waiting.columns[2].no_wrap = False
        for one in snapshot.waiting:
            since = one.waiting_since or one.queued.created_at
            pod = f"{one.queued.namespace}/{one.queued.name}"
            waiting.add_row(pod, age(snapshot.read_at - since), one.refusal.text)
        blocks += [Text(), waiting]
    return Group(*blocks, *usage_notes(snapshot.usage))


def _fault_lines(snapshot: Snapshot) -> list[Text]:
    """Return the fault of each device that is not healthy and has a lease of the list."""
    leased = {share.device for lease in snapshot.leases for share in lease.shares}
    devices, faults = snapshot.devices, snapshot.device_faults
    return [
        Text(f"{devices[uuid][0]} device {devices[uuid][1].index}: {fault}", style="red")
        for uuid, fault in faults.items()
        if uuid in leased
    ]


def usage_notes(usage: MeasuredUsage) -> list[Text]:
    """Return what is missing, if anything."""
    return [Text(note, style="yellow") for note in usage.notes]


def explanation(explained: Explanation) -> RenderableType:
    """Format the output of `explain`."""
    lines = (Text(f"  {line}") for line in explained.lines)
    return Group(
        Text(explained.headline, style="bold"),
        *lines,
        Text(f"next: {explained.next}", style="cyan"),
    )


def _device_lines(totals: NodeTotals, width: int, usage: MeasuredUsage) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for device, use in sorted(totals.node.devices, key=lambda pair: pair[0].index):
        shares = list(shares_on(totals, device.uuid))
        pods = list(dict.fromkeys(lease.pod for lease, _ in shares))
        style = {pod: COLOURS[number % len(COLOURS)] for number, pod in enumerate(pods)}
        letter = {pod: _letter(number) for number, pod in enumerate(pods)}
        head = f"  {device.index} {device.model}  "
        tail = _tail(device, use)
        bar_width = max(min(width - len(head) - len(tail) - 4, 48), 10)
        line = Text(head)
        line.append("[")
        free = bar_width
        for pod in pods:
            memory = max(peak(((s.memory_mib, s.init) for x, s in shares if x.pod == pod), 0), 1)
            cells = min(max(round(memory * bar_width / device.memory_mib), 1), free)
            line.append(letter[pod] * cells, style=style[pod])
            free -= cells
        line.append("." * free + "]" + tail, style=None if device.healthy else "red")
        lines.append(line)
        for lease, share in shares:
            text = f"      {letter[lease.pod]} {_share_text(lease, share, usage)}"
            lines.append(Text(text, style=style[lease.pod]))
        if device.fault:
            lines.append(Text(f"      {device.fault}", style="red"))
    return lines


def _share_text(lease: Lease, share: Share, usage: MeasuredUsage) -> str:
    text = f"{_holder(lease, share)}  {share.memory_mib} MiB  {_place(share)}  {lease.state}"
    if not lease.namespace:
        return text
    used_mib, used_cores = used_texts(usage.of(lease, share))
    idle = _idle(usage.idle_since(lease, share), usage)
    return f"{text}  in use: {used_mib} MiB, {used_cores}{idle}"


def _holder(lease: Lease, share: Share) -> str:
    """Return pod and container, or claim and request; those of other namespaces may be hidden."""
    if not lease.namespace:
        return "in use by another namespace"
    kind = "claim " if lease.claim else ""
    return f"{kind}{lease.namespace}/{lease.name} {share.container}"


def _idle(since: float | None, usage: MeasuredUsage) -> str:
    """Return the mark of what is idle, to be appended."""
    return "" if since is None else f", idle {age(usage.read_at - since)}"


def _place(share: Share) -> str:
    """Return a share's part of its device: an instance, or cores and a slot."""
    if share.mig is not None:
        return f"{share.mig.profile}  position {share.mig.position}"
    slot = "" if share.slot is None else f"  slot {share.slot}"
    return f"{share.cores_percent} %{slot}" if share.cores_percent else f"any cores{slot}"


def _tail(device: Device, use: DeviceUse) -> str:
    health = "" if device.healthy else "  UNHEALTHY"
    if device.mode is DeviceMode.MIG:
        memory = f" {use.memory_mib}/{device.memory_mib} MiB  "
        return f"{memory}MIG: {_layout(device, use)}{health}"
    return (
        f" {use.memory_mib}/{device.memory_mib} MiB  {use.cores_percent} % cores  "
        f"{use.shares}/{device.slots} shares{health}"
    )


def _layout(device: Device, use: DeviceUse) -> str:
    """Describe a device's MIG instances and how many are leased."""
    layout = next((one for one in device.layouts if one.name == use.layout), None)
    if layout is None:
        return f"idle, {len(device.layouts)} possible layouts"
    instances = " + ".join(f"{one.count} x {one.name}" for one in layout.profiles)
    return f"{layout.name} ({instances}), {use.shares}/{len(layout.positions)} instances"


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 26]


def _lease_row(
    lease: Lease, snapshot: Snapshot, device_faults: Mapping[DeviceUuid, str]
) -> tuple[str, ...]:
    shares = [share for share in lease.shares if not share.init] or list(lease.shares)
    used = [used_texts(snapshot.usage.of(lease, share)) for share in shares]
    unhealthy = any(share.device in device_faults for share in lease.shares)
    idle = _idle(snapshot.usage.lease_idle_since(lease), snapshot.usage)
    return (
        f"{lease.namespace}/{lease.name}",
        lease.node,
        _device_indices(shares),
        _sum_text(str(share.memory_mib) for share in shares),
        _sum_text(memory for memory, _ in used),
        _sum_text(map(cores_text, shares)),
        _sum_text(cores for _, cores in used),
        f"{lease.state}{', on an unhealthy device' if unhealthy else ''}{idle}",
        age(snapshot.read_at - lease.created_at),
        "claim" if lease.claim else lease.dialect or "-",
    )


def _device_indices(shares: Iterable[Share]) -> str:
    return ",".join(map(str, sorted({share.index for share in shares}))) or "-"


def _sum_text(amounts: Iterable[str]) -> str:
    """Return `2x3000+5000` for 3000, 3000 and 5000."""
    counted = [(each, len(list(equal))) for each, equal in groupby(amounts)]
    return "+".join(f"{n}x{each}" if n > 1 else each for each, n in counted) or "-"


def cores_text(share: Share) -> str:
    """Return the leased part of a device's cores, or the profile of the instance."""
    if share.mig is not None:
        return share.mig.profile
    return f"{share.cores_percent}%" if share.cores_percent else "any"
