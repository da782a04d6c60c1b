"""The annotations by which KAI's and Run:ai's users request a part of a GPU; pure.

Rules are those of KAI's guide, its validation, and NvFractions; a word that cannot have an effect
is refused.
https://github.com/kai-scheduler/KAI-Scheduler/tree/main/docs/gpu-sharing
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shared.dialects.dialect import PodManifest
from shared.dialects.strict_values import (
    check_choice,
    parse_boolean,
    parse_name,
    parse_part,
    parse_whole_number,
    shown,
)
from shared.model.bounds import MOST, MOST_SHARES
from shared.model.change import Change, Place
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_quantity
from shared.model.requests.request import ALL_PERCENT

FRACTION = "gpu-fraction"
MEMORY = "gpu-memory"
"""In MiB, without a suffix."""
DEVICES = "gpu-fraction-num-devices"
CONTAINER = "gpu-fraction-container-name"
MPS = "mps"
POD_MODE = "kai.scheduler/gpu-compute-sharing-mode"
"""The pod's `CONTAINER_MODE` in earlier releases."""
ANNOTATIONS = frozenset({FRACTION, MEMORY, DEVICES, CONTAINER, MPS, POD_MODE})

CONTAINER_PREFIX = "nvidia.com/container."
"""A container's name and one of these endings follow."""
REQUEST = "gpu-memory.request"
LIMIT = "gpu-memory.limit"
CONTAINER_MODE = "gpu-compute.mode"
COMPUTE = "gpu-compute.request"
ENDINGS = (REQUEST, LIMIT, CONTAINER_MODE, COMPUTE)
OWNED_ENDINGS = ("gpus.devices", "gpu-compute.portion")
"""KAI's binder writes them, and a program on the node obeys them."""

PORTION_PREFIX = "kai.scheduler/container."
PORTION_LIMIT = "gpu-memory.portion.limit"
"""Follows that prefix and the container's name."""
LONGEST_PORTION = 5
"""Digits after the point."""
PREFIXES = (CONTAINER_PREFIX, PORTION_PREFIX)

TIME_SLICING = "time-slicing"
SM_SHARING = "sm-sharing"
QUEUE = "kai.scheduler/queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    container: str
    gpus: int = 1
    fraction: Fraction | None = None
    """Of each GPU's memory."""
    memory_mib: int | None = None
    """Of each GPU. Only this or the fraction is set."""
    compute: Fraction | None = None
    by_mps: bool = False
    unused_limits: tuple[str, ...] = ()
    """A container could get more than it requests by them."""


def requests_gpus(annotations: Iterable[str]) -> bool:
    """Return whether these annotations request GPUs, valid or not.

    >>> requests_gpus({"gpu-fraction": "0.5"}), requests_gpus({"mps": "true"})
    (True, True)
    """
    return any(key in ANNOTATIONS or key.startswith(PREFIXES) for key in annotations)


def parse_wish(pod: PodManifest) -> Wish:
    """Raise RequestError naming the annotation, its value and what is allowed."""
    notes = pod.annotations
    own = _of_container(notes, CONTAINER_PREFIX, ENDINGS)
    portion = _of_container(notes, PORTION_PREFIX, (PORTION_LIMIT,))
    container = _container(pod, (*own, *portion))
    keys = {key.ending: key.key for key in (*own, *portion)}
    fraction = _parse_fraction(notes[FRACTION]) if FRACTION in notes else None
    memory_mib = _parse_mib(notes[MEMORY]) if MEMORY in notes else None
    _check_one_amount(notes, keys)
    request_mib = _request_mib(notes, keys)
    if memory_mib is not None and request_mib not in {None, memory_mib}:
        raise RequestError(
            f"{MEMORY} is {notes[MEMORY]} and {keys[REQUEST]} is {shown(notes[keys[REQUEST]])}: "
            f"write one of them, such as without {keys[REQUEST]}",
            Change(Place.ANNOTATION, keys[REQUEST]),
        )
    memory_mib = request_mib if memory_mib is None else memory_mib
    _check_amount_beside(notes, keys, has_amount=fraction is not None or memory_mib is not None)
    compute = None
    if COMPUTE in keys:
        compute = parse_part(keys[COMPUTE], notes[keys[COMPUTE]], may_be_all=True)
    return Wish(
        container=container,
        gpus=parse_whole_number(DEVICES, notes.get(DEVICES, "1"), least=1, most=MOST_SHARES),
        fraction=fraction,
        memory_mib=memory_mib,
        compute=compute,
        by_mps=_by_mps(notes, keys),
        unused_limits=tuple(_unused_limits(notes, keys, fraction, request_mib)),
    )


