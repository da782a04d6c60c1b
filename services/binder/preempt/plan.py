"""Which leases to take back so that a pod fits: devices are simulated, never a node's sums.

The result is exact for small numbers: no other set that makes the pod fit on one node is cheaper.
What a set costs is decided by its most unwelcome victim first (`EvictionTier`), then by how many
there are, then by what they lose. Where there are too many sets to try, victims are spared one by
one, the most expensive first. All in a fixed order, and never more than `FITS` trials.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from services.binder.preempt.rules import Allowance, DisruptionBudget, EvictionTier, VictimCandidate
from shared.model.device import Device, DeviceUse
from shared.model.lease import Lease, Share, bookings
from shared.model.ledger import LedgerNode, NodeTotals, counted_use
from shared.model.names import NodeName, PodUid
from shared.model.request import PodRequest

Fit = Callable[[PodRequest, LedgerNode], tuple[Share, ...] | None]
"""The shares that a pod would get on a node, by the placer's rules."""
Cost = tuple[EvictionTier, int, float, float, tuple[str, ...]]
"""Worst tier, victims, GPU-seconds lost, minus the instant at which the oldest began, names."""

FITS = 6000
"""Trials in all."""
FITS_ON_NODE = 1500
"""Trials on one node before victims are only spared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    """Where the pod will go, and who has to leave for that."""

    node: NodeName
    shares: tuple[Share, ...]
    victims: tuple[VictimCandidate, ...]
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Nobody is evicted."""

    reason: str


@dataclass(slots=True)
class Trials:
    """Fits, counted."""

    fit: Fit
    request: PodRequest
    left: int = FITS

    def shares(self, account: NodeTotals, gone: Collection[PodUid]) -> tuple[Share, ...] | None:
        """Return what the pod would get once these pods' leases have ended."""
        self.left -= 1
        return self.fit(self.request, without(account, gone))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All that a plan is made from."""

    accounts: Sequence[NodeTotals]
    candidates: Sequence[VictimCandidate]
    ending: frozenset[PodUid] = frozenset()
    """Pods that leave anyway."""
    disruptions: Sequence[DisruptionBudget] = ()
    allowance: Allowance = field(
        default_factory=lambda: Allowance(everywhere=1 << 30, per_namespace=1 << 30)
    )


def plan(request: PodRequest, seen: PlanInput, fit: Fit) -> PreemptionPlan | NoPlan:
    """Return the cheapest set of leases whose end makes the pod fit on one node.

    None of it where the pod fits anyway, now or when those have left who leave already.
    """
    trials = Trials(fit, request)
    by_node: dict[NodeName, list[VictimCandidate]] = {}
    for candidate in seen.candidates:
        if allowed([candidate], seen):
            by_node.setdefault(candidate.lease.node, []).append(candidate)
    best: PreemptionPlan | None = None
    for account in sorted(seen.accounts, key=lambda account: account.node.facts.name):
        if trials.shares(account, seen.ending) is not None:
            return NoPlan(reason=f"it will fit on {account.node.facts.name} as it is")
    for account in sorted(seen.accounts, key=lambda account: account.node.facts.name):
        here = by_node.get(account.node.facts.name)
        if here and trials.left > 0:
            found = _on_node(account, here, seen, trials)
            if found and (best is None or found.cost < best.cost):
                best = found
    if best is not None:
        return best
    if not by_node:
        return NoPlan(reason="no lease may be taken back for it")
    return NoPlan(reason="it would fit nowhere even if all were taken back that may be")


def without(account: NodeTotals, gone: Collection[PodUid]) -> LedgerNode:
    """Return a node as it is once these pods' leases have ended."""
    leaving = [lease for lease in account.leases if lease.pod in gone]
    if not leaving:
        return account.node
    used = dict(account.node.used)
    touched = {share.device for lease in leaving for share in lease.shares}
    for lease in leaving:
        for resource, amount in lease.resources.items():
            used[resource] = used.get(resource, 0) - amount
    counted, _ = counted_use(lease for lease in account.leases if lease.pod not in gone)
    devices = tuple(
        (device, _use_after(use, counted.get(device.uuid)) if device.uuid in touched else use)
        for device, use in account.node.devices
    )
    return replace(account.node, used=used, devices=devices)


def _use_after(before: DeviceUse, counted: DeviceUse | None) -> DeviceUse:
    after = counted or DeviceUse()
    return replace(
        after,
        fence=before.fence,
        exclusive=after.exclusive or before.claimed_by,
        claimed_by=before.claimed_by,
    )


