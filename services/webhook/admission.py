"""The decision: whether a new pod may be created, and what is added to it; pure.

Every container of every kind is looked at, and one that breaks a rule denies the pod. What a pod
may not say is in `shared.dialects.reserved`; what it asks for is read by the code that the watcher
reads it with, so that nothing is admitted that would then be refused for how it is written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from services.webhook.largest_device import Largest, too_large
from services.webhook.patches import (
    ANNOTATIONS,
    Patch,
    add_annotation,
    add_variable,
    complete_limits,
    remove,
    set_variable,
)
from services.webhook.pods import ContainerSeen, PodSeen, Source
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
BAD_REQUEST, FORBIDDEN, UNREADABLE = 400, 403, 422

Keys = Callable[[Source], frozenset[str] | None]
"""The keys of a config map or secret of the pod's namespace; None: they cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices."""

    scheduler: str = "leasehold"
    """Given to pods that ask for a GPU and name no scheduler of their own."""
    schedulers: frozenset[str] = frozenset({"leasehold"})
    """Ours."""
    rules: Rules = field(default_factory=Rules)
    vendor_messages: frozenset[str] = frozenset()
    """Dialects whose own webhooks' messages refuse a pod, word by word, where they would."""
    runtime_class: str = ""
    """Given to GPU pods that name none; empty: none is given."""
    in_budget_class: str = ""
    """Priority class of GPU pods whose namespace has budget left; empty: none is given."""
    out_of_budget_class: str = ""
    privileged: bool = False
    """GPU pods may have privileged containers, which see every device whatever they lease."""
    unread_secrets: bool = False
    """Variables may come from secrets and config maps whose keys cannot be read."""
    larger: bool = False
    """A container may ask for more memory than the largest device has, and wait for a larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is answered."""

    allowed: bool
    message: str = ""
    code: int = 200
    patches: tuple[Patch, ...] = ()
    warnings: tuple[str, ...] = ()
    asks: bool = False
    """The pod asks for a GPU, and its request is admitted."""


def decide(
    pod: PodSeen,
    policy: Policy,
    keys: Keys,
    *,
    has_budget: bool = True,
    largest: Largest | None = None,
    usual_class: str = "",
) -> Decision:
    """Decide on one new pod; `largest` is what is known of the cluster's largest device.

    `usual_class` is the priority class of pods that name none: the API server has written it into
    them before webhooks are asked, so that a pod with it counts as one that names none.
    """
    patches, warnings = _stripped(pod)
    denied = _denied_annotation(pod) or _named_by_mount(pod)
    if denied:
        return Decision(allowed=False, message=denied, code=FORBIDDEN)
    asking = [container for container in pod.containers if _asks(container)]
    if not asking:
        patches += [patch for each in pod.containers for patch in _blinded(each)]
        return Decision(allowed=True, patches=tuple(patches), warnings=tuple(warnings))
    if pod.scheduler not in {"", DEFAULT_SCHEDULER, *policy.schedulers}:
        warnings.append(
            f"schedulerName is {pod.scheduler}: Leasehold leaves the pod alone, and its node "
            "agents refuse containers that no lease is for"
        )
        return Decision(allowed=True, patches=tuple(patches), warnings=tuple(warnings))
    faults = list(_forbidden(pod, asking, policy, keys))
    if faults:
        return Decision(allowed=False, message="; ".join(faults), code=FORBIDDEN)
    completed = {container.path: _completed(container) for container in asking}
    try:
        warnings += _checked(pod, _read(pod, completed, policy), policy, largest)
    except RequestError as error:
        return Decision(allowed=False, message=str(error), code=BAD_REQUEST)
    wanted = policy.in_budget_class if has_budget else policy.out_of_budget_class
    if pod.priority_class not in {"", usual_class}:
        wanted = ""
    patches += _completions(pod, asking, completed, policy, priority_class=wanted)
    return Decision(allowed=True, patches=tuple(patches), warnings=tuple(warnings), asks=True)


def _blinded(container: ContainerSeen) -> Iterator[Patch]:
    """Have a container of a pod that asks for no GPU see none."""
    if VISIBLE in container.elsewhere or sees_devices(
        container.image, container.variables.get(VISIBLE)
    ):
        yield from set_variable(container, VISIBLE, NOTHING_VISIBLE)


def _asks(container: ContainerSeen) -> bool:
    amounts = {**container.requests, **container.limits}
    return any(name in GPU_RESOURCES for name in amounts)


def _stripped(pod: PodSeen) -> tuple[list[Patch], list[str]]:
    found = sorted(key for key in pod.annotations if key.startswith(STRIPPED_ANNOTATIONS))
    warnings = [
        f"annotation {key} is written by schedulers only, and was taken away" for key in found
    ]
    found += [key for key in COMPLETED_ANNOTATIONS if key in pod.annotations]
    return [remove(ANNOTATIONS, key) for key in found], warnings


def _denied_annotation(pod: PodSeen) -> str:
    found = sorted(key for key in pod.annotations if is_denied(key))
    if not found:
        return ""
    return f"annotation {found[0]} is written by Leasehold only: create the pod without it"


def _named_by_mount(pod: PodSeen) -> str:
    """Say which mount would name devices to NVIDIA's runtime, whoever asks for none or for some."""
    for container in pod.containers:
        for path in filter(is_device_name_mount, container.mounts):
            return (
                f"container {container.name}: a mount at {path} would name devices to the "
                "container runtime: leave it out, devices come with the lease"
            )
    return ""


