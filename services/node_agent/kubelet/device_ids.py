"""Device IDs of a device-plugin list; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from shared.dialects.advertised import PluginDeviceId
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid

MAX_PLAIN = 64


def compact(ids: Iterable[str]) -> tuple[str, ...]:
    """Many IDs that end in a number (base 36) become runs, `0-1..0-rs`.

    Two sets of IDs are equal if their results are.
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
    """None is any device. Raises RequestError for an ID that is not served."""
    devices: Counter[DeviceUuid | None] = Counter()
    for text in ids:
        entry = served.get(text)
        if entry is None:
            raise RequestError(f"device ID {text} is not one that this node serves")
        devices[entry.device] += 1
    return devices
