"""How long a pod may run, and is expected to, from its spec and annotations; pure."""

from shared.model.bounds import MOST_RUN_S
from shared.model.errors import RequestError
from shared.model.names import EXPECTED_RUN_TIME, MAX_RUN_TIME
from shared.model.quantity import parse_duration_s
from shared.model.request import NO_TERM, Term
from shared.pods.pod_view import PodView


def parse_term(pod: PodView) -> Term:
    """Return the term that its spec enforces, once admission has completed it.

    Raises RequestError for a malformed annotation, and for one that the spec does not enforce.
    """
    spec, written = pod.spec, wanted_max_run_s(pod)
    enforced = _seconds(spec.active_deadline_seconds)
    if written is not None and (enforced is None or enforced > written):
        raise RequestError(
            f"annotation {MAX_RUN_TIME} has not been through admission: create the pod again, or "
            f"set spec.activeDeadlineSeconds to {written}"
        )
    grace_s = _seconds(spec.termination_grace_period_seconds)
    return Term(
        max_run_s=enforced,
        expected_run_s=_annotated(pod, EXPECTED_RUN_TIME),
        grace_s=NO_TERM.grace_s if grace_s is None else grace_s,
    )


def wanted_max_run_s(pod: PodView) -> int | None:
    """Return what its author's annotation allows, in seconds; None: it has none.

    Raises RequestError if it is malformed.
    """
    return _annotated(pod, MAX_RUN_TIME)


def _annotated(pod: PodView, annotation: str) -> int | None:
    text = pod.annotations.get(annotation)
    try:
        return None if text is None else parse_duration_s(text)
    except RequestError as error:
        raise RequestError(f"annotation {annotation}: {error}") from error


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(min(max(value, 0), MOST_RUN_S))
