"""The admission decision: whether a new pod may be created, and its patches; pure.

Every container of every kind is checked, and one that breaks a rule denies the pod. The fields that
a pod must not set are in `shared.dialects.reserved`. Its request is parsed by the code that the
watcher uses, so a pod that is admitted is never rejected later for the syntax of its request.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from services.webhook.largest_device import DeviceMaximum, excess_memory
from services.webhook.patches import (
    ANNOTATIONS,
    PatchOperation,
    add,
    add_annotation,
    add_variable,
    complete_limits,
    remove,
)
from services.webhook.reviewed_pod import EnvFromSource, ReviewedContainer, ReviewedPod
from shared.dialects import GPU_RESOURCES, pod_requests
from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.reserved import (
    COMPLETED_ANNOTATIONS,
    LIBRARY_DIRECTORY,
    LIBRARY_SEARCH,
    NOTHING_VISIBLE,
    STRIPPED_ANNOTATIONS,
    VISIBLE,
    exposes_devices,
    is_denied,
    is_device_name_mount,
    is_reserved,
    is_reserved_prefix,
    sees_devices,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.request import PodRequest

DEFAULT_SCHEDULER = "default-scheduler"
BAD_REQUEST, FORBIDDEN, UNPROCESSABLE = 400, 403, 422

EnvFromKeys = Callable[[EnvFromSource], frozenset[str] | None]
"""The keys of a ConfigMap or Secret in the pod's namespace; None if they cannot be read."""
AmountChanges = Mapping[str, Mapping[str, int | None]]
"""Changes of a container's amounts, by the container's path; None removes an amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """The operator's choices."""

    scheduler: str = "leasehold"
    """Set on GPU pods that do not choose a scheduler."""
    schedulers: frozenset[str] = frozenset({"leasehold"})
    """The values of `schedulerName` that Leasehold serves."""
    rules: Rules = field(default_factory=Rules)
    vendor_messages: frozenset[str] = frozenset()
    """Dialects whose own webhooks' messages are used, word for word, where these would deny."""
    runtime_class: str = ""
    """Set on GPU pods without a runtime class; empty: none is set."""
    in_budget_class: str = ""
    """Priority class of GPU pods whose namespace has budget left; empty: none is set."""
    out_of_budget_class: str = ""
    """Priority class of GPU pods whose namespace's budget is exhausted; empty: none is set."""
    allow_privileged: bool = False
    """GPU pods may have privileged containers, which see every device whatever they lease."""
    allow_unread_secrets: bool = False
    """`envFrom` may refer to Secrets and ConfigMaps whose keys cannot be read."""
    allow_larger_requests: bool = False
    """A container may request more memory than the largest device has, and wait for a larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    """The response of the webhook for one pod."""

    allowed: bool
    message: str = ""
    code: int = 200
    patches: tuple[PatchOperation, ...] = ()
    warnings: tuple[str, ...] = ()
    requests_gpu: bool = False
    """The pod requests a GPU, and its request is admitted."""


def decide(
    pod: ReviewedPod,
    policy: AdmissionPolicy,
    env_from_keys: EnvFromKeys,
    *,
    has_budget: bool = True,
    largest: DeviceMaximum | None = None,
    default_class: str = "",
) -> AdmissionDecision:
    """Decide on one new pod; `largest` is the cluster's largest device, None if it is unknown.

    `default_class` is the cluster's default priority class. The API server sets it before it calls
    webhooks, so a pod with it counts as one without a class.
    """
    patches, warnings = _strip_annotations(pod)
    denial = _unconditional_denial(pod)
    if denial:
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    gpu_containers = [container for container in pod.containers if _requests_gpu(container)]
    if not gpu_containers:
        patches += [patch for each in pod.containers for patch in _hide_devices(each)]
        return AdmissionDecision(allowed=True, patches=tuple(patches), warnings=tuple(warnings))
    if pod.scheduler not in {"", DEFAULT_SCHEDULER, *policy.schedulers}:
        warnings.append(
            f"schedulerName is {pod.scheduler}: Leasehold does not schedule the pod, and its node "
            "agents refuse containers without a lease"
        )
        return AdmissionDecision(allowed=True, patches=tuple(patches), warnings=tuple(warnings))
    violations = list(_violations(pod, gpu_containers, policy, env_from_keys))
    if violations:
        return AdmissionDecision(allowed=False, message="; ".join(violations), code=FORBIDDEN)
    changes = {container.path: _amount_changes(container) for container in gpu_containers}
    try:
        request = _parse_request(pod, changes, policy)
        warnings += _size_warnings(pod, request, policy, largest)
    except RequestError as error:
        return AdmissionDecision(allowed=False, message=str(error), code=BAD_REQUEST)
    patches += _complete_containers(pod, changes)
    patches += _complete_spec(
        pod, policy, _budget_class(pod, policy, default_class, has_budget=has_budget)
    )
    for key, value in pod_requests.added_annotations(_manifest(pod, {})).items():
        patches.append(add_annotation(pod, patches, key, value))
    return AdmissionDecision(
        allowed=True, patches=tuple(patches), warnings=tuple(warnings), requests_gpu=True
    )


def _requests_gpu(container: ReviewedContainer) -> bool:
    amounts = {**container.requests, **container.limits}
    return any(name in GPU_RESOURCES for name in amounts)


def _strip_annotations(pod: ReviewedPod) -> tuple[list[PatchOperation], list[str]]:
    stripped = sorted(key for key in pod.annotations if key.startswith(STRIPPED_ANNOTATIONS))
    warnings = [f"annotation {key} was removed: only schedulers may write it" for key in stripped]
    replaced = [key for key in COMPLETED_ANNOTATIONS if key in pod.annotations]
    return [remove(ANNOTATIONS, key) for key in (*stripped, *replaced)], warnings


def _unconditional_denial(pod: ReviewedPod) -> str:
    """Return why any such pod is denied: Leasehold's annotations, mounts that select devices."""
    denied = sorted(key for key in pod.annotations if is_denied(key))
    if denied:
        return f"annotation {denied[0]} is written by Leasehold only: create the pod without it"
    for container in pod.containers:
        for path in filter(is_device_name_mount, container.mount_paths):
            return (
                f"container {container.name}: a mount at {path} would select devices in the "
                "container runtime: remove it, the lease provides the devices"
            )
    return ""


