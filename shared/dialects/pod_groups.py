"""The gang that a pod names: for Kubernetes, Volcano, coscheduling or Koordinator; pure.

A PodGroup has the number of pods that start together. With Koordinator, the pod may have it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from shared.dialects import gang_topologies
from shared.dialects.gang_topologies import NO_TOPOLOGY, GangTopology, parse_topology
from shared.dialects.strict_values import (
    check_annotation,
    check_duration,
    parse_list,
    parse_name,
    parse_whole_number,
)
from shared.model.bounds import NAME as LONGEST_NAME
from shared.model.change import Change, Place
from shared.model.errors import RequestError
from shared.model.names import Namespace

VOLCANO_GROUPS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
COSCHEDULING_GROUPS = ("scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io")
KOORDINATOR = (
    "gang.scheduling.koordinator.sh/name",
    "gang.scheduling.koordinator.sh/min-available",
)
LIGHTWEIGHT = (
    "pod-group.scheduling.sigs.k8s.io/name",
    "pod-group.scheduling.sigs.k8s.io/min-available",
)

MODE = "gang.scheduling.koordinator.sh/mode"
STRICT = "Strict"
NON_STRICT = "NonStrict"
MATCH_POLICIES = (
    "gang.scheduling.koordinator.sh/match-policy",
    "pod-group.scheduling.sigs.k8s.io/match-policy",
)
WAITING_AND_RUNNING = "waiting-and-running"
ONCE_SATISFIED = "once-satisfied"
WAITING_TIME = "gang.scheduling.koordinator.sh/waiting-time"
TOTAL = "gang.scheduling.koordinator.sh/total-number"
GROUPS = "gang.scheduling.koordinator.sh/groups"
TOPOLOGY = "gang.scheduling.koordinator.sh/network-topology-spec"

READ_ANNOTATIONS = frozenset(
    {
        *(*VOLCANO_GROUPS, *KOORDINATOR, *MATCH_POLICIES),
        *(MODE, WAITING_TIME, TOTAL, GROUPS, TOPOLOGY),
        *gang_topologies.READ_ANNOTATIONS,
    }
)
READ_LABELS = frozenset({*COSCHEDULING_GROUPS, *LIGHTWEIGHT})

MOST_MEMBERS = 999_999


class PodGroupKind(StrEnum):
    KUBERNETES = "scheduling.k8s.io"
    VOLCANO = "scheduling.volcano.sh"
    COSCHEDULING = "scheduling.x-k8s.io"


PATHS: Mapping[PodGroupKind, tuple[str, ...]] = {
    PodGroupKind.KUBERNETES: (
        "/apis/scheduling.k8s.io/v1beta1/podgroups",
        "/apis/scheduling.k8s.io/v1alpha2/podgroups",
    ),
    PodGroupKind.VOLCANO: ("/apis/scheduling.volcano.sh/v1beta1/podgroups",),
    PodGroupKind.COSCHEDULING: ("/apis/scheduling.x-k8s.io/v1alpha1/podgroups",),
}
"""Of all namespaces, in the versions that may be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupReference:
    name: str
    """`namespace/name`."""
    kind: PodGroupKind | None = None
    """None if the pod has the number."""
    min_member: int = 1
    """The pod's own minimum, if `kind` is None."""
    topology: GangTopology = NO_TOPOLOGY


def parse_pod_group(
    namespace: Namespace,
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
    scheduling_group: str = "",
) -> PodGroupReference | None:
    """A group whose number the pod has goes before others, except `spec.schedulingGroup`.

    Raises RequestError for a malformed name, number or topology, and for what no gang can have
    here.
    """
    group = _named_group(namespace, annotations, labels, scheduling_group)
    return replace(group, topology=parse_topology(annotations)) if group else None


def _named_group(
    namespace: Namespace,
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
    scheduling_group: str,
) -> PodGroupReference | None:
    if scheduling_group:
        name = parse_name("spec.schedulingGroup.podGroupName", scheduling_group)
        return PodGroupReference(name=f"{namespace}/{name}", kind=PodGroupKind.KUBERNETES)
    _check_gang(namespace, annotations)
    for keys, values, place in (
        (KOORDINATOR, annotations, Place.ANNOTATION),
        (LIGHTWEIGHT, labels, Place.LABEL),
    ):
        if any(key in values for key in keys):
            return _group_with_number(namespace, keys, values, place)
    for keys, values, place, kind in (
        (VOLCANO_GROUPS, annotations, Place.ANNOTATION, PodGroupKind.VOLCANO),
        (COSCHEDULING_GROUPS, labels, Place.LABEL, PodGroupKind.COSCHEDULING),
    ):
        name = group_name(namespace, keys, values, place)
        if name:
            return PodGroupReference(name=name, kind=kind)
    return None


