"""Recomputing what must hold from what leases, pods and agents say; nothing here repairs anything.

Each difference names its invariant and how long it may last: leases, pods and agents are read one
after the other while the system works, so only what stays is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from services.cli.audit.difference import BIND_S, Difference
from services.cli.audit.sums import budgets, quotas, turns
from services.cli.inspect.facts import Facts, PodSeen, shares_on
from shared.dialects import DIALECTS
from shared.model.device import Device, DeviceUse
from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease, LeaseState, Share, bookings
from shared.model.lease_copy import ANNOTATION, load_lease
from shared.model.ledger import NodeTotals, counted_use
from shared.model.names import DeviceUuid, PodUid
from shared.model.request import SharingPolicy

EXPLAIN_S = 15.0
EXPIRE_S = 5.0
OUTLIVE_S = 30.0
NAMED = 5


def differences(facts: Facts) -> tuple[Difference, ...]:
    """Return everything that does not add up, sorted by invariant."""
    found = [difference for check in CHECKS for difference in check(facts)]
    return tuple(sorted(set(found), key=lambda d: (d.invariant, d.subject, d.text)))


def device_totals(facts: Facts) -> Iterator[Difference]:
    """S1: the stored total of every device is the sum of its leases."""
    for account in facts.accounts:
        counted, _ = counted_use(account.leases)
        stored = {device.uuid: use for device, use in account.node.devices}
        for uuid in sorted(counted.keys() | stored.keys()):
            yield from _compare(uuid, stored.get(uuid), counted.get(uuid, DeviceUse()))
        for stray in account.index_mismatches:
            yield Difference(invariant="S1", subject=account.node.facts.name, text=stray)


def node_totals(facts: Facts) -> Iterator[Difference]:
    """S1: the stored total of every node's ordinary resources is the sum of its leases and claims.

    Claims are read apart: one may come or go in between.
    """
    for account in facts.accounts:
        name = account.node.facts.name
        counted = counted_use(account.leases)[1].get(name, {})
        kept = facts.kept.get(name, {})
        for resource in sorted(counted.keys() | account.node.used.keys()):
            stored = account.node.used.get(resource, 0)
            summed = counted.get(resource, 0) + kept.get(resource, 0)
            if stored != summed:
                text = f"the ledger counts {stored} of {resource}, its leases sum up to {summed}"
                yield Difference(
                    invariant="S1", subject=f"node {name}", text=text, settles_s=BIND_S
                )


def over_commitment(facts: Facts) -> Iterator[Difference]:
    """S1: no device gives more memory, cores or slots than it has, or is shared and exclusive."""
    for account in facts.accounts:
        for device, _ in account.node.devices:
            held = list(shares_on(account, device.uuid))
            booked = [
                booking
                for lease in account.leases
                for booking in bookings(lease.shares)
                if booking.device == device.uuid
            ]
            for what, taken, limit in (
                ("MiB", sum(b.memory_mib for b in booked), device.memory_mib),
                ("% of its cores", sum(b.cores_percent for b in booked), 100),
                ("slots", sum(b.slots for b in booked), _slots(device, held)),
            ):
                if taken > limit:
                    yield _over(device, f"leases take {taken} {what}, it has {limit}")
            yield from _same_slots(device, held)
            yield from _not_alone(device, booked_by(account.leases, device.uuid))


def booked_by(leases: Iterable[Lease], device: DeviceUuid) -> list[Lease]:
    """Return the leases that hold something of a device."""
    return [lease for lease in leases if any(share.device == device for share in lease.shares)]


def one_lease(facts: Facts) -> Iterator[Difference]:
    """S2: a pod holds one live lease."""
    for pod, count in Counter(lease.pod for lease in facts.leases).items():
        if count > 1:
            nodes = sorted(lease.node for lease in facts.leases if lease.pod == pod)
            text = f"it holds {count} live leases, on {', '.join(nodes)}"
            yield Difference(invariant="S2", subject=f"pod {pod}", text=text)


def bound_is_leased(facts: Facts) -> Iterator[Difference]:
    """S3: every pod that we bound holds a lease on the node where it is."""
    leases = {lease.pod: lease for lease in facts.leases}
    for pod in facts.pods:
        if not (pod.node and pod.lives and ANNOTATION in pod.annotations):
            continue
        lease = leases.get(pod.pod)
        if lease is not None and lease.node == pod.node:
            continue
        held = "holds no lease" if lease is None else f"holds a lease on {lease.node}"
        text = f"it is bound to {pod.node} and {held}"
        yield Difference(invariant="S3", subject=_named(pod), text=text, settles_s=BIND_S)


def fences(facts: Facts) -> Iterator[Difference]:
    """S4: a device's fences are unique and none is above the device's own."""
    for account in facts.accounts:
        for device, use in account.node.devices:
            held = Counter(share.fence for _, share in shares_on(account, device.uuid))
            for fence, count in sorted(held.items()):
                if count > 1:
                    yield _fence(device, f"fence {fence} is carried by {count} shares")
                if fence > use.fence:
                    yield _fence(device, f"a share carries fence {fence}, the device {use.fence}")


def agents(facts: Facts) -> Iterator[Difference]:
    """S5, S7: what the kubelet was told is what a live lease says; what is active was told."""
    leases = {(lease.pod, lease.node): lease for lease in facts.leases}
    for node, told in facts.allocations.items():
        for activation in told:
            yield from _told(activation, leases.get((activation.pod, node)))
        known = {activation.pod for activation in told}
        for lease in facts.leases:
            if lease.node == node and lease.state is LeaseState.ACTIVE and lease.pod not in known:
                text = "its lease is active, and the node's agent has told the kubelet nothing"
                yield Difference(
                    invariant="S5", subject=_leased(lease), text=text, settles_s=OUTLIVE_S
                )


def outlived(facts: Facts) -> Iterator[Difference]:
    """P2: no lease outlives its pod, no reservation its expiry."""
    pods = {pod.pod: pod for pod in facts.pods}
    for lease in facts.leases:
        pod = pods.get(lease.pod)
        if pod is None or not pod.lives:
            why = "is gone" if pod is None else f"has {pod.phase.lower()}"
            text = f"the pod {why} and its lease is {lease.state}, version {lease.version}"
            yield Difference(invariant="P2", subject=_leased(lease), text=text, settles_s=OUTLIVE_S)
        if lease.state is LeaseState.RESERVED and lease.expires_at < facts.read_at:
            text = "its reservation has run out and is still held"
            yield Difference(invariant="P2", subject=_leased(lease), text=text, settles_s=EXPIRE_S)


def gangs(facts: Facts) -> Iterator[Difference]:
    """P5: the pods that are counted with a gang are those that hold a lease of it."""
    held: dict[str, set[PodUid]] = {}
    for lease in facts.leases:
        if lease.gang:
            held.setdefault(lease.gang, set()).add(lease.pod)
    for gang in sorted(held.keys() | facts.gangs.keys()):
        counted, holding = facts.gangs.get(gang, frozenset()), held.get(gang, set())
        if counted != holding:
            text = f"the ledger counts {len(counted)} pods of it, {len(holding)} hold a lease"
            yield Difference(invariant="P5", subject=f"gang {gang}", text=text, settles_s=BIND_S)


def views(facts: Facts) -> Iterator[Difference]:
    """O2: what a pod's annotations claim is what its lease says."""
    pods = {pod.pod: pod for pod in facts.pods}
    for lease in facts.leases:
        pod, dialect = pods.get(lease.pod), DIALECTS.get(lease.dialect)
        if pod is not None and pod.node and pod.lives and dialect is not None:
            text = dialect.annotation_difference(lease, pod.annotations)
            if text:
                yield Difference(
                    invariant="O2", subject=_leased(lease), text=text, settles_s=BIND_S
                )


