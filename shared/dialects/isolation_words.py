"""The annotation by which a pod or namespace demands an isolation; pure."""

import re
from collections.abc import Mapping

import msgspec

from shared.dialects.closest import MOST_COMPARED, closest
from shared.dialects.dialect import list_entries
from shared.model.change import Change, Place
from shared.model.devices.enforcers import (
    BESIDE_MPS,
    COMPUTE_ENFORCERS,
    LABELS,
    MEMORY_ENFORCERS,
    MPS,
    NO_DEMAND,
    HeldBy,
)
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.names import ISOLATION

STRICT = "strict"
_OF_BOTH: Mapping[str, HeldBy] = {
    word: msgspec.convert(
        {
            **({"memory": word} if word in MEMORY_ENFORCERS else {}),
            **({"compute": word} if word in COMPUTE_ENFORCERS else {}),
        },
        HeldBy,
    )
    for word in LABELS
}
"""A word alone demands all that its enforcer can hold."""
_HOW = (
    f"write {STRICT}, or one of {', '.join(LABELS)}, or memory=WORD,compute=WORD with memory one "
    f"of {', '.join(MEMORY_ENFORCERS)} and compute one of {', '.join(COMPUTE_ENFORCERS)}"
)


def parse_isolation(text: str) -> HeldBy:
    """Return nothing for `strict`. Raises RequestError that says what to write instead.

    >>> parse_isolation("driver").memory
    'driver'
    >>> str(parse_isolation("memory=driver,compute=none"))
    'memory=driver,compute=none'
    """
    if text == STRICT:
        return NO_DEMAND
    if text in _OF_BOTH:
        return _OF_BOTH[text]
    words = dict(entry.split("=", 1) for entry in list_entries(text) if "=" in entry)
    try:
        demand = msgspec.convert(words, _Words)
    except UNDECODABLE as error:
        raise _unknown(text) from error
    if len(words) != len(list_entries(text)) or demand == _Words():
        raise _unknown(text)
    _check_together(demand)
    return HeldBy(memory=demand.memory, compute=demand.compute)


def isolation_word(demand: HeldBy) -> str:
    """Return what an author writes for a demand.

    >>> isolation_word(HeldBy(compute="time"))
    'time'
    """
    return next((word for word, held_by in _OF_BOTH.items() if held_by == demand), str(demand))


class _Words(HeldBy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only these two are demanded."""


def _unknown(text: str) -> RequestError:
    meant = _meant(text)
    way = f"did you mean {meant}? Otherwise {_HOW}" if meant else f"{_HOW}, or leave it out"
    return RequestError(
        f"annotation {ISOLATION} is {text[:64]!r}: {way}",
        Change(Place.ANNOTATION, ISOLATION, meant),
    )


_FIELDS = {"mem": "memory", "cores": "compute", "core": "compute", "gpucores": "compute"}
_PAIR = r"([a-z]+) *[=:] *([a-z_-]+)"


def _meant(text: str) -> str:
    """Return the value that was probably meant, or "".

    >>> _meant("memory:driver; cores=Time"), _meant("hami")
    ('memory=driver,compute=time', 'hami-core')
    """
    if len(text) > MOST_COMPARED:
        return ""
    small = text.lower()
    if not re.fullmatch(f"(?:{_PAIR}[,; ]*)+", small):
        return closest(small, (STRICT, *LABELS))
    words = {
        _FIELDS.get(name, name): closest(word, LABELS) for name, word in re.findall(_PAIR, small)
    }
    try:
        demand = msgspec.convert(words, _Words)
        _check_together(demand)
    except (*UNDECODABLE, RequestError):
        return ""
    return str(demand)


def _check_together(demand: HeldBy) -> None:
    for word in ("exclusive", "mig"):
        if word in (demand.memory, demand.compute) and demand.memory != demand.compute:
            raise RequestError(
                f"annotation {ISOLATION} is {demand}: {word} holds memory and cores: write {word}",
                Change(Place.ANNOTATION, ISOLATION, word),
            )
    memory = demand.memory
    compute = demand.compute
    if memory is not None and memory in MPS and compute not in {None, MPS[memory]}:
        raise RequestError(
            f"annotation {ISOLATION} is {demand}: where {LABELS[memory]} holds memory it holds the "
            f"cores: write {memory}",
            Change(Place.ANNOTATION, ISOLATION, memory),
        )
    if compute is not None and compute in BESIDE_MPS:
        beside = (*reversed(BESIDE_MPS[compute]), "none")
        if memory not in {None, *beside}:
            raise RequestError(
                f"annotation {ISOLATION} is {demand}: beside compute={compute} write memory= with "
                f"one of {', '.join(beside)}",
                Change(Place.ANNOTATION, ISOLATION, f"memory={beside[0]},compute={compute}"),
            )
