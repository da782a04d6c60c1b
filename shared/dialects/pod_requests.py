"""A pod's GPU request in any dialect: parsed, checked, and completed; pure."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import structs

from shared.dialects import DIALECTS, REQUEST_ANNOTATIONS, REQUEST_LABELS, pod_groups
from shared.dialects.advertised import TRIGGER
from shared.dialects.demanded_enforcers import demanding, whole_gpus
from shared.dialects.dialect import ContainerManifest, Dialect, PodManifest, Rules
from shared.dialects.isolation_words import STRICT, parse_isolation
from shared.dialects.meant_resources import translated
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.strict_values import check_range, shown
from shared.model.bounds import (
    HIGHEST_INDEX,
    MOST_CONTAINERS,
    MOST_ENTRIES,
    MOST_SHARES,
    MOST_WITH_GPUS,
    check_bounds,
    check_size,
    check_text,
)
from shared.model.change import limit, words
from shared.model.denial import Denial
from shared.model.devices.node import CORDONED, DEVICE_CORDON_PREFIX
from shared.model.errors import RequestError
from shared.model.names import ISOLATION
from shared.model.quantity import check_amount, parse_decimal
from shared.model.requests.request import (
    DeviceOrder,
    GpuRequest,
    NodeOrder,
    PodRequest,
    SharingPolicy,
)

_OWNERS: Mapping[str, tuple[str, ...]] = {
    resource: tuple(d.name for d in DIALECTS.values() if resource in d.resources)
    for resource in frozenset().union(*(d.resources for d in DIALECTS.values()))
}
ALL_NAMESPACES = "*"
MOST_REASON = 200
"""Characters of the reason for which a device is cordoned."""
_READ_ANNOTATIONS = REQUEST_ANNOTATIONS | pod_groups.READ_ANNOTATIONS
_READ_LABELS = REQUEST_LABELS | pod_groups.READ_LABELS


def enabled(rules: Rules) -> Sequence[Dialect]:
    """Raise RequestError naming an unknown dialect."""
    for name in rules.enabled:
        if name not in DIALECTS:
            raise RequestError(f"there is no system {name!r}; there are {', '.join(DIALECTS)}")
    return [DIALECTS[n] for n in rules.enabled or DIALECTS if n not in rules.disabled]


def check_rules(rules: Rules) -> None:
    """Raise RequestError naming a setting that some dialect does not accept."""
    enabled(rules)
    for dialect in DIALECTS.values():
        dialect.check_rules(rules)


def parse_pod_request(pod: PodManifest, rules: Rules) -> PodRequest:
    """Parse a pod's request in whatever dialect; a pod without GPUs has an empty request.

    Raises RequestError, naming container, field, value and rule, for a malformed, mixed, unread or
    too large request.

    >>> container = ContainerManifest(name="train", limits={"nvidia.com/gpu": 1})
    >>> request = parse_pod_request(PodManifest(namespace="ml", containers=(container,)), Rules())
    >>> request.dialect, request.containers[0].whole
    ('nvidia', True)
    """
    _check_sizes(pod)
    _check_signs(pod)
    _check_mixed(pod)
    requests = [
        request for dialect in enabled(rules) if (request := dialect.parse(pod, rules)) is not None
    ]
    if len(requests) > 1:
        raise _mixed_error(pod, [request.dialect for request in requests])
    request = requests[0] if requests else PodRequest()
    _check_unread(pod, rules, request)
    _check_trigger(pod, request)
    _check_amounts(request)
    _check_shares(request)
    if request.containers:
        request = demanding(request, parse_isolation(pod.annotations.get(ISOLATION, STRICT)))
        if is_strict(pod, rules):
            request = strict_request(request)
    order = NodeOrder(rules.node_scheduler_policy)
    if order.compares and request.dialect != nvidia.NAME:
        request = structs.replace(request, node_order=order, device_order=DeviceOrder.BINPACK)
    if rules.prefer_mig:
        request = structs.replace(request, prefer_mig=True)
    check_bounds(request, "the request for GPUs")
    return request


def is_strict(pod: PodManifest, rules: Rules) -> bool:
    return pod.annotations.get(ISOLATION) == STRICT or not {
        pod.namespace,
        ALL_NAMESPACES,
    }.isdisjoint(rules.strict_namespaces)


def strict_request(request: PodRequest) -> PodRequest:
    """All memory of a device becomes the whole device.

    Raises RequestError for a part of a device that cannot be a MIG instance.
    """
    containers = tuple(_strict_container(container) for container in request.containers)
    parts = [
        container for container in containers if container.sharing is not SharingPolicy.EXCLUSIVE
    ]
    instances = all(container.mig_allowed and not container.whole for container in containers)
    if parts and not (instances and request.selection.mode in {None, "mig"}):
        whole = tuple(change for part in parts for change in whole_gpus(request, part))
        instead = f": {words(whole)}" if whole else ""
        raise RequestError(
            f"container {parts[0].container} requests a part of a GPU, and the pod's isolation "
            f"is {STRICT}: request whole GPUs{instead}; or memory by resource names for "
            "which MIG instances are possible, in all containers and without another mode",
            *whole,
        )
    return structs.replace(request, containers=containers)


def _strict_container(container: GpuRequest) -> GpuRequest:
    alone = container.wants_all_memory or container.sharing is SharingPolicy.EXCLUSIVE
    return structs.replace(
        container, strict=True, sharing=SharingPolicy.EXCLUSIVE if alone else container.sharing
    )


def _check_sizes(pod: PodManifest) -> None:
    """Refuse a pod whose lease, or record while it waits, would be too large."""
    for path, size in pod.field_bytes.items():
        check_size(path, size)
    for kind, values, keys in (
        ("annotation", pod.annotations, _READ_ANNOTATIONS),
        ("label", pod.labels, _READ_LABELS),
    ):
        for key in keys & values.keys():
            check_text(f"{kind} {key}", values[key])
    names = {
        name for container in pod.containers for name in (*container.limits, *container.requests)
    }
    if len(names) > MOST_ENTRIES:
        raise RequestError(
            f"the pod names {len(names)} different resources; at most {MOST_ENTRIES} are allowed"
        )
    requesting = [container for container in pod.containers if _requested(container)]
    if requesting and len(pod.containers) > MOST_CONTAINERS:
        raise RequestError(
            f"the pod requests GPUs and has {len(pod.containers)} containers; at most "
            f"{MOST_CONTAINERS} are allowed"
        )
    if len(requesting) > MOST_WITH_GPUS:
        raise RequestError(
            f"{len(requesting)} containers of the pod request GPUs; at most {MOST_WITH_GPUS} are "
            "allowed"
        )


def _check_signs(pod: PodManifest) -> None:
    """The API server admits pods before it validates them."""
    for container in pod.containers:
        for name in sorted(container.amounts.keys() & _OWNERS.keys()):
            check_range(container.name, name, container.amounts[name], 0)


def _check_shares(request: PodRequest) -> None:
    shares = sum(container.gpus for container in request.containers)
    if shares > MOST_SHARES:
        raise RequestError(
            f"the pod requests {shares} GPUs or shares of GPUs in all its containers; at most "
            f"{MOST_SHARES} are allowed"
        )


def _check_mixed(pod: PodManifest) -> None:
    """Refuse a pod of whose resources no dialect has all."""
    resources = [resource for container in pod.containers for resource in _requested(container)]
    owners = [_OWNERS[resource] for resource in resources]
    if owners and not frozenset(owners[0]).intersection(*owners):
        raise _mixed_error(pod, dict.fromkeys(names[0] for names in owners))


def _mixed_error(pod: PodManifest, names: Collection[str]) -> RequestError:
    uses = ", ".join(_example(pod, DIALECTS[name]) for name in names)
    text = (
        f"the pod mixes {' and '.join(names)}: {uses}; use the words of one system in all its "
        "containers"
    )
    counts = Counter(
        _OWNERS[resource][0] for container in pod.containers for resource in _requested(container)
    )
    own = max(names, key=lambda name: (not DIALECTS[name].resources, counts[name]))
    resources = {resource for resource, owners in _OWNERS.items() if owners[0] == own}
    changes = [
        change
        for container in pod.containers
        for change in (
            translated(container, resources)
            if resources
            else [limit(container.name, resource) for resource in _requested(container)]
        )
    ]
    return RequestError(f"{text}, such as {own}: {words(changes)}", *changes)


def _example(pod: PodManifest, dialect: Dialect) -> str:
    """Prefer a resource that only this dialect has."""
    if not dialect.resources:
        key = min(annotations_of(pod, dialect))
        return f"annotation {key} is {shown(pod.annotations[key])}"
    uses = [
        (len(_OWNERS[resource]), place, resource, container.name)
        for place, container in enumerate(pod.containers)
        for resource in _requested(container)
        if resource in dialect.resources
    ]
    _, _, resource, container = min(uses)
    return f"container {container} requests {resource}"


def _check_unread(pod: PodManifest, rules: Rules, request: PodRequest) -> None:
    """Refuse resources that no dialect has read for this pod: nothing would serve them."""
    own = DIALECTS[request.dialect] if request.dialect else None
    read = frozenset() if own is None else own.resources
    enabled_names = {dialect.name for dialect in enabled(rules)}
    for dialect in DIALECTS.values():
        if dialect.name not in enabled_names and dialect.read_for == pod.scheduler != "":
            for key in annotations_of(pod, dialect):
                raise RequestError(
                    f"annotation {key} belongs to {dialect.name}, which is not enabled here"
                )
    for container in pod.containers:
        for resource in _requested(container):
            if resource in read:
                continue
            owners = _OWNERS[resource]
            disabled = [name for name in owners if name not in enabled_names]
            if disabled:
                fault = f"belongs to {' and '.join(disabled)}, which is not enabled here"
            elif own is not None:
                fault = (
                    f"belongs to {owners[0]}, and {_example(pod, own)}, which belongs to "
                    f"{request.dialect} in pods for the scheduler {pod.scheduler!r}"
                )
            else:
                fault = f"has no meaning in pods for the scheduler {pod.scheduler!r}"
            raise RequestError(f"container {container.name}: {resource} {fault}")


def _check_trigger(pod: PodManifest, request: PodRequest) -> None:
    """Refuse our own resource where its author wrote it: admission adds it."""
    for container in () if request.containers else pod.containers:
        if container.amounts.get(TRIGGER):
            count = limit(container.name, nvidia.COUNT, container.amounts[TRIGGER])
            raise RequestError(
                f"container {container.name}: {TRIGGER} is written by admission only, for "
                f"annotations that request GPUs: write {count.name}: {count.value} instead",
                limit(container.name, TRIGGER),
                count,
            )


def _check_amounts(request: PodRequest) -> None:
    """Refuse amounts too large to count, also after multiplication by a dialect's unit."""
    for container in request.containers:
        for name, amount in (
            ("GPUs", container.gpus),
            ("units of memory", container.memory_units or 0),
            ("bytes of memory", container.memory_bytes or 0),
        ):
            check_amount(f"container {container.container}: {name}", amount)


