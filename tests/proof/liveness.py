"""Checks of liveness: what is still to come true, and within how many seconds; pure."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from tests.proof.history import Finding, History, of_device
from tests.proof.observations import RawLedger, Sample, SeenPod, Want
from tests.proof.safety import HELD, LIVE, differences_in_sums

EXPLAINED_S = 15.0
STARTED_S = 30.0
"""A kubelet retries a refused container after 10 s."""
LEASE_ENDS_S = 30.0
RESUMED_S = 10.0
REBUILT_S = 20.0
TRUSTED_S = 20.0
"""Of the agent's own reports, of which there is one every 10 s, those count that come 5 s later."""
OFFERED_S = 2.0
EXPIRED_S = 5.0
REGION_S = 30.0
DRIVER_LIMIT_S = 40.0
"""An agent compares every 30 s; what the driver has is read every 2 s."""
_NODES = re.compile(r"\d+/(\d+) nodes are available")


def resumed_s(history: History) -> float:
    return REBUILT_S if history.redis_lost else RESUMED_S


def p1_a_pod_is_bound_or_explained(sample: Sample, history: History) -> Iterator[Finding]:
    """A pending pod has a node or a reason within 15 s, and a bound one starts or fails."""
    for pod in (sample.pods or {}).values():
        if pod.deleted or pod.ended or pod.forged or pod.runs:
            continue
        text = f"it is bound to {pod.node} and not started"
        bound_s = STARTED_S
        if not pod.node:
            text = "it has neither a node nor a reason"
            bound_s = EXPLAINED_S
        if pod.node or not pod.message:
            since = history.first_seen.get(pod.uid, 0.0)
            yield history.about("P1", pod.uid, text, bound_s, counts_from=since)


def p2_no_lease_outlives_its_pod(sample: Sample, history: History) -> Iterator[Finding]:
    """A lease ends, and the record of a waiting pod goes, within 30 s of the pod (also S8)."""
    if sample.ledger is None or sample.pods is None:
        return
    for lease in sample.ledger.leases.values():
        pod = sample.pods.get(lease.pod)
        if lease.state in LIVE and (pod is None or pod.ended):
            text = f"its pod {'ended' if pod else 'is gone'}, its lease is {lease.state}"
            yield history.about("P2", lease.pod, text, LEASE_ENDS_S)
        if lease.state == "reserved" and lease.expires_at < sample.at:
            text = f"its reservation expired {sample.at - lease.expires_at:.1f} s ago"
            yield history.about("P2", lease.pod, text, EXPIRED_S)
    for uid in sorted(sample.ledger.waiting):
        pod = sample.pods.get(uid)
        if pod is None or pod.ended or pod.node:
            text = f"it {'is bound' if pod else 'is gone'} and still counts as waiting"
            yield history.about("P2", uid, text, LEASE_ENDS_S)
    for uid in sorted(sample.ledger.gone & sample.pods.keys()):
        if not (sample.pods[uid].ended or sample.pods[uid].deleted):
            yield history.about("P2", uid, "it exists and counts as gone", LEASE_ENDS_S)


def p2_no_claim_outlives_its_pod(sample: Sample, history: History) -> Iterator[Finding]:
    """A device is kept only for a pod that waits."""
    if sample.ledger is None or sample.pods is None:
        return
    if any(waits(pod) for pod in sample.pods.values()):
        return
    for uuid, device in sorted(sample.ledger.devices.items()):
        if device.is_claimed:
            text = "it is claimed, and no pod waits for it"
            yield of_device("P2", uuid, text, resumed_s(history))


def p3_service_resumes(sample: Sample, history: History) -> Iterator[Finding]:
    """Every part is ready again within 10 s, or 20 s where Redis is rebuilt."""
    for part, reason in sorted(sample.unready.items()):
        yield Finding(
            check="P3", subject=part, text=f"not ready: {reason}", bound_s=resumed_s(history)
        )
    for what, seen in (("API server", sample.pods), ("Redis", sample.ledger)):
        if seen is None:
            yield Finding(check="P3", subject=what, text="no answer", bound_s=RESUMED_S)


def p3_a_node_is_trusted_again(sample: Sample, history: History) -> Iterator[Finding]:
    """A node gets pods again within 20 s of the last message that is refused."""
    for node in sorted(sample.ledger.distrusted if sample.ledger else ()):
        text = "it gets no pods since its agent's messages were refused"
        yield Finding(check="P3", subject=f"node {node}", text=text, bound_s=TRUSTED_S)


