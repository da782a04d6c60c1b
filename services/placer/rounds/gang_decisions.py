"""Decisions for a gang: enough of its pods are placed together, or none at all; pure.

Pods that share domains are tried in one after another. Domains without enough room, with each kind
of pod counted alone, are not tried.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from msgspec import structs

from services.placer.rounds.decisions import Choose, ChosenPod, DecisionContext
from services.placer.rounds.gang_domains import (
    NO_TOPOLOGY,
    Domain,
    Keys,
    PodKind,
    Topology,
    domains_by_size,
    kinds_of,
    nodes_within,
    own_part,
    part_of,
    room_if_empty,
    room_in,
    topology_of,
)
from services.placer.rounds.room_counts import pods_on_empty_nodes
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import GangEnrollment
from shared.model.names import PodUid
from shared.model.requests.placement import DomainRoom, Placement, Refusal
from shared.model.requests.request import Gang, GpuRequest, PodRequest, Within
from shared.placing.index.node_index import placement_key

SHOWN_DOMAINS = 5


@dataclass(frozen=True, slots=True)
class GangDecision:
    """Places for as many pods as needed; or for none, and why the next does not fit."""

    chosen: list[ChosenPod]
    fitting: int
    """How many pods fit before one did not."""
    refusal: Refusal | None = None
    lacking: tuple[int, int] | None = None
    """How many of how many equal pods would fit if no other pod ran, or None if all may."""
    waits: bool = False
    """The pod that does not fit would fit once other pods have ended."""
    differs: bool = False
    """Whether its pods fit beside each other on empty nodes is not known."""
    required: Keys = ()
    """Labels of which all pods must share the values."""
    one_node_claim: str = ""
    """A claim that pods share, for which one of these labels is the name of the node."""
    domains: tuple[DomainRoom, ...] = ()
    """Those with the most room, the largest first."""
    further_domains: int = 0
    """Domains with no more room than the last of `domains`."""


def strictest(gang: Gang, members: Iterable[PodQueued]) -> Gang:
    """Pods may name different minimums of their gang: none starts with fewer than it names."""
    named = [other for event in members if (other := event.request.gang) is not None]
    return max([gang, *named], key=attrgetter("min_member"))


def decide_gang(
    members: Sequence[PodQueued], needed: int, context: DecisionContext, joined: Within = ()
) -> GangDecision:
    """Place `needed` of the members, counting each as used in the mirror, or none of them.

    The largest pods go first, since small ones fit between them; if that fails and some may be left
    out, the smallest. `joined` has the values of the gang's labels on the nodes of its other pods.
    """
    topology = topology_of(members)
    if topology is not NO_TOPOLOGY:
        return GangInDomains(members, needed, context, topology, joined).decide()
    decision = _place_sorted(members, needed, context, lambda: context.choose)
    if decision.refusal is None or decision.refusal.permanent or decision.refusal.quota:
        return decision
    lacking = _lacking(members, needed, context)
    if lacking is None:
        waits = decision.waits and _lacking(members, needed, context, as_is=True) is None
        return replace(decision, waits=waits, differs=_differ(members))
    return replace(decision, lacking=lacking)


def _differ(members: Iterable[PodQueued]) -> bool:
    return len({placement_key(event.request) for event in members}) > 1


def _lacking(
    members: Sequence[PodQueued], needed: int, context: DecisionContext, *, as_is: bool = False
) -> tuple[int, int] | None:
    """Return how many of how many equal pods would fit if no other ran, or None if all would.

    Pods that differ are not counted beside each other.
    """
    alike: dict[Hashable, list[PodRequest]] = {}
    for event in members:
        alike.setdefault(placement_key(event.request), []).append(event.request)
    for requests in alike.values():
        least = len(requests) - (len(members) - needed)
        if least > 0:
            most = pods_on_empty_nodes(requests[0], context.index, least, as_is=as_is)
            if most < least:
                return most, least
    return None


def choose_beside(
    event: PodQueued, context: DecisionContext, joined: Within
) -> tuple[Placement, ...] | Refusal:
    """Prefer to be near the gang's other pods."""
    gang = event.request.gang
    required = part_of(joined, gang.required_topology) if gang else ()
    near = own_part(joined, event)
    if near != required:
        result = context.choose(event, near)
        if not isinstance(result, Refusal):
            return result
    return context.choose(event, required)


