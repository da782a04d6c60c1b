"""How long a pod may run, and is expected to, from its spec and annotations; pure."""

import re
from fractions import Fraction

from shared.model.bounds import MOST_RUN_S
from shared.model.budgets.quota import Quota
from shared.model.change import DEADLINE, Change, Place, field_removed, words
from shared.model.errors import RequestError
from shared.model.names import EXPECTED_RUN_TIME, MAX_RUN_TIME
from shared.model.quantity import LONGEST, duration_text, parse_duration_s
from shared.model.requests.request import NO_TERM, Term
from shared.pods.pod_view import PodView


def parse_term(pod: PodView) -> Term:
    """Raise RequestError for an annotation that is malformed, or that the spec does not enforce."""
    spec = pod.spec
    wanted = deadline_s(pod)
    enforced = _seconds(spec.active_deadline_seconds)
    if wanted != enforced:
        raise RequestError(
            f"annotation {MAX_RUN_TIME} has not been through admission: create the pod again, or "
            f"set spec.activeDeadlineSeconds to {wanted}"
        )
    grace_s = _seconds(spec.termination_grace_period_seconds)
    return Term(
        max_run_s=enforced,
        expected_run_s=expected_run_s(pod),
        grace_s=NO_TERM.grace_s if grace_s is None else grace_s,
        runs_on=pod.runs_on,
    )


def deadline_s(pod: PodView, quota: Quota | None = None) -> int | None:
    """Return the smaller of spec and annotation, or else the quota's default.

    Raises RequestError for a malformed annotation, and for more than the quota's maximum: with less
    than its author wrote, a pod would lose its work.
    """
    spec = _seconds(pod.spec.active_deadline_seconds)
    annotated = _annotated(pod, MAX_RUN_TIME)
    given = min((seconds for seconds in (spec, annotated) if seconds is not None), default=None)
    if quota is None or pod.runs_on:
        return given
    if given is None:
        return quota.max_run_s if quota.default_run_s is None else quota.default_run_s
    if quota.max_run_s is not None and given > quota.max_run_s:
        most = duration_text(quota.max_run_s)
        written = Change(Place.ANNOTATION, MAX_RUN_TIME, most)
        changes = (field_removed(DEADLINE), written) if given == spec else (written,)
        name = DEADLINE if given == spec else f"annotation {MAX_RUN_TIME}"
        raise RequestError(
            f"{name} lets the pod run for {duration_text(given)}, and the GPUQuota of namespace "
            f"{pod.namespace} allows {most} at most: {words(changes)}",
            *changes,
        )
    return given


def expected_run_s(pod: PodView) -> int | None:
    """Raise RequestError if the annotation is malformed."""
    return _annotated(pod, EXPECTED_RUN_TIME)


def _annotated(pod: PodView, annotation: str) -> int | None:
    text = pod.annotations.get(annotation)
    try:
        return None if text is None else parse_duration_s(text)
    except RequestError as error:
        fault = f"annotation {annotation}: {error}"
        meant = _meant_duration(text or "")
        way = f"write {meant}" if meant else "remove it, if the pod may run for any time"
        change = Change(Place.ANNOTATION, annotation, meant)
        raise RequestError(f"{fault}: {way}", change) from error


_PART = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]*)[\s,]*", re.ASCII)
_PARTS = re.compile(f"(?:{_PART.pattern})+", re.ASCII)
_UNIT_S = {
    word: seconds
    for seconds, names in (
        (604_800, ("w", "wk", "week", "weeks")),
        (86_400, ("d", "day", "days")),
        (3_600, ("h", "hr", "hrs", "hour", "hours")),
        (60, ("m", "min", "mins", "minute", "minutes")),
        (1, ("s", "sec", "secs", "second", "seconds", "")),
    )
    for word in names
}
"""A number alone is one of seconds."""
_ISO = re.compile(r"p((?:\d{1,6}[wd])*)(?:t((?:\d{1,6}(?:\.\d{1,3})?[hms])+))?", re.ASCII)
"""A duration of ISO 8601, in small letters."""
_CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,4})(?::|h)([0-5]?\d)(?::([0-5]\d)|m?)", re.ASCII)
"""Days, hours, minutes and seconds, as batch systems have them."""


def _meant_duration(text: str) -> str:
    """Return a duration as it is written here, or "" for a text that seems to be none.

    >>> [_meant_duration(text) for text in ("1 hour", "3600", "1-00:30:00", "1h30", "2:00")]
    ['1h', '1h', '24h30m', '1h30m', '']
    >>> [_meant_duration(text) for text in ("1w", "1.5h", "PT2H30M", "1 h, 30 min", "5 apples")]
    ['168h', '1h30m', '2h30m', '1h30m', '']
    """
    small = text.strip().lower()
    clock = _CLOCK.fullmatch(small)
    if clock and (clock[4] or "h" in small):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        iso = _ISO.fullmatch(small)
        seconds = _sum_of_parts("".join(iso.groups("")) if iso else small)
    return duration_text(seconds) if 1 <= seconds <= MOST_RUN_S else ""


def _sum_of_parts(small: str) -> int:
    """Return 0 for any other text."""
    parts = _PART.findall(small) if len(small) <= LONGEST and _PARTS.fullmatch(small) else []
    units = {unit for _, unit in parts}
    if not units <= _UNIT_S.keys() or ("" in units and len(parts) > 1):
        return 0
    return int(sum(Fraction(number) * _UNIT_S[unit] for number, unit in parts))


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(min(max(value, 0), MOST_RUN_S))
