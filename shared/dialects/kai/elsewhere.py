"""KAI's and Run:ai's annotations where nothing reads them; pure."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shared.dialects import GPU_RESOURCES
from shared.dialects.dialect import PodManifest
from shared.dialects.kai import dialect as kai
from shared.dialects.kai import words
from shared.dialects.kai.words import Wish, parse_wish
from shared.dialects.meant_resources import MOST_GPUS, meant_part
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.pod_requests import annotations_of
from shared.model import change
from shared.model.change import Change, Hint, Place, limit
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_quantity

MISTAKEN_PREFIXES = ("run.ai/", "runai/", "kai.scheduler/")
"""Users write them before annotations that have no prefix."""
OTHER_READER = "runai-scheduler"
"""Run:ai's own scheduler, which reads these annotations, too."""
NAMED = 4
"""Annotations in one message."""


def bare_name(key: str) -> str:
    """Return the annotation that was meant by one with a prefix, or "".

    >>> bare_name("run.ai/gpu-fraction"), bare_name("kai.scheduler/queue")
    ('gpu-fraction', '')
    """
    for prefix in MISTAKEN_PREFIXES:
        name = key.removeprefix(prefix)
        if name != key and name in words.ANNOTATIONS:
            return name
    return ""


def find_ineffective(pod: PodManifest, dialect: str) -> Iterator[Hint]:
    """`dialect` is that of the request."""
    mistaken = {key: name for key in sorted(pod.annotations) if (name := bare_name(key))}
    if dialect == kai.NAME or pod.scheduler == kai.SCHEDULER:
        for key, name in mistaken.items():
            text = f"annotation {key} has no effect: write {name}"
            renamed = Change(Place.ANNOTATION, name, pod.annotations[key])
            yield Hint(text, (Change(Place.ANNOTATION, key), renamed))
        return
    keys = sorted({*annotations_of(pod, kai.DIALECT), *mistaken})
    if not keys or pod.scheduler == OTHER_READER:
        return
    listed = " and ".join(keys[:NAMED])
    if len(keys) > NAMED:
        listed += f" and {len(keys) - NAMED} more"
    fault = f"annotation {listed} has no effect: it is"
    if len(keys) > 1:
        fault = f"annotations {listed} have no effect: they are"
    names = f", by the name {' and '.join(mistaken.values())}" if mistaken else ""
    text = f"{fault} read in pods with schedulerName {kai.SCHEDULER} only{names}"
    changes = tuple(Change(Place.ANNOTATION, key) for key in keys)
    if (part := as_resources(pod)) is not None:
        text = f"{text}; {part.text}"
        changes += part.changes
    yield Hint(text, changes)


def as_resources(pod: PodManifest) -> Hint | None:
    """Return how a pod requests the same by resources.

    None if annotations stand for nothing, or if the pod requests more than a number of GPUs.

    >>> from shared.dialects.dialect import ContainerManifest
    >>> container = ContainerManifest(name="main")
    >>> notes = {"run.ai/gpu-memory": "4Gi"}
    >>> as_resources(PodManifest(namespace="ml", containers=(container,), annotations=notes)).text
    'in container main set nvidia.com/gpu: 1, nvidia.com/gpumem: 4096'
    """
    notes = _mended(pod.annotations)
    if not pod.containers or not words.requests_gpus(notes):
        return None
    wish = None
    with contextlib.suppress(RequestError):
        wish = parse_wish(replace(pod, annotations=notes))
    requested = {
        container.name: container.amounts.keys() & GPU_RESOURCES
        for container in pod.containers
        if container.amounts.keys() & GPU_RESOURCES
    }
    if wish is None or (wish.fraction is None and wish.memory_mib is None):
        return None if requested else _whole_or_percent(pod, notes.get(words.FRACTION, ""))
    if requested and requested != {wish.container: {nvidia.COUNT}}:
        return None
    changes = tuple(
        limit(wish.container, name, amount)
        for name, amount in _amounts(wish).items()
        if not (requested and name == nvidia.COUNT)
    )
    share = ""
    if wish.fraction is not None:
        gpus = "a GPU" if wish.gpus == 1 else f"each of {wish.gpus} GPUs"
        share = f"for {_percent(wish)} % of {gpus}, "
    return Hint(f"{share}{change.words(changes)}", changes)


def _mended(annotations: Mapping[str, str]) -> dict[str, str]:
    notes = {bare_name(key) or key: text for key, text in annotations.items()}
    with contextlib.suppress(RequestError):
        amount = parse_quantity(notes.get(words.MEMORY, ""))
        if amount >= MIB:
            notes[words.MEMORY] = str(math.ceil(amount / MIB))
    return notes


def _whole_or_percent(pod: PodManifest, text: str) -> Hint | None:
    """Return how whole GPUs or a percentage are requested; a fraction is below 1."""
    with contextlib.suppress(RequestError):
        if not 0 < parse_quantity(text.removesuffix("%")) <= (100 if "%" in text else MOST_GPUS):
            return None
        container = next((it for it in pod.containers if not it.init), pod.containers[0])
        if (part := meant_part(nvidia.COUNT, text, (), container.name)) is not None:
            return Hint(change.words(part.changes), part.changes)
    return None


def _percent(wish: Wish) -> int:
    return math.ceil(wish.fraction * 100) if wish.fraction is not None else 0


def _amounts(wish: Wish) -> dict[str, int]:
    amounts = {
        nvidia.COUNT: wish.gpus,
        nvidia.PERCENTAGE: _percent(wish),
        nvidia.MEMORY: wish.memory_mib or 0,
        nvidia.CORES: math.ceil(wish.compute * 100) if wish.compute is not None else 0,
    }
    return {name: amount for name, amount in amounts.items() if amount}
