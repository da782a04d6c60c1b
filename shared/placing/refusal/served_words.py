"""The same request by resources that a node serves; pure."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.advertised import TRIGGER
from shared.dialects.dialect import ContainerManifest, Dialect, PodManifest, Rules
from shared.dialects.meant_resources import translated
from shared.model.change import Change
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.quantity import parse_quantity
from shared.model.requests.request import PodRequest
from shared.placing.choice.device_choice import fits
from shared.placing.mirror.node_mirror import MirroredNode

MOST_MISSING = 3


def in_served_words(
    request: PodRequest, node: MirroredNode
) -> tuple[PodRequest, tuple[Change, ...]] | None:
    """Return a request that an idle node fits, and the changes of the pod's resources.

    The words of the pod's own system come first.
    """
    own = DIALECTS.get(request.dialect)
    if own is None or node.serving.intersection(request.triggers):
        return None
    written = [
        ContainerManifest(
            name=container.container, limits=own.limits(container, request), init=container.init
        )
        for container in request.containers
    ]
    for dialect in sorted(DIALECTS.values(), key=lambda dialect: dialect is not own):
        served = node.serving & dialect.served - {TRIGGER}
        if not served:
            continue
        words = dialect.resources - (dialect.served - served)
        changed = _translated(request, written, words, dialect)
        if changed is not None and fits(changed[0], node):
            return changed
    return None


def _translated(
    request: PodRequest,
    written: Sequence[ContainerManifest],
    words: frozenset[str],
    dialect: Dialect,
) -> tuple[PodRequest, tuple[Change, ...]] | None:
    changes = [change for container in written for change in translated(container, words)]
    for _ in range(MOST_MISSING):
        if not changes:
            return None
        parsed = _parsed(request, written, changes, dialect)
        if isinstance(parsed, PodRequest):
            return parsed, tuple(changes)
        changes += parsed  # of what is missing, such as the number of GPUs
    return None


def _parsed(
    request: PodRequest,
    written: Sequence[ContainerManifest],
    changes: Sequence[Change],
    dialect: Dialect,
) -> PodRequest | tuple[Change, ...]:
    """Return what to change if the dialect cannot parse the limits."""
    containers = []
    for container in written:
        limits = dict(container.limits)
        for change in changes:
            if change.container == container.name:
                limits.pop(change.name, None)
                if change.value:
                    limits[change.name] = int(parse_quantity(change.value))
        completed = limits | dialect.amount_changes(limits)
        kept = {name: amount for name, amount in completed.items() if amount is not None}
        containers.append(replace(container, limits=kept))
    manifest = PodManifest(
        namespace=Namespace(""), containers=tuple(containers), scheduler=dialect.scheduler
    )
    try:
        parsed = dialect.parse(manifest, Rules())
    except RequestError as error:
        return error.changes
    if parsed is None:
        return ()
    return structs.replace(
        parsed, resources=request.resources, node_requirements=request.node_requirements
    )
