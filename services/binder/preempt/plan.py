"""Plans: the cheapest set of leases to preempt so that a pod fits on one node; pure.

Trials use the node's devices, never sums over them. The result is exact for small numbers: no other
set that makes the pod fit on one node is cheaper. The cost of a set is decided by its most
undesirable victim first (`EvictionTier`), then by their number, then by the GPU-seconds they have
used. Where there are too many sets to try, victims are removed from the set one by one, the most
expensive first. The order is fixed, and there are at most `MAX_TRIALS` trials.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from msgspec import structs

from services.binder.ports.observations import DisruptionBudget
from services.binder.preempt.rules import Allowance, EvictionTier, VictimCandidate
from shared.model.device import Device, DeviceUse
from shared.model.lease import Lease, Share, bookings
from shared.model.ledger import LedgerNode, NodeTotals, counted_use
from shared.model.names import NodeName, PodUid
from shared.model.request import PodRequest

Fit = Callable[[PodRequest, LedgerNode], tuple[Share, ...] | None]
"""The shares that a pod would get on a node, by the placer's rules."""
PreemptionCost = tuple[EvictionTier, int, float, float, tuple[str, ...]]
"""Worst tier, victims, GPU-seconds used, minus the creation time of the oldest lease, names."""

MAX_TRIALS = 6000
MAX_NODE_TRIALS = 1500
"""Trials on one node before victims are only spared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    """Where the pod will run, and which leases end for it."""

    node: NodeName
    shares: tuple[Share, ...]
    victims: tuple[VictimCandidate, ...]
    cost: PreemptionCost


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """No pod is evicted."""

    reason: str


@dataclass(slots=True)
class Trials:
    """Counted trials of a pod's fit."""

    fit: Fit
    request: PodRequest
    left: int = MAX_TRIALS

    def shares(self, node: NodeTotals, ended: Collection[PodUid]) -> tuple[Share, ...] | None:
        """Return what the pod would get once these pods' leases have ended."""
        self.left -= 1
        return self.fit(self.request, without(node, ended))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All that a plan is made from."""

    nodes: Sequence[NodeTotals]
    candidates: Sequence[VictimCandidate]
    leaving: frozenset[PodUid] = frozenset()
    """Pods that are being deleted already."""
    disruption_budgets: Sequence[DisruptionBudget] = ()
    allowance: Allowance = field(
        default_factory=lambda: Allowance(total=1 << 30, per_namespace=1 << 30)
    )


def plan(request: PodRequest, given: PlanInput, fit: Fit) -> PreemptionPlan | NoPlan:
    """Return the cheapest set of leases whose end makes the pod fit on one node.

    None if the pod fits anyway, now or once the leaving pods are gone.
    """
    trials = Trials(fit, request)
    by_node = _evictable_by_node(given)
    nodes = sorted(given.nodes, key=lambda node: node.node.facts.name)
    for node in nodes:
        if trials.shares(node, given.leaving) is not None:
            return NoPlan(reason=f"it will fit on {node.node.facts.name} as it is")
    best: PreemptionPlan | None = None
    for node in nodes:
        candidates = by_node.get(node.node.facts.name)
        if candidates and trials.left > 0:
            found = _plan_on_node(node, candidates, given, trials)
            if found and (best is None or found.cost < best.cost):
                best = found
    if best is not None:
        return best
    if not by_node:
        return NoPlan(reason="no lease may be preempted for it")
    return NoPlan(reason="it would fit on no node even if every preemptible lease ended")


def without(node: NodeTotals, ended: Collection[PodUid]) -> LedgerNode:
    """Return a node as it is once these pods' leases have ended."""
    ending = [lease for lease in node.leases if lease.pod in ended]
    if not ending:
        return node.node
    used = dict(node.node.used)
    freed = {share.device for lease in ending for share in lease.shares}
    for lease in ending:
        for resource, amount in lease.resources.items():
            used[resource] = used.get(resource, 0) - amount
    counted, _ = counted_use(lease for lease in node.leases if lease.pod not in ended)
    devices = tuple(
        (device, _use_after(use, counted.get(device.uuid)) if device.uuid in freed else use)
        for device, use in node.node.devices
    )
    return replace(node.node, used=used, devices=devices)


def _use_after(before: DeviceUse, counted: DeviceUse | None) -> DeviceUse:
    after = counted or DeviceUse()
    return structs.replace(
        after,
        fence=before.fence,
        exclusive=after.exclusive or before.claimed_by,
        claimed_by=before.claimed_by,
    )


def used_gpu_s(lease: Lease, devices: Iterable[Device], now: float) -> float:
    """Return the GPU-seconds that a lease has used: the larger part of each device, times time."""
    memory = {device.uuid: max(1, device.memory_mib) for device in devices}
    parts = sum(
        max(booking.cores_percent / 100, booking.memory_mib / memory.get(booking.device, 1 << 62))
        for booking in bookings(lease.shares)
    )
    return parts * max(0.0, now - lease.created_at)


