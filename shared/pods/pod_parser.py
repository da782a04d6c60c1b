"""Parses pods of the API server; pure."""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import msgspec
from msgspec import structs

from shared.dialects import (
    KUBE_SCHEDULER,
    LEDGER_RESOURCES,
    REQUEST_ANNOTATIONS,
    REQUEST_LABELS,
    REQUEST_PREFIXES,
    pod_groups,
)
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import amount_changes, annotated_amounts, parse_pod_request
from shared.dialects.protected_paths import HOST_PATHS
from shared.dialects.reserved import EXEMPT
from shared.kubernetes.types import (
    Affinity,
    ApiPod,
    Container,
    Quantities,
    Resources,
    Volume,
)
from shared.model.bounds import MOST_HOST_PORTS, NAME, check_bounds, cut
from shared.model.errors import RequestError
from shared.model.events.event import ADMISSION
from shared.model.events.pod_events import message_digest
from shared.model.leases.lease_copy import ANNOTATION, lease_outline
from shared.model.names import BUDGET_GATE, Namespace, NodeName, PodUid
from shared.model.quantity import HUGE_PAGES, check_amount, parse_resources, peak
from shared.model.requests.host_ports import HostPorts, host_ports
from shared.model.requests.pod_rules import SELECTED_PREFIX, selected_in_use
from shared.model.requests.request import (
    GpuRequest,
    NodeRequirements,
    PodRequest,
    Toleration,
)
from shared.placing.index.threshold_column import store
from shared.placing.node_filters import ATTACHABLE
from shared.placing.pod_fields import handed_over
from shared.pods.member_affinity import affinity_to_members, with_affinity
from shared.pods.node_selectors import node_terms
from shared.pods.observed_pod import TERMINAL, AwaitedClaims, ObservedPod, rejection_of
from shared.pods.pod_anti_affinity import PodAntiAffinity, parse_anti_affinity
from shared.pods.pod_policy import (
    Check,
    PolicySubject,
    demand_violations,
    device_mounts,
    violations,
)
from shared.pods.pod_rules import Selections, has_rules, parse_pod_rules
from shared.pods.pod_snapshot import claim_names
from shared.pods.pod_view import SIDECAR, PodView, runs_on, view_of
from shared.pods.pod_volumes import ClaimUse
from shared.pods.run_term import deadline_s, parse_term

TEMPLATES = 4096
TEMPLATES_BYTES = 16 * 1024 * 1024
"""Of pod templates; one has up to 1.5 MiB."""
RESIZABLE = ("cpu", "memory")
"""Resources that a running pod may change (`pods/resize`)."""
INFEASIBLE = ("PodResizePending", "True", "Infeasible")
"""Type, status and reason of the condition of a pod whose new size no kubelet will give it.
https://kubernetes.io/docs/tasks/configure-pod-container/resize-container-resources/
"""
MOST_NAMED = 8
"""They are the reason why kube-scheduler places a pod."""
POD_LEVEL = frozenset({"cpu", "memory"})
"""Resources that a pod may request as a whole, beside huge pages.
https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/#pod-level-resource-specification
"""


@dataclass(frozen=True, slots=True)
class _TemplateRequest:
    resources: Mapping[str, int]
    repels: tuple[PodAntiAffinity, ...] = ()
    request: PodRequest | None = None
    error: str = ""
    group: pod_groups.PodGroupReference | None = None
    handed_over: str = ""
    selections: Selections = field(default_factory=dict)


GATED = "SchedulingGated"
"""Reason of PodScheduled that the API server writes; it remains when the gates are removed."""


