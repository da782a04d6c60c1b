"""Vendors' keys in pods: where each belongs, and what it does here; pure.

Keys that requests depend on come from `DIALECTS`. `docs/reference.md` shows the table.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from shared.dialects import DIALECTS, GPU_RESOURCES, REQUEST_PREFIXES, pod_groups
from shared.dialects.dialect import ContainerManifest, Dialect, PodManifest
from shared.dialects.kai import elsewhere
from shared.dialects.meant_resources import (
    ACCELERATORS,
    IN_HUNDREDTHS,
    meant_resource,
    more_than_none,
)
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.reserved import AUTHOR_ANNOTATIONS, COMPLETED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.model.change import Change, Hint, Place, limit
from shared.model.names import HANDED_OVER, PREEMPTIBLE
from shared.model.requests.claim import EXTENDED_RESOURCES


class WordEffect(StrEnum):
    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    """Admission warns of it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Word:
    """`*` at the end stands for any ending."""

    name: str
    place: Place
    effect: WordEffect = WordEffect.SUPPORTED
    note: str = ""
    """With NO_EFFECT, why, and what to use."""


LEFT_ALONE = ("hami.io/webhook", "ignore")
"""Admission completes pods with this label for no scheduler."""
_ARTICLES = {Place.ANNOTATION: "an", Place.LABEL: "a"}
_GANG = "gang.scheduling.koordinator.sh/"
_KUEUE = "kueue.x-k8s.io/podset-"
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
        "scheduling.volcano.sh/group-min-member", Place.ANNOTATION, WordEffect.NO_EFFECT,
        f"a gang's size is that of its PodGroup, or {pod_groups.KOORDINATOR[1]} beside its name",
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
        f"{_KUEUE}unconstrained-topology", Place.ANNOTATION, note="the default: nothing is required"
    ),
    Word(
        f"{_KUEUE}slice-*", Place.ANNOTATION, WordEffect.NO_EFFECT,
        "all pods of a gang are kept together, not slices of it",
    ),
    Word(
        f"{_KUEUE}group-name", Place.ANNOTATION, WordEffect.NO_EFFECT,
        "write the pods that have to be together into one gang",
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
"""A later row replaces an earlier one."""
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
    _KUEUE,
    "pod-group.scheduling.sigs.k8s.io",
    "tencent.com/vcuda",
    "leasehold.dev/",
)
"""Other keys with these are unknown."""


@dataclass(frozen=True, slots=True)
class MisplacedKey(Hint):
    is_resource: bool = False
    """Without this amount the container gets more than its author meant."""


def find_misplaced(pod: PodManifest) -> Iterator[MisplacedKey]:
    """Yield keys without effect where they are, with what to write instead."""
    written = (*STRIPPED_ANNOTATIONS, *COMPLETED_ANNOTATIONS, *REQUEST_PREFIXES)
    annotations = {
        key: value for key, value in pod.annotations.items() if not key.startswith(written)
    }
    yield from _misplaced_texts(pod, annotations, Place.ANNOTATION)
    yield from _misplaced_texts(pod, pod.labels, Place.LABEL)
    for container in pod.containers:
        yield from _misplaced_resources(container)
        for name in sorted((container.requests.keys() - container.limits.keys()) & GPU_RESOURCES):
            text = (
                f"container {container.name}: {name} is in the requests only: write it into the "
                "limits"
            )
            change = limit(container.name, name, container.requests[name])
            yield MisplacedKey(text, (change,), is_resource=True)
        yield from _unequal_amounts(container)
        yield from _one_percent(container)
    yield from _unread_value(pod)


def _unequal_amounts(container: ContainerManifest) -> Iterator[MisplacedKey]:
    """The API server overcommits no such resource."""
    for name in sorted(container.limits.keys() & container.requests.keys() & GPU_RESOURCES):
        most, least = container.limits[name], container.requests[name]
        if most != least:
            text = (
                f"container {container.name}: {name} is {most} in the limits and {least} in the "
                f"requests, and Kubernetes refuses that: write {most} into both"
            )
            yield MisplacedKey(text, (limit(container.name, name, most),))


def _one_percent(container: ContainerManifest) -> Iterator[MisplacedKey]:
    for name in sorted(container.amounts.keys() & IN_HUNDREDTHS):
        if container.amounts[name] == 1:
            text = f"container {container.name}: {name}: 1 is 1 % of a GPU: for all of it write 100"
            yield MisplacedKey(text, (limit(container.name, name, 100),))


def _unread_value(pod: PodManifest) -> Iterator[MisplacedKey]:
    value = pod.labels.get(PREEMPTIBLE, "true")
    if value not in {"true", "false"}:
        text = (
            f'label {PREEMPTIBLE} is {value[:20]!r} and has no effect: write "false" to protect '
            "the pod from preemption, or leave it out"
        )
        yield MisplacedKey(text, (Change(Place.LABEL, PREEMPTIBLE, "false"),))