def copies(facts: Facts) -> Iterator[Difference]:
    """S7: the copy of its lease that a pod carries says what the lease does."""
    pods = {pod.pod: pod for pod in facts.pods if pod.node and pod.lives}
    for lease in facts.leases:
        pod = pods.get(lease.pod)
        if pod is None or ANNOTATION not in pod.annotations:
            continue
        try:
            copy = load_lease(pod.annotations[ANNOTATION], namespace=pod.namespace, name=pod.name)
        except RequestError as error:
            yield Difference(invariant="S7", subject=_named(pod), text=str(error))
            continue
        if _amounts(copy.shares) != _amounts(lease.shares):
            text = (
                f"its annotation says {_amounts(copy.shares)} (device, MiB, %), its lease says "
                f"{_amounts(lease.shares)}"
            )
            yield Difference(invariant="S7", subject=_named(pod), text=text, settles_s=BIND_S)


CHECKS: tuple[Callable[[Facts], Iterator[Difference]], ...] = (
    device_totals,
    node_totals,
    over_commitment,
    one_lease,
    bound_is_leased,
    fences,
    agents,
    outlived,
    gangs,
    quotas,
    turns,
    copies,
    views,
    budgets,
)


def unexplained(facts: Facts, schedulers: frozenset[str]) -> Iterator[Difference]:
    """P1: every pod that waits for us is bound, or its owner can read why not."""
    known = {lease.pod for lease in facts.leases} | {w.queued.pod for w in facts.waiting}
    for pod in facts.pods:
        ours = pod.scheduler in schedulers and pod.lives and not pod.node and not pod.gates
        if ours and pod.pod not in known and not pod.said:
            text = "it waits with neither a lease nor an explanation"
            yield Difference(invariant="P1", subject=_named(pod), text=text, settles_s=EXPLAIN_S)


def unseen_agents(facts: Facts) -> Iterator[str]:
    """Say which agents' checkpoints are not on this machine, of nodes with something to compare."""
    leased = {lease.node for lease in facts.leases if lease.state is LeaseState.ACTIVE}
    nodes = sorted(leased - facts.allocations.keys())
    if nodes:
        others = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
        yield (
            f"what the agents of {', '.join(nodes[:NAMED])}{others} told their kubelets: their "
            "checkpoints are not here; `leasehold doctor` compares them on each node, --agents "
            "names a directory of them"
        )


