"""gpu-fraction, gpu-memory and NvFractions, in pods for KAI's scheduler; pure.

The annotations name no resource, so admission adds our own, for which the kubelet calls Allocate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shared.dialects import hami_core
from shared.dialects.advertised import TRIGGER, Advertisement, Strategy, trigger_ids
from shared.dialects.dialect import ContainerSetup, Dialect, Paths, PodManifest, Rules
from shared.dialects.isolation_words import STRICT, parse_isolation
from shared.dialects.kai import words
from shared.dialects.kai.words import Wish, parse_wish, requests_gpus
from shared.dialects.volcano import gpushare
from shared.model.bounds import BILLION
from shared.model.change import Hint
from shared.model.devices.device import Device
from shared.model.devices.enforcers import NO_DEMAND, HeldBy
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease
from shared.model.names import ISOLATION, DeviceUuid
from shared.model.requests.request import (
    ALL_PERCENT,
    DeviceOrder,
    GpuRequest,
    NodeRequirements,
    PodRequest,
)

NAME = "kai"
SCHEDULER = "kai-scheduler"
PORTION = "GPU_PORTION"
"""Two decimals, as KAI's pods read it."""
_NO_MORE = "the container gets what it requests, and no more while the GPU is free"
_COMPUTE = f"a part of the compute is requested by {words.CONTAINER_PREFIX}NAME.{words.COMPUTE}"
_BUDGETS = "namespaces share by their budgets"
UNUSED = {
    "gpu-fraction.limit": _NO_MORE,
    "gpu-memory.limit": _NO_MORE,
    "gpu-sm-cores": _COMPUTE,
    "gpu-sm-percentage": _COMPUTE,
    "pod-group-name": "KAI's pod grouper writes it; a gang is named as for Kubernetes, Volcano, "
    "coscheduling or Koordinator",
}
"""Why an annotation has no effect, or what to use."""
UNKNOWN = ("gpu-fraction", "gpu-memory", "gpu-sm-")
BY_MPS = HeldBy(memory="mps", compute="mps")


def is_read(pod: PodManifest) -> bool:
    """Return whether the pod is for KAI's scheduler, or was.

    Admission has completed a pod that it then gave to kube-scheduler.
    """
    return requests_gpus(pod.annotations) and (
        pod.scheduler == SCHEDULER
        or any(
            TRIGGER in container.limits and gpushare.MEMORY not in container.limits
            for container in pod.containers
        )
    )


def parse(pod: PodManifest, _: Rules) -> PodRequest | None:
    """Parse a pod's request. Raises RequestError naming annotation, value and rule.

    For example, `gpu-fraction: "0.5"` requests half of the memory of one GPU for the first
    container, and `gpu-memory: "2000"` 2000 MiB.
    """
    if not is_read(pod):
        return None
    wish = parse_wish(pod)
    if wish.fraction is None and wish.memory_mib is None:
        return None
    _check_trigger(pod, wish)
    container = next(it for it in pod.containers if it.name == wish.container)
    percent = None
    billionths = 0
    if wish.fraction is not None:
        percent = _percent(wish)
        billionths = max(1, int(wish.fraction * BILLION))
    request = GpuRequest(
        container=wish.container,
        gpus=wish.gpus,
        memory_bytes=None if wish.memory_mib is None else wish.memory_mib * MIB,
        memory_percent=percent,
        memory_billionths=billionths,
        cores_percent=_cores_percent(pod, wish),
        slotted=False,
        init=container.ends_first,
        held_by=BY_MPS if wish.by_mps else NO_DEMAND,
    )
    return PodRequest(
        dialect=NAME,
        containers=(request,),
        triggers=(TRIGGER,),
        node_requirements=NodeRequirements(sole_manager=True),
        device_order=DeviceOrder.BINPACK,
    )


def _check_trigger(pod: PodManifest, wish: Wish) -> None:
    for container in pod.containers:
        wanted = wish.gpus if container.name == wish.container else 0
        amount = container.limits.get(TRIGGER, 0)
        if amount == wanted:
            continue
        if not wanted:
            raise RequestError(
                f"container {container.name}: {TRIGGER} is in its limits, and the pod's "
                f"annotations request a GPU for container {wish.container}: remove it"
            )
        raise RequestError(
            f"container {container.name}: {TRIGGER} must be {wanted} in its limits, as many as "
            f"GPUs that the annotations request, got {amount}: admission adds it to a new pod, so "
            "create the pod again while Leasehold's webhook runs"
        )