class PodParser:
    """The request of a template is parsed once for all of its pods."""

    def __init__(
        self,
        schedulers: frozenset[str],
        rules: Rules,
        *,
        allow_privileged: bool = False,
        host_paths: Sequence[str] = HOST_PATHS,
    ) -> None:
        self.schedulers = schedulers | {KUBE_SCHEDULER}
        self.rules = rules
        self.allow_privileged = allow_privileged
        self.host_paths = host_paths
        self.keeps_reasons = False
        """Whether pods have what only their traces need."""
        self.annotations = REQUEST_ANNOTATIONS | pod_groups.READ_ANNOTATIONS | {EXEMPT}
        self.labels = (REQUEST_LABELS | pod_groups.READ_LABELS).union(
            *(dict(rule) for rule in rules.exclusive_labels)
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._templates: OrderedDict[bytes, _TemplateRequest] = OrderedDict()
        self._templates_bytes = 0
        self._labels: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}

    def parse(self, pod: ApiPod) -> ObservedPod:
        """The error of an invalid request is in `request_error`."""
        meta = pod.metadata
        spec = pod.spec
        status = pod.status
        ours = spec.scheduler_name in self.schedulers
        by_kube_scheduler = spec.scheduler_name == KUBE_SCHEDULER
        template = self._template_request(pod, ours=ours)
        awaited = None if ours or not spec.resource_claims else _awaited_claims(pod)
        lease_copy = meta.annotations.get(ANNOTATION, "")
        leased = lease_outline(lease_copy).resources if lease_copy else {}
        shown = next(
            (
                c.message
                for c in status.conditions
                if c.type == "PodScheduled" and c.status == "False" and c.reason != GATED
            ),
            None,
        )
        return ObservedPod(
            pod=PodUid(meta.uid),
            namespace=Namespace(meta.namespace),
            name=meta.name,
            resource_version=meta.resource_version,
            ours=ours,
            by_kube_scheduler=by_kube_scheduler,
            handed_over=template.handed_over,
            node=NodeName(spec.node_name) if spec.node_name else None,
            phase=status.phase or "Pending",
            rejection=rejection_of(status),
            deleting=meta.deletion_timestamp is not None,
            gated=bool(spec.scheduling_gates),
            budget_gated=ours and any(gate.name == BUDGET_GATE for gate in spec.scheduling_gates),
            priority=spec.priority or 0,
            shown=0 if shown is None else message_digest(shown),
            reason=cut(shown or "")
            if self.keeps_reasons
            or by_kube_scheduler
            or awaited
            or spec.scheduling_group.pod_group_name
            else "",
            has_lease=ANNOTATION in meta.annotations,
            grown=_grown(template.resources, leased),
            leased_volumes={name: leased[name] for name in leased if name.startswith(ATTACHABLE)},
            created_at=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
            labels=self._shared(meta.labels),
            repels=template.repels,
            selections=template.selections,
            counted=_counted(meta.annotations.get(ANNOTATION, "")),
            resources=template.resources,
            request=template.request if ours or awaited else None,
            request_error=template.error,
            group=template.group,
            claims=_claim_uses(pod),
            awaited=awaited,
            reviewed=meta.annotations.get(ADMISSION, "") if self.keeps_reasons else "",
        )

    def _shared(self, labels: Mapping[str, str]) -> Mapping[str, str]:
        """Most pods have the labels of their controller's others."""
        key = tuple(labels.items())
        shared = self._labels.get(key)
        return store(self._labels, key, labels, TEMPLATES) if shared is None else shared

    def _template_request(self, pod: ApiPod, *, ours: bool) -> _TemplateRequest:
        spec = pod.spec
        notes = pod.metadata.annotations
        labels = pod.metadata.labels
        key = self._encode(
            (
                ours,
                pod.metadata.namespace,
                [(name, notes[name]) for name in sorted(self.annotations & notes.keys())],
                sorted(item for item in notes.items() if item[0].startswith(REQUEST_PREFIXES)),
                [
                    (name, labels[name])
                    for name in sorted(labels if has_rules(pod) else self.labels & labels.keys())
                ],
                spec.scheduler_name if ours else "",
                spec.containers,
                spec.init_containers,
                spec.overhead,
                spec.node_selector,
                spec.affinity,
                spec.tolerations,
                spec.topology_spread_constraints,
                spec.priority,
                spec.resources,
                spec.resource_claims,
                spec.scheduling_group,
                (spec.host_network, spec.host_users, spec.security_context),
                (spec.active_deadline_seconds, spec.termination_grace_period_seconds),
                runs_on(pod.metadata),
                [volume for volume in spec.volumes if volume != Volume(volume.name)]
                if ours
                else (),
                _running(pod),
            )
        )
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._parse_template(pod, ours=ours)
            self._templates_bytes += len(key)
            while len(self._templates) > TEMPLATES or self._templates_bytes > TEMPLATES_BYTES:
                oldest, _ = self._templates.popitem(last=False)
                self._templates_bytes -= len(oldest)
        return template

    def _parse_template(self, pod: ApiPod, *, ours: bool) -> _TemplateRequest:
        resources: Mapping[str, int] = {}
        repels: tuple[PodAntiAffinity, ...] = ()
        selections: Selections = {}
        by_kube_scheduler = pod.spec.scheduler_name == KUBE_SCHEDULER
        fields = _handed_over(pod) if by_kube_scheduler else ""
        try:
            own = pod_resources(pod)
            ports = pod_ports(pod)
            resources = own | dict(ports)
            repels = parse_anti_affinity(pod)
            group = _group(pod) if ours else _valid_group(pod)
            request = self._request(pod, own, ports) if ours else self._elsewhere(pod, own, ports)
            if request is not None and not by_kube_scheduler:
                of_gang = affinity_to_members(pod.spec, pod.metadata) if group else ()
                rules, selections = parse_pod_rules(pod, repels, of_gang)
                if rules is not None:
                    request = structs.replace(request, pod_rules=rules)
        except RequestError as error:
            return _TemplateRequest(resources, repels, error=cut(str(error)), handed_over=fields)
        except Exception as error:  # noqa: BLE001 - of one pod: the others are read all the same
            reason = f"a bug in how the pod is read: {error!r}; please report it"
            return _TemplateRequest(resources, repels, error=cut(reason), handed_over=fields)
        return _TemplateRequest(
            resources, repels, request, group=group, handed_over=fields, selections=selections
        )

    def _request(self, pod: ApiPod, resources: Mapping[str, int], ports: HostPorts) -> PodRequest:
        view = view_of(pod)
        request = _request(pod, view, resources, self.rules)
        needs = structs.replace(request.node_requirements, host_ports=ports)
        request = structs.replace(request, node_requirements=needs)
        if pod.spec.scheduler_name == KUBE_SCHEDULER:
            request = _of_kube_scheduler(request)
        if request.containers:
            self._check_policy(view, request)
        return request

    def _elsewhere(
        self, pod: ApiPod, resources: Mapping[str, int], ports: HostPorts
    ) -> PodRequest | None:
        """Return what a pod of another scheduler requests beside its ResourceClaims.

        None without claims, or for an invalid request: our rules do not apply to it.
        """
        if not pod.spec.resource_claims:
            return None
        with contextlib.suppress(RequestError):
            request = _request(pod, view_of(pod), resources, self.rules)
            needs = structs.replace(request.node_requirements, host_ports=ports)
            return _of_kube_scheduler(structs.replace(request, node_requirements=needs))
        return None

    def _check_policy(self, pod: PodView, request: PodRequest) -> None:
        """Raise RequestError for a pod that would see other devices, or lift limits.

        The webhook denies such pods; this is for those created while it was not running.
        """
        subject = PolicySubject(
            check=Check.WATCH,
            pod=pod,
            containers=pod.containers,
            allow_privileged=self.allow_privileged,
            host_paths=self.host_paths,
        )
        faults = demand_violations(pod, request)
        if EXEMPT not in pod.annotations:
            faults = chain(violations(subject), device_mounts(pod.containers), faults)
        for fault in faults:
            raise RequestError(fault.text, *fault.changes)


