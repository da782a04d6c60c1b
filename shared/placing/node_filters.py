"""Filters for a pod's node requirements besides devices, with kube-scheduler's messages; pure."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from shared.model.devices.device import visible_fault
from shared.model.devices.node import (
    AGENT_STARTING,
    AGENT_STOPPING,
    LABEL_OPERATORS,
    NodeFacts,
    Taint,
    cordon_reason,
)
from shared.model.quantity import amount_text
from shared.model.requests.host_ports import HOST_PORT_PREFIX, HostPorts, has_ports
from shared.model.requests.pod_rules import SELECTED_PREFIX, DomainRule
from shared.model.requests.request import (
    NodeRequirements,
    NodeTerm,
    PodRequest,
    Toleration,
    VolumeRule,
    VolumeTerms,
)

UNSCHEDULABLE = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
SOFT_EFFECT = "PreferNoSchedule"
ATTACHABLE = "attachable-volumes-csi-"
"""A CSI driver's name follows; the amount is how many volumes it can attach."""
SOFT_TAINT_PENALTY = 10
"""For each untolerated `PreferNoSchedule` taint; affinity weights go up to 100."""


@dataclass(frozen=True, slots=True)
class NodeFilterFailure:
    code: str
    """Such as `InsufficientCpu`."""
    message: str
    """The same for all nodes that are counted together."""
    numbers: str = ""


