"""The gang that a pod names: for Volcano, coscheduling or Koordinator; pure.

Volcano names a PodGroup in an annotation and coscheduling in a label; the PodGroup's
`spec.minMember` is the number of pods that start together. Koordinator may have both name and
number on the pod itself, in two annotations or, in its lightweight form, in two labels.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shared.model.bounds import NAME as LONGEST_NAME
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

READ_ANNOTATIONS = frozenset({*VOLCANO_GROUPS, *KOORDINATOR})
READ_LABELS = frozenset({*COSCHEDULING_GROUPS, *LIGHTWEIGHT})

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]{1,6}")


class PodGroupKind(StrEnum):
    """The API group of a PodGroup."""

    VOLCANO = "scheduling.volcano.sh"
    COSCHEDULING = "scheduling.x-k8s.io"


PATHS: Mapping[PodGroupKind, str] = {
    PodGroupKind.VOLCANO: "/apis/scheduling.volcano.sh/v1beta1/podgroups",
    PodGroupKind.COSCHEDULING: "/apis/scheduling.x-k8s.io/v1alpha1/podgroups",
}
"""API paths of the PodGroups of all namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroupReference:
    """A pod's group."""

    name: str
    """`namespace/name`."""
    kind: PodGroupKind | None = None
    """The PodGroup that has the minimum number of members; None: the pod has it."""
    min_member: int = 1
    """The pod's own minimum, if `kind` is None."""


def parse_pod_group(
    namespace: Namespace, annotations: Mapping[str, str], labels: Mapping[str, str]
) -> PodGroupReference | None:
    """Parse a pod's group; a group with its number on the pod comes first.

    Raises RequestError for a malformed name or number, if the number is on the pod.
    """
    for (name_key, number_key), values in ((KOORDINATOR, annotations), (LIGHTWEIGHT, labels)):
        if values.get(name_key) and values.get(number_key):
            name = _name(namespace, name_key, values[name_key])
            number = _number(number_key, values[number_key])
            return PodGroupReference(name=name, min_member=number)
    for keys, values, kind in (
        (VOLCANO_GROUPS, annotations, PodGroupKind.VOLCANO),
        (COSCHEDULING_GROUPS, labels, PodGroupKind.COSCHEDULING),
    ):
        name = group_name(namespace, keys, values)
        if name:
            return PodGroupReference(name=name, kind=kind)
    return None


def group_name(namespace: Namespace, keys: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the group that the first of these annotations or labels names; empty: none does.

    Raises RequestError for what is no name of an object: no such PodGroup can exist.
    """
    key = next((key for key in keys if values.get(key)), None)
    return _name(namespace, key, values[key]) if key else ""


def _name(namespace: Namespace, key: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{key} is {name[:LONGEST_NAME]!r}, with {len(name)} characters: a group's name has at "
            f"most {LONGEST_NAME}, which are small letters, digits, '-' and '.'"
        )
    return f"{namespace}/{name}"


def _number(key: str, text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) < 1:
        raise RequestError(f"{key} is {text!r}: it must be a whole number from 1 to 999999")
    return int(text)
