"""Content of a Binding, and the meaning of the API server's response; pure.

A Binding may be sent twice (a lost response, a redelivered message), so an error alone decides
nothing: the pod is read, and its node decides.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.binder.observations import PodSnapshot
from shared.dialects import DIALECTS
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import ANNOTATION, dump_lease


class BindingOutcome(StrEnum):
    """The outcome of one Binding."""

    BOUND = "bound"
    ELSEWHERE = "elsewhere"
    """The pod is bound to another node."""
    DELETED = "deleted"
    """The pod is not there any more; it may run if an earlier Binding of it succeeded."""
    REFUSED = "refused"
    """The API server rejects the Binding for good."""
    UNKNOWN = "unknown"
    """Not known yet; the same Binding must be sent again."""


@dataclass(frozen=True, slots=True)
class BindingResult:
    """An outcome, with its reason unless the pod is bound."""

    outcome: BindingOutcome
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the pod will not be bound with this lease."""
        return self.outcome not in {BindingOutcome.BOUND, BindingOutcome.UNKNOWN}


BOUND = BindingResult(BindingOutcome.BOUND)


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    """Return all annotations that the Binding writes: the dialect's, and the lease."""
    dialect = DIALECTS.get(lease.dialect)
    of_dialect = dialect.binding_annotations(lease, now_s) if dialect else {}
    return {**of_dialect, ANNOTATION: dump_lease(lease)}


def needs_binding(lease: Lease) -> bool:
    """Return whether the Binding must be sent: the pod of an active lease is on its node."""
    return lease.state is not LeaseState.ACTIVE


def judge(lease: Lease, error: LeaseholdError, pod: PodSnapshot | None) -> BindingResult:
    """Return the result of a Binding that failed with `error`, given the pod as read after it.

    The pod's node settles an error that leaves the write in doubt. A pod that is not bound is
    tried again only if the API server was unavailable; any other error is final.
    """
    name = f"{lease.namespace}/{lease.name}"
    if pod is None:
        return BindingResult(BindingOutcome.DELETED, f"pod {name} was deleted before it was bound")
    if pod.uid == lease.pod and pod.node == lease.node and not pod.terminal:
        return BOUND
    results = (
        (
            pod.uid != lease.pod,
            BindingOutcome.DELETED,
            f"pod {name} was replaced: its uid was {lease.pod} and is {pod.uid} now",
        ),
        (
            pod.terminal,
            BindingOutcome.REFUSED,
            f"pod {name} has terminated: its placement was decided before that",
        ),
        (
            pod.node is not None,
            BindingOutcome.ELSEWHERE,
            f"pod {name} is already bound to node {pod.node}; the lease is for {lease.node}",
        ),
        (pod.deleting, BindingOutcome.REFUSED, f"pod {name} is being deleted"),
        (isinstance(error, UnavailableError), BindingOutcome.UNKNOWN, str(error)),
        (True, BindingOutcome.REFUSED, str(error)),
    )
    return next(BindingResult(outcome, text) for applies, outcome, text in results if applies)