def lasting(
    found: Iterable[Difference], since: Mapping[Difference, float], now: float
) -> tuple[tuple[Difference, ...], dict[Difference, float]]:
    """Return which differences have lasted too long, and since when each was seen."""
    seen = {difference: since.get(difference, now) for difference in found}
    wrong = tuple(d for d, first in seen.items() if now - first >= d.settles_s)
    return wrong, seen


def _compare(uuid: str, stored: DeviceUse | None, summed: DeviceUse) -> Iterator[Difference]:
    if stored is None:
        text = f"leases hold {summed.memory_mib} MiB of a device that is not in the ledger"
        yield Difference(invariant="S1", subject=f"device {uuid}", text=text)
        return
    for what, counted, added in (
        ("MiB", stored.memory_mib, summed.memory_mib),
        ("% of its cores", stored.cores_percent, summed.cores_percent),
        ("shares", stored.shares, summed.shares),
        (
            "tags",
            ",".join(sorted(stored.anti_affinity_groups)),
            ",".join(sorted(summed.anti_affinity_groups)),
        ),
        (
            "leases that keep it to themselves",
            int(stored.exclusive),
            int(summed.exclusive or stored.claimed_by),
        ),
        ("as MIG layout", stored.layout or "none", summed.layout or "none"),
        ("as slots taken", stored.slots_taken or "none", summed.slots_taken or "none"),
    ):
        if counted != added:
            text = f"the ledger counts {counted} {what}, its leases sum up to {added}"
            yield Difference(invariant="S1", subject=f"device {uuid}", text=text)


def _same_slots(device: Device, held: list[tuple[Lease, Share]]) -> Iterator[Difference]:
    slots: dict[int, set[str]] = {}
    for lease, share in held:
        if share.slot is not None and not share.init:
            slots.setdefault(share.slot, set()).add(f"{lease.pod}/{share.container}")
    for slot, holders in sorted(slots.items()):
        if len(holders) > 1:
            yield _over(device, f"slot {slot} is held by {len(holders)} containers")
        if not 0 <= slot < _slots(device, held):
            yield _over(device, f"slot {slot} is held, it has {_slots(device, held)}")
    layouts = sorted({share.mig.layout if share.mig else "no MIG layout" for _, share in held})
    if len(layouts) > 1:
        yield _over(device, f"leases hold it in different ways: {', '.join(layouts)}")


def _slots(device: Device, held: Sequence[tuple[Lease, Share]]) -> int:
    """Return how many slots leases may hold: the device's, the dialect's, or the positions."""
    positions = [len(layout.positions) for layout in device.layouts]
    return max([device.slots, *positions, *(share.slots for _, share in held)])


def _not_alone(device: Device, holders: list[Lease]) -> Iterator[Difference]:
    alone = [
        lease
        for lease in holders
        if any(
            share.device == device.uuid and share.sharing is SharingPolicy.EXCLUSIVE
            for share in lease.shares
        )
    ]
    if alone and len(holders) > 1:
        text = f"{_leased(alone[0])} holds it alone, and {len(holders) - 1} others hold it, too"
        yield _over(device, text)


def _told(activation: Allocation, lease: Lease | None) -> Iterator[Difference]:
    subject = f"pod {activation.namespace}/{activation.name}"
    if lease is None:
        text = f"the kubelet was told of container {activation.container}, and no lease is live"
        yield Difference(invariant="S5", subject=subject, text=text, settles_s=OUTLIVE_S)
        return
    told = activation.lease.shares_of(activation.container)
    held = lease.shares_of(activation.container)
    if _amounts(told) != _amounts(held):
        text = (
            f"container {activation.container} was given {_amounts(told)} (device, MiB, %), its "
            f"lease says {_amounts(held)}"
        )
        yield Difference(invariant="S7", subject=subject, text=text, settles_s=BIND_S)


def _amounts(shares: Iterable[Share]) -> list[tuple[str, int, int]]:
    return [(share.device, share.memory_mib, share.cores_percent) for share in shares]


def _over(device: Device, text: str) -> Difference:
    return Difference(invariant="S1", subject=f"device {device.uuid}", text=text)


def _fence(device: Device, text: str) -> Difference:
    return Difference(invariant="S4", subject=f"device {device.uuid}", text=text)


def _named(pod: PodSeen) -> str:
    return f"pod {pod.namespace}/{pod.name}"


def _leased(lease: Lease) -> str:
    return f"pod {lease.namespace}/{lease.name}"


def account_numbers(accounts: Iterable[NodeTotals]) -> tuple[int, int, int]:
    """Return how many nodes, devices and leases there are."""
    listed = list(accounts)
    devices = sum(len(account.node.devices) for account in listed)
    return len(listed), devices, sum(len(account.leases) for account in listed)
