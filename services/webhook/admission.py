"""The admission decision: whether a pod may be created or updated, and its patches; pure.

Every container of every kind is checked, and one that breaks a rule of `pod_policy` denies the pod.
Containers that request no GPU see none, whatever they set. A pod's request is parsed by the code
that the watcher uses, so an admitted pod is never rejected later for the syntax of its request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

from msgspec import structs

from services.webhook.copied_state import CopiedState
from services.webhook.patches import (
    PatchOperation,
    add,
    add_annotation,
    add_label,
    add_variable,
    complete_limits,
    rename_amounts,
)
from services.webhook.small_requests import DeviceUnits, small_requests
from shared.dialects import DIALECTS, GPU_RESOURCES, pod_requests
from shared.dialects.dialect import Rules
from shared.dialects.pod_groups import parse_pod_group
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.protected_paths import HOST_PATHS
from shared.dialects.reserved import (
    EXEMPT,
    NO_DEVICE_VALUES,
    NOTHING_VISIBLE,
    RUNTIME_CLASSES,
    VISIBLE,
    is_cuda_image,
    names_devices,
)
from shared.dialects.vocabulary import LEFT_ALONE, find_misplaced, find_unread
from shared.model.bounds import MOST_ANNOTATIONS, cut
from shared.model.claim import EXTENDED_RESOURCES
from shared.model.device import MIB
from shared.model.errors import RequestError
from shared.model.events.pod_events import LargestDeviceReported
from shared.model.names import DEFAULT_SCHEDULER, HANDED_OVER
from shared.model.quota import Quota
from shared.model.request import LEAST_SHARE_MIB, GpuRequest, PodRequest
from shared.placing.advice import Change, changes_between
from shared.pods.pod_policy import Check, PolicySubject, device_names, violations
from shared.pods.pod_view import PodContainer, PodView
from shared.pods.run_term import deadline_s, expected_run_s

MOST_REPORTS = 1_000
STALE_S = 30.0
"""How long a report counts: a node that is briefly absent does not lower the maximum."""


class DeviceMaximum(NamedTuple):
    """The most memory of any device, in MiB and in units of its node."""

    memory_mib: int
    memory_units: int


class LargestDevice:
    """The largest device by the placers' recent reports; MiB and units may be of different ones."""

    def __init__(self) -> None:
        self._reported_at: dict[tuple[int, int], float] = {}
        """When each pair of MiB and units was last reported."""

    def note(self, report: LargestDeviceReported, received_at: float) -> None:
        """Record a report and when it was received (on this process' monotonic clock, seconds)."""
        if len(self._reported_at) >= MOST_REPORTS:
            self._forget_old(received_at)
        self._reported_at[report.memory_mib, report.memory_units] = received_at

    def now(self, now: float) -> DeviceMaximum | None:
        """Return the maximum of the reports that count at `now` (on the same clock), if any."""
        self._forget_old(now)
        if not self._reported_at:
            return None
        return DeviceMaximum(
            memory_mib=max(mib for mib, _ in self._reported_at),
            memory_units=max(units for _, units in self._reported_at),
        )

    def _forget_old(self, now: float) -> None:
        recent = {key: at for key, at in self._reported_at.items() if now - at <= STALE_S}
        self._reported_at = recent


def excess_memory(
    pod: PodRequest, containers: Iterable[PodContainer], largest: DeviceMaximum
) -> str:
    """Return which container requests more of one device than the largest has; empty: none."""
    amounts = {each.name: each.amounts for each in containers}
    for request in pod.containers:
        excess = _excess(request, largest)
        if excess:
            written = _written(amounts.get(request.container, {}))
            less = ", ".join(f"{each.name}: {each.value}" for each in _most(pod, request, largest))
            return (
                f'container "{request.container}" ({written}) requests {excess}; set {less}, or '
                "request a whole GPU"
            )
    return ""