def p4_freed_capacity_is_offered(sample: Sample, history: History) -> Iterator[Finding]:
    """A waiting pod that fits, by our own sums, is bound within 2 s."""
    ledger = sample.ledger
    if sample.pods is None or sample.nodes is None or ledger is None:
        return
    free = free_devices(sample, ledger)
    waiting = [pod for pod in sample.pods.values() if waits(pod) and pod.uid not in ledger.leases]
    highest = max((pod.priority for pod in waiting), default=0)
    for pod in waiting:
        if pod.gang or pod.spread or pod.priority < highest:  # devices may be claimed for it
            continue
        fits = _fits_mig(pod.want, sample) if pod.want.mig or pod.want.either else ""
        others = (node for node in sorted(free) if fits_on(pod.want, free[node], sample))
        node = fits or next(others, None)
        if node is not None:
            yield Finding(
                check="P4",
                subject=f"pod {history.name(pod.uid)}",
                text=f"{pod.want} fits on {node} and it waits: {pod.message}",
                bound_s=OFFERED_S,
                pods=frozenset({pod.uid}),
                counts_from=history.quiet_since + resumed_s(history),
            )


def waits(pod: SeenPod) -> bool:
    return not (pod.node or pod.deleted or pod.ended or pod.forged)


Free = list[tuple[int, int, int, str]]
"""Of each device: free MiB, free percent of cores, free slots, and the mode of its leases or ""."""


def free_devices(sample: Sample, ledger: RawLedger) -> dict[str, Free]:
    """Return what the pods of the API server leave of the devices that can be used."""
    taken = _taken(sample, ledger)
    modes = {
        share.device: share.mode
        for lease in ledger.leases.values()
        if lease.state in LIVE
        for share in lease.shares
    }
    free: defaultdict[str, Free] = defaultdict(list)
    for raw in ledger.devices.values():
        node = (sample.nodes or {}).get(raw.node)
        if node is None or node.cordoned or not node.ready or not raw.healthy:
            continue
        if raw.node in ledger.distrusted or raw.uuid in sample.mig_devices:
            continue
        wants = taken[raw.uuid]
        if any(want.exclusive for want in wants) or raw.is_claimed:
            continue
        cores = sample.hardware.cores - sum(want.cores for want in wants)
        if cores > 0:  # else it takes no further pod
            mib = sample.hardware.mib - sum(want.mib for want in wants)
            slots = sample.hardware.slots - len(wants)
            free[raw.node].append((mib, cores, slots, modes.get(raw.uuid, "")))
    return free


def _taken(sample: Sample, ledger: RawLedger) -> defaultdict[str, list[Want]]:
    """Return by device what bound pods request, and what reservations without a Binding hold."""
    taken: defaultdict[str, list[Want]] = defaultdict(list)
    pods = sample.pods or {}
    for pod in pods.values():
        for device in () if pod.ended or pod.resized else pod.devices:
            taken[device].append(pod.want)
    for lease in ledger.leases.values():
        seen = pods.get(lease.pod)
        if lease.state in LIVE and not (seen and seen.devices and not seen.resized):
            for share in lease.shares:
                taken[share.device].append(Want(1, share.mib, share.cores))
    return taken


def _fits_mig(want: Want, sample: Sample) -> str:
    """Return a node with a free MIG instance that is large enough, if there is one.

    An idle device can get any layout, another one keeps that of its leases.
    """
    ledger = sample.ledger
    nodes = sample.nodes or {}
    for uuid in sorted(sample.mig_devices):
        raw = ledger.devices.get(uuid) if ledger else None
        node = nodes.get(raw.node) if raw else None
        if not (ledger and raw and node and raw.healthy and node.ready) or node.cordoned:
            continue
        if raw.node in ledger.distrusted or raw.is_claimed:
            continue
        shares = [
            share
            for lease in ledger.leases.values()
            if lease.state in LIVE
            for share in lease.shares
            if share.device == uuid
        ]
        layouts = sample.hardware.layouts
        sizes = layouts.get(shares[0].layout, ()) if shares else max(layouts.values())
        taken = {share.slot for share in shares}
        if any(mib >= want.mib for slot, mib in enumerate(sizes) if slot not in taken):
            return raw.node
    return ""


def fits_on(want: Want, devices: Free, sample: Sample) -> bool:
    if want.mig:
        return False
    most = sample.hardware.slots
    fitting = [
        slots
        for mib, cores, slots, mode in devices
        if mib >= want.mib and cores >= want.cores and slots > (most - 1) * want.exclusive
        if not (want.memory and mode) or want.memory == mode
    ]
    return len(fitting) >= want.gpus


def s7_a_region_follows_the_lease(sample: Sample, history: History) -> Iterator[Finding]:
    """HAMi-core's limits become those of the lease.

    A lower limit that was not confirmed stays for 20 s: the ledger may still have it written.
    """
    for uid, limits in sorted(sample.limits.items()):
        lease = sample.ledger.leases.get(uid) if sample.ledger else None
        if lease is None or lease.state not in HELD:
            continue
        leased = sorted((share.mib, share.cores or sample.hardware.cores) for share in lease.shares)
        enforced = sorted(limits.of_devices(len(leased)))
        if enforced != leased:
            text = f"its container may use {enforced} MiB and %, its lease has {leased}"
            yield history.about("S7", uid, text, REGION_S)


