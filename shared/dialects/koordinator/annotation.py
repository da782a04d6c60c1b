"""`scheduling.koordinator.sh/device-allocated`: what a pod was given, in Koordinator's own text.

A view for people, for koordlet's metrics and for whatever else reads Koordinator's annotations. It
is written from the lease and grants nothing: no part of Leasehold that places pods or serves
kubelets reads it. Only the audit does, to tell whether somebody changed it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.dialects.koordinator.amounts import CORE, DEPRECATED, FULL, MEMORY, PREFIX, RATIO
from shared.model.errors import RequestError
from shared.model.lease import MIB, Lease, Share, Terms
from shared.model.quantity import parse_count

ALLOCATED = "scheduling.koordinator.sh/device-allocated"

BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """One card of the annotation."""

    minor: int
    id: str = ""
    """The GPU's UUID; empty: the writer did not know it."""
    resources: Mapping[str, int] | None = None
    """By the names of today; None: unknown."""


def encode_allocated(lease: Lease) -> str:
    """Write a lease's cards as compact JSON, in the order in which they were chosen.

    A card that an init container uses before another container does is one entry: the larger one.
    Raises RequestError for a share that does not tell in which terms it was asked for.
    """
    cards: dict[str, Share] = {}
    for share in lease.shares:
        held = cards.get(share.device)
        if held is None or held.memory_mib < share.memory_mib:
            cards[share.device] = share
    entries = [
        {"minor": share.index, "resources": resources_of(share), "id": share.device}
        for share in cards.values()
    ]
    return json.dumps({"gpu": entries}, separators=(",", ":"))


def resources_of(share: Share) -> dict[str, str]:
    """Return a share's amounts as Koordinator writes them, the asked and the derived one.

    Bytes from a ratio are exact, whereas the share is booked in whole MiB, rounded down; a ratio
    from bytes is cut off the way Koordinator's scheduler does it. Compute that was not asked for is
    not named.
    """
    terms = share.terms
    if terms is None:
        raise RequestError(f"the share of device {share.device} does not tell its terms")
    memory_bytes, ratio = _memory(share, terms)
    core = {PREFIX + CORE: decimal_text(share.cores_percent)} if share.cores_percent else {}
    return core | {
        PREFIX + MEMORY: binary_text(memory_bytes),
        PREFIX + RATIO: decimal_text(ratio),
    }


def _memory(share: Share, terms: Terms) -> tuple[int, int]:
    total = terms.device_mib * MIB
    if share.whole:
        return total, FULL
    if terms.memory_bytes is not None:
        return terms.memory_bytes, ratio_of(terms.memory_bytes, total)
    ratio = terms.memory_percent if terms.memory_percent is not None else FULL
    return ratio * total // 100, ratio


def ratio_of(memory_bytes: int, total_bytes: int) -> int:
    """Return bytes as percent, cut off after a division of floats.

    So 29 % of a card comes out as 28, as it does in Koordinator's annotations.
    """
    return int(memory_bytes / total_bytes * 100)


def binary_text(number: int) -> str:
    """Write a whole number with the largest binary suffix that leaves no rest."""
    return _text(number, 1024, BINARY)


def decimal_text(number: int) -> str:
    """Write a whole number with the largest decimal suffix that leaves no rest."""
    return _text(number, 1000, DECIMAL)


def _text(number: int, base: int, suffixes: Iterable[str]) -> str:
    *smaller, last = suffixes
    for suffix in smaller:
        if number == 0 or number % base:
            return f"{number}{suffix}"
        number //= base
    return f"{number}{last}"


def difference(lease: Lease, annotations: Mapping[str, str]) -> str:
    """Say what a bound pod's annotation claims otherwise than its lease; empty: nothing."""
    try:
        claimed = parse_allocated(annotations.get(ALLOCATED, "{}"))
    except RequestError as error:
        return str(error)
    if claimed == parse_allocated(encode_allocated(lease)):
        return ""
    cards = ", ".join(f"GPU {card.minor} ({card.id})" for card in claimed) or "no GPU"
    return f"{ALLOCATED} claims {cards} and not what the lease says: {encode_allocated(lease)}"


def parse_allocated(text: str) -> tuple[Allocated, ...]:
    """Read the GPUs of an annotation, whoever wrote it; unknown keys are ignored.

    Amounts may be numbers or quantities, resource names those of before Koordinator 1.0. Raises
    RequestError if the text is none.
    """
    try:
        entries = json.loads(text).get("gpu") or []
        return tuple(_entry(entry) for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{ALLOCATED} is none: {error!r}") from error


def _entry(entry: Mapping[str, Any]) -> Allocated:
    resources = entry.get("resources")
    return Allocated(
        minor=int(entry["minor"]),
        id=str(entry.get("id", "")),
        resources=None
        if resources is None
        else {
            key.replace(DEPRECATED, PREFIX, 1) if key.startswith(DEPRECATED) else key: parse_count(
                amount
            )
            for key, amount in resources.items()
        },
    )