def _requested(container: ContainerManifest) -> list[str]:
    amounts = container.amounts.items()
    return sorted(name for name, amount in amounts if amount > 0 and name in _OWNERS)


def amount_changes(amounts: Mapping[str, int]) -> dict[str, int | None]:
    """None removes an amount.

    >>> amount_changes({"nvidia.com/gpumem": 3000})
    {'nvidia.com/gpu': 1}
    """
    changes: dict[str, int | None] = {}
    for dialect in DIALECTS.values():
        changes |= dialect.amount_changes(amounts)
    return changes


def annotated_amounts(pod: PodManifest, rules: Rules) -> dict[str, dict[str, int | None]]:
    """Raise RequestError for wrong annotations.

    >>> container = ContainerManifest(name="train")
    >>> notes = {"gpu-fraction": "0.5"}
    >>> pod = PodManifest(
    ...     namespace="ml", containers=(container,), annotations=notes, scheduler="kai-scheduler"
    ... )
    >>> annotated_amounts(pod, Rules())
    {'train': {'leasehold.dev/share': 1}}
    """
    added: dict[str, dict[str, int | None]] = {}
    for dialect in enabled(rules):
        added |= dialect.annotated_amounts(pod)
    return added


def annotations_of(pod: PodManifest, dialect: Dialect) -> list[str]:
    return sorted(
        key
        for key in pod.annotations
        if key in dialect.request_annotations
        or (dialect.request_prefixes and key.startswith(dialect.request_prefixes))
    )


