"""The least change of a pod with which a node fits it; pure.

Every change is tried on the nodes, after the dialect has parsed the changed limits again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.advertised import TRIGGER
from shared.dialects.demanded_enforcers import demanding
from shared.dialects.dialect import ContainerManifest, Dialect, PodManifest, Rules
from shared.dialects.meant_resources import memory_mib
from shared.dialects.pod_requests import amount_changes, strict_request
from shared.dialects.vocabulary import unknown_gpus
from shared.model.devices.device import MIB
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.requests.request import (
    ALL_PERCENT,
    DeviceSelection,
    GpuRequest,
    PodRequest,
    SharingPolicy,
    Toleration,
    TopologyScope,
)
from shared.placing.advice import field_of, limits_peak
from shared.placing.choice.container_choice import share_mib
from shared.placing.choice.device_choice import fits
from shared.placing.mirror.node_mirror import MirroredDevice, MirroredNode
from shared.placing.node_filters import (
    HARD_EFFECTS,
    check_node_selector,
    check_supported,
    tolerates,
)

IDLE_DEVICE = SharingPolicy.IDLE_DEVICE
SENSIBLE = 8
"""Where waiting helps, a smaller part of the requested memory is not advised."""
PARTS = 16
"""Several containers shrink together in so many steps."""
SYSTEM_TAINTS = ("node.kubernetes.io/", "node-role.kubernetes.io/")


Step = Callable[[PodRequest, MirroredNode, Dialect | None], PodRequest]


def is_tiny(changed: PodRequest, request: PodRequest, node: MirroredNode) -> bool:
    return any(
        share_mib(new, node.devices[0]) * SENSIBLE < share_mib(old, node.devices[0])
        for new, old in zip(changed.containers, request.containers, strict=True)
    )


def changed_to_fit(
    request: PodRequest, node: MirroredNode, absent: Collection[str] = ()
) -> PodRequest | None:
    """Return the fewest changes with which the node fits the request, or None.

    `absent` are resources that no node has. Changes that hurt most are taken back first. Parts
    replace whole devices where none fits, and the reverse.
    """
    dialect = DIALECTS.get(request.dialect)
    for sizes in _SIZES:
        possible = (_without(absent), *_STEPS, *sizes)
        steps = [step for step in possible if step(request, node, dialect) != request]
        if fits(_applied(steps, request, node, dialect), node):
            return _least(steps, request, node, dialect)
    return None


def _least(
    steps: list[Step], request: PodRequest, node: MirroredNode, dialect: Dialect | None
) -> PodRequest | None:
    for step in list(steps):
        kept = [other for other in steps if other is not step]
        if fits(_applied(kept, request, node, dialect), node):
            steps = kept
    for at, step in enumerate(steps):
        for larger in _larger(step, request, node):
            trial = [*steps[:at], larger, *steps[at + 1 :]]
            if fits(_applied(trial, request, node, dialect), node):
                steps = trial
                break
    read = read_again(request, _applied(steps, request, node, dialect), dialect)
    return read if read is not None and fits(read, node) else None


def _applied(
    steps: Iterable[Step], request: PodRequest, node: MirroredNode, dialect: Dialect | None
) -> PodRequest:
    changed = request
    for step in steps:
        changed = step(changed, node, dialect)
    return with_resources(changed, request)


def with_resources(changed: PodRequest, request: PodRequest) -> PodRequest:
    added = {
        name: limits_peak(name, changed) - limits_peak(name, request) for name in request.resources
    }
    if not any(added.values()):
        return changed
    return structs.replace(
        changed, resources={name: n + added[name] for name, n in changed.resources.items()}
    )


def read_again(before: PodRequest, after: PodRequest, dialect: Dialect | None) -> PodRequest | None:
    """Return what the dialect parses from the changed limits, or None if it cannot."""
    if dialect is None or after.containers == before.containers:
        return after
    limits = {
        container.container: dialect.limits(container, after) for container in after.containers
    }
    mode = dialect.request_fields.get("mode", ())
    notes = {
        key: text
        for container in after.containers
        for key, text in dialect.annotations(container, after).items()
    }
    manifest = PodManifest(
        namespace=Namespace(""),
        containers=tuple(
            ContainerManifest(
                name=container.container, limits=limits[container.container], init=container.init
            )
            for container in after.containers
        ),
        annotations={mode[0]: after.selection.mode} if mode and after.selection.mode else notes,
        scheduler=dialect.scheduler or dialect.read_for,
    )
    try:
        if not notes and not all(limits.values()):
            return None
        parsed = dialect.parse(_completed(manifest, dialect), Rules())
        if parsed is None:
            return None
        if any(container.strict for container in before.containers):
            parsed = strict_request(parsed)
        parsed = demanding(parsed, before.containers[0].held_by)
    except RequestError:
        return None
    if any(_part_sharing(container) is IDLE_DEVICE for container in before.containers):
        parsed = with_containers(
            parsed,
            lambda container: structs.replace(container, sharing=container.sharing or IDLE_DEVICE),
        )
    needs = after.node_requirements
    selector = tuple(sorted({*needs.selector, *parsed.node_requirements.selector}))
    return structs.replace(
        after,
        containers=parsed.containers,
        triggers=parsed.triggers,
        node_requirements=structs.replace(needs, selector=selector),
    )


def _completed(manifest: PodManifest, dialect: Dialect) -> PodManifest:
    """Add the amounts that admission adds for annotations."""
    added = dialect.annotated_amounts(manifest)
    if not added:
        return manifest
    containers = tuple(
        replace(container, limits={**container.limits, **amounts})
        for container in manifest.containers
        for amounts in [
            {name: n for name, n in added.get(container.name, {}).items() if n is not None}
        ]
    )
    return replace(manifest, containers=containers)


# Steps: each makes the request easier to fit on a node, as far as its author can change it.


def _needs(request: PodRequest, **changes: object) -> PodRequest:
    return structs.replace(
        request, node_requirements=structs.replace(request.node_requirements, **changes)
    )


def _any_labels(request: PodRequest, node: MirroredNode, dialect: Dialect | None) -> PodRequest:
    """Keep labels that a dialect requires by itself."""
    own = dialect.node_labels & dialect.request_labels if dialect else frozenset()
    labels = node.facts.labels
    selector = request.node_requirements.selector
    kept = [
        (key, value if key in own else labels[key])
        for key, value in selector
        if key in own or key in labels
    ]
    if tuple(kept) != selector:
        request = _needs(request, selector=tuple(kept))
    if check_node_selector(request.node_requirements, node.facts) is None:
        return request
    return _needs(request, required=())


def _tolerate(request: PodRequest, node: MirroredNode, _: Dialect | None) -> PodRequest:
    tolerations = request.node_requirements.tolerations
    added = [
        Toleration(key=taint.key, value=taint.value, effect=taint.effect)
        for taint in node.facts.taints
        if taint.effect in HARD_EFFECTS
        and not taint.key.startswith(SYSTEM_TAINTS)
        and not any(tolerates(toleration, taint) for toleration in tolerations)
    ]
    return _needs(request, tolerations=(*tolerations, *added)) if added else request


def _supported(request: PodRequest, _: MirroredNode, __: Dialect | None) -> PodRequest:
    if check_supported(request.node_requirements) is None:
        return request
    return _needs(request, unsupported=())


def _field_step(name: str, nothing: object) -> Step:
    """Return a step that removes a field that an annotation sets."""

    def step(request: PodRequest, _: MirroredNode, dialect: Dialect | None) -> PodRequest:
        if dialect is None or name not in dialect.request_fields:
            return request
        if field_of(request, name) == nothing:
            return request
        if name not in DeviceSelection.__struct_fields__:
            return structs.replace(request, **{name: nothing})
        return structs.replace(
            request, selection=structs.replace(request.selection, **{name: nothing})
        )

    return step


def _own_trigger(request: PodRequest, node: MirroredNode, _: Dialect | None) -> PodRequest:
    if TRIGGER not in node.serving or not any(
        name not in node.serving and amount_changes({name: 1}).get(TRIGGER)
        for name in request.triggers
    ):
        return request
    return structs.replace(request, triggers=(TRIGGER,))


def _without(absent: Collection[str]) -> Step:
    def step(request: PodRequest, _: MirroredNode, __: Dialect | None) -> PodRequest:
        kept = {name: n for name, n in request.resources.items() if name not in absent}
        return structs.replace(request, resources=kept) if absent else request

    return step


def _without_other_accelerators(
    request: PodRequest, node: MirroredNode, dialect: Dialect | None
) -> PodRequest:
    """Memory of a resource that the node lacks is a part of the GPU."""
    missing = {
        name: request.resources[name]
        for name in unknown_gpus(request.resources)
        if name not in node.facts.allocatable
    }
    if not missing or not request.containers:
        return request
    kept = {name: n for name, n in request.resources.items() if name not in missing}
    request = structs.replace(request, resources=kept)
    mib = sum(memory_mib(name, amount) for name, amount in missing.items())
    if not mib or dialect is None or len(request.containers) > 1 or not node.devices:
        return request
    return with_containers(
        request, lambda container: resized(container, mib, node.devices[0], dialect)
    )


def _less_of_others(request: PodRequest, node: MirroredNode, _: Dialect | None) -> PodRequest:
    less = {}
    for name, amount in request.resources.items():
        free = max(node.free_resources.get(name, 0), limits_peak(name, request))
        if name in {"memory", "ephemeral-storage"}:
            free -= free % MIB
        less[name] = free if 0 < free < amount and name != "pods" else amount
    return structs.replace(request, resources=less) if less != request.resources else request


def with_containers(request: PodRequest, change: Callable[[GpuRequest], GpuRequest]) -> PodRequest:
    containers = tuple([change(container) for container in request.containers])
    return structs.replace(request, containers=containers)


def fewer_gpus(most: int) -> Step:
    return lambda request, _, __: with_containers(
        request, lambda container: structs.replace(container, gpus=min(container.gpus, most))
    )


def _less_cores(most: int, parts: int = 0) -> Step:
    """Return a step to `most` percent in each container, or to parts of its own."""

    def step(request: PodRequest, _: MirroredNode, __: Dialect | None) -> PodRequest:
        return with_containers(
            request,
            lambda container: with_cores(
                container, most or container.cores_percent * parts // PARTS
            ),
        )

    return step


def _part_sharing(container: GpuRequest) -> SharingPolicy:
    if container.idle_parts:
        return IDLE_DEVICE
    exclusive = container.sharing is SharingPolicy.EXCLUSIVE
    return SharingPolicy.SHARED if exclusive else container.sharing


def with_cores(container: GpuRequest, cores: int) -> GpuRequest:
    cores = max(cores, 1)
    if container.whole or container.cores_percent <= cores:
        return container
    exclusive = container.sharing is SharingPolicy.EXCLUSIVE and not container.strict
    sharing = _part_sharing(container) if exclusive else container.sharing
    return structs.replace(container, cores_percent=cores, sharing=sharing)


def _less_memory(
    mib: int, device: MirroredDevice | None = None, parts: int = 0, *, divide: bool
) -> Step:
    """Return a step to so many MiB in each container, or to parts of its own.

    Parts replace whole devices where it shall `divide` them.
    """

    def step(request: PodRequest, _: MirroredNode, dialect: Dialect | None) -> PodRequest:
        if dialect is None:
            return request

        def smaller(container: GpuRequest) -> GpuRequest:
            if container.whole and not divide:
                return container
            own = share_mib(container, device) * parts // PARTS if device else 0
            return resized(container, mib or own, device, dialect)

        return with_containers(request, smaller)

    return step


def resized(
    container: GpuRequest, mib: int, device: MirroredDevice | None, dialect: Dialect
) -> GpuRequest:
    """The unit is that of the container's memory."""
    units = ("memory_percent", "memory_bytes", "memory_units")
    used = [name for name in units if getattr(container, name) is not None]
    field = used[0] if used else dialect.part
    if not field:
        return container
    if field == "memory_bytes":
        amount = max(mib * MIB // dialect.memory_step, 1) * dialect.memory_step
    elif field == "memory_percent":
        amount = max(mib * 100 // device.total_mib if device else 0, 1)
    else:
        amount = max(mib // device.unit_mib if device else 0, 1)
    if not container.wants_all_memory and (getattr(container, field) or 0) <= amount:
        return container
    changes: dict[str, object] = {field: amount, "memory_billionths": 0}
    if container.whole:
        cores = container.cores_percent
        needs_cores = dialect.part != "memory_units"
        changes |= {
            "whole": False,
            "mig_allowed": not needs_cores,
            "sharing": _part_sharing(container),
            "cores_percent": min(cores, 99) or (99 if needs_cores else 0),
        }
    return structs.replace(container, **changes)


def _whole_devices(request: PodRequest, _: MirroredNode, dialect: Dialect | None) -> PodRequest:
    if dialect is None or not dialect.part:
        return request
    return with_containers(
        request,
        lambda container: structs.replace(
            container,
            whole=True,
            sharing=SharingPolicy.EXCLUSIVE,
            memory_units=None,
            memory_bytes=None,
            # The container's percentage is not known where an amount counts instead.
            memory_percent=ALL_PERCENT if container.memory_units else None,
            cores_percent=ALL_PERCENT,
        ),
    )


def _no_groups(request: PodRequest, _: MirroredNode, dialect: Dialect | None) -> PodRequest:
    """An administrator's rules about labels stay."""
    if dialect is None or "anti_affinity_groups" not in dialect.request_fields:
        return request
    kept = [group for group in request.anti_affinity_groups if group.startswith("labels ")]
    return structs.replace(request, anti_affinity_groups=tuple(kept))


_ONE_GPU = fewer_gpus(1)
_LEAST_CORES = _less_cores(1)
_LEAST_MEMORY = _less_memory(0, divide=False)
_LEAST_PART = _less_memory(0, divide=True)
_STEPS: tuple[Step, ...] = (
    _supported,
    _any_labels,
    _tolerate,
    _own_trigger,
    _no_groups,
    _field_step("topology_scope", TopologyScope.NODE),
    _field_step("mode", None),
    *(
        _field_step(name, ())
        for name in ("models", "not_models", "types", "not_types", "uuids", "not_uuids")
    ),
    _without_other_accelerators,
    _less_of_others,
    _ONE_GPU,
)
"""Those that hurt most come first."""
_SIZES: tuple[tuple[Step, ...], ...] = (
    (_LEAST_CORES, _LEAST_MEMORY),
    (_LEAST_PART, _LEAST_CORES),
    (_whole_devices,),
)


def _larger(step: Step, request: PodRequest, node: MirroredNode) -> Iterator[Step]:
    """The largest amounts come first."""
    has_one_container = len(request.containers) == 1
    devices = [device for device in node.devices if device.healthy]
    devices.sort(key=_free_mib, reverse=True)
    if step is _ONE_GPU:
        most = max([container.gpus for container in request.containers])
        yield from map(fewer_gpus, range(most - 1, 1, -1))
    elif step is _LEAST_CORES:
        free = sorted({100 - device.used_cores for device in devices}, reverse=True)
        yield from map(_less_cores, free if has_one_container else [])
        for parts in range(PARTS - 1, 0, -1):
            yield _less_cores(0, parts)
    elif step in {_LEAST_MEMORY, _LEAST_PART} and devices:
        divide = step is _LEAST_PART
        for device in devices if has_one_container else ():
            yield _less_memory(_free_mib(device), device, divide=divide)
        for parts in range(PARTS - 1, 0, -1):
            yield _less_memory(0, devices[0], parts, divide=divide)


def _free_mib(device: MirroredDevice) -> int:
    return device.free_instance_mib if device.in_mig_mode else device.total_mib - device.used_mib