def check_node(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    return (
        check_supported(demands)
        or check_waits(demands)
        or check_manager(demands, facts)
        or check_taints(demands.tolerations, facts)
        or check_node_selector(demands, facts)
        or check_volumes(demands, facts)
        or check_domains(demands, facts)
        or check_anti_affinity(demands, facts)
        or check_within(demands, facts)
    )


def check_supported(demands: NodeRequirements) -> NodeFilterFailure | None:
    if not demands.unsupported:
        return None
    names = ", ".join(demands.unsupported)
    text = f"the pod has fields that only kube-scheduler supports: {names}"
    return NodeFilterFailure("UnsupportedConstraint", text)


WAITS = "ClaimNotReady"


def check_waits(demands: NodeRequirements) -> NodeFilterFailure | None:
    if not demands.waits_for:
        return None
    return NodeFilterFailure(WAITS, demands.waits_for.partition(": ")[0])


OTHER_MANAGER = "OtherManager"


def check_manager(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    """Refuse a node where another program would enforce the pod's annotations, too."""
    if not (demands.sole_manager and facts.other_manager):
        return None
    text = "node(s) had another manager that enforces parts of GPUs"
    return NodeFilterFailure(OTHER_MANAGER, text, facts.other_manager)


def check_taints(tolerations: Iterable[Toleration], facts: NodeFacts) -> NodeFilterFailure | None:
    if facts.unschedulable and not any(tolerates(t, UNSCHEDULABLE) for t in tolerations):
        return NodeFilterFailure("NodeUnschedulable", "node(s) were unschedulable")
    for taint in facts.taints:
        if taint.effect in HARD_EFFECTS and not any(tolerates(t, taint) for t in tolerations):
            return NodeFilterFailure(
                "UntoleratedTaint",
                f"node(s) had untolerated taint {{{taint.key}: {taint.value}}}",
                f"effect {taint.effect}",
            )
    return None


def has_untolerated_taint(tolerations: Iterable[Toleration], facts: NodeFacts) -> bool:
    return any(
        taint.effect in HARD_EFFECTS and not any(tolerates(t, taint) for t in tolerations)
        for taint in facts.taints
    )


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """An empty effect matches every effect; an empty key every key, with `Exists` only."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    operator = toleration.operator or "Equal"
    if not toleration.key:
        return operator == "Exists"
    if toleration.key != taint.key:
        return False
    if operator in _COMPARISONS:
        return _larger(taint.value, (toleration.value,), by=_COMPARISONS[operator])
    return operator == "Exists" or (operator == "Equal" and toleration.value == taint.value)


def check_node_selector(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    chosen = all(facts.labels.get(key) == value for key, value in demands.selector) and (
        not demands.required or _terms_of(demands).required.holds(facts)
    )
    if chosen:
        return None
    labels = (
        f"{key}={value} is required, it has {facts.labels.get(key, 'no such label')}"
        for key, value in demands.selector
        if facts.labels.get(key) != value
    )
    text = "node(s) didn't match Pod's node affinity/selector"
    return NodeFilterFailure("NodeAffinity", text, next(labels, ""))


VOLUME_TEXTS: Mapping[VolumeRule, str] = {
    VolumeRule.NODE_AFFINITY: "node(s) didn't match PersistentVolume's node affinity",
    VolumeRule.ZONE: "node(s) had no available volume zone",
    VolumeRule.NO_VOLUME: "node(s) didn't find available persistent volumes to bind",
    VolumeRule.STORAGE: "node(s) did not have enough free storage",
    VolumeRule.IN_USE: "node(s) were not where the pod's ReadWriteOnce volume is in use",
}


def check_volumes(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    for rule, terms in _terms_of(demands).volumes if demands.volumes else ():
        if not terms.holds(facts):
            return NodeFilterFailure(rule, VOLUME_TEXTS[rule])
    return None


def reaches(facts: NodeFacts, terms: VolumeTerms) -> bool:
    return not terms or any(matches_term(term, facts) for term in terms)


DOMAIN_TEXTS: Mapping[DomainRule, str] = {
    DomainRule.SPREAD_LABEL: (
        "node(s) didn't match pod topology spread constraints (missing required label)"
    ),
    DomainRule.SPREAD: "node(s) didn't match pod topology spread constraints",
    DomainRule.AFFINITY: "node(s) didn't match pod affinity rules",
    DomainRule.ANTI_AFFINITY: "node(s) didn't match pod anti-affinity rules",
}


def check_domains(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    for domains in demands.domains:
        if not domains.admits(facts.labels):
            value = facts.labels.get(domains.key)
            numbers = f"no label {domains.key}" if value is None else f"{domains.key}={value}"
            return NodeFilterFailure(domains.rule, DOMAIN_TEXTS[domains.rule], numbers)
    return None


REPELLED = "ExistingAntiAffinity", "node(s) didn't satisfy existing pods anti-affinity rules"


def check_anti_affinity(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    for key, values in demands.repelled_from:
        value = facts.labels.get(key)
        if value in values:
            return NodeFilterFailure(*REPELLED, f"{key}={value}")
    return None


def check_within(demands: NodeRequirements, facts: NodeFacts) -> NodeFilterFailure | None:
    for key, values in demands.within:
        if facts.labels.get(key) not in values:
            return NodeFilterFailure(*outside(key, values))
    return None


def outside(key: str, values: Collection[str]) -> tuple[str, str]:
    return "OutsideGangTopology", f"node(s) were not in {key} {' or '.join(sorted(values))}"


def matches_term(term: tuple[NodeTerm, ...], facts: NodeFacts) -> bool:
    return bool(term) and all(_requirement_holds(need, need.values, facts) for need in term)


def _requirement_holds(need: NodeTerm, values: Collection[str], facts: NodeFacts) -> bool:
    check = _OPERATORS.get(need.operator)
    return check is not None and check(_text_of(facts, need.key, field=need.field), values)


def _text_of(facts: NodeFacts, key: str, *, field: bool) -> str | None:
    if field:
        return facts.name if key == "metadata.name" else None
    return facts.labels.get(key)


class _AnyTerm:
    """Terms of which one must hold: thousands, of local volumes, or one with thousands of names."""

    __slots__ = ("_others", "_values")

    def __init__(self, terms: Iterable[tuple[NodeTerm, ...]]) -> None:
        self._values: dict[tuple[str, bool], set[str]] = {}
        """Of terms that only require one of some values, by key."""
        self._others: list[list[tuple[NodeTerm, Collection[str]]]] = []
        for term in terms:
            if len(term) == 1 and term[0].operator == "In":
                key = term[0].key, term[0].field
                self._values.setdefault(key, set()).update(term[0].values)
            elif term:
                self._others.append([(need, _quick(need)) for need in term])

    def holds(self, facts: NodeFacts) -> bool:
        for (key, field), values in self._values.items():
            if _text_of(facts, key, field=field) in values:
                return True
        for term in self._others:
            if all(_requirement_holds(need, values, facts) for need, values in term):
                return True
        return False


def _quick(need: NodeTerm) -> Collection[str]:
    return frozenset(need.values) if need.operator in LABEL_OPERATORS else need.values


class _Terms:
    __slots__ = ("demands", "preferred", "required", "volumes")

    def __init__(self, demands: NodeRequirements) -> None:
        self.demands = demands
        self.required = _AnyTerm(demands.required)
        self.volumes = [(volume.rule, _AnyTerm(volume.terms)) for volume in demands.volumes]
        self.preferred = [(weight, _AnyTerm((term,))) for weight, term in demands.preferred]


CACHED_TERMS = 64
_cached_terms: dict[int, _Terms] = {}
"""By the identity of requirements, which are compared with thousands of nodes."""


def _terms_of(demands: NodeRequirements) -> _Terms:
    terms = _cached_terms.get(id(demands))
    if terms is None or terms.demands is not demands:
        if len(_cached_terms) >= CACHED_TERMS:
            _cached_terms.clear()
        terms = _cached_terms[id(demands)] = _Terms(demands)
    return terms


_COMPARISONS = {"Gt": 1, "Lt": -1}
_INTEGER = re.compile(r"[+-]?0{0,99}[0-9]{1,18}")
"""Within int64, with which kubelets compare: they reject a pod that they understand differently."""
_OPERATORS: Mapping[str, Callable[[str | None, Collection[str]], bool]] = {
    **LABEL_OPERATORS,
    "Gt": lambda text, values: _larger(text, values, by=_COMPARISONS["Gt"]),
    "Lt": lambda text, values: _larger(text, values, by=_COMPARISONS["Lt"]),
}


def _larger(label: str | None, values: Collection[str], *, by: int) -> bool:
    """Compare integers as Go parses them."""
    if label is None or len(values) != 1:
        return False
    numbers = [int(text) for text in (label, *values) if _INTEGER.fullmatch(text)]
    return len(numbers) == 2 and (numbers[0] - numbers[1]) * by > 0


UNHEALTHY = "GpuUnhealthy", "node(s) had unhealthy GPUs"
RESTARTING = "NodeAgentRestarting", "node(s) had a node agent that is restarting"


def check_served(
    triggers: tuple[str, ...],
    served: frozenset[str],
    paused: frozenset[str] = frozenset(),
    *,
    all_sick: bool = False,
) -> NodeFilterFailure | None:
    """Refuse a node that cannot start containers or does not serve a requested resource.

    Its kubelet has none of a `paused` resource: no device is healthy (`all_sick`), or the agent is
    not registered.
    """
    if served.issuperset(triggers):
        return None
    missing = [name for name in triggers if name not in served]
    why = cordon_reason(served)
    if why:
        return NodeFilterFailure(
            "NodeAgentNotReady",
            "node(s) had a node agent that was not ready",
            visible_fault(why, lambda _: False),
        )
    if AGENT_STARTING in served:
        text = "node(s) had a node agent that has just started and waits for the kubelet"
        return NodeFilterFailure("NodeAgentStarting", text)
    if all_sick and missing[0] in paused:
        return NodeFilterFailure(*UNHEALTHY)
    if AGENT_STOPPING in served or missing[0] in paused:
        return NodeFilterFailure(*RESTARTING)
    return NodeFilterFailure("ResourceNotServed", f"node(s) did not serve {missing[0]}")


NO_PORTS = "NodePorts", "node(s) didn't have free ports for the requested pod ports"


def check_ports(wanted: HostPorts, free: Mapping[str, int]) -> NodeFilterFailure | None:
    if not wanted or has_ports(wanted, free):
        return None
    taken = [name for name, amount in wanted if not has_ports(((name, amount),), free)]
    return NodeFilterFailure(*NO_PORTS, ", ".join(taken))


def check_resources(
    requested: Mapping[str, int], free: Mapping[str, int]
) -> NodeFilterFailure | None:
    """A missing resource counts as 0."""
    for name, amount in requested.items():
        there = free.get(name, 0)
        if amount > there:
            return _insufficient(name, amount, there)
    return None


def has_too_little(free: dict[str, int], requested: dict[str, int]) -> bool:
    """As `check_resources`, without a message."""
    for name, amount in requested.items():  # noqa: SIM110 - for every candidate; twice as fast
        if free.get(name, 0) < amount:
            return True
    return False


def _insufficient(name: str, amount: int, there: int) -> NodeFilterFailure:
    free = amount_text(name, max(there, 0))
    numbers = f"{amount_text(name, amount)} of {name} requested, {free} free"
    return NodeFilterFailure(*insufficient_resource(name), numbers)


@lru_cache(maxsize=256)
def insufficient_resource(name: str) -> tuple[str, str]:
    if name == "pods":
        return "TooManyPods", "Too many pods"
    if name.startswith(ATTACHABLE):
        return "TooManyVolumes", "node(s) exceed max volume count"
    words = name.replace("/", "-").replace(".", "-").split("-")
    code = "Insufficient" + "".join(word[:1].upper() + word[1:] for word in words)
    return code, f"Insufficient {name}"


_WITHOUT_LIMIT = (HOST_PORT_PREFIX, SELECTED_PREFIX)


def free_resources(facts: NodeFacts, used: Mapping[str, int]) -> dict[str, int]:
    """Of host ports and selections of pods, return what is in use, below 0."""
    free = {
        name: amount - facts.used_by_others.get(name, 0) - used.get(name, 0)
        for name, amount in facts.allocatable.items()
    }
    for amounts in (facts.used_by_others, used):
        for name, amount in amounts.items():
            if name not in facts.allocatable and name.startswith(_WITHOUT_LIMIT):
                free[name] = free.get(name, 0) - amount
    return free


def has_no_node_constraints(demands: NodeRequirements) -> bool:
    return not (
        demands.selector
        or demands.required
        or demands.preferred
        or demands.unsupported
        or demands.volumes
        or demands.waits_for
        or demands.is_for_decision
    )


def accepts_any_pod(facts: NodeFacts) -> bool:
    is_closed = facts.unschedulable or bool(facts.other_manager)
    return not is_closed and not any(t.effect in HARD_EFFECTS for t in facts.taints)


def has_soft_taint(facts: NodeFacts) -> bool:
    return any(taint.effect == SOFT_EFFECT for taint in facts.taints)


def preference(demands: NodeRequirements, facts: NodeFacts) -> int:
    liked = 0
    if demands.preferred:
        liked = sum(weight for weight, term in _terms_of(demands).preferred if term.holds(facts))
    disliked = sum(
        taint.effect == SOFT_EFFECT and not any(tolerates(t, taint) for t in demands.tolerations)
        for taint in facts.taints
    )
    return liked - SOFT_TAINT_PENALTY * disliked


def check_all(
    request: PodRequest,
    facts: NodeFacts,
    free: Mapping[str, int],
    served: frozenset[str],
    paused: frozenset[str] = frozenset(),
    *,
    all_sick: bool = False,
) -> NodeFilterFailure | None:
    return (
        check_node(request.node_requirements, facts)
        or check_served(request.triggers, served, paused, all_sick=all_sick)
        or check_ports(request.node_requirements.host_ports, free)
        or check_resources(request.resources, free)
    )
