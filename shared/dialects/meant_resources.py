"""Which resource was meant by one that no system has; pure."""

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum, auto
from fractions import Fraction

from shared.dialects.dialect import ContainerManifest
from shared.dialects.koordinator import requests as koordinator
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.tencent import vcuda
from shared.dialects.volcano import gpushare, vgpu
from shared.dialects.volcano.device_register import NUMBER
from shared.model.change import Change, Hint, Place, limit
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_quantity


class Measure(Enum):
    GPUS = auto()
    MEMORY = auto()
    MEMORY_PERCENT = auto()
    CORES = auto()
    PRIORITY = auto()


_KOORDINATOR = {
    Measure.GPUS: koordinator.GPU,
    Measure.MEMORY: koordinator.MEMORY,
    Measure.MEMORY_PERCENT: koordinator.RATIO,
    Measure.CORES: koordinator.CORE,
}
FAMILIES: tuple[tuple[str, Mapping[Measure, str]], ...] = (
    ("volcano.sh/gpu", {Measure.GPUS: gpushare.NUMBER, Measure.MEMORY: gpushare.MEMORY}),
    (
        "volcano.sh/",
        {
            Measure.GPUS: NUMBER,
            Measure.MEMORY: vgpu.MEMORY,
            Measure.MEMORY_PERCENT: vgpu.PERCENTAGE,
            Measure.CORES: vgpu.CORES,
        },
    ),
    *(
        (prefix, {measure: f"{prefix}{name}" for measure, name in _KOORDINATOR.items()})
        for prefix in (koordinator.PREFIX, koordinator.DEPRECATED)
    ),
    (
        "tencent.com/",
        {Measure.GPUS: vcuda.CORE, Measure.CORES: vcuda.CORE, Measure.MEMORY: vcuda.MEMORY},
    ),
    (
        "",
        {
            Measure.GPUS: nvidia.COUNT,
            Measure.MEMORY: nvidia.MEMORY,
            Measure.MEMORY_PERCENT: nvidia.PERCENTAGE,
            Measure.CORES: nvidia.CORES,
            Measure.PRIORITY: nvidia.PRIORITY,
        },
    ),
)
"""Systems that Leasehold does not read come last."""
MEASURED: Mapping[str, Measure] = {
    **{name: measure for _, resources in FAMILIES for measure, name in resources.items()},
    koordinator.PREFIX + koordinator.SHARED: Measure.GPUS,
    nvidia.REPLICA: Measure.GPUS,
}
_MEMORY = (Measure.MEMORY, Measure.MEMORY_PERCENT)
_UNIT_MIB = {
    koordinator.PREFIX + koordinator.MEMORY: Fraction(1, MIB),
    koordinator.DEPRECATED + koordinator.MEMORY: Fraction(1, MIB),
    vcuda.MEMORY: Fraction(vcuda.BLOCK_MIB),
}
"""Of resources that are not a number of MiB."""
FOREIGN_GIB = 256
"""Less memory of a foreign system is a number of GiB: no CUDA program runs in so few MiB."""
_MIG = re.compile(r"nvidia\.com/mig[-_.]?(\d)g[-_.]?(\d+)gb.*", re.ASCII)
_OF_SIZE = re.compile(r"nvidia\.com/gpu-(\d{1,4})gb", re.ASCII)
"""Some operators of MPS name a part with so much memory so."""
ACCELERATORS = re.compile(
    r"gaudi|neuron|ascend|qaic|(?<![a-z])(?:tpu|mlu|dcu|gcu|vgcu|npu|xpu|ppu)(?![a-z])"
    r"|(?:mlu|dcu)num"
)
"""Of device plugins of other vendors."""
_OF_UNIT = re.compile(r"\.(\d{1,5})(mi|gi)", re.ASCII)
"""The amount is a number of such units."""
_FRACTION = re.compile(r"(\d{1,3})/([1-9]\d{0,2})", re.ASCII)
_SIZE = re.compile(
    r"(\d{1,9}|\d{1,3}(?:[,_]\d{3}){1,2}|\d{1,9}\.\d{1,9})\s*(?:([kmgt])(ib|i|b|))?", re.ASCII
)
"""As people write memory, in small letters."""
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SCALES_MIB = {
    scale + ending: Fraction((1000 if ending == "b" else 1024) ** power, MIB)
    for scale, power in _POWERS.items()
    for ending in ("b", "ib", "i", "")
}
"""Without `b` it is binary, as in Docker's and HAMi-core's settings."""
_MEASURES = (
    (("neuroncore",), (), Measure.GPUS),
    (("mem",), ("percent", "ratio"), Measure.MEMORY_PERCENT),
    (("mem",), (), Measure.MEMORY),
    (("core", "vcuda"), (), Measure.CORES),
    (("priority",), (), Measure.PRIORITY),
    (("percent", "ratio"), (), Measure.MEMORY_PERCENT),
    (("gpu", "cuda"), (), Measure.GPUS),
)
"""A name has a part of each of two lists; the first row counts."""
MOST_GPUS = 16
"""No node has more: a larger number is one of hundredths of a GPU."""
IN_HUNDREDTHS = frozenset(
    {
        koordinator.PREFIX + koordinator.GPU,
        koordinator.DEPRECATED + koordinator.GPU,
        vcuda.CORE,
    }
)
"""Names that do not say so."""