def find_unread(pod: PodManifest, dialect: str) -> Iterator[Hint]:
    """Yield what only other dialects read, and words without effect."""
    yield from elsewhere.find_ineffective(pod, dialect)
    if not dialect:
        return
    own = DIALECTS[dialect]
    yield from own.warnings(pod)
    read = own.request_annotations | own.request_labels
    for key in sorted((pod.annotations.keys() | pod.labels.keys()) & _OF_DIALECTS - read):
        text = f"{key} has no effect beside the resource names of {dialect}"
        same = next(iter(_same_field(key, own)), "")
        if not same or same in pod.annotations or key not in pod.annotations:
            yield Hint(text)
            continue
        value = pod.annotations[key]
        yield Hint(
            f"{text}: write {same}",
            (Change(Place.ANNOTATION, key), Change(Place.ANNOTATION, same, value)),
        )
    yield from _wrongly_separated(pod, own)


_LISTS = ("types", "not_types", "uuids", "not_uuids")
_SEPARATORS = re.compile(r"\s*[;|]\s*")


def _wrongly_separated(pod: PodManifest, own: Dialect) -> Iterator[Hint]:
    """Yield lists in annotations whose entries no comma separates."""
    for key in (key for name in _LISTS for key in own.request_fields.get(name, ())):
        text = pod.annotations.get(key, "")
        if _SEPARATORS.search(text):
            meant = _SEPARATORS.sub(",", text)
            yield Hint(
                f"annotation {key}: commas separate several entries: write {meant}",
                (Change(Place.ANNOTATION, key, meant),),
            )


def _same_field(key: str, own: Dialect) -> Iterator[str]:
    """Yield a dialect's annotations for the field that another dialect's key sets."""
    for dialect in DIALECTS.values():
        for name, annotations in dialect.request_fields.items():
            if annotations[0] == key and name in own.request_fields:
                yield own.request_fields[name][0]


_OF_DIALECTS = frozenset().union(
    *(
        dialect.request_annotations | dialect.request_labels
        for dialect in DIALECTS.values()
        if not dialect.read_for
    )
) - (pod_groups.READ_ANNOTATIONS | pod_groups.READ_LABELS)


def _misplaced_texts(
    pod: PodManifest, texts: Mapping[str, str], place: Place
) -> Iterator[MisplacedKey]:
    for name in sorted(texts):
        word = _word_of(name, place)
        small = name.lower()
        of_domain = _BY_SMALL_LETTERS.get(_in_right_domain(small))
        if word is None and of_domain is None and not small.startswith(PREFIXES):
            continue
        fault = f"{place} {name} has no effect"
        if word is None:
            word = of_domain or _known_text(small, place)
        elif word.effect is WordEffect.NO_EFFECT and word.place is place:
            yield MisplacedKey(f"{fault}: {word.note}")
            continue
        elif word.place is place:
            continue
        if word is None:
            yield MisplacedKey(f"{fault}: it is unknown")
        elif word.effect is WordEffect.NO_EFFECT:
            yield MisplacedKey(f"{fault}: {word.note}")
        elif word.place is Place.RESOURCE:
            yield _belongs_to_limits(fault, word, pod, Change(place, name), texts[name])
        else:
            text = f"{fault}; {word.name} is {_ARTICLES[word.place]} {word.place}"
            if word.place is place:
                text = f"{fault}: write {word.name}"
            yield MisplacedKey(
                text, (Change(place, name), Change(word.place, word.name, texts[name]))
            )


_DOMAINS = {
    "hami": "hami.io",
    "koordinator": "koordinator.sh",
    "leasehold": "leasehold.dev",
    "nvidia": "nvidia.com",
    "tencent": "tencent.com",
    "volcano": "volcano.sh",
}
"""By how they begin."""


def _in_right_domain(small: str) -> str:
    """Return a key in the right domain, or "" if it is in it.

    >>> _in_right_domain("volcano.com/vgpu-number"), _in_right_domain("nvidia.com/gpu")
    ('volcano.sh/vgpu-number', '')
    """
    domain, _, ending = small.rpartition("/")
    right = _DOMAINS.get(domain.partition(".")[0], domain)
    return "" if domain == right else f"{right}/{ending}"


def _word_of(name: str, place: Place) -> Word | None:
    """Annotations with a mistaken prefix have their own hints."""
    return WORDS.get(name) or WORDS.get(elsewhere.bare_name(name) if place is Place.LABEL else "")


def _known_text(small: str, place: Place) -> Word | None:
    """Return the annotation, label or resource that was meant."""
    word = _BY_SMALL_LETTERS.get(small) or _nearest(small, _BY_SMALL_LETTERS)
    if word is None or word.place is not Place.RESOURCE:
        return word
    instead = meant_resource(small, 0)
    return WORDS.get(instead.changes[-1].name, word) if instead else word