def group_name(
    namespace: Namespace,
    keys: Sequence[str],
    values: Mapping[str, str],
    place: Place = Place.ANNOTATION,
) -> str:
    """Raise RequestError for an invalid name: no such PodGroup can exist.

    >>> annotations = {"scheduling.k8s.io/group-name": "train"}
    >>> group_name(Namespace("ml"), ["scheduling.k8s.io/group-name"], annotations)
    'ml/train'
    """
    key = next((key for key in keys if values.get(key)), None)
    return f"{namespace}/{_name(key, values[key], place)}" if key else ""


def _group_with_number(
    namespace: Namespace, keys: tuple[str, str], values: Mapping[str, str], place: Place
) -> PodGroupReference:
    name_key, number_key = keys
    fault = "beside it: a gang has a name and a size"
    if name_key not in values:
        raise RequestError(
            f"{number_key} needs {name_key} {fault}: remove {number_key}, or write the name, the "
            "same in all pods of the gang",
            Change(place, number_key),
        )
    if number_key not in values:
        raise RequestError(
            f"{name_key} needs {number_key} {fault}: write {number_key}: 1, or how many of its "
            "pods must run together",
            Change(place, number_key, "1"),
        )
    name = _name(name_key, values[name_key], place)
    return PodGroupReference(
        name=f"{namespace}/{name}", min_member=_number(number_key, values[number_key], place)
    )


_NOT_IN_NAMES = re.compile(r"[^a-z0-9.]+")
_WHOLE = re.compile(r"\s*([1-9][0-9]{0,5})(?![0-9])")


def _name(key: str, text: str, place: Place) -> str:
    try:
        return parse_name(key, text)
    except RequestError as refused:
        meant = _NOT_IN_NAMES.sub("-", text.lower())[:LONGEST_NAME].strip("-.")
        way = f"write {meant} in all pods of the gang" if meant else f"remove {key}"
        raise RequestError(f"{refused}: {way}", Change(place, key, meant)) from refused


def _number(key: str, text: str, place: Place) -> int:
    try:
        return parse_whole_number(key, text, least=1, most=MOST_MEMBERS)
    except RequestError as refused:
        whole = _WHOLE.match(text)
        meant = whole[1] if whole else "1"
        raise RequestError(
            f"{refused}: write {meant}, or how many pods must run together",
            Change(place, key, meant),
        ) from refused


def _check_gang(namespace: Namespace, annotations: Mapping[str, str]) -> None:
    if MODE in annotations and annotations[MODE] != STRICT:
        check_annotation(MODE, annotations[MODE], (STRICT, NON_STRICT))
        raise RequestError(
            f"{MODE} {NON_STRICT} is not supported: gangs start together; remove it",
            Change(Place.ANNOTATION, MODE),
        )
    for key in MATCH_POLICIES:
        if key in annotations:
            check_annotation(key, annotations[key], (WAITING_AND_RUNNING, ONCE_SATISFIED))
    least = _number(KOORDINATOR[1], annotations.get(KOORDINATOR[1], "1"), Place.ANNOTATION)
    _check_unneeded(WAITING_TIME, annotations, check_duration)
    _check_unneeded(TOTAL, annotations, partial(parse_whole_number, least=least, most=MOST_MEMBERS))
    if TOPOLOGY in annotations:
        raise RequestError(
            f"{TOPOLOGY} is not supported: name the label that the pods' nodes share in "
            f"{gang_topologies.KUEUE_REQUIRED} or {gang_topologies.KUEUE_PREFERRED}"
        )
    _check_bundle(namespace, annotations)


def _check_unneeded(
    key: str, annotations: Mapping[str, str], check: Callable[[str, str], object]
) -> None:
    try:
        if key in annotations:
            check(key, annotations[key])
    except RequestError as refused:
        change = Change(Place.ANNOTATION, key)
        raise RequestError(f"{refused}: remove it, no gang needs it here", change) from refused


def _check_bundle(namespace: Namespace, annotations: Mapping[str, str]) -> None:
    own = {f"{namespace}/{annotations.get(KOORDINATOR[0])}"}
    others = set(parse_list(GROUPS, annotations.get(GROUPS, "[]"))) - own
    if others:
        raise RequestError(
            f"{GROUPS} names {min(others)}: gangs do not wait for each other here; make one gang "
            "of all their pods, or remove it",
            Change(Place.ANNOTATION, GROUPS),
        )
