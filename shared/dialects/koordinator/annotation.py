"""`scheduling.koordinator.sh/device-allocated`: a pod's devices in Koordinator's format; pure.

Nothing is placed or served by it; the audit reports when it was changed.
"""

import json
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct, field, structs

from shared.dialects.koordinator.requests import CORE, DEPRECATED, FULL, MEMORY, PREFIX, RATIO
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import MIB, Lease, RequestedUnits, Share
from shared.model.quantity import parse_count

ALLOCATED = "scheduling.koordinator.sh/device-allocated"

BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


class AllocatedGpu(Struct, frozen=True, kw_only=True):
    minor: int
    uuid: str = field(name="id", default="")
    """Empty if its writer does not know it."""
    resources: Mapping[str, int | float | str] | None = None
    """None if they are unknown."""


class _Allocated(Struct, frozen=True):
    gpu: tuple[AllocatedGpu, ...] | None = None


def encode_allocated(lease: Lease) -> str:
    """Encode compact JSON in the order of choice.

    A GPU that an init container uses before another is one entry with the larger share. Raises
    RequestError for a share without its requested terms.
    """
    gpus: dict[str, Share] = {}
    for share in lease.shares:
        other = gpus.get(share.device)
        if other is None or other.memory_mib < share.memory_mib:
            gpus[share.device] = share
    entries = [
        {"minor": share.index, "resources": resources_of(share), "id": share.device}
        for share in gpus.values()
    ]
    return json.dumps({"gpu": entries}, separators=(",", ":"))


def resources_of(share: Share) -> dict[str, str]:
    """Return the requested amount and the derived one.

    Bytes from a ratio are exact, although the share is in whole MiB; a ratio from bytes is
    truncated.
    """
    terms = share.requested_units
    if terms is None:
        raise RequestError(f"the share of device {share.device} has no requested terms")
    memory_bytes, ratio = _memory(share, terms)
    core = {PREFIX + CORE: decimal_text(share.cores_percent)} if share.cores_percent else {}
    return core | {
        PREFIX + MEMORY: binary_text(memory_bytes),
        PREFIX + RATIO: decimal_text(ratio),
    }


def _memory(share: Share, terms: RequestedUnits) -> tuple[int, int]:
    total = share.device_mib * MIB
    if share.whole:
        return total, FULL
    if terms.memory_bytes is not None:
        return terms.memory_bytes, ratio_of(terms.memory_bytes, total)
    ratio = terms.memory_percent if terms.memory_percent is not None else FULL
    return ratio * total // 100, ratio


def ratio_of(memory_bytes: int, total_bytes: int) -> int:
    """Truncate after a floating-point division, as Koordinator does.

    >>> ratio_of(29, 100)
    28
    """
    return int(memory_bytes / total_bytes * 100)


def binary_text(number: int) -> str:
    """Use the largest binary suffix that leaves no remainder.

    >>> binary_text(8 << 30)
    '8Gi'
    """
    return _text(number, 1024, BINARY)


def decimal_text(number: int) -> str:
    """Use the largest decimal suffix that leaves no remainder.

    >>> decimal_text(1500)
    '1500'
    """
    return _text(number, 1000, DECIMAL)


def _text(number: int, base: int, suffixes: Iterable[str]) -> str:
    *smaller, last = suffixes
    for suffix in smaller:
        if number == 0 or number % base:
            return f"{number}{suffix}"
        number //= base
    return f"{number}{last}"


def difference(lease: Lease, annotations: Mapping[str, str]) -> str:
    try:
        listed = parse_allocated(annotations.get(ALLOCATED, "{}"))
    except RequestError as error:
        return str(error)
    if listed == parse_allocated(encode_allocated(lease)):
        return ""
    gpus = ", ".join(f"GPU {gpu.minor} ({gpu.uuid})" for gpu in listed) or "no GPU"
    return f"{ALLOCATED} lists {gpus} instead of the lease's devices: {encode_allocated(lease)}"


def parse_allocated(text: str) -> tuple[AllocatedGpu, ...]:
    """Parse the GPUs of an annotation from any writer. Raises RequestError.

    Unknown keys are ignored, and names before Koordinator 1.0 are read.
    """
    try:
        listed = msgspec.json.decode(text, type=_Allocated).gpu or ()
    except UNDECODABLE as error:
        raise RequestError(f"{ALLOCATED} is malformed: {error!r}") from error
    return tuple(
        structs.replace(gpu, resources=gpu.resources and _current(gpu.resources)) for gpu in listed
    )


def _current(resources: Mapping[str, int | float | str]) -> dict[str, int | float | str]:
    amounts = ((name, parse_count(amount)) for name, amount in resources.items())
    return {
        name.replace(DEPRECATED, PREFIX, 1) if name.startswith(DEPRECATED) else name: amount
        for name, amount in amounts
    }
