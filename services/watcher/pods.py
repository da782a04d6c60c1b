"""Reads the API server's pods as the watcher's own values.

Resource arithmetic is that of Kubernetes' documentation on init and sidecar containers: what runs
side by side adds up, what runs one after the other counts by its largest.
https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from services.watcher.observed_pod import PodSeen
from shared.dialects import (
    LEDGER_RESOURCES,
    REQUEST_ANNOTATIONS,
    REQUEST_LABELS,
    pod_groups,
)
from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.reserved import exposes_devices, is_device_name_mount
from shared.kubernetes.types import Affinity, ApiPod, Container, NodeSelectorTerm
from shared.model.errors import RequestError
from shared.model.events.event import ADMISSION, is_traceparent
from shared.model.lease_copy import ANNOTATION
from shared.model.names import BUDGET_GATE, Namespace, NodeName, PodUid
from shared.model.quantity import check_amount, parse_resources
from shared.model.request import NodeRequirements, NodeTerm, PodRequest, Toleration

TEMPLATES = 4096
"""Templates whose request is remembered."""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SIDECAR = "Always"
"""`restartPolicy` of an init container that stays beside those that follow."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What all pods made from one template ask for."""

    resources: Mapping[str, int]
    host_ports: tuple[str, ...]
    request: PodRequest | None = None
    fault: str = ""
    group: pod_groups.PodGroupReference | None = None


GATED = "SchedulingGated"
"""Reason of PodScheduled that the API server writes; it stays when the gates are gone."""