def _most(pod: PodRequest, request: GpuRequest, largest: DeviceMaximum) -> tuple[Change, ...]:
    """Return the change of a container's limits to all the memory of the largest device."""
    step = DIALECTS[pod.dialect].memory_step
    changes = {"memory_units": largest.memory_units}
    if request.memory_bytes is not None:
        changes = {"memory_bytes": largest.memory_mib * MIB // step * step}
    most = structs.replace(request, **changes)
    containers = tuple(most if each is request else each for each in pod.containers)
    return changes_between(pod, structs.replace(pod, containers=containers))


def _excess(request: GpuRequest, largest: DeviceMaximum) -> str:
    if request.whole or request.memory_percent is not None:
        return ""
    if request.memory_bytes is not None:
        mib = -(-request.memory_bytes // MIB)
        if mib > largest.memory_mib:
            return (
                f"{mib} MiB of one GPU, and the largest GPU of the cluster has "
                f"{largest.memory_mib} MiB"
            )
    elif request.memory_units is not None and request.memory_units > largest.memory_units:
        unit = "MiB"
        size = ""
        if largest.memory_units != largest.memory_mib:
            unit = "units of memory"
            size = f" ({largest.memory_mib} MiB)"
        return (
            f"{request.memory_units} {unit} of one GPU, and the largest GPU of the cluster has "
            f"{largest.memory_units} {unit}{size}"
        )
    return ""


def _written(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{key}={amounts[key]}" for key in sorted(amounts) if key in GPU_RESOURCES)


SCHEDULER = "/spec/schedulerName"
"""Its path in patches."""
ALL_PODS = "all-pods"
"""The label's value where kube-scheduler gets all pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """The operator's schedulers, by `schedulerName`."""

    placer: str = "leasehold"
    """Set on GPU pods that do not choose a scheduler."""
    served: frozenset[str] = frozenset({"leasehold"})
    """All that Leasehold serves."""
    handover: str = ""
    """That of kube-scheduler with the extender; empty: it is not installed."""
    all_pods: bool = False
    """All pods are handed over."""

    def has(self, pod: PodView) -> bool:
        """Return whether a pod names a scheduler that Leasehold serves."""
        return pod.scheduler in self.served

    def serves(self, pod: PodView) -> bool:
        """Return whether a pod has no scheduler yet, or one that Leasehold serves."""
        return self.has(pod) or (
            pod.scheduler in {"", DEFAULT_SCHEDULER} and LEFT_ALONE not in pod.labels.items()
        )

    def unsupported(self, pod: PodView) -> Iterator[str]:
        """Yield the fields that no installed scheduler of GPU pods supports, and what to do."""
        if not self.handover:
            for found in pod.handed_over:
                yield (
                    f"{found.path}: only kube-scheduler supports it, and the scheduler extender is "
                    "not installed: remove the field, or have an administrator install the extender"
                )

    def patches(self, pod: PodView) -> Iterator[PatchOperation]:
        """Yield the patches of an admitted pod: its scheduler, and a label with why it is that."""
        reasons = [found.row.reason for found in pod.handed_over] + [ALL_PODS] * self.all_pods
        if self.handover and reasons and pod.scheduler != self.handover:
            yield add(SCHEDULER, self.handover)
            yield add_label(pod, HANDED_OVER, reasons[0])
        elif pod.scheduler in {"", DEFAULT_SCHEDULER}:
            yield add(SCHEDULER, self.placer)


SERVED = frozenset().union(*(dialect.served for dialect in DIALECTS.values()))
BAD_REQUEST = 400
FORBIDDEN = 403
UNPROCESSABLE = 422
TOO_MANY = 429

CHECKS_OF_NEW_PODS = {False: Check.CREATION, True: Check.EXEMPTED}
"""By whether administrators have exempted the namespace."""
MAX_SHOWN = 10
"""Reasons that a message shows."""
MOST_WARNINGS = 10
"""Words of a pod that are warned of: each is compared with all that are known."""

AmountChanges = Mapping[str, Mapping[str, int | None]]
"""Changes of a container's amounts, by the container's path; None removes an amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """The operator's choices."""

    schedulers: SchedulerChoice = field(default_factory=SchedulerChoice)
    resource_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of resources, and for each the one that it stands for."""
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
    allow_env_from: bool = False
    """`envFrom` of containers with GPUs needs no prefix: CDI passes the devices."""
    host_paths: tuple[str, ...] = HOST_PATHS
    """Directories of nodes that GPU pods may mount: they contain only data."""
    claims: bool = False
    """ResourceClaims may be for GPUs: `pod_policy` applies to the containers that use them."""
    allow_larger_requests: bool = False
    """A container may request more memory than the largest device has, and wait for a larger."""
    least_share_mib: int = LEAST_SHARE_MIB
    """A container that requests less memory of a device is warned of."""
    quota: Quota | None = None
    """That of the pod's namespace."""


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
    pod: PodView,
    policy: AdmissionPolicy,
    *,
    has_budget: bool = True,
    largest: DeviceMaximum | None = None,
    default_class: str = "",
    exempt: bool = False,
) -> AdmissionDecision:
    """Decide on one new pod; `largest` is the cluster's largest device, None if it is unknown.

    `default_class` is the cluster's default priority class. The API server sets it before it calls
    webhooks, so a pod with it counts as one without a class. `exempt`: administrators have exempted
    the namespace from `pod_policy`. Raises RequestError for a malformed or too long run time.
    """
    copied = CopiedState.of(pod, is_placed=_is_placed(pod, policy))
    patches = copied.patches(pod)
    warnings = copied.warnings()
    pod = copied.removed(pod)
    if policy.resource_names and policy.schedulers.serves(pod):
        renamed = [rename_amounts(each, policy.resource_names) for each in pod.containers]
        pod = replace(pod, containers=tuple(each for each, _ in renamed))
        patches += chain.from_iterable(made for _, made in renamed)
    denial = copied.misspelled()
    if not (denial or exempt):
        denial = _shown(device_names(pod, pod.containers))
    if denial:
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    patches += _term_patches(pod, policy)
    gpu_containers = [container for container in pod.containers if container.requests_gpu]
    subject = _subject(pod, pod.containers, policy, CHECKS_OF_NEW_PODS[exempt])
    is_leased = bool(gpu_containers) and policy.schedulers.serves(pod)
    if not exempt:
        in_gpu_pod = bool(subject.gpu_containers)
        patches += _hide_devices(pod, pod.containers, in_gpu_pod=in_gpu_pod, is_leased=is_leased)
    if not is_leased:
        warnings += _foreign_warnings(pod, gpu_containers)
        uses_claims = any(_uses_claims(each, policy) for each in subject.containers)
        broken = violations(subject) if uses_claims else ()
        return _decide_without_lease(pod, policy, patches, warnings, broken)
    if denial := _shown(violations(subject)):
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    try:
        changes = {container.path: _amount_changes(container) for container in gpu_containers}
        request = _parse_request(pod, changes, policy)
        warnings += _word_warnings(pod, request)
        warnings += _size_warnings(pod, request, policy, largest)
    except RequestError as error:
        return AdmissionDecision(allowed=False, message=str(error), code=BAD_REQUEST)
    if denial := _shown(policy.schedulers.unsupported(pod)):
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    priority_class = _budget_class(pod, policy, default_class, has_budget=has_budget)
    patches += _complete_pod(pod, policy, changes, priority_class)
    added = pod_requests.added_annotations(pod) | ({EXEMPT: "true"} if exempt else {})
    for key, value in added.items():
        patches.append(add_annotation(pod, patches, key, value))
    return AdmissionDecision(
        allowed=True, patches=tuple(patches), warnings=tuple(warnings), requests_gpu=True
    )


def _is_placed(pod: PodView, policy: AdmissionPolicy) -> bool:
    """Return whether a pod gets GPUs by a lease, or by claims, on the node where it is placed."""
    is_served = policy.schedulers.serves(pod)
    return any(
        (is_served and each.requests_gpu) or _uses_claims(each, policy) for each in pod.containers
    )


def _term_patches(pod: PodView, policy: AdmissionPolicy) -> Iterator[PatchOperation]:
    """Yield the deadline of a pod: by its annotation and, with GPUs, by its namespace's quota."""
    expected_run_s(pod)
    has_gpus = any(_holds_gpu(each, policy) for each in pod.containers)
    wanted = deadline_s(pod, policy.quota if has_gpus else None)
    if wanted is not None and wanted != pod.spec.active_deadline_seconds:
        yield add("/spec/activeDeadlineSeconds", wanted)


def _foreign_warnings(pod: PodView, gpu_containers: Sequence[PodContainer]) -> Iterator[str]:
    if gpu_containers:
        left = LEFT_ALONE in pod.labels.items()
        why = "the label {}={}".format(*LEFT_ALONE) if left else f"schedulerName {pod.scheduler}"
        yield (
            f"by {why} Leasehold does not schedule the pod, and its node agents refuse containers "
            "without a lease"
        )


def _decide_without_lease(
    pod: PodView,
    policy: AdmissionPolicy,
    patches: Iterable[PatchOperation],
    warnings: Iterable[str],
    broken: Iterable[str],
) -> AdmissionDecision:
    """Decide on a pod without a lease of its own; its node, if it names our scheduler."""
    ours = policy.schedulers.has(pod)
    if denial := _shown(chain(broken, _broken_by_scheduler(pod, policy) if ours else ())):
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    scheduler = policy.schedulers.patches(pod) if ours else ()
    warnings = (*warnings, *_word_warnings(pod, PodRequest()))
    return AdmissionDecision(allowed=True, patches=(*patches, *scheduler), warnings=warnings)


def _broken_by_scheduler(pod: PodView, policy: AdmissionPolicy) -> Iterator[str]:
    yield from policy.schedulers.unsupported(pod)
    try:
        _check_group(pod)
    except RequestError as error:
        yield str(error)


def decide_without_gpu(pod: PodView, policy: AdmissionPolicy) -> AdmissionDecision:
    """Have a placer place a pod without GPUs, unless only kube-scheduler can."""
    schedulers = policy.schedulers
    if pod.handed_over or pod.spec.node_name or schedulers.has(pod) or not schedulers.serves(pod):
        return AdmissionDecision(allowed=True)
    return AdmissionDecision(allowed=True, patches=(add(SCHEDULER, schedulers.placer),))


def decide_update(pod: PodView, old: PodView, policy: AdmissionPolicy) -> AdmissionDecision:
    """Decide on changed images, and on ephemeral containers that are added to a pod.

    Other fields cannot change so that a container sees other devices.
    """
    before = {container.name: container for container in old.containers}
    added = [each for each in pod.containers if each.ephemeral and each.name not in before]
    subject = _subject(pod, added, policy, Check.UPDATE)
    in_gpu_pod = bool(subject.gpu_containers_of_pod)
    images = (
        f"container {each.name} would see every GPU with image {each.image}: create a new pod "
        "with that image, or request a GPU"
        for each in pod.containers
        if each.name in before
        and each.image != before[each.name].image
        and is_cuda_image(each.image)
        and not _is_limited(each)
    )
    found = chain(device_names(pod, added), violations(subject) if in_gpu_pod else (), images)
    if denial := _shown(found):
        return AdmissionDecision(allowed=False, message=denial, code=FORBIDDEN)
    patches = tuple(_hide_devices(pod, added, in_gpu_pod=in_gpu_pod))
    return AdmissionDecision(allowed=True, patches=patches)


def _shown(reasons: Iterable[str]) -> str:
    """Return the first reasons as one message: a pod may have thousands. Empty: there is none."""
    return cut("; ".join(islice(reasons, MAX_SHOWN)))


def _is_limited(container: PodContainer) -> bool:
    """Return whether a container's devices do not depend on its image."""
    return container.requests_gpu or VISIBLE in container.variables


def _subject(
    pod: PodView,
    containers: Sequence[PodContainer],
    policy: AdmissionPolicy,
    check: Check,
) -> PolicySubject:
    return PolicySubject(
        check=check,
        pod=pod,
        containers=containers,
        gpu_containers=[each for each in containers if _holds_gpu(each, policy)],
        gpu_containers_of_pod=[each for each in pod.containers if _holds_gpu(each, policy)],
        allow_privileged=policy.allow_privileged,
        allow_env_from=policy.allow_env_from,
        host_paths=policy.host_paths,
    )


def _uses_claims(container: PodContainer, policy: AdmissionPolicy) -> bool:
    """Return whether a container may get a GPU by a ResourceClaim, its own or a scheduler's."""
    names = container.amounts
    return policy.claims and (
        container.has_claims or any(name.startswith(EXTENDED_RESOURCES) for name in names)
    )


def _holds_gpu(container: PodContainer, policy: AdmissionPolicy) -> bool:
    return container.requests_gpu or _uses_claims(container, policy)


def _hide_devices(
    pod: PodView, containers: Sequence[PodContainer], *, in_gpu_pod: bool, is_leased: bool = True
) -> Iterator[PatchOperation]:
    """Hide all devices from containers that request none and could see some.

    Without a lease, an amount is no request: only for resources of device plugins does the kubelet
    call an agent, which refuses the container.
    """
    runtime_adds_devices = RUNTIME_CLASSES in (pod.spec.runtime_class_name or "")
    for container in containers:
        if not (container.requests_gpu if is_leased else container.amounts.keys() & SERVED) and (
            in_gpu_pod or runtime_adds_devices or _may_see_devices(container)
        ):
            value = container.variables.get(VISIBLE)
            if value not in NO_DEVICE_VALUES or VISIBLE in container.value_from:
                yield add_variable(container, VISIBLE, NOTHING_VISIBLE)


def _may_see_devices(container: PodContainer) -> bool:
    """Return whether NVIDIA's runtime may add devices: by the variables, or by the image."""
    return (
        VISIBLE in container.value_from
        or names_devices(container.variables)
        or (VISIBLE not in container.variables and bool(container.prefixes))
        or (VISIBLE not in container.variables and is_cuda_image(container.image))
    )


def _amount_changes(container: PodContainer) -> Mapping[str, int | None]:
    """Return the changes that the vendors' own webhooks would make to a container's amounts.

    Raises RequestError where its author has set to 0 what is missing beside the other amounts.
    """
    amounts = container.amounts
    changes = pod_requests.amount_changes(amounts)
    contradicted = sorted(container.zeros & {key for key, amount in changes.items() if amount})
    if contradicted:
        requested = ", ".join(sorted(amounts.keys() & GPU_RESOURCES))
        raise RequestError(
            f"container {container.name}: {contradicted[0]} is 0 and needed by {requested}: set it "
            "to 1 or more, or remove them all"
        )
    return changes


def _parse_request(pod: PodView, changes: AmountChanges, policy: AdmissionPolicy) -> PodRequest:
    """Parse the request. Raises RequestError, with the vendor's message where that is chosen."""
    vendors = policy.vendor_messages
    message = pod_requests.vendor_denial(pod, vendors, refused=False)
    if message:
        raise RequestError(message)
    try:
        request = parse_pod_request(_completed(pod, changes), policy.rules)
    except RequestError as error:
        message = pod_requests.vendor_denial(pod, vendors, refused=True)
        raise RequestError(message or str(error)) from error
    _check_group(pod)
    _check_annotations(pod)
    return request


def _check_group(pod: PodView) -> None:
    """Raise RequestError for a gang that the watcher would refuse."""
    group = pod.spec.scheduling_group.pod_group_name
    parse_pod_group(pod.namespace, pod.annotations, pod.labels, group)


def _check_annotations(pod: PodView) -> None:
    """Raise RequestError if a Binding could make a pod of which no status can be written."""
    annotations = sum(len(text.encode()) for each in pod.annotations.items() for text in each)
    if annotations > MOST_ANNOTATIONS:
        raise RequestError(
            f"metadata.annotations has {annotations} bytes; at most {MOST_ANNOTATIONS} are "
            "allowed, as the lease is written there, too"
        )


def _word_warnings(pod: PodView, request: PodRequest) -> list[str]:
    """Return warnings of vendors' words that have no effect in this pod.

    Raises RequestError where a container would get all of a device, and was to get a part.
    """
    misplaced = tuple(islice(find_misplaced(pod), MOST_WARNINGS))
    wide = next((each for each in request.containers if each.wants_all_memory), None)
    amount = next((each for each in misplaced if each.is_resource), None)
    if wide and amount:
        raise RequestError(f"{amount.text}; container {wide.container} would get a whole GPU")
    return [*(each.text for each in misplaced), *find_unread(pod, request.dialect)]


def _size_warnings(
    pod: PodView,
    request: PodRequest,
    policy: AdmissionPolicy,
    largest: DeviceMaximum | None,
) -> list[str]:
    """Return warnings. Raises RequestError for more memory than any device of the cluster has."""
    excess = excess_memory(request, pod.containers, largest) if largest else ""
    if excess and not policy.allow_larger_requests:
        raise RequestError(excess)
    late = [f"{excess}; the pod waits for a node with such a device"] if excess else []
    units = DeviceUnits()
    if largest is not None and largest.memory_units:
        units = DeviceUnits(largest.memory_mib // largest.memory_units, largest.memory_mib)
    small = small_requests(request, policy.least_share_mib, units)
    return [*late, *islice(small, MOST_WARNINGS)]


def _completed(pod: PodView, changes: AmountChanges) -> PodView:
    containers = (
        replace(each, limits=_changed(each.limits, made), requests=_changed(each.requests, made))
        for each in pod.containers
        for made in (changes.get(each.path, {}),)
    )
    return replace(pod, containers=tuple(containers))


def _changed(amounts: Mapping[str, int], changes: Mapping[str, int | None]) -> dict[str, int]:
    merged = {**amounts, **changes}
    return {name: amount for name, amount in merged.items() if amount is not None}


def _budget_class(
    pod: PodView, policy: AdmissionPolicy, default_class: str, *, has_budget: bool
) -> str:
    """Return the priority class that follows from the budget; empty: the pod keeps its own."""
    if pod.spec.priority_class_name not in {"", default_class}:
        return ""
    return policy.in_budget_class if has_budget else policy.out_of_budget_class


def _complete_pod(
    pod: PodView, policy: AdmissionPolicy, changes: AmountChanges, priority_class: str
) -> Iterator[PatchOperation]:
    for container in pod.containers:
        if container.path in changes:
            yield from complete_limits(container, changes[container.path])
    yield from policy.schedulers.patches(pod)
    if policy.runtime_class and pod.spec.runtime_class_name is None:
        yield add("/spec/runtimeClassName", policy.runtime_class)
    if priority_class:
        yield add("/spec/priorityClassName", priority_class)
        # The API server set both from the previous class, and sets them again afterwards.
        if pod.spec.priority is not None:
            yield PatchOperation(op="remove", path="/spec/priority")
        if pod.spec.preemption_policy is not None:
            yield PatchOperation(op="remove", path="/spec/preemptionPolicy")