def cost_of(victims: Collection[VictimCandidate]) -> PreemptionCost:
    """Return the cost of a set of victims; less is cheaper."""
    return (
        max(victim.tier for victim in victims),
        len(victims),
        round(sum(victim.used_gpu_s for victim in victims), 3),
        -min(victim.lease.created_at for victim in victims),
        tuple(sorted(f"{victim.lease.namespace}/{victim.lease.name}" for victim in victims)),
    )


def allowed(victims: Collection[VictimCandidate], given: PlanInput) -> bool:
    """Return whether PodDisruptionBudgets and limits allow all these evictions together.

    A pod that several PodDisruptionBudgets select cannot be evicted at all.
    """
    if len(victims) > given.allowance.total:
        return False
    namespaces = Counter(victim.lease.namespace for victim in victims)
    if any(count > given.allowance.of(name) for name, count in namespaces.items()):
        return False
    pods = {victim.lease.pod for victim in victims}
    selected = Counter(pod for budget in given.disruption_budgets for pod in budget.pods & pods)
    return all(count < 2 for count in selected.values()) and all(
        len(budget.pods & pods) <= budget.allowed for budget in given.disruption_budgets
    )


def _evictable_by_node(given: PlanInput) -> dict[NodeName, list[VictimCandidate]]:
    by_node: dict[NodeName, list[VictimCandidate]] = {}
    for candidate in given.candidates:
        if allowed([candidate], given):
            by_node.setdefault(candidate.lease.node, []).append(candidate)
    return by_node


def _plan_on_node(
    node: NodeTotals, candidates: list[VictimCandidate], given: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    """Return the node's cheapest plan: tier by tier, as few and as cheap victims as possible."""
    reserved_trials = trials.left - MAX_NODE_TRIALS
    candidates = sorted(candidates, key=_spare_order)
    everyone = given.leaving | {each.lease.pod for each in candidates}
    if trials.shares(node, everyone) is None:
        return None
    for tier in sorted({each.tier for each in candidates}):
        among = [each for each in candidates if each.tier <= tier]
        ended = given.leaving | {each.lease.pod for each in among}
        if trials.shares(node, ended) is None:
            continue
        found = _fewest(node, among, given, trials, reserved_trials) or _spared(
            node, among, given, trials
        )
        if found:
            return found
    return None


def _spare_order(candidate: VictimCandidate) -> tuple[EvictionTier, float, PodUid]:
    return (candidate.tier, candidate.used_gpu_s, candidate.lease.pod)


def _fewest(
    node: NodeTotals,
    among: list[VictimCandidate],
    given: PlanInput,
    trials: Trials,
    reserved_trials: int,
) -> PreemptionPlan | None:
    """Return the cheapest of the smallest sets; None if none fits, or there are too many to try."""
    for size in range(1, len(among) + 1):
        trials_left = max(0, trials.left - max(reserved_trials, 0))
        sets = list(islice(_victim_sets(among, size, trials.request), trials_left + 1))
        if len(sets) > trials_left:
            return None
        for victims in sorted((each for each in sets if allowed(each, given)), key=cost_of):
            found = _try(node, victims, given, trials)
            if found:
                return found
    return None


def _victim_sets(
    among: list[VictimCandidate], size: int, request: PodRequest
) -> Iterator[tuple[VictimCandidate, ...]]:
    """Yield sets of a size; of one device only, where the pod needs no more than one."""
    if not _wants_one_device(request):
        yield from combinations(among, size)
        return
    seen: set[tuple[PodUid, ...]] = set()
    for device in sorted({share.device for each in among for share in each.lease.shares}):
        on_device = [each for each in among if any(s.device == device for s in each.lease.shares)]
        for victims in combinations(on_device, size):
            pods = tuple(each.lease.pod for each in victims)
            if pods not in seen:
                seen.add(pods)
                yield victims


def _wants_one_device(request: PodRequest) -> bool:
    return request.same_device or sum(container.gpus for container in request.containers) == 1


def _spared(
    node: NodeTotals, among: list[VictimCandidate], given: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    """Spare victims one by one, the most expensive first, as long as the pod fits."""
    victims = list(among)
    for candidate in sorted(among, key=_spare_order, reverse=True):
        fewer = [other for other in victims if other is not candidate]
        ended = given.leaving | {other.lease.pod for other in fewer}
        if fewer and trials.shares(node, ended) is not None:
            victims = fewer
    return _try(node, tuple(victims), given, trials) if allowed(victims, given) else None


def _try(
    node: NodeTotals, victims: tuple[VictimCandidate, ...], given: PlanInput, trials: Trials
) -> PreemptionPlan | None:
    ended = given.leaving | {victim.lease.pod for victim in victims}
    shares = trials.shares(node, ended)
    if shares is None:
        return None
    return PreemptionPlan(
        node=node.node.facts.name,
        shares=shares,
        victims=tuple(sorted(victims, key=lambda victim: victim.lease.pod)),
        cost=cost_of(victims),
    )
