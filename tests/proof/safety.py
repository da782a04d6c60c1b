"""Checks of safety: they hold at every instant, whatever fault is at work; pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.proof.history import Finding, History, of_device
from tests.proof.observations import Grant, RawLease, RawLedger, Sample, SeenPod, Want

LIVE = frozenset({"reserved", "bound", "active"})
HELD = frozenset({"bound", "active"})


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one pod takes of one device."""

    pod: str
    device: str
    mib: int
    cores: int
    exclusive: bool = False
    slices: range = range(0)


def _over(
    check: str, source: str, pieces: Iterable[_Piece], sample: Sample, history: History
) -> Iterator[Finding]:
    """Compare the sums per device with what a device has."""
    by_device: defaultdict[str, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        by_device[piece.device].append(piece)
    most = sample.hardware
    for device, taken in sorted(by_device.items()):
        mib = sum(piece.mib for piece in taken)
        cores = sum(piece.cores for piece in taken)
        pods = frozenset(piece.pod for piece in taken)
        exclusive = any(piece.exclusive for piece in taken) and len(pods) > 1
        slices = Counter(number for piece in taken for number in piece.slices)
        twice = max(slices.values(), default=0) > 1
        mixed = 0 < sum(bool(piece.slices) for piece in taken) < len(taken)
        is_over = mib > most.mib or cores > most.cores or len(pods) > most.slots
        if not (is_over or exclusive or twice or mixed):
            continue
        holders = ", ".join(
            f"{history.name(piece.pod)} {piece.mib} MiB {piece.cores} %" for piece in taken
        )
        shared = ", shared although exclusive" if exclusive else ""
        shared += ", slices twice" if twice else ", instances and shares" if mixed else ""
        text = f"{source}: {mib} of {most.mib} MiB, {cores} % of cores{shared}: {holders}"
        yield of_device(check, device, text, pods=pods)


def s1_no_device_is_over_committed(sample: Sample, history: History) -> Iterator[Finding]:
    """The sums of containers, of pods and of live leases stay within each device."""
    containers = (
        _Piece(g.pod, g.device, _mib_now(g, sample), g.cores, g.exclusive, g.slices)
        for g in sample.grants
    )
    yield from _over("S1", "containers", containers, sample, history)
    by_pods = (
        _Piece(
            pod.uid,
            device,
            mib,
            0 if device in sample.mig_devices else pod.want.cores,
            pod.want.exclusive,
        )
        for pod in (sample.pods or {}).values()
        if pod.lease_node and pod.lease_node == pod.node and not (pod.ended or pod.deleted)
        for device, mib in zip(pod.devices, _mib_of(pod), strict=True)
    )
    yield from _over("S1", "bound pods", by_pods, sample, history)
    leases = (
        _Piece(lease.pod, share.device, share.mib, share.cores)
        for lease in _live(sample)
        for share in lease.shares
    )
    yield from _over("S1", "leases", leases, sample, history)
    yield from _instances_twice(sample, history)


def _instances_twice(sample: Sample, history: History) -> Iterator[Finding]:
    """MIG instances exist and are disjoint; all leases of a device have one layout."""
    holders: dict[str, tuple[str, str]] = {}
    instances = [(g.instance, g.pod, g.device) for g in sample.grants if g.instance]
    layouts = [
        (share.device, share.layout, share.device)
        for lease in _live(sample)
        for share in lease.shares
    ]
    for thing, holder, device in (*instances, *layouts):
        other, _ = holders.setdefault(thing, (holder, device))
        if other != holder:
            text = f"{thing} is of {history.name(other)!r} and {history.name(holder)!r}"
            pods = frozenset({other, holder}) & history.pods.keys()
            yield of_device("S1", device, text, pods=pods)


def s1_a_device_has_one_mode(sample: Sample, history: History) -> Iterator[Finding]:
    """All live leases of a device share it in one mode."""
    holders: dict[str, tuple[str, str]] = {}
    for lease in _live(sample):
        for share in lease.shares:
            mode, other = holders.setdefault(share.device, (share.mode, lease.pod))
            if mode != share.mode:
                text = f"{history.name(other)} shares it in mode {mode}, " + (
                    f"{history.name(lease.pod)} in mode {share.mode}"
                )
                pods = frozenset({other, lease.pod}) & history.pods.keys()
                yield of_device("S1", share.device, text, pods=pods)


def _mib_now(grant: Grant, sample: Sample) -> int:
    """Return the memory that a container can have now; a resized one started with another limit."""
    limits = sample.limits.get(grant.pod)
    return max(limits.mib) if limits else grant.mib


def _mib_of(pod: SeenPod) -> Iterator[int]:
    """Return a pod's memory of each device; of a resized one that which it certainly has.

    The copy in its annotation follows the resize.
    """
    for mib in pod.copied_mib:
        yield min(mib, pod.want.mib) if pod.resized else pod.want.mib


def _live(sample: Sample) -> Iterator[RawLease]:
    for lease in sample.ledger.leases.values() if sample.ledger else ():
        if lease.state in LIVE:
            yield lease


def s2_a_container_has_one_lease(sample: Sample, history: History) -> Iterator[Finding]:
    """No two leases have one slot or position, no pod a lease elsewhere, no container two nodes."""
    slots: dict[tuple[str, int], str] = {}
    for lease in _live(sample):
        for share in lease.shares:
            other = slots.setdefault((share.device, share.slot), lease.pod)
            if share.slot >= 0 and other != lease.pod:
                names = f"{history.name(other)} and {history.name(lease.pod)}"
                text = f"slot {share.slot} is of {names}"
                pods = frozenset({other, lease.pod})
                yield of_device("S2", share.device, text, pods=pods)
        pod = (sample.pods or {}).get(lease.pod)
        if pod and pod.node and pod.node != lease.node and lease.state in HELD:
            text = f"it is bound to {pod.node}, its lease is on {lease.node}"
            yield history.about("S2", pod.uid, text)
    nodes: dict[tuple[str, str], str] = {}
    for uid, container, at in (
        *((grant.pod, grant.container, grant.node) for grant in sample.agents),
        *((grant.pod, "", grant.node) for grant in sample.grants),
    ):
        node = nodes.setdefault((uid, container), at)
        if node != at:
            text = f"container {container} was given devices on {node} and {at}"
            yield history.about("S2", uid, text)


def s3_what_runs_is_leased(sample: Sample, history: History) -> Iterator[Finding]:
    """A pod whose container has a device was bound by us, with a lease on that node."""
    for pod in _granted(sample, history):
        if not pod.forged and pod.node and pod.lease_node != pod.node:
            text = f"it runs on {pod.node}, the lease it was bound with is on {pod.lease_node!r}"
            yield history.about("S3", pod.uid, text)


def s4_fences_only_rise(sample: Sample, history: History) -> Iterator[Finding]:
    """An agent gives a slot only to a higher fence than the one it gave it to before."""
    for grant in sorted(sample.agents, key=lambda agent_grant: agent_grant.activated_at):
        if grant.slot is None:
            continue
        key = (grant.node, grant.device, grant.slot)
        highest = history.fences.get(key)
        if highest is None or grant.fence > highest.fence:
            history.fences[key] = grant
        elif grant.pod != highest.pod and grant.activated_at > highest.activated_at:
            if history.fences_repeat and grant.fence == highest.fence:
                history.fences[key] = grant
                continue
            text = (
                f"{grant.node} gave slot {grant.slot} to {history.name(grant.pod)} with fence "
                f"{grant.fence} after {history.name(highest.pod)} with fence {highest.fence}"
            )
            pods = frozenset({grant.pod, highest.pod})
            slot = f"{grant.device} slot {grant.slot}"
            yield of_device("S4", slot, text, pods=pods)


def s5_only_a_lease_grants(sample: Sample, history: History) -> Iterator[Finding]:
    """A pod that names its node itself, with a forged grant, gets no device."""
    for pod in _granted(sample, history):
        if pod.forged:
            yield history.about("S5", pod.uid, f"its forged grant works on {pod.node}")


def s7_limits_equal_the_lease(sample: Sample, history: History) -> Iterator[Finding]:
    """What a container was given equals what its pod requests, and the devices of its lease."""
    given: defaultdict[str, list[Grant]] = defaultdict(list)
    for grant in sample.grants:
        given[grant.pod].append(grant)
    for uid, grants in sorted(given.items()):
        pod = history.pods.get(uid)
        if pod is None or pod.forged:
            continue
        shown = sorted((grant.instance or grant.device, grant.mib, grant.cores) for grant in grants)
        right = [_is_as_requested(grant, pod.want, sample) for grant in grants]
        if not pod.resized and (len(grants) != pod.want.gpus or not all(right)):
            text = f"it requests {pod.want}, its container was given {shown}"
            yield history.about("S7", uid, text)
        lease = sample.ledger.leases.get(uid) if sample.ledger else None
        leased = {share.device for share in lease.shares} if lease else set()
        if (
            leased
            and lease
            and lease.state in HELD
            and leased != {grant.device for grant in grants}
        ):
            text = f"its lease is on {sorted(leased)}, its container has {shown}"
            yield history.about("S7", uid, text)


def _is_as_requested(grant: Grant, want: Want, sample: Sample) -> bool:
    """Whether a limit is the requested one, or an instance is there and large enough."""
    if grant.instance:
        return grant.instance in sample.instances and grant.mib >= want.mib
    return (grant.mib, grant.cores) == (want.mib, want.cores) and not want.mig


def is_as_leased(grants: Iterable[Grant], lease: RawLease) -> bool:
    """Whether a container was given exactly what the lease has."""
    leased = sorted((share.device, share.mib, share.cores) for share in lease.shares)
    return sorted((grant.device, grant.mib, grant.cores) for grant in grants) == leased


def s7_a_region_allows_no_more_than_the_lease(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """HAMi-core's limit is never above the lease, also while the lease is resized.

    Only leases that did not change since the sample before: the region was read between.
    """
    ledger = sample.ledger
    if ledger is None or not ledger.ready or history.redis_lost:
        return
    for uid, limits in sorted(sample.limits.items()):
        lease = ledger.leases.get(uid)
        if lease is None or lease.state not in HELD:
            continue
        leased = max((share.mib for share in lease.shares), default=0)
        if history.lease_versions.get(uid) == lease.version and max(limits.mib) > leased:
            text = f"its container may use {max(limits.mib)} MiB, its lease has {leased}"
            yield history.about("S7", uid, text)


def s8_a_lease_lasts_while_its_pod_may_run(sample: Sample, history: History) -> Iterator[Finding]:
    """A pod that runs keeps its lease, but for the time in which a lost Redis is rebuilt."""
    ledger = sample.ledger
    if ledger is None or not ledger.ready or sample.pods is None or history.redis_lost:
        return
    running = {grant.pod for grant in sample.grants}
    for uid in list(history.without_lease):
        if uid not in running:
            del history.without_lease[uid]
    for uid in sorted(running):
        pod = sample.pods.get(uid)
        lease = ledger.leases.get(uid)
        if pod is None or pod.deleted or pod.ended or (lease and lease.state in HELD):
            history.without_lease.pop(uid, None)
            continue
        history.without_lease[uid] = history.without_lease.get(uid, 0) + 1
        if history.without_lease[uid] >= history.lost_samples:
            text = f"it runs on {pod.node} and its lease is {lease.state if lease else 'gone'}"
            yield history.about("S8", uid, text)


CONTRADICTION = re.compile(
    r"device \S+ would be over-committed|its lease of GPU \S+ is outdated: pod \S+"
    r"|instance \S+ is in use by pod \S+|device \S+ is in \S+ mode|GPU \S+ .*is missing"
)
"""The part of an agent's refusal that names a device, and what contradicts the lease."""
_HOLDER = re.compile(r", pod (\S+) has ")


def cause_of(refusal: str) -> str:
    """Return why an agent's records contradict a lease, by device and holders; or an empty text."""
    contradiction = CONTRADICTION.search(refusal)
    return " ".join([contradiction[0], *_HOLDER.findall(refusal)]) if contradiction else ""


def p8_no_pod_fails_twice(sample: Sample, history: History) -> Iterator[Finding]:
    """One pod at most fails for one contradiction between an agent's records and the ledger."""
    if sample.pods is None:
        return
    failed: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for uid, pod in sorted({**history.pods, **sample.pods}.items()):
        if pod.phase == "Failed" and (cause := cause_of(pod.failure)):
            failed[pod.node, cause].append(uid)
    for (node, cause), uids in failed.items():
        for uid in uids[1:]:
            yield history.about("P8", uid, f"it failed on {node} as another before it: {cause}")


def s9_an_agent_gives_out_no_more_than_there_is(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """By an agent's own checkpoint, all that it has given out is no more than each device has.

    Whatever the API server and the ledger say: an entry counts until the agent itself removes it.
    A device that has moved may still be recorded on its earlier node, for a pod that has ended.
    """
    by_node: defaultdict[str, list[_Piece]] = defaultdict(list)
    slots: dict[tuple[str, str, int], str] = {}
    for grant in sample.agents:
        piece = _Piece(grant.pod, grant.device, grant.mib, grant.cores, grant.exclusive)
        by_node[grant.node].append(piece)
        if grant.slot is None:
            continue
        other = slots.setdefault((grant.node, grant.device, grant.slot), grant.pod)
        if other != grant.pod:
            names = f"{history.name(other)} and {history.name(grant.pod)}"
            text = f"slot {grant.slot} was given to {names}"
            pods = frozenset({other, grant.pod})
            yield of_device("S9", grant.device, f"checkpoint: {text}", pods=pods)
    for pieces in by_node.values():
        yield from _over("S9", "checkpoint", pieces, sample, history)


def differences_in_sums(ledger: RawLedger) -> Iterator[tuple[str, str]]:
    """Yield devices whose totals are not the sums of their leases, and how they differ."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for lease in ledger.leases.values():
        if lease.state in LIVE:
            for share in lease.shares:
                sums[share.device][0] += share.mib
                sums[share.device][1] += share.cores
                sums[share.device][2] += 1
                device = ledger.devices.get(share.device)
                if device and device.node != lease.node:
                    yield device.uuid, f"is on {device.node}, and its lease on {lease.node}"
    for uuid in sorted(ledger.devices.keys() | sums.keys()):
        device = ledger.devices.get(uuid)
        stored = [device.used_mib, device.used_cores, device.shares] if device else None
        if stored != sums[uuid]:
            yield uuid, f"Redis counts {stored} MiB, % and shares, its leases {sums[uuid]}"


def _granted(sample: Sample, history: History) -> Iterator[SeenPod]:
    """Return the pods that have a container with a device."""
    for uid in sorted({grant.pod for grant in sample.grants}):
        if pod := history.pods.get(uid):
            yield pod