def _hide_devices(container: ReviewedContainer) -> Iterator[PatchOperation]:
    """Hide all devices from a container of a pod that requests no GPU."""
    if VISIBLE in container.value_from or sees_devices(
        container.image, container.variables.get(VISIBLE)
    ):
        yield add_variable(container, VISIBLE, NOTHING_VISIBLE)


def _violations(
    pod: ReviewedPod,
    gpu_containers: list[ReviewedContainer],
    policy: AdmissionPolicy,
    env_from_keys: EnvFromKeys,
) -> Iterator[str]:
    """Yield the fields that would let the pod exceed its limits."""
    if pod.node:
        yield (
            f"nodeName is set to {pod.node}, which bypasses every scheduler: use a node selector "
            "or affinity"
        )
    for volume, path in pod.host_paths.items():
        if exposes_devices(path):
            yield (
                f"volume {volume} mounts {path} of the node, which exposes devices or the "
                "isolation library: remove it, the lease provides the devices"
            )
    for container in pod.containers:
        if container.privileged and not policy.allow_privileged:
            yield (
                f"container {container.name} is privileged and would see every device: add only "
                "the capabilities that it needs"
            )
    for container in gpu_containers:
        place = f"container {container.name}"
        yield from (f"{place}: {text}" for text in _variable_violations(container))
        for source in container.env_from:
            text = _env_from_violation(source, policy, env_from_keys)
            if text:
                yield f"{place}: {text}"


def _variable_violations(container: ReviewedContainer) -> Iterator[str]:
    for name, value in container.variables.items():
        if is_reserved(name):
            yield f"variable {name} is set by the lease only: remove it"
        elif name == LIBRARY_SEARCH and LIBRARY_DIRECTORY in value:
            yield f"{name} contains {LIBRARY_DIRECTORY}: remove that directory from it"
        elif name == LIBRARY_SEARCH and name in container.value_from:
            yield f"{name} uses valueFrom, which cannot be checked: write its value"