def lost_by(lease: Lease, devices: Iterable[Device], now: float) -> float:
    """Return the GPU-seconds that a lease has held: the larger part of each device, times time."""
    memory = {device.uuid: max(1, device.memory_mib) for device in devices}
    parts = sum(
        max(booking.cores_percent / 100, booking.memory_mib / memory.get(booking.device, 1 << 62))
        for booking in bookings(lease.shares)
    )
    return parts * max(0.0, now - lease.created_at)


def cost_of(victims: Collection[VictimCandidate]) -> Cost:
    """Return what a set of victims costs; less is cheaper."""
    return (
        max(each.tier for each in victims),
        len(victims),
        round(sum(each.lost for each in victims), 3),
        -min(each.lease.created_at for each in victims),
        tuple(sorted(f"{each.lease.namespace}/{each.lease.name}" for each in victims)),
    )


def allowed(victims: Collection[VictimCandidate], seen: PlanInput) -> bool:
    """Say whether budgets for disruptions and limits let all of these go together.

    A pod that several PodDisruptionBudgets count cannot be evicted at all.
    """
    if len(victims) > seen.allowance.everywhere:
        return False
    namespaces = Counter(each.lease.namespace for each in victims)
    if any(count > seen.allowance.of(name) for name, count in namespaces.items()):
        return False
    pods = {each.lease.pod for each in victims}
    counted = Counter(pod for budget in seen.disruptions for pod in budget.pods & pods)
    return all(count < 2 for count in counted.values()) and all(
        len(budget.pods & pods) <= budget.allowed for budget in seen.disruptions
    )


def _on_node(
    account: NodeTotals, here: list[VictimCandidate], seen: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    """Return the node's cheapest plan: tier by tier, as few and as cheap victims as possible."""
    enough = trials.left - FITS_ON_NODE
    here = sorted(here, key=lambda each: (each.tier, each.lost, each.lease.pod))
    everybody = seen.ending | {each.lease.pod for each in here}
    if trials.shares(account, everybody) is None:
        return None
    for tier in sorted({each.tier for each in here}):
        among = [each for each in here if each.tier <= tier]
        gone = seen.ending | {each.lease.pod for each in among}
        if trials.shares(account, gone) is None:
            continue
        found = _fewest(account, among, seen, trials, enough) or _spared(
            account, among, seen, trials
        )
        if found:
            return found
    return None


def _fewest(
    account: NodeTotals, among: list[VictimCandidate], seen: PlanInput, trials: Trials, enough: int
) -> PreemptionPlan | None:
    for size in range(1, len(among) + 1):
        room = max(0, trials.left - max(enough, 0))
        sets = list(islice(_sets(among, size, trials.request), room + 1))
        if len(sets) > room:
            return None
        for victims in sorted((v for v in sets if allowed(v, seen)), key=cost_of):
            found = _tried(account, victims, seen, trials)
            if found:
                return found
    return None


def _sets(
    among: list[VictimCandidate], size: int, request: PodRequest
) -> Iterator[tuple[VictimCandidate, ...]]:
    """Yield sets of a size; of one device only, where the pod needs no more than one."""
    if not _wants_one_device(request):
        yield from combinations(among, size)
        return
    known: set[tuple[PodUid, ...]] = set()
    for device in sorted({share.device for each in among for share in each.lease.shares}):
        on_it = [each for each in among if any(s.device == device for s in each.lease.shares)]
        for victims in combinations(on_it, size):
            pods = tuple(each.lease.pod for each in victims)
            if pods not in known:
                known.add(pods)
                yield victims


def _wants_one_device(request: PodRequest) -> bool:
    return request.same_device or sum(container.gpus for container in request.containers) == 1


def _spared(
    account: NodeTotals, among: list[VictimCandidate], seen: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    """Spare victims one by one, the most expensive first, as long as the pod fits."""
    left = list(among)
    for each in sorted(among, key=lambda c: (c.tier, c.lost, c.lease.pod), reverse=True):
        fewer = [other for other in left if other is not each]
        gone = seen.ending | {other.lease.pod for other in fewer}
        if fewer and trials.shares(account, gone) is not None:
            left = fewer
    return _tried(account, tuple(left), seen, trials) if allowed(left, seen) else None


def _tried(
    account: NodeTotals, victims: tuple[VictimCandidate, ...], seen: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    gone = seen.ending | {each.lease.pod for each in victims}
    shares = trials.shares(account, gone)
    if shares is None:
        return None
    return PreemptionPlan(
        node=account.node.facts.name,
        shares=shares,
        victims=tuple(sorted(victims, key=lambda each: each.lease.pod)),
        cost=cost_of(victims),
    )