def _of_kube_scheduler(request: PodRequest) -> PodRequest:
    """Leave out what kube-scheduler decides by."""
    needs = structs.replace(request.node_requirements, preferred=(), unsupported=())
    return structs.replace(request, node_requirements=needs)


def _awaited_claims(pod: ApiPod) -> AwaitedClaims | None:
    """Return the ResourceClaims of a pod without a node, or None if none is made or it ends."""
    is_ending = pod.status.phase in TERMINAL or pod.metadata.deletion_timestamp is not None
    if pod.spec.node_name or pod.spec.scheduling_gates or is_ending:
        return None
    names = tuple(filter(None, claim_names(pod)))
    return AwaitedClaims(pod.spec.scheduler_name[:NAME], names) if names else None


def _claim_uses(pod: ApiPod) -> tuple[ClaimUse, ...]:
    """Return the pod's claims; that of an ephemeral volume has the names of both."""
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim or volume.ephemeral:
            break
    else:
        return ()
    uses = list[ClaimUse]()
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim:
            uses.append(ClaimUse(str(volume.persistent_volume_claim.get("claimName", ""))))
        elif volume.ephemeral:
            uses.append(ClaimUse(f"{pod.metadata.name}-{volume.name}", ephemeral=True))
    return tuple(uses)


def parse_manifest(pod: ApiPod, rules: Rules) -> ObservedPod:
    """Parse a pod that is not created yet, as admission will complete it."""
    return PodParser(frozenset({pod.spec.scheduler_name}), rules).parse(admitted(pod, rules))