def s7_the_driver_holds_what_is_leased(sample: Sample, history: History) -> Iterator[Finding]:
    """The driver's limit of a pod becomes that of its lease, also when it was lost."""
    held = sample.driver_limits
    if held is None or sample.ledger is None:
        return
    for uid, pod in sorted((sample.pods or {}).items()):
        lease = sample.ledger.leases.get(uid)
        if lease is None or lease.state not in HELD or not pod.runs or pod.ended or pod.deleted:
            continue
        leased: defaultdict[str, int] = defaultdict(int)
        for share in lease.shares:
            if share.memory == "driver":
                leased[share.device] += share.mib
        for device, mib in leased.items():
            if held.get((uid, device)) != mib:
                text = (
                    f"the driver holds it to {held.get((uid, device))} MiB of {device}, not {mib}"
                )
                yield history.about("S7", uid, text, DRIVER_LIMIT_S)


def o3_a_refusal_counts_the_nodes(sample: Sample, history: History) -> Iterator[Finding]:
    """A refusal counts as many nodes as there are."""
    if sample.pods is None or sample.nodes is None:
        return
    for pod in sample.pods.values():
        counted = _NODES.match(pod.message) if waits(pod) else None
        if counted and int(counted[1]) != len(sample.nodes):
            text = f"{pod.message!r}, and there are {len(sample.nodes)} nodes"
            yield history.about("O3", pod.uid, text, EXPLAINED_S)


def p5_a_gang_holds_all_or_nothing(sample: Sample, history: History) -> Iterator[Finding]:
    """A gang of which a member was bound has at least its minimum of members bound."""
    if sample.pods is None:
        return
    for gang, members in sorted(history.gangs().items()):
        bound = [pod for pod in members if pod.uid in history.bound_at]
        least = max(pod.gang_min for pod in members)
        if not 0 < len(bound) < least or not any(pod.uid in sample.pods for pod in members):
            continue
        began_at = min(history.bound_at[pod.uid] for pod in bound)
        left = [pod for pod in members if _left_while_binding(pod, began_at, sample, history)]
        if len(bound) + len(left) < least:
            text = f"{len(bound)} of at least {least} members were bound"
            yield Finding(
                check="P5",
                subject=f"gang {gang}",
                text=text,
                bound_s=resumed_s(history),
                pods=frozenset(pod.uid for pod in members),
            )


def _left_while_binding(pod: SeenPod, began_at: float, sample: Sample, history: History) -> bool:
    """Whether a member was never bound since it was deleted just as the first ones were."""
    is_gone = pod.uid not in (sample.pods or {})
    return is_gone and pod.uid not in history.bound_at and history.last_seen[pod.uid] > began_at - 3


def p6_the_ledger_agrees(sample: Sample, history: History) -> Iterator[Finding]:
    """The ledger holds the state that Kubernetes and the agents imply."""
    ledger = sample.ledger
    pods = sample.pods
    if ledger is None or pods is None or sample.nodes is None:
        return
    limit_s = resumed_s(history)
    if not ledger.ready:
        yield Finding(check="P6", subject="ledger", text="not ready", bound_s=limit_s)
    cordoned = {name for name, node in sample.nodes.items() if node.cordoned}
    for what, there, stored in (
        ("nodes", sample.nodes.keys(), ledger.nodes),
        ("cordoned nodes", cordoned, ledger.cordoned & ledger.nodes),
    ):
        if set(there) != stored:
            text = f"{sorted(there)} in Kubernetes, {sorted(stored)} in Redis"
            yield Finding(check="P6", subject=what, text=text, bound_s=limit_s)
    for uuid, home in sample.homes.items():
        device = ledger.devices.get(uuid)
        is_mig = uuid in sample.mig_devices
        place = (device.node, device.in_mig_mode) if device else None
        if home in sample.nodes and place != (home, is_mig):
            text = f"Redis has {place}, and it is on {home}, in MIG mode: {is_mig}"
            yield of_device("P6", uuid, text, limit_s)
    for pod in pods.values():
        stays = pod.lease_node and not pod.ended and not pod.deleted
        if stays and (text := _disagreement(pod, ledger)):
            yield history.about("P6", pod.uid, text, limit_s)
    for uuid, text in differences_in_sums(ledger):
        leases = [lease for lease in ledger.leases.values() if uuid in lease.devices]
        holders = frozenset(lease.pod for lease in leases)
        yield replace(of_device("P6", uuid, text, limit_s), pods=holders)


def _disagreement(pod: SeenPod, ledger: RawLedger) -> str:
    """Return how a bound pod's lease differs from the copy in its Binding, if it does."""
    lease = ledger.leases.get(pod.uid)
    if lease is None or lease.state not in HELD or lease.node != pod.node:
        state = f"{lease.state} on {lease.node}" if lease else "gone"
        return f"bound to {pod.node}, its lease is {state}"
    if sorted(share.device for share in lease.shares) != sorted(pod.devices):
        return "its lease is on other devices than its copy"
    leased = sorted(share.mib for share in lease.shares)
    if leased != sorted(pod.copied_mib):
        return f"its lease has {leased} MiB, its copy {sorted(pod.copied_mib)}"
    return ""
