"""What a Binding carries, and what the API server's answers to it mean.

A Binding may be sent twice (a lost answer, a redelivered message), so no refusal is taken at its
word: the pod itself is read, and where it is decides.
"""

from dataclasses import dataclass
from enum import StrEnum

from shared.dialects import DIALECTS
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import ANNOTATION, dump_lease
from shared.model.names import NodeName, PodUid


class BindingOutcome(StrEnum):
    """What became of one Binding."""

    BOUND = "bound"
    ELSEWHERE = "elsewhere"
    """Somebody else bound the pod, to another node."""
    GONE = "gone"
    REFUSED = "refused"
    """The API server will not bind this pod as it stands."""
    UNKNOWN = "unknown"
    """Nobody can say yet; the same Binding is to be sent again."""


@dataclass(frozen=True, slots=True)
class BindingResult:
    """An outcome, with its reason unless the pod is bound."""

    outcome: BindingOutcome
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the pod will not be bound with this lease."""
        return self.outcome not in {BindingOutcome.BOUND, BindingOutcome.UNKNOWN}


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod as the API server has it now."""

    uid: PodUid
    node: NodeName | None
    ending: bool = False
    """Its deletion has been asked for."""
    over: bool = False
    """Its phase says that its containers no longer run."""


BOUND = BindingResult(BindingOutcome.BOUND)


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    """Return all annotations that the pod gets with its node: the dialect's, and the lease."""
    dialect = DIALECTS.get(lease.dialect)
    said = dialect.binding_annotations(lease, now_s) if dialect else {}
    return {**said, ANNOTATION: dump_lease(lease)}


def needs_binding(lease: Lease) -> bool:
    """Tell whether the Binding is still to be sent: an active lease's pod is on its node."""
    return lease.state is not LeaseState.ACTIVE


def judge(lease: Lease, error: LeaseholdError, seen: ObservedPod | None) -> BindingResult:
    """Say what became of a Binding that was answered with `error`, given the pod as read after it.

    An error that leaves the write in doubt is settled by the pod's node. A pod that is still
    unbound is to be tried again only if the API server was unavailable; any other refusal stands.
    """
    pod = f"{lease.namespace}/{lease.name}"
    if seen is None:
        return BindingResult(BindingOutcome.GONE, f"pod {pod} was deleted before it was bound")
    if seen.uid == lease.pod and seen.node == lease.node and not seen.over:
        return BOUND
    reasons = (
        (
            seen.uid != lease.pod,
            BindingOutcome.GONE,
            f"pod {pod} was replaced: its uid was {lease.pod} and is {seen.uid} now",
        ),
        (
            seen.over,
            BindingOutcome.GONE,
            f"pod {pod} has ended: this lease was made from news older than its end",
        ),
        (
            seen.node is not None,
            BindingOutcome.ELSEWHERE,
            f"pod {pod} is on node {seen.node} already; the lease was for {lease.node}",
        ),
        (seen.ending, BindingOutcome.GONE, f"pod {pod} is being deleted"),
        (isinstance(error, UnavailableError), BindingOutcome.UNKNOWN, str(error)),
        (True, BindingOutcome.REFUSED, str(error)),
    )
    return next(BindingResult(outcome, text) for holds, outcome, text in reasons if holds)
