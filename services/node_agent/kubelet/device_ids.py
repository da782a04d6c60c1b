"""Device IDs of a device-plugin list: which device each names, and many of them as runs; pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from shared.dialects.advertised import PluginDeviceId, numbered_id
from shared.model.errors import RequestError
from shared.model.lease import Share
from shared.model.names import DeviceUuid

IdsOf = Callable[[Share], int]
"""How many IDs a share takes in its dialect: `Dialect.ids_of`."""

MAX_PLAIN = 64
"""More IDs than this are recorded as runs."""


def compact(ids: Iterable[str]) -> tuple[str, ...]:
    """Return IDs sorted; many that end in a number (base 36) as runs, `0-1..0-rs`.

    Two sets of IDs are equal if what this returns for them is.
    """
    plain = tuple(sorted(ids))
    if len(plain) <= MAX_PLAIN:
        return plain
    numbers: dict[str, dict[int, str]] = {}
    for text in plain:
        head, _, tail = text.replace("::", "-").rpartition("-")
        try:
            numbers.setdefault(head, {})[int(tail, 36)] = text
        except ValueError:
            return plain
    return tuple(run for named in numbers.values() for run in _runs(named))


def _runs(named: Mapping[int, str]) -> Iterable[str]:
    order = sorted(named)
    start = order[0]
    for number, following in zip(order, [*order[1:], None], strict=True):
        if following != number + 1:
            first, last = named[start], named[number]
            yield first if first == last else f"{first}..{last}"
            start = following if following is not None else start


def devices_named(
    ids: Iterable[str], served: Mapping[str, PluginDeviceId]
) -> Counter[DeviceUuid | None]:
    """Count IDs by device; None counts those that stand for any.

    Raises RequestError naming an ID that is not served.
    """
    devices: Counter[DeviceUuid | None] = Counter()
    for text in ids:
        entry = served.get(text)
        if entry is None:
            raise RequestError(f"device ID {text} is not one that this node serves")
        devices[entry.device] += 1
    return devices


def wanted_counts(shares: Iterable[Share], ids_of: IdsOf) -> Counter[DeviceUuid]:
    """Return how many IDs of each device a container's shares take."""
    counts: Counter[DeviceUuid] = Counter()
    for share in shares:
        counts[share.device] += ids_of(share)
    return counts


def preferred_ids(
    shares: Sequence[Share],
    served: Mapping[str, PluginDeviceId],
    ids_of: IdsOf,
    *,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> list[str]:
    """Choose the IDs of a container's shares: the leased slots if free, else others of the device.

    Where a share takes many, the lowest numbers are taken first, so that many IDs make few runs.
    Returns exactly `size` IDs with `must_include` among them, or none at all if that cannot be.
    """
    wanted: Counter[DeviceUuid | None] = Counter(wanted_counts(shares, ids_of))
    wanted.subtract(served[text].device for text in must_include if text in served)
    free = set(available).intersection(served)
    leased = [numbered_id(share.device, share.slot) for share in shares if share.slot is not None]
    chosen = dict.fromkeys(must_include)
    for text in (*leased, *served):
        if len(chosen) >= size:
            break
        if text in chosen or text not in free:
            continue
        device = served[text].device
        if device is not None:
            if wanted[device] <= 0:
                continue
            wanted[device] -= 1
        chosen[text] = None
    return list(chosen) if len(chosen) == size else []