class PodReader:
    """Reads pods. What a template asks for is read once, however many pods are made from it."""

    def __init__(
        self, schedulers: frozenset[str], rules: Rules, *, allow_privileged: bool = False
    ) -> None:
        self.schedulers = schedulers
        self.rules = rules
        self.allow_privileged = allow_privileged
        self.annotations = REQUEST_ANNOTATIONS | pod_groups.READ_ANNOTATIONS
        self.labels = (REQUEST_LABELS | pod_groups.READ_LABELS).union(
            *(dict(rule) for rule in rules.exclusive_labels)
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()

    def read(self, pod: ApiPod) -> PodSeen:
        """Read one pod. A request that cannot be read becomes the pod's `fault`, not an error."""
        meta, spec, status = pod.metadata, pod.spec, pod.status
        ours = spec.scheduler_name in self.schedulers
        asked = self._remembered(pod, ours=ours)
        return PodSeen(
            pod=PodUid(meta.uid),
            namespace=Namespace(meta.namespace),
            name=meta.name,
            resource_version=meta.resource_version,
            ours=ours,
            node=NodeName(spec.node_name) if spec.node_name else None,
            phase=status.phase or "Pending",
            deleting=meta.deletion_timestamp is not None,
            gated=bool(spec.scheduling_gates),
            held=ours and any(gate.name == BUDGET_GATE for gate in spec.scheduling_gates),
            priority=spec.priority or 0,
            explained=any(
                c.type == "PodScheduled" and c.status == "False" and c.reason != GATED
                for c in status.conditions
            ),
            leased=ANNOTATION in meta.annotations,
            created_at=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
            resources=asked.resources,
            host_ports=asked.host_ports,
            request=asked.request,
            fault=asked.fault,
            group=asked.group,
            admitted=_admitted(meta.annotations),
        )

    def _remembered(self, pod: ApiPod, *, ours: bool) -> _Asked:
        spec, notes, labels = pod.spec, pod.metadata.annotations, pod.metadata.labels
        key = self._encode(
            (
                ours,
                pod.metadata.namespace,
                {name: notes[name] for name in self.annotations if name in notes},
                {name: labels[name] for name in self.labels if name in labels},
                spec.scheduler_name if ours else "",
                spec.containers,
                spec.init_containers,
                spec.overhead,
                spec.node_selector,
                spec.affinity,
                spec.tolerations,
                spec.topology_spread_constraints,
                spec.priority,
                [volume for volume in spec.volumes if volume.host_path] if ours else (),
            )
        )
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = self._ask(pod, ours=ours)
            if len(self._asked) > TEMPLATES:
                self._asked.popitem(last=False)
        return asked

    def _ask(self, pod: ApiPod, *, ours: bool) -> _Asked:
        ports = tuple(
            f"{port.protocol}/{port.host_port}"
            for container in pod.spec.containers
            for port in container.ports
            if port.host_port
        )
        resources: Mapping[str, int] = {}
        try:
            resources = pod_resources(pod)
            request = _request(pod, resources, ports, self.rules) if ours else None
            if request and request.containers:
                check_openings(pod, allow_privileged=self.allow_privileged)
            group = _group(pod) if ours else None
        except RequestError as error:
            return _Asked(resources, ports, fault=str(error))
        return _Asked(resources, ports, request, group=group)


def check_openings(pod: ApiPod, *, allow_privileged: bool) -> None:
    """Raise RequestError for a pod that would see devices which its lease does not say.

    The webhook denies such a pod; this is for those that were created while it was away. Reserved
    variables are its node agent's business, which sees them as the kubelet does.
    """
    for volume in pod.spec.volumes:
        if volume.host_path and exposes_devices(volume.host_path.path):
            raise RequestError(
                f"volume {volume.name} mounts {volume.host_path.path} of the node, which opens "
                "devices or the isolation library: create the pod without it, devices come with "
                "the lease"
            )
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        for mount in container.volume_mounts:
            if is_device_name_mount(mount.mount_path):
                raise RequestError(
                    f"container {container.name}: a mount at {mount.mount_path} would name devices "
                    "to the container runtime: create the pod without it"
                )
        context = container.security_context
        if context and context.privileged and not allow_privileged:
            raise RequestError(
                f"container {container.name} is privileged and would see every device: create the "
                "pod with the capabilities that it needs"
            )


def _admitted(annotations: Mapping[str, str]) -> str:
    """Return the span that the webhook has named; whoever else wrote something there is ignored."""
    said = annotations.get(ADMISSION, "")
    return said if is_traceparent(said) else ""


def _group(pod: ApiPod) -> pod_groups.PodGroupReference | None:
    meta = pod.metadata
    return pod_groups.parse_pod_group(Namespace(meta.namespace), meta.annotations, meta.labels)


def _request(
    pod: ApiPod, resources: Mapping[str, int], host_ports: tuple[str, ...], rules: Rules
) -> PodRequest:
    asked = [
        ContainerManifest(
            name=container.name,
            limits=parse_resources(container.resources.limits),
            requests=parse_resources(container.resources.requests),
            init=init,
            sidecar=init and container.restart_policy == SIDECAR,
        )
        for containers, init in ((pod.spec.init_containers, True), (pod.spec.containers, False))
        for container in containers
    ]
    request = parse_pod_request(
        PodManifest(
            namespace=Namespace(pod.metadata.namespace),
            containers=tuple(asked),
            annotations=pod.metadata.annotations,
            labels=pod.metadata.labels,
            scheduler=pod.spec.scheduler_name,
        ),
        rules,
    )
    demands = demands_of(pod, host_ports)
    selector = sorted({*demands.selector, *request.node_requirements.selector})
    return replace(
        request,
        resources=resources,
        node_requirements=replace(demands, selector=tuple(selector)),
        priority=pod.spec.priority or 0,
    )


def pod_resources(pod: ApiPod) -> dict[str, int]:
    """Return what the pod takes of a node, dialects' resources left out.

    Raises RequestError for a quantity that is none, and for more than can be counted.
    """
    beside: Counter[str] = Counter()
    largest: dict[str, int] = {}
    for container in pod.spec.init_containers:
        wanted = _requests(container)
        if container.restart_policy == SIDECAR:
            beside.update(wanted)
            wanted = dict(beside)
        else:
            wanted = {key: wanted.get(key, 0) + beside[key] for key in wanted.keys() | beside}
        _raise_to(largest, wanted)
    for container in pod.spec.containers:
        beside.update(_requests(container))
    _raise_to(largest, beside)
    total = Counter(largest)
    total.update(parse_resources(pod.spec.overhead))
    for key, amount in total.items():
        check_amount(key, amount)
    return {**{key: amount for key, amount in total.items() if amount}, "pods": 1}


def _requests(container: Container) -> dict[str, int]:
    said = {**container.resources.limits, **container.resources.requests}
    return {key: n for key, n in parse_resources(said).items() if key not in LEDGER_RESOURCES}


def _raise_to(largest: dict[str, int], wanted: Mapping[str, int]) -> None:
    for key, amount in wanted.items():
        largest[key] = max(largest.get(key, 0), amount)


def demands_of(pod: ApiPod, host_ports: tuple[str, ...]) -> NodeRequirements:
    """Return what the pod demands of its node besides resources."""
    spec = pod.spec
    affinity = spec.affinity or Affinity()
    node = affinity.node_affinity
    required = node.required.node_selector_terms if node and node.required else ()
    return NodeRequirements(
        selector=tuple(sorted(spec.node_selector.items())),
        required=tuple(_terms(term) for term in required),
        preferred=tuple((p.weight, _terms(p.preference)) for p in node.preferred) if node else (),
        tolerations=tuple(
            Toleration(key=t.key, operator=t.operator or "Equal", value=t.value, effect=t.effect)
            for t in spec.tolerations
        ),
        host_ports=host_ports,
        unsupported=tuple(_unsupported(pod, affinity)),
    )


def _terms(term: NodeSelectorTerm) -> tuple[NodeTerm, ...]:
    return tuple(
        NodeTerm(key=one.key, operator=one.operator, values=one.values, field=field)
        for group, field in ((term.match_expressions, False), (term.match_fields, True))
        for one in group
    )


def _unsupported(pod: ApiPod, affinity: Affinity) -> Iterable[str]:
    for name, wish in (
        ("podAffinity", affinity.pod_affinity),
        ("podAntiAffinity", affinity.pod_anti_affinity),
    ):
        if wish and wish.get(REQUIRED):
            yield f"required {name}"
    for constraint in pod.spec.topology_spread_constraints:
        if constraint.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            yield f"topologySpreadConstraints on {constraint.get('topologyKey')}"
