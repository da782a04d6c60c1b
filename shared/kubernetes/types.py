"""Objects of the API server, the fields that we read; every field has a default; pure.

Quantities stay as written. Fields of a pod that the watcher does not need are in `full_pods`:
decoding them would cost CPU time for each event of a watch.
"""

from datetime import datetime
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

T = TypeVar("T")

Quantities = dict[str, str | int | float]


class OwnerReference(Struct, frozen=True, gc=False):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class ObjectMeta(Struct, frozen=True, rename="camel", gc=False):
    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class ManagedFields(Struct, frozen=True, gc=False):
    manager: str = ""
    fields_v1: dict[str, Any] | None = field(default=None, name="fieldsV1")


class NodeMeta(ObjectMeta, frozen=True, rename="camel", gc=False):
    managed_fields: tuple[ManagedFields, ...] = ()

    def manager_of(self, *path: str) -> str:
        """Return which program wrote a field last, or "" if that is not recorded."""
        for entry in self.managed_fields:
            fields: Any = entry.fields_v1
            for key in path:
                fields = fields.get(f"f:{key}") if isinstance(fields, dict) else None
            if fields is not None:
                return entry.manager
        return ""


class ApiObject(Struct, frozen=True, gc=False):
    """Only the metadata is decoded."""

    metadata: ObjectMeta = ObjectMeta()


class RawObject(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: Any = None
    status: Any = None
    data: dict[str, str] | None = None


class ApiSecret(Struct, frozen=True, gc=False):
    """msgspec decodes and encodes bytes as base64."""

    metadata: ObjectMeta = ObjectMeta()
    data: dict[str, bytes] | None = None


class ObjectList(Struct, Generic[T], frozen=True, gc=False):
    """`null` stands for an empty one."""

    items: tuple[T, ...] | None = None


class NamedReference(Struct, frozen=True, gc=False):
    name: str = ""


class SelectorRequirement(Struct, frozen=True, omit_defaults=True, gc=False):
    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """An empty selector matches everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[SelectorRequirement, ...] = ()


class NodeSelectorTerm(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """All of its requirements must hold."""

    match_expressions: tuple[SelectorRequirement, ...] = ()
    match_fields: tuple[SelectorRequirement, ...] = ()


class NodeSelector(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """One of its terms must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredTerm(Struct, frozen=True, omit_defaults=True, gc=False):
    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(Struct, frozen=True, omit_defaults=True, gc=False):
    required: NodeSelector | None = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )
    preferred: tuple[PreferredTerm, ...] = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )


class PodAffinityTerm(Struct, frozen=True, rename="camel", gc=False):
    topology_key: str = ""
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None


