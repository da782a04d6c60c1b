"""All checks of an audit, and the differences that they find in a snapshot; pure."""

from collections.abc import Callable, Iterator, Mapping

from services.cli.audit import account_checks, device_checks, lease_checks
from services.cli.audit.snapshot import OUTLIVE_S, Snapshot
from shared.ledger import total_checks
from shared.ledger.total_checks import BIND_S, Difference
from shared.model.events.claim_events import AllocatedClaim
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import LEASED, allocated_name


def nodes(snapshot: Snapshot) -> Iterator[Difference]:
    """O2: the ledger has every node of the API server, and no other."""
    if snapshot.api_nodes is None:
        return
    known_nodes = {totals.node.facts.name for totals in snapshot.nodes if totals.is_known}
    for name in sorted(snapshot.api_nodes ^ known_nodes):
        text = "the API server has it, the ledger does not"
        if name in known_nodes:
            text = "the ledger has it, the API server does not"
        yield Difference("O2", f"node {name}", text, OUTLIVE_S)


def shared_devices(snapshot: Snapshot) -> Iterator[Difference]:
    """S1: no device is reported by two nodes."""
    reporters: dict[DeviceUuid, list[NodeName]] = {}
    for totals in snapshot.nodes:
        for uuid in totals.reported:
            reporters.setdefault(uuid, []).append(totals.node.facts.name)
    for uuid, names in sorted(reporters.items()):
        if len(names) > 1:
            text = f"it is reported by {len(names)} nodes: {', '.join(sorted(names))}"
            yield Difference("S1", f"device {uuid}", text, OUTLIVE_S)


def waiting_pods(snapshot: Snapshot) -> Iterator[Difference]:
    """P2: no pod is recorded as waiting that is gone, bound or terminated."""
    pods = {pod.pod: pod for pod in snapshot.pods}
    for waiting in snapshot.waiting:
        queued = waiting.queued
        pod = pods.get(queued.pod)
        if pod is not None and pod.is_active and not pod.node:
            continue
        reason = "is gone" if pod is None else f"is bound to {pod.node}"
        if pod is not None and not pod.is_active:
            reason = f"has {pod.phase.lower()}"
        yield Difference(
            "P2",
            f"pod {queued.namespace}/{queued.name}",
            f"the pod {reason} and the ledger has it as waiting",
            OUTLIVE_S,
        )


def gangs(snapshot: Snapshot) -> Iterator[Difference]:
    """P5: a gang is counted with the pods that hold a lease of it or wait, and no others."""
    present = {pod.pod for pod in snapshot.pods if pod.is_active}
    holders: dict[str, set[PodUid]] = {}
    for lease in snapshot.leases:
        if lease.gang:
            holders.setdefault(lease.gang, set()).add(lease.pod)
    waiting: dict[str, set[PodUid]] = {}
    for waiting_pod in snapshot.waiting:
        queued = waiting_pod.queued
        if queued.request.gang is not None:
            waiting.setdefault(queued.request.gang.name, set()).add(queued.pod)
    # A lease may outlive its pod until the containers have ended: it is not counted then.
    yield from _miscounted("hold a lease", snapshot.gangs, holders, present)
    yield from _miscounted("wait", snapshot.waiting_gangs, waiting, present)


def _miscounted(
    what: str,
    counted: Mapping[str, frozenset[PodUid]],
    recorded: Mapping[str, set[PodUid]],
    present: set[PodUid],
) -> Iterator[Difference]:
    for gang in sorted(counted.keys() | recorded.keys()):
        listed = counted.get(gang, frozenset())
        recorded_pods = recorded.get(gang, set())
        missing = (recorded_pods & present) - listed
        extra = listed - recorded_pods
        gone = listed - present
        for pods, text, settles_s in (
            (missing, "%d of its pods %s and are not counted", BIND_S),
            (extra, "%d pods are counted that do not %s", BIND_S),
            (gone - extra, "%d pods are counted that are gone, as if they %s", OUTLIVE_S),
        ):
            if pods:
                yield Difference("P5", f"gang {gang}", text % (len(pods), what), settles_s)


def claims(snapshot: Snapshot) -> Iterator[Difference]:
    """S3, S7, P2: leases of ResourceClaims are exactly what is allocated to them."""
    if snapshot.claims is None:
        return
    leases = {lease.pod: lease for lease in snapshot.leases if lease.claim}
    for claim in snapshot.claims:
        lease = leases.pop(claim.claim, None)
        subject = f"claim {claim.namespace}/{claim.name}"
        if lease is None and claim.devices and claim.answer == LEASED:
            text = "it is answered as leased and holds no lease"
            yield Difference("S3", subject, text, BIND_S)
        if lease is not None and _allocated(claim) != _leased(lease):
            text = (
                f"it is allocated {_allocated(claim)} (request, device, share), its lease has "
                f"{_leased(lease)}"
            )
            yield Difference("S7", subject, text, OUTLIVE_S)
    for lease in leases.values():
        text = f"it has no allocation and its lease is {lease.state}, version {lease.version}"
        subject = f"claim {lease.namespace}/{lease.name}"
        yield Difference("P2", subject, text, OUTLIVE_S)


def _allocated(claim: AllocatedClaim) -> list[tuple[str, str, str]]:
    return sorted((device.request, device.device, device.share_id) for device in claim.devices)


def _leased(lease: Lease) -> list[tuple[str, str, str]]:
    shares = lease.shares
    return sorted((s.container, allocated_name(s), s.share_id) for s in shares)


NAMED_NODES = 5

CHECKS: tuple[Callable[[Snapshot], Iterator[Difference]], ...] = (
    *total_checks.CHECKS,
    *device_checks.CHECKS,
    shared_devices,
    nodes,
    *lease_checks.CHECKS,
    claims,
    waiting_pods,
    gangs,
    *account_checks.CHECKS,
)


def differences(snapshot: Snapshot) -> tuple[Difference, ...]:
    differences = [difference for check in CHECKS for difference in check(snapshot)]
    return tuple(sorted(set(differences), key=lambda d: (d.invariant, d.subject, d.text)))


def unread_checkpoints(snapshot: Snapshot) -> Iterator[str]:
    leased = {lease.node for lease in snapshot.leases if lease.state is LeaseState.ACTIVE}
    nodes = sorted(leased - snapshot.allocations.keys())
    if nodes:
        others = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
        yield (
            f"the devices that the agents of {', '.join(nodes[:NAMED_NODES])}{others} handed to "
            "their kubelets: the checkpoints are not on this machine; `leasehold doctor` compares "
            "them on each node, --agents names a directory of them"
        )