@dataclass(frozen=True, slots=True)
class _ContainerKey:
    key: str
    container: str
    ending: str


def _of_container(
    notes: Mapping[str, str], prefix: str, endings: tuple[str, ...]
) -> list[_ContainerKey]:
    keys = list[_ContainerKey]()
    for key in sorted(notes):
        if not key.startswith(prefix):
            continue
        container, _, ending = key.removeprefix(prefix).partition(".")
        if ending in OWNED_ENDINGS:
            raise RequestError(
                f"annotation {shown(key)} is written by KAI's binder only, and nothing reads it "
                f"here: remove it; {REQUEST} requests memory"
            )
        if not container or ending not in endings:
            ways = " or ".join(f"{prefix}NAME.{allowed}" for allowed in endings)
            raise RequestError(f"annotation {shown(key)} is unknown: write {ways}")
        keys.append(_ContainerKey(key, container, ending))
    return keys


def _container(pod: PodManifest, keys: Iterable[_ContainerKey]) -> str:
    """Return the named container, or the first that is no init container."""
    naming = {key.container: key.key for key in keys}
    if CONTAINER in pod.annotations:
        naming[parse_name(CONTAINER, pod.annotations[CONTAINER])] = CONTAINER
    if not naming:
        first = next((it.name for it in pod.containers if not it.init), "")
        if not first:
            raise RequestError("the pod has no container that could have a part of a GPU")
        return first
    if len(naming) > 1:
        texts = " and ".join(
            f"{shown(key)} names the container {shown(name)}" for name, key in naming.items()
        )
        raise RequestError(f"{texts}: one container of a pod can have a part of a GPU")
    [(name, key)] = naming.items()
    names = [container.name for container in pod.containers]
    if name not in names:
        raise RequestError(
            f"{shown(key)} names the container {shown(name)}, which the pod does not have: it has "
            f"{', '.join(names[:10])}"
        )
    return name


def _parse_mib(text: str) -> int:
    most = MOST // MIB
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(most)):
        raise _no_mib(text)
    if not 1 <= int(text) <= most:
        raise _no_mib(text)
    return int(text)


def _no_mib(text: str) -> RequestError:
    fault = (
        f"{MEMORY} must be a whole number of MiB, 1 or more, without a suffix, got {shown(text)}"
    )
    amount = Fraction(0)
    with contextlib.suppress(RequestError):
        amount = parse_quantity(text)
    if amount < MIB:
        return RequestError(fault)
    mib = str(math.ceil(amount / MIB))
    return RequestError(f'{fault}: write "{mib}"', Change(Place.ANNOTATION, MEMORY, mib))


def _parse_fraction(text: str) -> Fraction:
    try:
        return parse_part(FRACTION, text)
    except RequestError as error:
        percent = Fraction(0)
        with contextlib.suppress(RequestError):
            percent = parse_quantity(text.removesuffix("%")) if text.endswith("%") else percent
        if not 0 < percent < ALL_PERCENT:
            raise
        part = f"{float(percent / ALL_PERCENT):g}"
        change = Change(Place.ANNOTATION, FRACTION, part)
        raise RequestError(f'{error}: write "{part}"', change) from error