def _cores_percent(pod: PodManifest, wish: Wish) -> int:
    """Return the requested compute, or the fraction if something holds it.

    By default, KAI holds no compute of a fraction.
    """
    if wish.compute is not None:
        return max(1, int(wish.compute * ALL_PERCENT))
    demand = parse_isolation(pod.annotations.get(ISOLATION, STRICT))
    is_held = wish.by_mps or demand.compute not in {None, "none"}
    return _percent(wish) if is_held else 0


def _percent(wish: Wish) -> int:
    return 0 if wish.fraction is None else max(1, int(wish.fraction * ALL_PERCENT))


def annotations(container: GpuRequest, _: PodRequest) -> dict[str, str]:
    """Return the annotations that request this; a part of the compute counts as of the memory."""
    notes: dict[str, str] = {}
    if container.memory_bytes is not None:
        notes[words.MEMORY] = str(container.memory_bytes // MIB)
    elif container.memory_billionths:
        notes[words.FRACTION] = f"{container.memory_billionths / BILLION:.9g}"
    elif container.memory_percent is not None:
        notes[words.FRACTION] = f"{container.memory_percent / ALL_PERCENT:g}"
    if container.gpus > 1:
        notes[words.DEVICES] = str(container.gpus)
    if container.cores_percent not in {0, container.memory_percent}:
        key = f"{words.CONTAINER_PREFIX}{container.container}.{words.COMPUTE}"
        notes[key] = f"{container.cores_percent / ALL_PERCENT:g}"
    return notes


def annotated_amounts(pod: PodManifest) -> dict[str, dict[str, int | None]]:
    if not is_read(pod):
        return {}
    wish = parse_wish(pod)
    if wish.fraction is None and wish.memory_mib is None:
        return {}
    return {wish.container: {TRIGGER: wish.gpus}}


def warnings(pod: PodManifest) -> Iterable[Hint]:
    yield from map(Hint, _warnings(pod))


def _warnings(pod: PodManifest) -> Iterable[str]:
    wish = parse_wish(pod)
    for key in sorted(pod.annotations):
        if key in UNUSED or (key.startswith(UNKNOWN) and key not in words.ANNOTATIONS):
            yield f"annotation {key} has no effect: {UNUSED.get(key, 'it is unknown')}"
    for key in wish.unused_limits:
        yield f"annotation {key} has no effect: {_NO_MORE}"
    if wish.by_mps:
        yield (
            "the pod demands MPS, which nodes offer only where --mps of their agents is private, "
            "and waits until one does: "
            f"without {words.MPS} and {words.SM_SHARING} the same part is held otherwise"
        )
    if words.QUEUE in pod.labels:
        yield f"label {words.QUEUE} has no effect: there are no queues; {_BUDGETS}"


def container_setup(
    lease: Lease, container: str, _: Mapping[DeviceUuid, Device], paths: Paths
) -> ContainerSetup:
    setup = hami_core.limited_setup(lease, container, paths)
    share = hami_core.shares_by_index(lease, container)[0]
    portion = f"{share.memory_mib / max(share.device_mib, 1):.2f}"
    return replace(setup, environment={**setup.environment, PORTION: portion})


def advertise(devices: Sequence[Device], strategy: str) -> Advertisement:
    """Serve the trigger, except on nodes that serve other resources of Volcano instead."""
    if strategy != Strategy.AUTO:
        return Advertisement()
    return Advertisement(served={TRIGGER: trigger_ids(devices)})


DIALECT = Dialect(
    name=NAME,
    resources=frozenset(),
    served=frozenset({TRIGGER}),
    status_resources=frozenset(),
    request_annotations=words.ANNOTATIONS,
    request_prefixes=words.PREFIXES,
    parse=parse,
    limits=lambda _container, _pod: {},
    annotations=annotations,
    binding_annotations=lambda _lease, _now: {},
    container_setup=container_setup,
    advertise=advertise,
    annotated_amounts=annotated_amounts,
    warnings=warnings,
    read_for=SCHEDULER,
)
