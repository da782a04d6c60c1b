"""Every way of asking for a GPU that Leasehold understands: one file each, one table."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shared.dialects import strict_isolation
from shared.dialects.dialect import TRIGGER, ContainerAsks, Dialect, PodAsks, Rules
from shared.dialects.koordinator import dialect as koordinator
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.tencent import vcuda
from shared.dialects.volcano import gpushare, vgpu
from shared.model.errors import RequestError
from shared.model.names import OWN_SCHEDULER
from shared.model.quantity import check_amount
from shared.model.request import PodRequest

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        vgpu.DIALECT,
        gpushare.DIALECT,
        vcuda.DIALECT,
        nvidia.DIALECT,
        koordinator.DIALECT,
    )
}

_OWNERS: Mapping[str, tuple[str, ...]] = {
    resource: tuple(d.name for d in DIALECTS.values() if resource in d.resources)
    for resource in frozenset().union(*(d.resources for d in DIALECTS.values()))
}
"""The dialects that know a resource name, by the name."""

OWN_RESOURCES = frozenset({TRIGGER}).union(*(d.resources for d in DIALECTS.values()))
"""Resource names that some dialect knows."""

BOOKED_RESOURCES = OWN_RESOURCES.difference(*(d.summed for d in DIALECTS.values()))
"""Those that are no ordinary resources of a node: the ledger accounts for them by device."""


RESOURCE_PREFIXES = (
    "volcano.sh/",
    "koordinator.sh/",
    "kubernetes.io/gpu",
    "tencent.com/vcuda-",
    "nvidia.com/gpu",
    "leasehold.dev/",
)
"""Each of `OWN_RESOURCES` begins with one of these; other names may, too."""

SCHEDULERS = tuple(
    dict.fromkeys((OWN_SCHEDULER, *(d.scheduler for d in DIALECTS.values() if d.scheduler)))
)
"""`spec.schedulerName`s of pods that are placed by default: ours, and those of the vendors."""

READ_ANNOTATIONS = frozenset({strict_isolation.ISOLATION}).union(
    *(d.annotations for d in DIALECTS.values())
)
"""Annotations of a pod that change how its request is read."""

READ_LABELS = frozenset().union(*(d.labels for d in DIALECTS.values()))
"""Labels of a pod that change how its request is read."""


def cordoned_devices(annotations: Mapping[str, str]) -> tuple[int, ...]:
    """Return the indices of devices that a node's annotations cordon, in any dialect, ascending."""
    return tuple(
        sorted({i for dialect in DIALECTS.values() for i in dialect.cordoned(annotations)})
    )


def enabled(rules: Rules) -> Sequence[Dialect]:
    """Return the dialects spoken. Raises RequestError naming an unknown one."""
    for name in rules.enabled:
        if name not in DIALECTS:
            raise RequestError(f"there is no dialect {name!r}; there are {', '.join(DIALECTS)}")
    return [DIALECTS[n] for n in rules.enabled or DIALECTS if n not in rules.disabled]


def check_rules(rules: Rules) -> None:
    """Raise RequestError naming a setting that no dialect knows or accepts."""
    enabled(rules)
    for dialect in DIALECTS.values():
        dialect.check_rules(rules)


def read_pod(asks: PodAsks, rules: Rules) -> PodRequest:
    """Read what a pod asks for, in whichever dialect; no GPU asked for is a request without one.

    Raises RequestError, naming container, field, value and rule, for a malformed request, for one
    that mixes dialects, and for one in words that nobody here reads.
    """
    _check_mixed(asks)
    requests = [
        request for dialect in enabled(rules) if (request := dialect.read(asks, rules)) is not None
    ]
    if len(requests) > 1:
        raise _mixed(asks, [request.dialect for request in requests])
    request = requests[0] if requests else PodRequest()
    _check_silent(asks, rules, request)
    _check_amounts(request)
    if request.containers and strict_isolation.is_strict(asks, rules):
        request = strict_isolation.strictly(request)
    return replace(request, prefer_mig=True) if rules.instances_first else request


def _check_mixed(asks: PodAsks) -> None:
    """Refuse a pod that uses words of several dialects, whatever else may be wrong with it.

    Words that several dialects know prove nothing.
    """
    words = [word for asked in asks.containers for word in _named(asked)]
    owners = dict.fromkeys(_OWNERS[word][0] for word in words if len(_OWNERS[word]) == 1)
    if len(owners) > 1:
        raise _mixed(asks, owners)


def _mixed(asks: PodAsks, names: Collection[str]) -> RequestError:
    uses = ", ".join(_use(asks, DIALECTS[name].resources) for name in names)
    return RequestError(
        f"the pod mixes {' and '.join(names)}: {uses}; ask in one vocabulary for all its containers"
    )


def _use(asks: PodAsks, words: frozenset[str]) -> str:
    """Say where the pod uses one of the words, preferably one that no other dialect knows."""
    uses = [
        (len(_OWNERS[word]), place, word, asked.name)
        for place, asked in enumerate(asks.containers)
        for word in _named(asked)
        if word in words
    ]
    _, _, word, container = min(uses)
    return f"container {container} asks for {word}"


def _check_silent(asks: PodAsks, rules: Rules, request: PodRequest) -> None:
    """Refuse words that no dialect has read for this pod: nobody would ever serve them."""
    read = DIALECTS[request.dialect].resources if request.dialect else frozenset()
    spoken = {dialect.name for dialect in enabled(rules)}
    for asked in asks.containers:
        for resource in _named(asked):
            if resource in read:
                continue
            owners = _OWNERS[resource]
            silent = [name for name in owners if name not in spoken]
            if silent:
                fault = f"belongs to {' and '.join(silent)}, which is not enabled here"
            elif request.dialect:
                fault = f"is a word of {owners[0]}, and this pod is read as {request.dialect}"
            else:
                fault = f"means nothing in pods for the scheduler {asks.scheduler!r}"
            raise RequestError(f"container {asked.name}: {resource} {fault}")


def _check_amounts(request: PodRequest) -> None:
    """Refuse amounts that no ledger can count: a dialect's unit may have multiplied them."""
    for asked in request.containers:
        for name, amount in (
            ("GPUs", asked.gpus),
            ("units of memory", asked.memory_units or 0),
            ("bytes of memory", asked.memory_bytes or 0),
        ):
            check_amount(f"container {asked.container}: {name}", amount)


def _named(asked: ContainerAsks) -> list[str]:
    """Return the dialects' resources of which a container asks for some, sorted."""
    amounts = {**asked.requests, **asked.limits}
    return sorted(name for name, amount in amounts.items() if amount > 0 and name in _OWNERS)
