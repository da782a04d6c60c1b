"""Another isolation for a pod whose demand no node offers; pure."""

import contextlib
from collections.abc import Iterable, Sequence

from shared.dialects.demanded_enforcers import demanding
from shared.dialects.isolation_words import isolation_word, parse_isolation
from shared.model.change import Change, Place
from shared.model.devices.device import DeviceMode, holding_of
from shared.model.devices.enforcers import NO_DEMAND
from shared.model.errors import RequestError
from shared.model.names import ISOLATION
from shared.model.requests.request import PodRequest
from shared.placing.advice import Advice
from shared.placing.choice.device_choice import fits
from shared.placing.mirror.node_mirror import MirroredNode

ADVISED = ("hami-core", "driver", "mps", "time", "mps-shared")
"""Those come first that need least beside them."""
BY_HARDWARE = ("exclusive", "mig")


def demands_isolation(request: PodRequest) -> bool:
    return any(
        part.held_by != NO_DEMAND and part.held_by.memory not in BY_HARDWARE
        for part in request.containers
    )


def with_offered_isolation(
    request: PodRequest,
    nodes: Sequence[tuple[MirroredNode, MirroredNode]],
    cluster: Iterable[MirroredNode],
) -> Advice | None:
    """Return None if the cluster offers what the pod demands, or nothing else that helps.

    Of each of the `nodes`, the second copy is idle.
    """
    demand = request.containers[0].held_by
    words = _offered_words(request, cluster)
    for ends in (False, True):
        for word in words:
            changed = None
            with contextlib.suppress(RequestError):
                changed = demanding(request, parse_isolation(word))
            if changed is None:
                continue
            for node, idle in nodes:
                if fits(changed, idle if ends else node):
                    return Advice(
                        changes=(Change(Place.ANNOTATION, ISOLATION, word),),
                        node=node.name,
                        ends=ends,
                        isolation=f"no node offers the isolation {isolation_word(demand)}, only "
                        f"{', '.join(words)}",
                    )
    return None


def _offered_words(request: PodRequest, cluster: Iterable[MirroredNode]) -> list[str]:
    """Return nothing if a device offers what the pod demands."""
    offered = set[str]()
    for node in cluster:
        for mirrored in node.devices:
            device = mirrored.device
            if device.mode is not DeviceMode.HAMI_CORE:
                continue
            if all(holding_of(part, device) is not None for part in request.containers):
                return []
            offered.update(device.offer.memory, device.offer.compute)
    return [word for word in ADVISED if word in offered]