def added_annotations(pod: PodManifest) -> dict[str, str]:
    added: dict[str, str] = {}
    for dialect in DIALECTS.values():
        added |= dialect.added_annotations(pod)
    return {key: value for key, value in added.items() if key not in pod.annotations}


def vendor_denial(pod: PodManifest, names: Collection[str], *, refused: bool) -> Denial | None:
    """`refused` is whether our own rules refuse the pod."""
    denials = (DIALECTS[name].vendor_denial(pod, refused) for name in DIALECTS if name in names)
    return next((denial for denial in denials if denial is not None), None)


def cordoned_devices(
    annotations: Mapping[str, str], author: Callable[[str], str]
) -> dict[int, str]:
    """`author` returns who wrote an annotation, or ""."""
    texts: dict[int, str] = {}
    for dialect in DIALECTS.values():
        for index, annotation in dialect.cordoned_devices(annotations).items():
            texts[index] = f"listed in the node's annotation {annotation}"
    for key, reason in annotations.items():
        index_text = key.removeprefix(DEVICE_CORDON_PREFIX)
        if index_text != key and (own := parse_decimal(index_text)) is not None:
            closed = f"{CORDONED} by {by}" if (by := author(key)) else CORDONED
            texts[own] = f"{closed}: {reason[:MOST_REASON]}" if reason else closed
    return {index: texts[index] for index in sorted(texts) if 0 <= index <= HIGHEST_INDEX}