def admitted(pod: ApiPod, rules: Rules) -> ApiPod:
    """Return a pod with its deadline, our resource, and missing amounts, as admission does."""
    with contextlib.suppress(RequestError):  # `parse` reports it
        wanted = deadline_s(view_of(pod))
        pod = structs.replace(pod, spec=structs.replace(pod.spec, active_deadline_seconds=wanted))
    with contextlib.suppress(RequestError):
        view = view_of(pod)
        changes = {it.name: amount_changes(it.amounts) for it in view.containers}
        pod = _completed(pod, changes)
    with contextlib.suppress(RequestError):
        pod = _completed(pod, annotated_amounts(view_of(pod), rules))
    return pod


def _completed(pod: ApiPod, added: Mapping[str, Mapping[str, int | None]]) -> ApiPod:
    """Change the limits of containers by name; None removes one."""
    spec = pod.spec
    init_containers, containers = (
        tuple(_with_limits(container, added.get(container.name, {})) for container in part)
        for part in (spec.init_containers, spec.containers)
    )
    spec = structs.replace(spec, init_containers=init_containers, containers=containers)
    return structs.replace(pod, spec=spec)


def _with_limits(container: Container, changes: Mapping[str, int | None]) -> Container:
    if not changes:
        return container
    limits, requests = (
        {name: amount for name, amount in amounts.items() if name not in changes}
        for amounts in (container.resources.limits, container.resources.requests)
    )
    limits |= {name: amount for name, amount in changes.items() if amount is not None}
    resources = structs.replace(container.resources, limits=limits, requests=requests)
    return structs.replace(container, resources=resources)


def _group(pod: ApiPod) -> pod_groups.PodGroupReference | None:
    meta = pod.metadata
    name = pod.spec.scheduling_group.pod_group_name
    namespace = Namespace(meta.namespace)
    group = pod_groups.parse_pod_group(namespace, meta.annotations, meta.labels, name)
    if group is None:
        return None
    return replace(
        group, topology=with_affinity(group.topology, affinity_to_members(pod.spec, pod.metadata))
    )


def _valid_group(pod: ApiPod) -> pod_groups.PodGroupReference | None:
    """Our rules do not apply to pods of another scheduler."""
    with contextlib.suppress(RequestError):
        return _group(pod)
    return None


def _request(pod: ApiPod, view: PodView, resources: Mapping[str, int], rules: Rules) -> PodRequest:
    request = parse_pod_request(view, rules)
    required = node_requirements(pod)
    selector = sorted({*required.selector, *request.node_requirements.selector})
    request = structs.replace(
        request,
        resources=resources,
        containers=_with_exclusive_cpus(pod, request.containers),
        node_requirements=structs.replace(
            required,
            selector=tuple(selector),
            sole_manager=request.node_requirements.sole_manager,
        ),
        priority=pod.spec.priority or 0,
        term=parse_term(view),
    )
    check_bounds(request, "the pod's request")
    return request


def _with_exclusive_cpus(
    pod: ApiPod, requests_of_gpus: tuple[GpuRequest, ...]
) -> tuple[GpuRequest, ...]:
    """The kubelet decides which containers get CPUs exclusively."""
    cpus = {}
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        limits, requests = container.resources.limits, container.resources.requests
        limited = parse_resources({name: limits[name] for name in limits.keys() & POD_LEVEL})
        wanted = parse_resources({name: requests[name] for name in requests.keys() & POD_LEVEL})
        if limited.keys() != POD_LEVEL or limited != {**limited, **wanted}:
            return requests_of_gpus
        if limited["cpu"] % 1000 == 0:
            cpus[container.name] = limited["cpu"] // 1000
    return tuple(
        structs.replace(gpu_request, exclusive_cpus=cpus.get(gpu_request.container, 0))
        for gpu_request in requests_of_gpus
    )