class GangInDomains:
    """Decides for a gang whose pods must, or should, share domains."""

    def __init__(
        self,
        members: Sequence[PodQueued],
        needed: int,
        context: DecisionContext,
        topology: Topology,
        joined: Within,
    ) -> None:
        self._members = members
        self._needed = needed
        self._context = context
        self._preferred = topology.preferred
        self._required = topology.required
        self._one_node_claim = topology.one_node_claim
        self._joined = joined
        context.index.sets.positions.catch_up()

    def decide(self) -> GangDecision:
        index = self._context.index
        fixed = part_of(self._joined, self._required)
        keys = tuple([key for key in self._required if key not in dict(fixed)])
        kinds = kinds_of(self._members, self._required or self._preferred, index)
        if keys:
            domains = domains_by_size(kinds, keys, fixed, index)
        else:
            domains = [Domain(fixed, nodes_within(fixed, index))]
        decision, rooms = self._try_domains(domains, kinds, self._place_within)
        if decision is not None:
            return decision
        if not rooms:
            return self._without_domains()
        best = max(domains, key=rooms.__getitem__)
        decision = None if rooms[best] else self._refused_anywhere(fixed)
        decision = decision or self._place_within(best.within)
        refusal = decision.refusal
        if refusal is None or refusal.quota:
            return decision
        return self._explained(decision, kinds, rooms)

    def _try_domains(
        self,
        domains: Sequence[Domain],
        kinds: Sequence[PodKind],
        place: Callable[[Within], GangDecision],
    ) -> tuple[GangDecision | None, dict[Domain, int]]:
        """Return a decision that suffices or that a quota refuses, and the room in each domain."""
        others = len(self._members) - sum(len(kind.pods) for kind in kinds)
        rooms: dict[Domain, int] = {}
        for enough in dict.fromkeys((len(self._members), self._needed)):
            for domain in domains:
                if domain not in rooms:
                    rooms[domain] = others + room_in(kinds, self._context.index, domain.nodes)
                if rooms[domain] < enough:
                    continue
                decision = place(domain.within)
                if decision.refusal is None or decision.refusal.quota:
                    return decision, rooms
                rooms[domain] = decision.fitting
        return None, rooms

    def _place_within(self, within: Within) -> GangDecision:
        """Place pods in as few of the preferred domains as possible."""
        if not self._preferred:
            return self._place(lambda: lambda event: self._choose(event, within))
        index = self._context.index
        kinds = kinds_of(self._members, self._preferred, index)
        domains = domains_by_size(kinds, self._preferred, within, index)
        near = part_of(self._joined, self._preferred)
        if not near:
            decision, rooms = self._try_domains(domains, kinds, self._place_all_within)
            if decision is not None:
                return decision
        else:
            rooms = {domain: room_in(kinds, index, domain.nodes) for domain in domains}
        by_room = sorted(domains, key=rooms.__getitem__, reverse=True)
        places = [domain.within for domain in by_room if rooms[domain]]
        if near:
            places.insert(0, (*within, *near))
        return self._place(lambda: FewDomains(self._choose, [*places, within]))

    def _place_all_within(self, within: Within) -> GangDecision:
        return self._place(lambda: lambda event: self._choose(event, within))

    def _place(self, new_choose: Callable[[], Choose]) -> GangDecision:
        return _place_sorted(self._members, self._needed, self._context, new_choose)

    def _choose(self, event: PodQueued, within: Within) -> tuple[Placement, ...] | Refusal:
        return self._context.choose(event, own_part(within, event))

    def _without_domains(self) -> GangDecision:
        keys = " and ".join(self._required)
        several = len(self._required) > 1
        same = "write one label that they have into all its pods"
        refusal = Refusal(
            reason=f"no node has {'all of the labels' if several else 'the label'} {keys}",
            hint=f"label the nodes, or {same if several else 'name a label that they have'}",
            permanent=True,
            counts=(("NoGangTopology", len(self._context.mirror.nodes)),),
        )
        return GangDecision([], 0, refusal, required=self._required)

    def _refused_anywhere(self, within: Within) -> GangDecision | None:
        """Return the refusal if not one of the pods fits on any node there."""
        decision = self._place_all_within(within)
        for event, _ in decision.chosen:
            self._context.mirror.drop(event.pod)
        return decision if decision.refusal is not None and not decision.fitting else None

    def _explained(
        self, decision: GangDecision, kinds: Sequence[PodKind], rooms: dict[Domain, int]
    ) -> GangDecision:
        by_room = sorted(rooms, key=lambda domain: (-rooms[domain], domain.name))
        shown = by_room[:SHOWN_DOMAINS] if self._required else []
        decision = replace(
            decision,
            required=self._required,
            one_node_claim=self._one_node_claim,
            domains=tuple(DomainRoom(domain=item.name, room=rooms[item]) for item in shown),
            further_domains=len(by_room) - len(shown),
            differs=_differ(self._members),
        )
        if decision.refusal is None or decision.refusal.permanent:
            return decision
        most = self._room_if_empty(kinds, by_room)
        if most < self._needed:
            return replace(decision, lacking=(most, self._needed))
        waits = self._room_if_empty(kinds, by_room, as_is=True) >= self._needed
        return replace(decision, waits=waits)

    def _room_if_empty(
        self, kinds: Sequence[PodKind], domains: Sequence[Domain], *, as_is: bool = False
    ) -> int:
        """Return for how many pods the largest domain has room, at least as many as needed."""
        others = len(self._members) - sum(len(kind.pods) for kind in kinds)
        most = 0
        for domain in domains:
            room = room_if_empty(kinds, self._context.index, domain.nodes, as_is=as_is)
            most = max(most, others + room)
            if most >= self._needed:
                break
        return most


