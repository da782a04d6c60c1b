"""Evictions of pods that break a rule of their node, if the operator enabled them.

A node agent reports the violation; the operator's rules decide whether the pod is evicted. Such an
eviction is a preemption like any other: a dry run, notice, the Eviction API, the journal.
"""

from collections.abc import Sequence

from services.binder.ports.observations import PodFacts
from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.rules import VIOLATION_ID, PreemptionRules, is_evictable, owner_key
from services.binder.preempt.steps import expiry
from shared.ledger.preemptions import Preemptions
from shared.model.events.node_events import ViolationFound
from shared.model.names import NodeName
from shared.model.preemption import Preemption, PreemptionCause, Victim


async def evict_violators(
    events: Sequence[ViolationFound],
    *,
    store: Preemptions,
    evictions: EvictionClient,
    rules: PreemptionRules,
    now: float,
) -> None:
    """Begin the evictions that the rules demand; the leader completes them.

    A report about a pod that does not run on the agent's own node is ignored. A repeat changes
    nothing.
    """
    for event in events:
        if not is_evictable(event, rules, now):
            continue
        pod = await evictions.get_pod(event.namespace, event.name)
        if pod is None or pod.pod != event.pod or pod.node != event.node or pod.deleting:
            continue
        victim = victim_of_violation(pod, event.node)
        await store.open(
            Preemption(
                id=f"{VIOLATION_ID}{pod.pod}",
                victims=(victim,),
                opened_at=now,
                expires_at=expiry([victim], rules.notice_s, now),
                reason=f"{event.reason}: {event.message}",
            )
        )


def victim_of_violation(pod: PodFacts, node: NodeName) -> Victim:
    """Return a pod as the victim of its own violation; it may have no lease."""
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