def pod_resources(pod: ApiPod) -> dict[str, int]:
    """Leave out resources of dialects.

    Raises RequestError for a quantity that is invalid or too large to count.
    """
    running = _running(pod)
    init = [
        (_requests(container, running), container.restart_policy != SIDECAR)
        for container in pod.spec.init_containers
    ]
    requests = [
        *init,
        *((_requests(container, running), False) for container in pod.spec.containers),
    ]
    at_once = {
        key: peak(((amounts.get(key, 0), ends_first) for amounts, ends_first in requests), 0)
        for key in dict.fromkeys(chain.from_iterable(amounts for amounts, _ in requests))
    }
    total = Counter(at_once | _pod_level(pod))
    total.update(parse_resources(pod.spec.overhead))
    for key, amount in total.items():
        check_amount(key, amount)
    return {**{key: amount for key, amount in total.items() if amount}, "pods": 1}


def pod_ports(pod: ApiPod) -> HostPorts:
    """Leave out init containers. Raises RequestError for more than `MOST_HOST_PORTS`."""
    spec = pod.spec
    sidecars = (init for init in spec.init_containers if init.restart_policy == SIDECAR)
    ports = host_ports(
        (port.protocol, port.host_port, port.host_ip)
        for container in chain(sidecars, spec.containers)
        for port in container.ports
        if port.host_port
    )
    if len(ports) > MOST_HOST_PORTS:
        raise RequestError(
            f"the pod reserves {len(ports)} ports of its node: {MOST_HOST_PORTS} at most"
        )
    return ports


def _running(pod: ApiPod) -> dict[str, Quantities]:
    """Return what containers use if the node can never fulfil the pod's resize.

    As for kube-scheduler, the wanted amounts do not count: a pod cannot fill a node by a wish.
    """
    if not any((c.type, c.status, c.reason) == INFEASIBLE for c in pod.status.conditions):
        return {}
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return {
        container_status.name: {
            **(container_status.resources or Resources()).requests,
            **container_status.allocated_resources,
        }
        for container_status in statuses
    }


def _requests(container: Container, running: Mapping[str, Quantities]) -> dict[str, int]:
    wanted = {**container.resources.limits, **container.resources.requests}
    amounts = {**wanted, **running.get(container.name, {})}
    try:
        return parse_resources({key: amounts[key] for key in amounts.keys() - LEDGER_RESOURCES})
    except RequestError as error:
        raise RequestError(f"container {container.name}: {error}") from error


def _grown(resources: Mapping[str, int], leased: Mapping[str, int]) -> dict[str, int]:
    """Return what a pod uses more than its lease since it was resized in place."""
    more = ((name, resources.get(name, 0) - leased.get(name, 0)) for name in RESIZABLE)
    return {name: amount for name, amount in more if name in leased and amount > 0}


def _counted(lease_copy: str) -> frozenset[str]:
    """The pod's lease counts it as these, for the rules of other pods."""
    if SELECTED_PREFIX not in lease_copy:
        return frozenset()
    return frozenset(selected_in_use(lease_outline(lease_copy).resources))


def _pod_level(pod: ApiPod) -> dict[str, int]:
    """Return what replaces the sum over the containers.

    The API server has completed these requests from the pod's limits.
    """
    requested = parse_resources(pod.spec.resources.requests)
    return {
        name: amount
        for name, amount in requested.items()
        if name in POD_LEVEL or name.startswith(HUGE_PAGES)
    }


def node_requirements(pod: ApiPod) -> NodeRequirements:
    spec = pod.spec
    affinity = spec.affinity or Affinity()
    node = affinity.node_affinity
    required = node.required.node_selector_terms if node and node.required else ()
    return NodeRequirements(
        selector=tuple(sorted(spec.node_selector.items())),
        required=tuple(node_terms(term) for term in required),
        preferred=tuple((p.weight, node_terms(p.preference)) for p in node.preferred)
        if node
        else (),
        tolerations=tuple(
            Toleration(key=t.key, operator=t.operator or "Equal", value=t.value, effect=t.effect)
            for t in spec.tolerations
        ),
        unsupported=tuple(
            field_of_pod.path for field_of_pod in handed_over({"spec": msgspec.to_builtins(spec)})
        ),
    )


def _handed_over(pod: ApiPod) -> str:
    fields = handed_over({"spec": msgspec.to_builtins(pod.spec)})
    return cut(", ".join(islice((field_of_pod.path for field_of_pod in fields), MOST_NAMED)))