def meant_resource(name: str, amount: int, container: str = "") -> Hint | None:
    """Return None if the resource seems to be no GPU's.

    >>> meant_resource("nvidia.com/gpu-memory", 3000).text
    'nvidia.com/gpumem'
    >>> meant_resource("aliyun.com/gpu-mem", 3).text
    'nvidia.com/gpumem: 3072'
    """
    small = name.lower()
    removed = limit(container, name)
    if profile := _MIG.fullmatch(small):
        # A GB of a profile's name is at most one of 10^9 bytes of its instance.
        mib = int(profile[2]) * 10**9 // MIB
        added = (limit(container, nvidia.COUNT, amount), limit(container, nvidia.MEMORY, mib))
        mode = Change(Place.ANNOTATION, nvidia.MODE, "mig")
        text = f"{_listed(added)} and the annotation {nvidia.MODE}: mig"
        return Hint(text, (removed, *added, mode))
    if size := _OF_SIZE.fullmatch(small):
        part = (
            limit(container, nvidia.COUNT, amount),
            limit(container, nvidia.MEMORY, int(size[1]) * 10**9 // MIB),
        )
        return Hint(_listed(part), (removed, *part))
    measure = _measure(small)
    if measure is None:
        return None
    written = _text(amount)
    if measure is Measure.MEMORY and (unit := _OF_UNIT.search(small)):
        amount *= int(unit[1]) * (1024 if unit[2] == "gi" else 1)
    prefix, resource = _resource(small, measure)
    is_foreign = not prefix and not small.startswith("nvidia.com/")
    value = _value(resource, measure, amount, is_foreign=is_foreign)
    words = resource if value == written else f"{resource}: {value}"
    return Hint(words, (removed, limit(container, resource, value)))


def memory_mib(name: str, amount: int) -> int:
    """Return 0 if no memory was meant.

    >>> memory_mib("aliyun.com/gpu-mem", 3), memory_mib("habana.ai/gaudi", 1)
    (3072, 0)
    """
    instead = meant_resource(name, amount)
    if instead is None or instead.changes[-1].name != nvidia.MEMORY:
        return 0
    return int(parse_quantity(instead.changes[-1].value))


def _listed(changes: tuple[Change, ...]) -> str:
    return " and ".join(f"{change.name}: {change.value}" for change in changes)


def _measure(small: str) -> Measure | None:
    ending = small.rpartition("/")[2]
    for parts, beside, measure in _MEASURES:
        if any(part in ending for part in parts) and (
            not beside or any(part in ending for part in beside)
        ):
            return measure
    return Measure.GPUS if ACCELERATORS.search(ending) else None


def _resource(small: str, measure: Measure) -> tuple[str, str]:
    return next(
        (prefix, resources[measure])
        for prefix, resources in FAMILIES
        if small.startswith(prefix) and measure in resources
    )


def _value(resource: str, measure: Measure, amount: int, *, is_foreign: bool) -> str:
    if resource in IN_HUNDREDTHS and measure is Measure.GPUS and amount <= MOST_GPUS:
        return str(amount * 100)
    if is_foreign and measure is Measure.MEMORY:
        if amount >= MIB:
            return str(amount // MIB)
        return str(amount * 1024 if amount < FOREIGN_GIB else amount)
    return _text(amount)


def _text(amount: int) -> str:
    return f"{amount // MIB}Mi" if amount and amount % MIB == 0 else str(amount)


def meant_part(name: str, text: str, others: Collection[str], container: str = "") -> Hint | None:
    """Return how a part of a GPU is requested that was written as a fraction or with `%`.

    `others` are the container's other resources. Returns None for any other text.

    >>> meant_part("nvidia.com/gpu", "0.5", ()).text
    'for 50 % of a GPU write nvidia.com/gpu: 1 and nvidia.com/gpumem-percentage: 50'
    """
    measure = MEASURED.get(name, Measure.GPUS)
    number = _number(text)
    if number is None or number < 0:
        return _as_people_write(name, measure, text, container)
    if not number:
        return None
    percent = math.ceil(number * 100)
    if name == vcuda.MEMORY:
        blocks = limit(container, name, vcuda.BLOCKS_OF_4_GIB)
        return Hint(f"it is a number of blocks of 256 MiB, {blocks.value} for 4 GiB", (blocks,))
    if not text.endswith("%") and (number > 1 or measure is Measure.PRIORITY):
        rounded = limit(container, name, math.ceil(number))
        return Hint(f"write {rounded.value}", (rounded,))
    percent = min(percent, 100)
    changes = tuple(_part(name, measure, percent, others, container))
    written = tuple(change for change in changes if change.value)
    of = "a GPU" if measure is Measure.GPUS else "it"
    share = f"for {percent} % of {of} " if written[-1].value == str(percent) else ""
    return Hint(f"{share}write {_listed(written)}", changes)


def _number(text: str) -> Fraction | None:
    """Return a quantity, a percentage or a fraction such as `1/2`, or None."""
    with contextlib.suppress(RequestError):
        if fraction := _FRACTION.fullmatch(text):
            return Fraction(int(fraction[1]), int(fraction[2]))
        return parse_quantity(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return None


def _as_people_write(name: str, measure: Measure, text: str, container: str) -> Hint | None:
    size = _SIZE.fullmatch(text.lower())
    if measure is Measure.MEMORY and size is not None:
        digits, scale, binary = size.groups()
        number = Fraction(re.sub("[,_]", "", digits))
        mib = number * _SCALES_MIB[scale + binary] if scale else number
        units = math.ceil(mib / _UNIT_MIB.get(name, Fraction(1)))
        change = limit(container, name, _text(units))
        return Hint(f"write {change.value}", (change,))
    if measure is Measure.PRIORITY:
        high = limit(container, name, 0)
        return Hint("write 0 for high or 1 for low priority", (high,))
    change = more_than_none(name, container)
    what = "" if measure is not Measure.GPUS else ", for a whole GPU"
    return Hint(f"write a number, such as {change.value}{what}", (change,))


def _part(
    name: str, measure: Measure, percent: int, others: Collection[str], container: str
) -> Iterator[Change]:
    if name in IN_HUNDREDTHS or measure in {Measure.CORES, Measure.MEMORY_PERCENT}:
        yield limit(container, name, percent)
        return
    family = next(
        resources
        for prefix, resources in FAMILIES
        if name.startswith(prefix) and Measure.MEMORY_PERCENT in resources
    )
    count = family[Measure.GPUS]
    by_percent = family[Measure.MEMORY_PERCENT]
    if measure is Measure.MEMORY:
        yield limit(container, name)
        yield limit(container, by_percent, percent)
    elif any(MEASURED.get(other) in _MEMORY for other in others):
        yield limit(container, name, 1)
    else:
        if count != name:
            yield limit(container, name)
        if count in IN_HUNDREDTHS:
            yield limit(container, count, percent)
        else:
            yield limit(container, count, 1)
            yield limit(container, by_percent, percent)


def translated(container: ContainerManifest, own: Collection[str]) -> Iterator[Change]:
    """Request the same by the resources of one system."""
    amounts = {name: amount for name, amount in container.amounts.items() if amount}
    family = next(
        resources for _, resources in FAMILIES if not set(own).isdisjoint(resources.values())
    )
    for name in sorted((amounts.keys() & MEASURED.keys()).difference(own)):
        yield limit(container.name, name)
        measure = MEASURED[name]
        resource = family.get(measure, "")
        if resource == koordinator.PREFIX + koordinator.GPU:
            resource = koordinator.PREFIX + koordinator.SHARED
        if resource and resource not in amounts:
            yield limit(container.name, resource, _converted(name, amounts[name], resource))


def _converted(name: str, amount: int, resource: str) -> str:
    if MEASURED[name] is Measure.MEMORY:
        mib = amount * _UNIT_MIB.get(name, Fraction(1))
        units = math.ceil(mib / _UNIT_MIB.get(resource, Fraction(1)))
        return _text(units) if resource in _UNIT_MIB else str(units)
    return str(amount * vcuda.WHOLE if resource == vcuda.CORE != name else amount)


def more_than_none(name: str, container: str) -> Change:
    """Change a resource that is requested with 0 to one GPU, or 4 GiB of one."""
    if MEASURED.get(name) is Measure.MEMORY:
        return limit(container, name, _text(math.ceil(4096 / _UNIT_MIB.get(name, Fraction(1)))))
    hundredths = name in IN_HUNDREDTHS or MEASURED.get(name) is not Measure.GPUS
    return limit(container, name, 100 if hundredths else 1)
