"""Vendors' keys in pods: where each belongs, and what it does here; pure.

Keys that requests depend on come from `DIALECTS`. A key that vendors document and that has another
effect, or none, has its row here. `docs/reference.md` shows the table.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.dialects import DIALECTS, GPU_RESOURCES, REQUEST_PREFIXES, pod_groups
from shared.dialects.dialect import PodManifest
from shared.dialects.pod_requests import annotations_of
from shared.dialects.reserved import AUTHOR_ANNOTATIONS, COMPLETED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.model.names import HANDED_OVER, PREEMPTIBLE
from shared.model.requests.claim import EXTENDED_RESOURCES


class Place(StrEnum):
    RESOURCE = "resource"
    ANNOTATION = "annotation"
    LABEL = "label"


class WordEffect(StrEnum):
    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    """Admission warns of it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Word:
    """A vendor's key; `*` at its end stands for any ending."""

    name: str
    place: Place
    effect: WordEffect = WordEffect.SUPPORTED
    note: str = ""
    """With NO_EFFECT, why, and what to use."""


LEFT_ALONE = ("hami.io/webhook", "ignore")
"""Label of pods that admission completes for no scheduler."""
_GANG = "gang.scheduling.koordinator.sh/"
_POLICY_NOTE = (
    f"`{pod_groups.WAITING_AND_RUNNING}`; `{pod_groups.ONCE_SATISFIED}` has the same effect here; "
    "`only-waiting` is refused"
)
_OWN_ROWS = (
    Word(
        pod_groups.MODE, Place.ANNOTATION, note=f"`{pod_groups.STRICT}`; "
        f"`{pod_groups.NON_STRICT}` is refused",
    ),
    Word(
        pod_groups.TOTAL, Place.ANNOTATION,
        note="not below `min-available`; pods beyond that are placed one by one",
    ),
    *(Word(key, Place.ANNOTATION, note=_POLICY_NOTE) for key in pod_groups.MATCH_POLICIES),
    Word(pod_groups.GROUPS, Place.ANNOTATION, note="the gang itself; others are refused"),
    Word(pod_groups.TOPOLOGY, Place.ANNOTATION, WordEffect.REFUSED),
    Word(
        pod_groups.WAITING_TIME, Place.ANNOTATION, WordEffect.NO_EFFECT,
        "no pod holds a GPU while its gang waits",
    ),
    Word(
        f"{_GANG}network-topology-index", Place.ANNOTATION, WordEffect.NO_EFFECT,
        "the network's topology is unknown here",
    ),
    Word(
        f"{_GANG}timeout", Place.ANNOTATION, WordEffect.NO_EFFECT,
        "Koordinator's scheduler writes it",
    ),
    Word(
        "quota.scheduling.koordinator.sh/name", Place.LABEL, WordEffect.NO_EFFECT,
        "a GPUQuota of the namespace limits its pods",
    ),
    Word(
        "quota.scheduling.koordinator.sh/preemptible", Place.LABEL, WordEffect.NO_EFFECT,
        f"use the label {PREEMPTIBLE}",
    ),
    Word(
        "koordinator.sh/gpu-share-isolation-level", Place.LABEL, WordEffect.NO_EFFECT,
        f"use the annotation {AUTHOR_ANNOTATIONS[0]}",
    ),
    Word(
        "scheduling.volcano.sh/queue-name", Place.ANNOTATION, WordEffect.NO_EFFECT,
        "there are no queues; namespaces share by their budgets",
    ),
    Word(
        LEFT_ALONE[0], Place.LABEL,
        note=f"`{LEFT_ALONE[1]}`: the pod keeps its own scheduler and gets no lease, so it runs "
        "only on nodes of other device plugins; containers without one's resources see no devices",
    ),
    Word(
        "nvidia.com/mig-*", Place.RESOURCE, WordEffect.NO_EFFECT,
        "no agent serves it; request nvidia.com/gpumem with the annotation nvidia.com/vgpu-mode: "
        "mig",
    ),
    Word(
        "nvidia.com/gpu.shared", Place.RESOURCE, WordEffect.NO_EFFECT,
        "no agent serves it; request nvidia.com/gpu with nvidia.com/gpumem-percentage for the part "
        "(`leasehold migrate` shows it), or with nvidia.com/gpumem",
    ),
    *(Word(key, Place.ANNOTATION) for key in AUTHOR_ANNOTATIONS),
    *(Word(key, Place.LABEL) for key in (PREEMPTIBLE, HANDED_OVER)),
)  # fmt: skip


def _words() -> Iterator[Word]:
    yield from (Word(name, Place.RESOURCE) for name in sorted(GPU_RESOURCES))
    for dialect in DIALECTS.values():
        yield from (Word(name, Place.ANNOTATION) for name in sorted(dialect.request_annotations))
        yield from (Word(name, Place.LABEL) for name in sorted(dialect.request_labels))
    yield from (Word(name, Place.ANNOTATION) for name in sorted(pod_groups.READ_ANNOTATIONS))
    yield from (Word(name, Place.LABEL) for name in sorted(pod_groups.READ_LABELS))
    yield from _OWN_ROWS


WORDS: Mapping[str, Word] = {word.name: word for word in _words()}
"""By name; a later row replaces an earlier one."""
_BY_SMALL_LETTERS = {name.lower(): word for name, word in WORDS.items()}

PREFIXES = (
    "volcano.sh/vgpu",
    "volcano.sh/gpu",
    "nvidia.com/",
    "hami.io/",
    "koordinator.sh/gpu",
    "kubernetes.io/gpu",
    "scheduling.koordinator.sh/device-",
    "scheduling.koordinator.sh/gpu-",
    _GANG,
    "pod-group.scheduling.sigs.k8s.io",
    "tencent.com/vcuda",
    "leasehold.dev/",
)
"""Prefixes of keys about GPUs: other keys with them are unknown."""