class FewDomains:
    """Chooses for pods one after another, in the first of some places where each fits."""

    def __init__(
        self,
        choose: Callable[[PodQueued, Within], tuple[Placement, ...] | Refusal],
        places: Sequence[Within],
    ) -> None:
        self._choose = choose
        self._places = places
        self._first_place: dict[Hashable, int] = {}
        """By kind of pod: the number of the first place that was not full."""

    def __call__(self, event: PodQueued) -> tuple[Placement, ...] | Refusal:
        kind = placement_key(event.request)
        first = self._first_place.get(kind, 0)
        for number, place in enumerate(self._places[first:-1], first):
            result = self._choose(event, place)
            if not isinstance(result, Refusal):
                return result
            self._first_place[kind] = number + 1
        return self._choose(event, self._places[-1])


def choose_offer_recipients(members: Iterable[PodQueued]) -> set[PodUid]:
    """Choose one pod for each different request.

    A gang that does not fit can fit only once one of its pods fits where capacity was freed.
    """
    recipients: dict[tuple[GpuRequest, ...], PodUid] = {}
    for event in members:
        recipients.setdefault(event.request.containers, event.pod)
    return set(recipients.values())


def changed_verdicts(
    members: Iterable[PodQueued],
    enrollment: GangEnrollment,
    refusal: Refusal,
    included: Collection[PodUid],
) -> list[PodQueued]:
    """Members whose stored verdict is the same are left out.

    So a gang of a thousand pods that still does not fit does not cost a thousand writes.
    """
    stored = {
        waiting.queued.pod: (waiting.refusal.reason, waiting.queued.request)
        for waiting in enrollment.waiting
        if not waiting.receives_offers
    }
    return [
        event
        for event in members
        if event.pod in included or stored.get(event.pod) != (refusal.reason, event.request)
    ]


def _place_sorted(
    members: Sequence[PodQueued],
    needed: int,
    context: DecisionContext,
    new_choose: Callable[[], Choose],
) -> GangDecision:
    """Place the largest pods first, or if that fails and some may be left out, the smallest."""
    size = attrgetter("request.size")
    in_order = sorted(members, key=size, reverse=True)
    decision = _place_in_order(in_order, needed, context, new_choose())
    if decision.refusal is not None and len(members) > needed:
        second = _place_in_order(sorted(members, key=size), needed, context, new_choose())
        decision = second if second.fitting > decision.fitting else decision
    return decision


def _place_in_order(
    members: Iterable[PodQueued], needed: int, context: DecisionContext, choose: Choose
) -> GangDecision:
    chosen: list[ChosenPod] = []
    refused: list[tuple[PodRequest, Refusal]] = []
    for event in members:
        request = event.request
        if refused and request == refused[-1][0]:
            refused.append(refused[-1])
            continue
        result = choose(event)
        if isinstance(result, Refusal):
            refused.append((request, result))
            continue
        chosen.append((event, result))
        if len(chosen) == needed:
            return GangDecision(chosen, needed)
    for event, _ in chosen:
        context.mirror.drop(event.pod)
    may_fit = len(chosen) + sum(not refusal.permanent for _, refusal in refused)
    if may_fit < needed:
        never = next(refusal for _, refusal in refused if refusal.permanent)
        return GangDecision([], len(chosen), never)
    request, refusal = refused[0]
    explanation = context.index.explanations.get(placement_key(request))
    waits = explanation is not None and bool(explanation.advice.waiting)
    return GangDecision([], len(chosen), structs.replace(refusal, permanent=False), waits=waits)
