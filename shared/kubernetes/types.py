"""Pods and Nodes, the fields that we read; every field has a default; pure.

Field names are Kubernetes' own in snake case. Quantities stay as written ("500m", "1Gi", 2);
`shared.model.quantity` reads them. What only a scheduler's deeper plug-ins need (inter-pod
affinity, topology spread) stays undecoded.
"""

from datetime import datetime

from msgspec import Struct, field

Quantities = dict[str, str | int | float]


class OwnerReference(Struct, frozen=True, gc=False):
    """Owner of the object."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class ObjectMeta(Struct, frozen=True, rename="camel", gc=False):
    """ObjectMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class SelectorRequirement(Struct, frozen=True, omit_defaults=True, gc=False):
    """`key operator values`, the operators being In, NotIn, Exists, DoesNotExist, Gt and Lt."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """All of its requirements must hold."""

    match_expressions: tuple[SelectorRequirement, ...] = ()
    match_fields: tuple[SelectorRequirement, ...] = ()


class NodeSelector(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """One of its terms must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredTerm(Struct, frozen=True, omit_defaults=True, gc=False):
    """A preferred term with a weight of 1 to 100."""

    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(Struct, frozen=True, omit_defaults=True, gc=False):
    """Required and preferred node affinity."""

    required: NodeSelector | None = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )
    preferred: tuple[PreferredTerm, ...] = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )


class Affinity(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """Affinity; pod affinities are not decoded."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: dict[str, object] | None = None
    pod_anti_affinity: dict[str, object] | None = None


class ApiToleration(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """A taint the pod accepts; an empty operator means Equal."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class Resources(Struct, frozen=True, gc=False):
    """A container's limits and requests."""

    limits: Quantities = {}
    requests: Quantities = {}


class EnvVar(Struct, frozen=True, gc=False):
    """An environment variable; `value` is empty if it has a `valueFrom`."""

    name: str = ""
    value: str = ""


class ContainerPort(Struct, frozen=True, rename="camel", gc=False):
    """A port; `host_port` 0 claims none on the node."""

    container_port: int = 0
    host_port: int = 0
    protocol: str = "TCP"
    host_ip: str = field(name="hostIP", default="")


class RestartRule(Struct, frozen=True, gc=False):
    """A container's `restartPolicyRules[]`: only the action."""

    action: str = ""


class SecurityContext(Struct, frozen=True, gc=False):
    """SecurityContext: only `privileged`."""

    privileged: bool | None = None


class HostPath(Struct, frozen=True, gc=False):
    """A directory or file of the node."""

    path: str = ""


class Volume(Struct, frozen=True, rename="camel", gc=False):
    """A volume; of the sources only `hostPath` and those that `pod_fields` hands over."""

    name: str = ""
    host_path: HostPath | None = None
    aws_elastic_block_store: dict[str, object] | None = None
    azure_disk: dict[str, object] | None = None
    azure_file: dict[str, object] | None = None
    cinder: dict[str, object] | None = None
    ephemeral: dict[str, object] | None = None
    gce_persistent_disk: dict[str, object] | None = None
    iscsi: dict[str, object] | None = None
    persistent_volume_claim: dict[str, object] | None = None
    portworx_volume: dict[str, object] | None = None
    rbd: dict[str, object] | None = None
    vsphere_volume: dict[str, object] | None = None


class VolumeMount(Struct, frozen=True, rename="camel", gc=False):
    """A volume mount without its name, since names of token volumes differ by pod."""

    mount_path: str = ""


class Container(Struct, frozen=True, rename="camel", gc=False):
    """A container or init container; a restart policy of Always makes the latter a sidecar."""

    name: str = ""
    image: str = ""
    resources: Resources = Resources()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[dict[str, object], ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    restart_policy: str | None = None
    restart_policy_rules: tuple[RestartRule, ...] = ()
    security_context: SecurityContext | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()


class SchedulingGate(Struct, frozen=True):
    """A scheduling gate."""

    name: str = ""


class ApiPodSpec(Struct, frozen=True, rename="camel", gc=False):
    """PodSpec."""

    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    priority_class_name: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[ApiToleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: Quantities = {}
    topology_spread_constraints: tuple[dict[str, object], ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    host_network: bool = False
    host_users: bool | None = None
    resource_claims: tuple[dict[str, object], ...] = ()
    resources: Resources = Resources()
    scheduling_group: dict[str, object] | None = None
    volumes: tuple[Volume, ...] = ()


class Condition(Struct, frozen=True, gc=False):
    """A condition of an object."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerStatus(Struct, frozen=True, rename="camel", gc=False):
    """The resources of a container that runs: a resize has not changed them yet."""

    name: str = ""
    resources: Resources | None = None
    allocated_resources: Quantities = {}


class PodStatus(Struct, frozen=True, rename="camel", gc=False):
    """PodStatus."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()


class ApiPod(Struct, frozen=True, gc=False):
    """`v1 Pod`, the fields we read."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ApiPodSpec = ApiPodSpec()
    status: PodStatus = PodStatus()


class ApiNamespace(Struct, frozen=True, gc=False):
    """`v1 Namespace`."""

    metadata: ObjectMeta = ObjectMeta()


class ApiTaint(Struct, frozen=True, gc=False):
    """A taint."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Struct, frozen=True, gc=False):
    """NodeSpec."""

    unschedulable: bool = False
    taints: tuple[ApiTaint, ...] = ()


class NodeAddress(Struct, frozen=True, gc=False):
    """One name or address of the node."""

    type: str = ""
    address: str = ""


class DaemonEndpoint(Struct, frozen=True, gc=False):
    """A port that the kubelet listens on."""

    port: int = field(name="Port", default=0)


class DaemonEndpoints(Struct, frozen=True, rename="camel", gc=False):
    """The node's daemons."""

    kubelet_endpoint: DaemonEndpoint = DaemonEndpoint()


class NodeStatus(Struct, frozen=True, rename="camel", gc=False):
    """NodeStatus."""

    allocatable: Quantities = {}
    capacity: Quantities = {}
    conditions: tuple[Condition, ...] = ()
    addresses: tuple[NodeAddress, ...] = ()
    daemon_endpoints: DaemonEndpoints = DaemonEndpoints()


class ApiNode(Struct, frozen=True, gc=False):
    """`v1 Node`, the fields we read."""

    metadata: ObjectMeta = ObjectMeta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class PodGroupSpec(Struct, frozen=True, rename="camel", gc=False):
    """PodGroupSpec of Volcano and of the coscheduling plugin."""

    min_member: int = 1


class PodGroup(Struct, frozen=True, gc=False):
    """A PodGroup."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PodGroupSpec = PodGroupSpec()
