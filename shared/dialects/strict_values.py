"""Values of annotations and labels, parsed strictly; pure.

Every function raises RequestError with the key, the value and what is allowed.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import Any

from shared.dialects.closest import closest
from shared.model.bounds import MOST_SHARES, SHORT
from shared.model.bounds import NAME as LONGEST_NAME
from shared.model.change import Change, Place, limit
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.quantity import amount_text


def load_json(text: str) -> Any:
    """Decode JSON. Raises ValueError, also for a repeated key."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} is there twice")
        values[key] = value
    return values


SHOWN = 100
"""Characters of a value that messages show."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_DURATION = re.compile(r"(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|ms|s|m|h))+")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_EXACT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_BOOLEANS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "t", "T", "true", "True", "TRUE"), True),
    **dict.fromkeys(("", "0", "f", "F", "false", "False", "FALSE"), False),
}


def check_range(
    container: str, name: str, amount: int | None, least: int, most: int | None = None
) -> None:
    """None is not requested."""
    if amount is None or (amount >= least and (most is None or amount <= most)):
        return
    where = f"container {container}"
    if most is None or amount < least:
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise RequestError(f"{where}: {name} must be {allowed}, got {amount}")
    raise RequestError(
        f"{where}: {name} must be {least} to {most}, got {amount}: write {most}",
        limit(container, name, most),
    )


USUAL_GPUS = 8
"""Of a large node."""


def check_gpus(container: str, name: str, gpus: int, *, unit: int = 1) -> None:
    """`unit` is how many units one GPU is."""
    if gpus > MOST_SHARES:
        raise RequestError(
            f"container {container}: {name} requests {gpus} GPUs; at most {MOST_SHARES} are "
            f"allowed, and all are those of one node: write {USUAL_GPUS * unit} for {USUAL_GPUS}",
            limit(container, name, USUAL_GPUS * unit),
        )


MORE_THAN_A_GPU = MIB
"""In MiB, or in larger units: such a number is one of bytes."""


def check_not_bytes(container: str, name: str, amount: int, *, unit_mib: int = 1) -> None:
    """Refuse bytes, such as 3Gi, where the resource is a number of larger units."""
    if amount >= MORE_THAN_A_GPU:
        unit = "MiB, unless an administrator has set another unit"
        if unit_mib > 1:
            unit = f"blocks of {unit_mib} MiB"
        more = "; no GPU has so much" if amount >= MORE_THAN_A_GPU * MIB else ""
        units = -(-amount // (unit_mib * MIB))
        written = amount_text("memory", amount)
        if "." in written and amount % MIB == 0:
            written = f"{amount // MIB}Mi"
        raise RequestError(
            f"container {container}: {name} is a number of {unit}: for {written} write "
            f"{units}{more}",
            limit(container, name, units),
        )


def parse_whole_number(key: str, text: str, *, least: int, most: int) -> int:
    """Parse a whole number within bounds.

    >>> parse_whole_number("slots", "8", least=1, most=100)
    8
    """
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise _refused(key, text, f"a whole number from {least} to {most}")
    return int(text)


def parse_decimal(key: str, text: str, *, most: int) -> float:
    """Parse a number from 0, perhaps with a fraction."""
    if not _DECIMAL.fullmatch(text) or float(text) > most:
        raise _refused(key, text, f"a number from 0 to {most}")
    return float(text)


def parse_part(key: str, text: str, *, may_be_all: bool = False) -> Fraction:
    """With `may_be_all`, 1 is allowed, too.

    >>> parse_part("part", ".25")
    Fraction(1, 4)
    """
    is_number = len(text) <= SHORT and _EXACT.fullmatch(text)
    part = Fraction(text) if is_number else Fraction(0)
    if not (0 < part < 1 or (may_be_all and part == 1)):
        end = "at most" if may_be_all else "below"
        raise _refused(key, text, f"a decimal number above 0 and {end} 1, such as 0.5")
    return part


def parse_boolean(key: str, text: str) -> bool:
    """Parse as Go does; an empty text is false."""
    if text.strip() not in _BOOLEANS:
        meant = "true" if text.strip().lower() in _YES else "false"
        refused = _refused(key, text, "true or false")
        raise RequestError(f"{refused}: write {meant}", Change(Place.ANNOTATION, key, meant))
    return _BOOLEANS[text.strip()]


def check_duration(key: str, text: str) -> None:
    if len(text) > SHORT or not _DURATION.fullmatch(text):
        raise _refused(key, text, "a duration such as 90s or 1h30m")


_YES = frozenset({"yes", "y", "on", "enable", "enabled", "true"})


def check_choice(key: str, text: str, choices: Collection[str]) -> None:
    if text not in choices:
        few = len(choices) < 3
        raise _refused(key, text, " or ".join(choices) if few else f"one of {', '.join(choices)}")


def check_annotation(key: str, text: str, choices: Collection[str], written: str = "") -> None:
    """`written` is the whole value."""
    try:
        check_choice(key, text, choices)
    except RequestError as refused:
        near = closest(text.lower(), choices, cutoff=0.5)
        meant = (written or text).replace(text, near) if near else ""
        way = f"write {meant}" if meant else "leave it out for the default"
        raise RequestError(f"{refused}: {way}", Change(Place.ANNOTATION, key, meant)) from refused


def parse_name(key: str, text: str) -> str:
    if len(text) > LONGEST_NAME or not _NAME.fullmatch(text):
        allowed = f"a name of at most {LONGEST_NAME} small letters, digits, '-' and '.'"
        raise _refused(key, text, allowed)
    return text


def parse_label_key(key: str, text: str) -> str:
    """Parse a name, with a DNS prefix or without.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/
    """
    prefix, slash, name = text.rpartition("/")
    is_prefix = not slash or (len(prefix) <= LONGEST_NAME and _NAME.fullmatch(prefix))
    if not is_prefix or not _LABEL_NAME.fullmatch(name):
        raise _refused(key, text, "the key of a label of nodes")
    return text


def parse_object(key: str, text: str | None, fields: Collection[str] = ()) -> Mapping[str, Any]:
    """Allow any field if there are no `fields`; None is an empty object."""
    if not text:
        return {}
    read = _json(key, text)
    if read is not None and not isinstance(read, dict):
        raise _refused(key, text, "a JSON object")
    check_fields(key, read or {}, fields)
    return read or {}


def parse_list(key: str, text: str) -> tuple[str, ...]:
    read = _json(key, text)
    if not isinstance(read, list) or not all(isinstance(item, str) for item in read):
        raise _refused(key, text, "a JSON list of texts")
    return tuple(read)


def check_fields(key: str, names: Mapping[str, object], fields: Collection[str]) -> None:
    unknown = sorted(names.keys() - set(fields)) if fields else []
    if unknown:
        raise RequestError(
            f"{key} has the field {shown(unknown[0])}: it may have {', '.join(fields)}"
        )


def _json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{key} is not JSON: {error}") from error


def _refused(key: str, text: str, allowed: str) -> RequestError:
    return RequestError(f"{key} must be {allowed}, got {shown(text)}")


def shown(text: str) -> str:
    more = f"... with {len(text)} characters" if len(text) > SHOWN else ""
    return f"{text[:SHOWN]!r}{more}"