def _check_one_amount(notes: Mapping[str, str], keys: Mapping[str, str]) -> None:
    amounts = [key for key in (FRACTION, MEMORY) if key in notes]
    if len(amounts) > 1:
        raise RequestError(
            f"{FRACTION} is {shown(notes[FRACTION])} and {MEMORY} is {shown(notes[MEMORY])}: write "
            f"one of them, such as without {MEMORY}",
            Change(Place.ANNOTATION, MEMORY),
        )
    more = [LIMIT] if amounts == [MEMORY] else [LIMIT, REQUEST]
    for ending in more if amounts else ():
        if ending in keys:
            key = keys[ending]
            raise RequestError(
                f"{amounts[0]} is {shown(notes[amounts[0]])} and {key} is {shown(notes[key])}: "
                f"write {REQUEST} and {LIMIT} of the container, without {amounts[0]}"
            )


def _request_mib(notes: Mapping[str, str], keys: Mapping[str, str]) -> int | None:
    """Return the request, or else the limit, in MiB rounded up."""
    amounts = {
        ending: _quantity_mib(keys[ending], notes[keys[ending]])
        for ending in (REQUEST, LIMIT)
        if ending in keys
    }
    if amounts.get(REQUEST, 0) > amounts.get(LIMIT, MOST):
        raise RequestError(
            f"{keys[REQUEST]} is {shown(notes[keys[REQUEST]])}, more than {keys[LIMIT]}, which is "
            f"{shown(notes[keys[LIMIT]])}"
        )
    return amounts.get(REQUEST, amounts.get(LIMIT))


def _quantity_mib(key: str, text: str) -> int:
    try:
        amount = parse_quantity(text) if text == text.strip() else None
    except RequestError:
        amount = None
    if amount is None or not MIB <= amount <= MOST:
        raise RequestError(
            f"{key} must be a Kubernetes quantity of bytes, 1Mi or more, such as 4Gi, got "
            f"{shown(text)}"
        )
    return -(-amount // MIB)


def _check_amount_beside(
    notes: Mapping[str, str], keys: Mapping[str, str], *, has_amount: bool
) -> None:
    if has_amount and (PORTION_LIMIT not in keys or FRACTION in notes):
        return
    alone = [key for key in (DEVICES, CONTAINER, MPS, POD_MODE) if key in notes]
    alone += [keys[ending] for ending in (CONTAINER_MODE, COMPUTE) if ending in keys]
    ways = f"{FRACTION}, {MEMORY} or {CONTAINER_PREFIX}NAME.{REQUEST}"
    if PORTION_LIMIT in keys:
        alone = [keys[PORTION_LIMIT]]
        ways = FRACTION
    if alone and not (alone == [MPS] and not parse_boolean(MPS, notes[MPS])):
        raise RequestError(
            f"{alone[0]} is {shown(notes[alone[0]])}, and the pod requests no part of a GPU that "
            f"it could apply to: write {ways} beside it"
        )


def _by_mps(notes: Mapping[str, str], keys: Mapping[str, str]) -> bool:
    modes = {key: notes[key] for key in (keys.get(CONTAINER_MODE, ""), POD_MODE) if key in notes}
    for key, mode in modes.items():
        check_choice(key, mode, (TIME_SLICING, SM_SHARING))
    if len(set(modes.values())) > 1:
        texts = " and ".join(f"{key} is {mode}" for key, mode in modes.items())
        raise RequestError(f"{texts}: write one of them")
    return SM_SHARING in modes.values() or parse_boolean(MPS, notes.get(MPS, ""))


def _unused_limits(
    notes: Mapping[str, str],
    keys: Mapping[str, str],
    fraction: Fraction | None,
    request_mib: int | None,
) -> Iterable[str]:
    if PORTION_LIMIT in keys:
        key = keys[PORTION_LIMIT]
        portion = parse_part(key, notes[key])
        digits = notes[key].partition(".")[2]
        if fraction is None or portion <= fraction or len(digits) > LONGEST_PORTION:
            raise RequestError(
                f"{key} must be above {FRACTION}, {shown(notes.get(FRACTION, ''))}, and below 1, "
                f"with at most {LONGEST_PORTION} digits after the point, got {shown(notes[key])}"
            )
        yield key
    if LIMIT in keys and REQUEST in keys:
        limit_mib = _quantity_mib(keys[LIMIT], notes[keys[LIMIT]])
        if request_mib is not None and limit_mib > request_mib:
            yield keys[LIMIT]
