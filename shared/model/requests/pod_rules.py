"""What a pod requires or prefers of the pods beside it: affinity, anti-affinity and spread; pure.

The pods that a rule selects are counted by node, as a resource of the node, of which their leases
take one: from their reservation on.

https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#inter-pod-affinity-and-anti-affinity

https://kubernetes.io/docs/concepts/scheduling-eviction/topology-spread-constraints/
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.model.bounds import KeyText, NameText, SignedAmount
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement
from shared.model.names import Namespace

SELECTED_PREFIX = "selected pods "
"""Before the digest of a `PodSelection`."""
MOST_SELECTIONS = 128
MOST_RULES = 32


class PodSelector(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    labels: tuple[LabelRequirement, ...] = ()
    """All must hold; without any, all pods of the namespaces are selected."""
    namespaces: tuple[Namespace, ...] = ()
    namespace_labels: tuple[LabelRequirement, ...] | None = None
    """Further namespaces, by their labels; empty: all; None: no further ones."""


class PodSelection(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    selectors: tuple[PodSelector, ...]
    with_terminating: bool = True
    """Pods that are being deleted count, too."""

    @property
    def resource(self) -> str:
        return SELECTED_PREFIX + blake2b(msgspec.msgpack.encode(self), digest_size=10).hexdigest()


class AffinityRule(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The pod runs only in domains in which a selected pod runs, of each of these labels.

    While no selected pod runs, a pod that the rule selects itself may run in any.
    """

    counted_as: KeyText
    keys: Annotated[tuple[KeyText, ...], Meta(max_length=MOST_RULES)]


class AntiAffinityRule(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The pod runs in no domain in which a selected pod runs."""

    counted_as: KeyText
    key: KeyText


class SpreadRule(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    counted_as: KeyText = ""
    """Empty: no pod is selected."""
    key: KeyText
    max_skew: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    min_domains: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    required: bool = True
    """DoNotSchedule; else ScheduleAnyway."""
    honors_affinity: bool = True
    """Nodes that the pod's node selector or affinity excludes are left out."""
    honors_taints: bool = False
    """Nodes with taints that the pod does not tolerate are left out."""
    selects_itself: bool = False


class PreferenceRule(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Preferred affinity; preferred anti-affinity has a weight below 0."""

    counted_as: KeyText
    key: KeyText
    weight: Annotated[int, Meta(ge=-100, le=100)]


class PodRules(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    affinity: AffinityRule | None = None
    anti_affinity: Annotated[tuple[AntiAffinityRule, ...], Meta(max_length=MOST_RULES)] = ()
    spread: Annotated[tuple[SpreadRule, ...], Meta(max_length=MOST_RULES)] = ()
    preferred: Annotated[tuple[PreferenceRule, ...], Meta(max_length=2 * MOST_RULES)] = ()
    repels: Annotated[tuple[AntiAffinityTerm, ...], Meta(max_length=MOST_RULES)] = ()
    """The required anti-affinity, which keeps later pods off, too."""

    @property
    def counted(self) -> frozenset[str]:
        names = [rule.counted_as for rule in self.anti_affinity]
        names += [rule.counted_as for rule in self.spread if rule.required]
        if self.affinity is not None:
            names.append(self.affinity.counted_as)
        return frozenset(names)

    @property
    def is_required(self) -> bool:
        return bool(self.affinity or self.anti_affinity or any(r.required for r in self.spread))


class DomainRule(StrEnum):
    """The rule of kube-scheduler by which the pods beside it limit where a pod runs."""

    AFFINITY = "PodAffinity"
    ANTI_AFFINITY = "PodAntiAffinity"
    SPREAD = "PodTopologySpread"
    SPREAD_LABEL = "MissingTopologyLabel"


class NodeDomains(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Where a pod may run by one of its rules: on nodes with one of these values of a label."""

    rule: DomainRule
    key: KeyText
    values: frozenset[NameText] | None = None
    """None: any value."""
    excluded: bool = False
    """It may run on the other nodes instead, also on those without the label."""

    def admits(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.values is None:
            return value is not None
        return (value in self.values) is not self.excluded


class DomainScores(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How much a pod prefers nodes by the value of a label; without an entry, 0."""

    key: KeyText
    scores: tuple[tuple[NameText, SignedAmount], ...]


def selected_in_use(used: Mapping[str, int]) -> dict[str, int]:
    """Return counts, which may be below 0."""
    return {
        name: amount for name, amount in used.items() if amount and name.startswith(SELECTED_PREFIX)
    }