def _env_from_violation(
    source: EnvFromSource, policy: AdmissionPolicy, env_from_keys: EnvFromKeys
) -> str:
    """Return why a source may not set variables; empty: it may."""
    if is_reserved_prefix(source.prefix):
        return f"envFrom with prefix {source.prefix} sets variables that the lease sets"
    keys = env_from_keys(source)
    if keys is None:
        if policy.allow_unread_secrets:
            return ""
        return (
            f"envFrom sets every key of {source.kind} {source.name}, which cannot be checked: list "
            "the variables one by one with valueFrom"
        )
    names = sorted(source.prefix + key for key in keys)
    reserved = [name for name in names if is_reserved(name) or name == LIBRARY_SEARCH]
    if not reserved:
        return ""
    return f"envFrom {source.kind} {source.name} sets {reserved[0]}, which the lease sets"


def _amount_changes(container: ReviewedContainer) -> Mapping[str, int | None]:
    """Return the changes that the vendors' own webhooks would make to a container's amounts."""
    return pod_requests.amount_changes({**container.requests, **container.limits})


def _parse_request(pod: ReviewedPod, changes: AmountChanges, policy: AdmissionPolicy) -> PodRequest:
    """Parse the request. Raises RequestError, with the vendor's message where that is chosen."""
    written, vendors = _manifest(pod, {}), policy.vendor_messages
    message = pod_requests.vendor_denial(written, vendors, refused=False)
    if message:
        raise RequestError(message)
    try:
        return parse_pod_request(_manifest(pod, changes), policy.rules)
    except RequestError as error:
        message = pod_requests.vendor_denial(written, vendors, refused=True)
        raise RequestError(message or str(error)) from error


def _size_warnings(
    pod: ReviewedPod,
    request: PodRequest,
    policy: AdmissionPolicy,
    largest: DeviceMaximum | None,
) -> list[str]:
    """Return warnings. Raises RequestError for more memory than any device of the cluster has."""
    excess = excess_memory(request.containers, pod.containers, largest) if largest else ""
    if excess and not policy.allow_larger_requests:
        raise RequestError(excess)
    return [f"{excess}; the pod waits for a node with such a device"] if excess else []


def _manifest(pod: ReviewedPod, changes: AmountChanges) -> PodManifest:
    return PodManifest(
        namespace=Namespace(pod.namespace),
        containers=tuple(
            ContainerManifest(
                name=container.name,
                limits=_changed(container.limits, changes.get(container.path, {})),
                requests=_changed(container.requests, changes.get(container.path, {})),
                init=container.init,
            )
            for container in pod.containers
        ),
        annotations=pod.annotations,
        labels=pod.labels,
        scheduler=pod.scheduler,
    )


def _changed(amounts: Mapping[str, int], changes: Mapping[str, int | None]) -> dict[str, int]:
    merged = {**amounts, **changes}
    return {name: amount for name, amount in merged.items() if amount is not None}


def _budget_class(
    pod: ReviewedPod, policy: AdmissionPolicy, default_class: str, *, has_budget: bool
) -> str:
    """Return the priority class that follows from the budget; empty: the pod keeps its own."""
    if pod.priority_class not in {"", default_class}:
        return ""
    return policy.in_budget_class if has_budget else policy.out_of_budget_class


def _complete_containers(pod: ReviewedPod, changes: AmountChanges) -> Iterator[PatchOperation]:
    """Complete the limits of GPU containers, and hide the devices from all others."""
    for container in pod.containers:
        if container.path in changes:
            yield from complete_limits(container, changes[container.path])
        elif VISIBLE not in container.variables:
            yield add_variable(container, VISIBLE, NOTHING_VISIBLE)


def _complete_spec(
    pod: ReviewedPod, policy: AdmissionPolicy, priority_class: str
) -> Iterator[PatchOperation]:
    if pod.scheduler in {"", DEFAULT_SCHEDULER}:
        yield add("/spec/schedulerName", policy.scheduler)
    if policy.runtime_class and "runtimeClassName" not in pod.set_fields:
        yield add("/spec/runtimeClassName", policy.runtime_class)
    if priority_class:
        yield add("/spec/priorityClassName", priority_class)
        # The API server set both from the previous class, and sets them again afterwards.
        for name in ("priority", "preemptionPolicy"):
            if name in pod.set_fields:
                yield PatchOperation(op="remove", path=f"/spec/{name}")