def _belongs_to_limits(
    fault: str, word: Word, pod: PodManifest, there: Change, value: str
) -> MisplacedKey:
    text = f"{fault}; {word.name} is a resource: write it into the container's limits"
    requesting = (it for it in pod.containers if it.amounts.keys() & GPU_RESOURCES)
    container = next((it.name for it in chain(requesting, pod.containers)), "")
    moved = Change(there.place, there.name), limit(container, word.name, value)
    return MisplacedKey(text, moved, is_resource=True)


def _misplaced_resources(container: ContainerManifest) -> Iterator[MisplacedKey]:
    for name in sorted(container.amounts):
        small = name.lower()
        word = WORDS.get(name)
        fault = f"container {container.name}: {Place.RESOURCE} {name} has no effect"
        if name.startswith(EXTENDED_RESOURCES) or name in GPU_RESOURCES:
            continue
        if word is not None and word.place is not Place.RESOURCE:
            yield MisplacedKey(f"{fault}; {word.name} is {_ARTICLES[word.place]} {word.place}")
        elif word is not None or small.startswith(PREFIXES):
            instead = meant(name, container.amounts[name], container.name)
            if instead is None:
                yield MisplacedKey(f"{fault}: it is unknown")
            else:
                text = f"{fault}: write {instead.text}"
                yield MisplacedKey(text, instead.changes, is_resource=True)


def meant(name: str, amount: int, container: str = "") -> Hint | None:
    """Return the resource that was meant by an unknown one.

    For example, `meant("nvidia.com/GPU", 1).text` is "nvidia.com/gpu".
    """
    small = name.lower()
    word = _RESOURCES.get(small) or _RESOURCES.get(_in_right_domain(small))
    if word is None or word.effect is not WordEffect.SUPPORTED:
        return meant_resource(name, amount, container)
    changes = limit(container, name), limit(container, word.name, amount)
    return Hint(word.name, changes)


def _nearest(small: str, words: Mapping[str, Word]) -> Word | None:
    for word in words.values():
        if word.name.endswith("*") and small.startswith(word.name[:-1]):
            return word
    _, _, ending = small.rpartition("/")
    of_domain = {
        name.rpartition("/")[2]: name for name in words if name.startswith(small[: -len(ending)])
    }
    if near := difflib.get_close_matches(ending, of_domain, n=1, cutoff=0.8):
        return words[of_domain[near[0]]]
    same = [name for name in words if name.rpartition("/")[2] == ending]
    close = difflib.get_close_matches(small, same or words, n=1, cutoff=0.0 if same else 0.8)
    if not close:
        endings = {name.rpartition("/")[2]: name for name in words}
        close = [endings[e] for e in difflib.get_close_matches(ending, endings, n=1, cutoff=0.8)]
    return words[close[0]] if close else None


_RESOURCES = {name.lower(): word for name, word in WORDS.items() if word.place is Place.RESOURCE}


def unknown_gpus(names: Iterable[str]) -> Iterator[str]:
    """Yield resources that no dialect has, and that look as if they were for GPUs."""
    for name in sorted(names):
        small = name.lower()
        if name in GPU_RESOURCES or small.startswith(EXTENDED_RESOURCES):
            continue
        accelerates = ACCELERATORS.search(small.partition("/")[2])
        if accelerates or "gpu" in small or "cuda" in small or small.startswith(PREFIXES):
            yield name


def no_node_has(name: str, amount: int, beside: Collection[str]) -> str:
    text = did_you_mean(name, amount, beside)
    return f"no node of this cluster has {name}: {text}".removesuffix(": ")


def did_you_mean(name: str, amount: int, beside: Collection[str] = ()) -> str:
    """Return what was probably meant by an unknown resource, or "".

    `beside` are other resources of the pod.

    >>> did_you_mean("nvidia.com/gpumemory", 3000)
    'did you mean nvidia.com/gpumem?'
    >>> did_you_mean("habana.ai/gaudi", 1, ["nvidia.com/gpu"])
    'remove it, as the pod requests nvidia.com/gpu, too'
    """
    instead = meant(name, amount)
    if instead is None:
        return ""
    added = [change.name for change in instead.changes if change.value]
    if all(resource in beside for resource in added):
        return f"remove it, as the pod requests {' and '.join(added)}, too"
    return f"did you mean {instead.text}?"


def request_one(none: Iterable[str] = (), container: str = "") -> Hint:
    """Return how a GPU is requested; `none` are resources that are requested with 0.

    >>> request_one(["volcano.sh/gpu-number"]).text
    'write `volcano.sh/gpu-number: 1` into the limits of its container'
    """
    zeros = sorted(GPU_RESOURCES.intersection(none))
    change = more_than_none(zeros[0] if zeros else nvidia.COUNT, container)
    return Hint(
        f"write `{change.name}: {change.value}` into the limits of its container", (change,)
    )