class Affinity(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """Pod affinities are not decoded."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: dict[str, object] | None = None
    pod_anti_affinity: dict[str, object] | None = None


class ApiToleration(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """An empty operator means Equal."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class ClaimUse(Struct, frozen=True, gc=False):
    name: str = ""
    request: str = ""


class Resources(Struct, frozen=True, gc=False):
    limits: Quantities = {}
    requests: Quantities = {}
    claims: tuple[ClaimUse, ...] = ()


class ContainerPort(Struct, frozen=True, rename="camel", gc=False):
    host_port: int = 0
    protocol: str = "TCP"
    host_ip: str = field(name="hostIP", default="")


class RestartRule(Struct, frozen=True, gc=False):
    action: str = ""


class Capabilities(Struct, frozen=True, gc=False):
    add: tuple[str, ...] = ()


class PodSecurityContext(Struct, frozen=True, rename="camel", gc=False):
    run_as_user: int | None = None
    run_as_non_root: bool | None = None


class SecurityContext(PodSecurityContext, frozen=True, rename="camel", gc=False):
    """Of a container: its user, where it has one, replaces the pod's."""

    privileged: bool | None = None
    capabilities: Capabilities | None = None
    allow_privilege_escalation: bool | None = None


class HostPath(Struct, frozen=True, gc=False):
    path: str = ""


class Volume(Struct, frozen=True, rename="camel", gc=False):
    """Of the sources only `hostPath` and those that `pod_fields` passes on."""

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
    """Without its name, since names of token volumes differ by pod."""

    mount_path: str = ""


class Container(Struct, frozen=True, rename="camel", gc=False):
    """A restart policy of Always makes an init container a sidecar."""

    name: str = ""
    resources: Resources = Resources()
    ports: tuple[ContainerPort, ...] = ()
    restart_policy: str | None = None
    restart_policy_rules: tuple[RestartRule, ...] = ()
    security_context: SecurityContext | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()


class PodResourceClaim(Struct, frozen=True, rename="camel", gc=False):
    """A claim from a template has the object's name only in the status."""

    name: str = ""
    resource_claim_name: str | None = None


class RequestMapping(Struct, frozen=True, rename="camel", gc=False):
    container_name: str = ""
    request_name: str = ""


class ExtendedResourceClaimStatus(Struct, frozen=True, rename="camel", gc=False):
    request_mappings: tuple[RequestMapping, ...] = ()
    resource_claim_name: str = ""


class SchedulingGroup(Struct, frozen=True, rename="camel", gc=False):
    pod_group_name: str = ""


class ApiPodSpec(Struct, frozen=True, rename="camel", gc=False):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    priority_class_name: str = ""
    preemption_policy: str | None = None
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[ApiToleration, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: Quantities = {}
    topology_spread_constraints: tuple[dict[str, object], ...] = ()
    scheduling_gates: tuple[NamedReference, ...] = ()
    host_network: bool = False
    host_pid: bool = field(name="hostPID", default=False)
    host_ipc: bool = field(name="hostIPC", default=False)
    share_process_namespace: bool = False
    runtime_class_name: str | None = None
    host_users: bool | None = None
    security_context: PodSecurityContext | None = None
    resource_claims: tuple[PodResourceClaim, ...] = ()
    resources: Resources = Resources()
    scheduling_group: SchedulingGroup = SchedulingGroup()
    termination_grace_period_seconds: float | None = None
    active_deadline_seconds: float | None = None
    volumes: tuple[Volume, ...] = ()


class Condition(Struct, frozen=True, gc=False):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True, gc=False):
    terminated: dict[str, object] | None = None


class ContainerStatus(Struct, frozen=True, rename="camel", gc=False):
    """Resources only while it runs: a resize changes them later."""

    name: str = ""
    container_id: str = field(name="containerID", default="")
    """Empty before the container is created."""
    state: ContainerState = ContainerState()
    resources: Resources | None = None
    allocated_resources: Quantities = {}


class PodStatus(Struct, frozen=True, rename="camel", gc=False):
    phase: str = ""
    reason: str = ""
    message: str = ""
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    ephemeral_container_statuses: tuple[ContainerStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
    resource_claim_statuses: tuple[PodResourceClaim, ...] = ()
    extended_resource_claim_status: ExtendedResourceClaimStatus | None = None


class ApiPod(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: ApiPodSpec = ApiPodSpec()
    status: PodStatus = PodStatus()


class PodPlace(Struct, frozen=True, rename="camel", gc=False):
    node_name: str = ""
    scheduler_name: str = ""


class PodPhase(Struct, frozen=True, gc=False):
    phase: str = ""


class PodName(Struct, frozen=True, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] = {}


class PodOutline(Struct, frozen=True, gc=False):
    metadata: PodName = PodName()
    spec: PodPlace = PodPlace()
    status: PodPhase = PodPhase()


class ResourceQuotaSpec(Struct, frozen=True, gc=False):
    hard: Quantities = {}


class ApiResourceQuota(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: ResourceQuotaSpec = ResourceQuotaSpec()


class PriorityClass(Struct, frozen=True, rename="camel", gc=False):
    metadata: ObjectMeta = ObjectMeta()
    value: int = 0
    global_default: bool = False


class DisruptionBudgetSpec(Struct, frozen=True, gc=False):
    selector: LabelSelector | None = None


class DisruptionBudgetStatus(Struct, frozen=True, rename="camel", gc=False):
    disruptions_allowed: int = 0


class ApiDisruptionBudget(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


class ClientConfig(Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    ca_bundle: bytes = b""
    url: str = ""


class ServerVersion(Struct, frozen=True, rename="camel", gc=False):
    git_version: str = ""


class RegisteredWebhook(Struct, frozen=True, rename="camel", gc=False):
    name: str = ""
    client_config: ClientConfig = ClientConfig()


class WebhookConfiguration(Struct, frozen=True, gc=False):
    """Mutating or validating."""

    metadata: ObjectMeta = ObjectMeta()
    webhooks: tuple[RegisteredWebhook, ...] = ()


class AccessStatus(Struct, frozen=True, gc=False):
    allowed: bool = False


class AccessReview(Struct, frozen=True, gc=False):
    status: AccessStatus = AccessStatus()


class ApiTaint(Struct, frozen=True, gc=False):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Struct, frozen=True, gc=False):
    unschedulable: bool = False
    taints: tuple[ApiTaint, ...] = ()


class NodeAddress(Struct, frozen=True, gc=False):
    type: str = ""
    address: str = ""


class NodeInfo(Struct, frozen=True, rename="camel", gc=False):
    container_runtime_version: str = ""


class NodeStatus(Struct, frozen=True, rename="camel", gc=False):
    allocatable: Quantities = {}
    capacity: Quantities = {}
    conditions: tuple[Condition, ...] = ()
    addresses: tuple[NodeAddress, ...] = ()
    node_info: NodeInfo = NodeInfo()


class ApiNode(Struct, frozen=True, gc=False):
    metadata: NodeMeta = NodeMeta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class GangPolicy(Struct, frozen=True, rename="camel", gc=False):
    min_count: int = 1


class SchedulingPolicy(Struct, frozen=True, gc=False):
    """PodGroupSchedulingPolicy; without a gang, its pods are scheduled one by one."""

    gang: GangPolicy | None = None


class NetworkTopology(Struct, frozen=True, gc=False):
    """Of Volcano's PodGroups: how far apart in its HyperNodes the pods may run."""

    mode: str = "hard"


class TopologyConstraint(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    key: str


class SchedulingConstraints(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """PodGroupSchedulingConstraints."""

    topology: tuple[TopologyConstraint, ...] = ()


class PodGroupSpec(Struct, frozen=True, rename="camel", gc=False):
    min_member: int = 1
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    scheduling_constraints: dict[str, object] | None = None
    network_topology: NetworkTopology | None = None
    priority: int | None = None


class PodGroupCondition(Condition, frozen=True, gc=False):
    last_transition_time: str = field(name="lastTransitionTime", default="")


class PodGroupStatus(Struct, frozen=True, gc=False):
    conditions: tuple[PodGroupCondition, ...] = ()


class PodGroup(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()
