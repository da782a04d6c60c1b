"""Every way of asking for a GPU that Leasehold understands: one file each, one table."""

from collections.abc import Mapping, Sequence

from shared.dialects import volcano_gpushare, volcano_vgpu
from shared.dialects.dialect import TRIGGER, Dialect, PodAsks, Rules
from shared.model.errors import RequestError
from shared.model.request import PodRequest

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (volcano_vgpu.DIALECT, volcano_gpushare.DIALECT)
}

OWN_RESOURCES = frozenset({TRIGGER}).union(*(d.resources for d in DIALECTS.values()))
"""Resource names that are no ordinary resources of a node: the ledger accounts for them."""


READ_ANNOTATIONS = frozenset().union(*(d.annotations for d in DIALECTS.values()))
"""Annotations of a pod that change how its request is read."""

READ_LABELS = frozenset().union(*(d.labels for d in DIALECTS.values()))
"""Labels of a pod that change how its request is read."""


def enabled(rules: Rules) -> Sequence[Dialect]:
    """Return the dialects spoken. Raises RequestError naming an unknown one."""
    for name in rules.enabled:
        if name not in DIALECTS:
            raise RequestError(f"there is no dialect {name!r}; there are {', '.join(DIALECTS)}")
    return [DIALECTS[n] for n in rules.enabled or DIALECTS if n not in rules.disabled]


def read_pod(asks: PodAsks, rules: Rules) -> PodRequest:
    """Read what a pod asks for, in whichever dialect; no GPU asked for is a request without one.

    Raises RequestError, naming container, field, value and rule, for a malformed request and for
    one that mixes dialects.
    """
    spoken = {
        dialect.name: request
        for dialect in enabled(rules)
        if (request := dialect.read(asks, rules)) is not None
    }
    if len(spoken) > 1:
        raise RequestError(
            f"the pod mixes {' and '.join(spoken)}: ask in one vocabulary for all its containers"
        )
    _check_silent(asks, rules)
    return next(iter(spoken.values()), PodRequest())


def _check_silent(asks: PodAsks, rules: Rules) -> None:
    """Refuse what a dialect that is switched off would have read: nobody would ever serve it."""
    spoken = {dialect.name for dialect in enabled(rules)}
    for dialect in DIALECTS.values():
        for asked in asks.containers:
            named = sorted(dialect.resources.intersection(asked.limits))
            if named and dialect.name not in spoken:
                raise RequestError(
                    f"container {asked.name}: {named[0]} belongs to {dialect.name}, "
                    "which is not enabled here"
                )