@dataclass(frozen=True, slots=True)
class MisplacedKey:
    text: str
    is_resource: bool = False
    """Without this amount the container gets more than its author meant."""


def find_misplaced(pod: PodManifest) -> Iterator[MisplacedKey]:
    """Yield the keys of a pod that have no effect where they are, with what to write instead."""
    written = (*STRIPPED_ANNOTATIONS, *COMPLETED_ANNOTATIONS, *REQUEST_PREFIXES)
    annotations = (key for key in pod.annotations if not key.startswith(written))
    yield from _misplaced("", annotations, Place.ANNOTATION)
    yield from _misplaced("", pod.labels, Place.LABEL)
    for container in pod.containers:
        of = f"container {container.name}: "
        resources = (name for name in container.amounts if not name.startswith(EXTENDED_RESOURCES))
        yield from _misplaced(of, resources, Place.RESOURCE)
        for name in sorted((container.requests.keys() - container.limits.keys()) & GPU_RESOURCES):
            yield MisplacedKey(f"{of}{name} is in the requests only: write it into the limits")


def find_unread(pod: PodManifest, dialect: str) -> Iterator[str]:
    """Yield annotations and labels that only other dialects read, and words without effect."""
    yield from _of_other_scheduler(pod, dialect)
    if not dialect:
        return
    own = DIALECTS[dialect]
    yield from own.warnings(pod)
    read = own.request_annotations | own.request_labels
    for key in sorted((pod.annotations.keys() | pod.labels.keys()) & _OF_DIALECTS - read):
        yield f"{key} has no effect beside the resource names of {dialect}"


def _of_other_scheduler(pod: PodManifest, dialect: str) -> Iterator[str]:
    for other in DIALECTS.values():
        if other.name == dialect or other.read_for in {"", pod.scheduler}:
            continue
        for key in annotations_of(pod, other):
            yield (
                f"annotation {key} has no effect: it is read in pods with schedulerName "
                f"{other.read_for} only"
            )


_OF_DIALECTS = frozenset().union(
    *(
        dialect.request_annotations | dialect.request_labels
        for dialect in DIALECTS.values()
        if not dialect.read_for
    )
) - (pod_groups.READ_ANNOTATIONS | pod_groups.READ_LABELS)


def _misplaced(of: str, names: Iterable[str], place: Place) -> Iterator[MisplacedKey]:
    for name in sorted(names):
        small = name.lower()
        word = WORDS.get(name)
        if word is None and not small.startswith(PREFIXES):
            continue
        if word is None:
            yield _unknown(f"{of}{place} {name} has no effect", small, place)
        elif word.place is not place:
            yield _belongs(f"{of}{place} {name} has no effect", word)
        elif word.effect is WordEffect.NO_EFFECT:
            yield MisplacedKey(f"{of}{place} {name} has no effect: {word.note}")


def _unknown(fault: str, small: str, place: Place) -> MisplacedKey:
    word = _BY_SMALL_LETTERS.get(small) or _nearest(small, _BY_SMALL_LETTERS)
    if word is None:
        return MisplacedKey(f"{fault}: it is unknown")
    if word.effect is WordEffect.NO_EFFECT:
        return MisplacedKey(f"{fault}: {word.note}")
    if word.place is not place:
        return _belongs(fault, word)
    return MisplacedKey(f"{fault}: write {word.name}", is_resource=place is Place.RESOURCE)


def _nearest(small: str, words: Mapping[str, Word]) -> Word | None:
    for word in words.values():
        if word.name.endswith("*") and small.startswith(word.name[:-1]):
            return word
    _, _, ending = small.rpartition("/")
    same = [name for name in words if name.rpartition("/")[2] == ending]
    close = difflib.get_close_matches(small, same or words, n=1, cutoff=0.0 if same else 0.8)
    if not close:
        endings = {name.rpartition("/")[2]: name for name in words}
        close = [endings[e] for e in difflib.get_close_matches(ending, endings, n=1, cutoff=0.8)]
    return words[close[0]] if close else None


_RESOURCES = {name.lower(): word for name, word in WORDS.items() if word.place is Place.RESOURCE}


REQUEST_ONE = "write `nvidia.com/gpu: 1` into the limits of its container for one GPU"


def unknown_gpus(names: Iterable[str]) -> Iterator[str]:
    """Yield resources that no dialect has, and that look as if they were for GPUs."""
    for name in sorted(names):
        small = name.lower()
        if name in GPU_RESOURCES or small.startswith(EXTENDED_RESOURCES):
            continue
        if "gpu" in small or small.startswith(PREFIXES):
            yield name


def no_node_has(name: str) -> str:
    return f"no node of this cluster has {name}: {did_you_mean(name)}".removesuffix(": ")


def did_you_mean(name: str) -> str:
    """Return what was probably meant by an unknown resource, or an empty text.

    >>> did_you_mean("nvidia.com/gpumemory")
    'did you mean nvidia.com/gpumem?'
    """
    small = name.lower()
    word = _RESOURCES.get(small) or _nearest(small, _RESOURCES)
    if word is None:
        return ""
    if word.effect is WordEffect.NO_EFFECT:
        return word.note
    return f"did you mean {word.name}?"


def _belongs(fault: str, word: Word) -> MisplacedKey:
    if word.place is Place.RESOURCE:
        advice = f"{word.name} is a resource: write it into the container's limits"
    else:
        advice = f"{word.name} is {'an' if word.place is Place.ANNOTATION else 'a'} {word.place}"
    return MisplacedKey(f"{fault}; {advice}", is_resource=word.place is Place.RESOURCE)
