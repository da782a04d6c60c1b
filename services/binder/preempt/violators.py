"""Pods that break a rule of their node, where the operator has them evicted for it.

An agent says what it has seen; whether that ends the pod is the operator's rule. It is begun like
every other preemption and goes the same way: a dry run, notice, the Eviction API, the journal.
"""

from collections.abc import Sequence
from typing import Protocol

from services.binder.preempt.rules import (
    VIOLATION,
    PodFacts,
    PreemptionRules,
    is_evictable,
    owner_key,
)
from services.binder.preempt.steps import expiry
from shared.model.events.node_events import ViolationFound
from shared.model.names import Namespace, NodeName
from shared.model.preemption import Preemption, PreemptionCause, Victim


class Store(Protocol):
    """What is under way."""

    async def open(self, preemption: Preemption) -> bool:
        """Begin a preemption; False if it is begun already."""
        ...


class Pods(Protocol):
    """Pods at the API server."""

    async def look(self, namespace: Namespace, name: str) -> PodFacts | None:
        """Return the pod of this name; None: there is none."""
        ...


async def evict_violators(
    events: Sequence[ViolationFound],
    *,
    store: Store,
    pods: Pods,
    rules: PreemptionRules,
    now: float,
) -> None:
    """Begin to evict the pods that the rules have evicted; who leads goes on with it.

    What an agent says of a pod that does not run on its own node is not believed. Doing it again
    changes nothing.
    """
    for event in events:
        if not is_evictable(event, rules, now):
            continue
        pod = await pods.look(event.namespace, event.name)
        if pod is None or pod.pod != event.pod or pod.node != event.node or pod.ending:
            continue
        victim = victim_of_violation(pod, event.node)
        await store.open(
            Preemption(
                id=f"{VIOLATION}{pod.pod}",
                victims=(victim,),
                opened_at=now,
                expires_at=expiry([victim], rules.notice_s, now),
                reason=f"{event.reason}: {event.message}",
            )
        )


def victim_of_violation(pod: PodFacts, node: NodeName) -> Victim:
    """Return a pod as one that is evicted for what it did; it may hold no lease."""
    return Victim(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        node=node,
        cause=PreemptionCause.VIOLATION,
        owner=owner_key(pod),
        budget="",
        grace_s=pod.grace_s,
        devices=(),
        priority=pod.priority,
    )
