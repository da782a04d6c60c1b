"""What a copy of a placed pod brings with it, and how it is removed; pure."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from msgspec import structs

from services.webhook.patches import ANNOTATIONS, remove
from services.webhook.pod_admission import FORBIDDEN, Changes, PodAdmission
from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    COMPLETED_ANNOTATIONS,
    STRIPPED_ANNOTATIONS,
    is_of_leasehold,
)
from shared.model.change import Change, Hint, Place
from shared.model.denial import Denial
from shared.model.names import PREEMPTIBLE
from shared.pods.manifest_patches import PatchOperation
from shared.pods.pod_view import PodView

MAX_SHOWN = 10
MOST_COMPARED = 100
"""The API server has checked neither number nor length of what it asks about."""
LONGEST_COMPARED = 2 * max(map(len, AUTHOR_ANNOTATIONS))
"""None that is longer resembles another."""


def remove_copied_state(admission: PodAdmission) -> Denial | Changes | None:
    """Remove the node, and the annotations that only schedulers write.

    A backup, or `kubectl get pod -o yaml`, has them. One that resembles an annotation of authors
    denies the pod.
    """
    pod = admission.pod
    copied = sorted(
        key
        for key in pod.annotations
        if key.startswith(STRIPPED_ANNOTATIONS) or is_of_leasehold(key)
    )
    denial = _misspelled(pod.annotations)
    if denial is not None:
        return denial
    replaced = [key for key in COMPLETED_ANNOTATIONS if key in pod.annotations]
    is_copy = bool(copied) or pod.has_run
    node = pod.spec.node_name if is_copy and _is_placed(admission) else ""
    if not (copied or replaced or node):
        return None
    return Changes(
        patches=tuple(_patches([*copied, *replaced], node)),
        warnings=tuple(_warnings(pod, copied, node)),
        pod=_without(pod, {*copied, *replaced}, node),
    )


def _misspelled(annotations: Mapping[str, str]) -> Denial | None:
    own = sorted(filter(is_of_leasehold, annotations))
    short = (key for key in own if len(key) <= LONGEST_COMPARED)
    for key in islice(short, MOST_COMPARED):
        meant = difflib.get_close_matches(key, AUTHOR_ANNOTATIONS, n=1, cutoff=0.8)
        if meant:
            return Denial(
                FORBIDDEN,
                f"annotation {key} is unknown to Leasehold: did you mean {meant[0]}?",
                (
                    Change(Place.ANNOTATION, key),
                    Change(Place.ANNOTATION, meant[0], annotations[key]),
                ),
            )
    return None


def _is_placed(admission: PodAdmission) -> bool:
    return admission.is_leased or any(map(admission.uses_claims, admission.pod.containers))


def _patches(annotations: Iterable[str], node: str) -> Iterator[PatchOperation]:
    for key in annotations:
        yield remove(ANNOTATIONS, key)
    if node:
        yield remove("/spec", "nodeName")


def _warnings(pod: PodView, annotations: list[str], node: str) -> Iterator[Hint]:
    for key in annotations[:MAX_SHOWN]:
        if key == PREEMPTIBLE:
            moved = Change(Place.LABEL, key, pod.annotations[key])
            text = f"annotation {key} was removed, as it is a label: write it into metadata.labels"
            yield Hint(text, (Change(Place.ANNOTATION, key), moved))
            continue
        writer = "Leasehold" if is_of_leasehold(key) else "schedulers"
        yield Hint(f"annotation {key} was removed: only {writer} may write it")
    if node:
        yield Hint(
            f"nodeName {node} was removed, as the pod is a copy of one that was placed: it gets "
            "GPUs of its own, possibly on another node"
        )


def _without(pod: PodView, annotations: Collection[str], node: str) -> PodView:
    kept = {key: value for key, value in pod.annotations.items() if key not in annotations}
    spec = structs.replace(pod.spec, node_name="") if node else pod.spec
    return replace(pod, annotations=kept, spec=spec)
