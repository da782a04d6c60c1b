"""Leases and devices as text for a terminal, `width` columns wide; nothing here does I/O."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.audit.audit import account_numbers
from services.cli.audit.difference import Difference
from services.cli.inspect.explain import Answer, age
from services.cli.inspect.facts import Facts, shares_on
from shared.model.device import Device, DeviceMode, DeviceUse
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.names import DeviceUuid

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def gpus(accounts: Sequence[NodeTotals], width: int) -> RenderableType:
    """Draw a bar per device, one letter per lease, and name the letters below."""
    blocks: list[RenderableType] = []
    for account in sorted(accounts, key=lambda account: account.node.facts.name):
        if account.node.devices:
            blocks.append(Text(account.node.facts.name, style="bold"))
            blocks += _devices(account, width)
    if not blocks:
        return Text("no node has reported a device yet: are the node agents running?")
    return Group(*blocks)


def ps(facts: Facts) -> RenderableType:
    """List leases, then pods that wait and why."""
    leases = _table("POD", "NODE", "DEVICES", "MIB", "CORES", "STATE", "AGE", "DIALECT")
    sick = facts.sick
    for lease in facts.leases:
        leases.add_row(*_lease_row(lease, facts.read_at, sick))
    blocks: list[RenderableType] = [leases if facts.leases else Text("no pod holds a lease")]
    if facts.waiting:
        waiting = _table("WAITING", "FOR", "VERDICT")
        waiting.columns[2].no_wrap = False
        for one in facts.waiting:
            since = one.waiting_since or one.queued.created_at
            pod = f"{one.queued.namespace}/{one.queued.name}"
            waiting.add_row(pod, age(facts.read_at - since), one.refusal.text)
        blocks += [Text(), waiting]
    return Group(*blocks)


def audit(facts: Facts, wrong: Sequence[Difference]) -> RenderableType:
    """Say what was checked and list what does not add up."""
    nodes, devices, leases = account_numbers(facts.accounts)
    checked = (
        f"{_count(leases, 'lease')} on {_count(devices, 'device')} of {_count(nodes, 'node')}, "
        f"{_count(len(facts.pods), 'pod')}, the checkpoints of "
        f"{_count(len(facts.allocations), 'agent')}"
    )
    if wrong:
        lines = [Text(f"{_count(len(wrong), 'difference')} among {checked}", style="bold red")]
        lines += [Text(f"{one.invariant}  {one.subject}: {one.text}") for one in wrong]
    else:
        lines = [Text(f"clean: {checked} agree", style="green")]
    lines += [Text(f"not seen: {one}", style="yellow") for one in facts.unseen]
    return Group(*lines)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def explanation(answer: Answer) -> RenderableType:
    """Write the answer of `explain`."""
    lines = [Text(answer.headline, style="bold"), *(Text(f"  {line}") for line in answer.lines)]
    return Group(*lines, Text(f"next: {answer.next}", style="cyan"))


def _devices(account: NodeTotals, width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for device, use in sorted(account.node.devices, key=lambda pair: pair[0].index):
        held = list(shares_on(account, device.uuid))
        pods = list(dict.fromkeys(lease.pod for lease, _ in held))
        style = {pod: COLOURS[number % len(COLOURS)] for number, pod in enumerate(pods)}
        letter = {pod: _letter(number) for number, pod in enumerate(pods)}
        head = f"  {device.index} {device.model}  "
        tail = _tail(device, use)
        bar_width = max(min(width - len(head) - len(tail) - 4, 48), 10)
        line = Text(head)
        line.append("[")
        free = bar_width
        for pod in pods:
            memory = max(sum(s.memory_mib for x, s in held if x.pod == pod and not s.init), 1)
            cells = min(max(round(memory * bar_width / device.memory_mib), 1), free)
            line.append(letter[pod] * cells, style=style[pod])
            free -= cells
        line.append("." * free + "]" + tail, style=None if device.healthy else "red")
        lines.append(line)
        for lease, share in held:
            text = (
                f"      {letter[lease.pod]} {lease.namespace}/{lease.name} {share.container}  "
                f"{share.memory_mib} MiB  {_place(share)}  {lease.state}"
            )
            lines.append(Text(text, style=style[lease.pod]))
        if device.fault:
            lines.append(Text(f"      {device.fault}", style="red"))
    return lines


def _place(share: Share) -> str:
    """Say which part of its device a share is: an instance, or cores and a slot."""
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
    """Name the instances that a device has while some are held."""
    layout = next((one for one in device.layouts if one.name == use.layout), None)
    if layout is None:
        return f"idle, {len(device.layouts)} possible layouts"
    instances = " + ".join(f"{one.count} x {one.name}" for one in layout.profiles)
    return f"{layout.name} ({instances}), {use.shares}/{len(layout.positions)} instances"


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 26]


def _lease_row(lease: Lease, now: float, sick: Mapping[DeviceUuid, str]) -> tuple[str, ...]:
    app = [share for share in lease.shares if not share.init] or list(lease.shares)
    devices = sorted({share.index for share in app})
    ill = any(share.device in sick for share in lease.shares)
    memory = [str(share.memory_mib) for share in app]
    cores = [_cores(share) for share in app]
    return (
        f"{lease.namespace}/{lease.name}",
        lease.node,
        ",".join(map(str, devices)) or "-",
        "+".join(memory) or "-",
        "+".join(cores) or "-",
        f"{lease.state}, on a sick device" if ill else str(lease.state),
        age(now - lease.created_at),
        lease.dialect or "-",
    )


def _cores(share: Share) -> str:
    if share.mig is not None:
        return share.mig.profile
    return f"{share.cores_percent}%" if share.cores_percent else "any"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table