def _forbidden(
    pod: PodSeen, asking: list[ContainerSeen], policy: Policy, keys: Keys
) -> Iterator[str]:
    """Say what would free the pod from its limits."""
    if pod.node:
        yield (
            f"nodeName is preset to {pod.node}, which passes by every scheduler: use a node "
            "selector or affinity"
        )
    for volume, path in pod.host_paths.items():
        if exposes_devices(path):
            yield (
                f"volume {volume} mounts {path} of the node, which opens devices or the isolation "
                "library: leave it out, devices come with the lease"
            )
    for container in pod.containers:
        if container.privileged and not policy.privileged:
            yield (
                f"container {container.name} is privileged and would see every device: use the "
                "capabilities that it needs"
            )
    for container in asking:
        yield from _variables(container, policy, keys)


def _variables(container: ContainerSeen, policy: Policy, keys: Keys) -> Iterator[str]:
    where = f"container {container.name}"
    for name, value in container.variables.items():
        if is_reserved(name):
            yield f"{where}: variable {name} is set by its lease only: leave it out"
        elif name == LIBRARY_SEARCH and LIBRARY_DIRECTORY in value:
            yield f"{where}: {name} leads into {LIBRARY_DIRECTORY}: leave that directory out of it"
        elif name == LIBRARY_SEARCH and name in container.elsewhere:
            yield f"{where}: {name} comes from elsewhere and cannot be looked at: write its value"
    for source in container.sources:
        if is_reserved_prefix(source.prefix):
            yield f"{where}: envFrom with prefix {source.prefix} sets variables of its lease"
            continue
        known = keys(source)
        if known is None and not policy.unread_secrets:
            yield (
                f"{where}: envFrom takes whatever {source.kind} {source.name} holds, and that "
                "cannot be looked at: name its variables one by one with valueFrom"
            )
        taken = sorted(key for key in known or () if _is_lease_s(source.prefix + key))
        if taken:
            name = source.prefix + taken[0]
            yield f"{where}: envFrom {source.kind} {source.name} sets {name}, which its lease sets"


def _is_lease_s(name: str) -> bool:
    """Say whether a variable whose value is not seen may not be set beside a lease."""
    return is_reserved(name) or name == LIBRARY_SEARCH


def _completed(container: ContainerSeen) -> Mapping[str, int | None]:
    """Return what is added to a container's amounts, as the vendors' own webhooks would."""
    return pod_requests.amount_changes({**container.requests, **container.limits})


def _read(
    pod: PodSeen, completed: Mapping[str, Mapping[str, int | None]], policy: Policy
) -> PodRequest:
    """Read the request. Raises RequestError saying what is wrong with it as it is written."""
    written, vendors = _asks_of(pod, {}), policy.vendor_messages
    message = pod_requests.vendor_denial(written, vendors, refused=False)
    if message:
        raise RequestError(message)
    try:
        return parse_pod_request(_asks_of(pod, completed), policy.rules)
    except RequestError as error:
        message = pod_requests.vendor_denial(written, vendors, refused=True)
        raise RequestError(message or str(error)) from error


def _checked(
    pod: PodSeen, request: PodRequest, policy: Policy, largest: Largest | None
) -> list[str]:
    """Return what to warn of. Raises RequestError for what no device of the cluster can give."""
    over = too_large(request.containers, pod.containers, largest) if largest else ""
    if over and not policy.larger:
        raise RequestError(over)
    return [f"{over}; the pod waits for a node that has it"] if over else []


def _asks_of(pod: PodSeen, completed: Mapping[str, Mapping[str, int | None]]) -> PodManifest:
    return PodManifest(
        namespace=Namespace(pod.namespace),
        containers=tuple(
            ContainerManifest(
                name=container.name,
                limits=_with(container.limits, completed.get(container.path, {})),
                requests=_with(container.requests, completed.get(container.path, {})),
                init=container.init,
            )
            for container in pod.containers
        ),
        annotations=pod.annotations,
        labels=pod.labels,
        scheduler=pod.scheduler,
    )


def _with(amounts: Mapping[str, int], added: Mapping[str, int | None]) -> dict[str, int]:
    merged = {**amounts, **added}
    return {name: amount for name, amount in merged.items() if amount is not None}


def _completions(
    pod: PodSeen,
    asking: list[ContainerSeen],
    completed: Mapping[str, Mapping[str, int | None]],
    policy: Policy,
    *,
    priority_class: str,
) -> Iterator[Patch]:
    for container in asking:
        yield from complete_limits(container, completed[container.path])
    for container in pod.containers:
        if not _asks(container) and VISIBLE not in container.variables:
            yield from add_variable(container, VISIBLE, NOTHING_VISIBLE)
    if pod.scheduler in {"", DEFAULT_SCHEDULER}:
        yield Patch(op="add", path="/spec/schedulerName", value=policy.scheduler)
    for key, value in pod_requests.added_annotations(_asks_of(pod, {})).items():
        yield from add_annotation(pod, key, value)
    if policy.runtime_class and "runtimeClassName" not in pod.has:
        yield Patch(op="add", path="/spec/runtimeClassName", value=policy.runtime_class)
    if priority_class:
        yield Patch(op="add", path="/spec/priorityClassName", value=priority_class)
        # Both were filled in from the class before, and are again after us.
        for filled in ("priority", "preemptionPolicy"):
            if filled in pod.has:
                yield Patch(op="remove", path=f"/spec/{filled}")
