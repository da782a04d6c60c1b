"""A dialect: a vendor's way of requesting GPUs, and the form in which its users get them; pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from shared.dialects.advertised import Advertisement, NodeSoftware
from shared.model.devices.device import Device
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.names import DeviceUuid, Namespace
from shared.model.requests.request import GpuRequest, PodRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerManifest:
    """A container's resources in its pod's manifest, as whole numbers."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    init: bool = False
    sidecar: bool = False
    """An init container with `restartPolicy: Always`, which runs beside those after it."""

    @property
    def amounts(self) -> dict[str, int]:
        """Its limits, and what it only requests."""
        return {**self.requests, **self.limits}

    @property
    def ends_first(self) -> bool:
        """Whether it ends before the pod's next container starts."""
        return self.init and not self.sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class PodManifest:
    """The parts of a pod's manifest that a dialect reads."""

    namespace: Namespace
    containers: tuple[ContainerManifest, ...]
    """In spec order, init containers first."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    """`spec.schedulerName`: it decides between dialects that share a resource name."""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    """The size of fields that the request keeps as they are, as JSON, by their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The operator's settings that change how a request is parsed."""

    enabled: tuple[str, ...] = ()
    """Names of the enabled dialects; empty: all."""
    disabled: tuple[str, ...] = ()
    """Names of those that are disabled nevertheless."""
    schedule_policy: str = ""
    """Volcano's `deviceshare.SchedulePolicy`: empty, `binpack` or `spread`."""
    exclusive_labels: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Volcano's `deviceshare.GPUExclusiveRules`: labels; pods with all labels of a rule
    never share a device."""
    node_scheduler_policy: str = "binpack"
    """HAMi's `--node-scheduler-policy`: `binpack` or `spread`; or, for the pods of all dialects and
    those without GPUs, `fragmentation` or `power`."""
    gpu_scheduler_policy: str = "spread"
    """HAMi's `--gpu-scheduler-policy`: a chain of words, see `nvidia.dialect`."""
    scoring_strategy: str = "LeastAllocated"
    """Koordinator's `DeviceShareArgs.scoringStrategy`: `LeastAllocated` or `MostAllocated`."""
    strict_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods get MIG instances or whole devices only; `*`: all."""
    prefer_mig: bool = False
    """Pods that accept both get MIG instances rather than shares of devices in hami-core mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Paths on the node that containers mount."""

    library: str
    """The HAMi-core library on the host."""
    preload: str
    """A file with the library's path inside the container."""
    containers: str
    """Directory that holds one directory per pod and container."""

    @classmethod
    def below(cls, state_dir: PurePath, library: PurePath) -> "Paths":
        """Return the paths of an agent with this directory on the host."""
        return cls(
            library=str(library),
            preload=str(state_dir / "ld.so.preload"),
            containers=str(state_dir / "containers"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One bind mount of a container."""

    container_path: str
    host_path: str
    read_only: bool
    directory: bool
    """The host path is a directory, created for this container if it is missing; else an existing
    file, or the container's own region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSetup:
    """The response to an Allocate call for a container."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Of the container in its runtime, not of the pod."""
    cdi_devices: tuple[str, ...] = ()
    """Names of its devices in the Container Device Interface, for the runtime."""


def assigned_when_done(annotation: str) -> Callable[[Lease, frozenset[str]], dict[str, str]]:
    """Return a function that marks a pod as assigned, once all its containers have GPUs."""
    return lambda lease, done: {annotation: "true"} if done.issuperset(lease.containers) else {}


def list_entries(text: str) -> tuple[str, ...]:
    """Return the entries of a comma-separated list, without empty ones."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One row of the table of dialects; every function is pure."""

    name: str
    resources: frozenset[str]
    """All its resource names. They do not count as ordinary resources of the pod."""
    served: frozenset[str]
    """Those of them (or `TRIGGER`) that the device plugin serves with some `Strategy`."""
    status_resources: frozenset[str]
    """Those of them that are written into node status. The rest are only read."""
    node_wide: frozenset[str] = frozenset()
    """Those of `patched` that count as ordinary resources of the node, too: a pod may request more
    of them than its shares hold, and the kubelet rejects it beyond the node's sum."""
    node_annotations: frozenset[str] = frozenset()
    """All annotations of nodes that the agent writes, without those in `shared.model.devices`."""
    node_labels: frozenset[str] = frozenset()
    """All labels of nodes that the agent writes."""
    node_objects: frozenset[str] = frozenset()
    """API paths of the collections of custom objects that the agent writes, one per node."""
    agent_annotations: frozenset[str] = frozenset()
    """All annotations of pods that the agent writes, after Allocate."""
    request_annotations: frozenset[str]
    """All annotations of the pod that `read` uses."""
    request_labels: frozenset[str] = frozenset()
    """All labels of the pod that `read` uses."""
    request_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the field of a request or of its devices' selection, the annotations it comes from."""
    parse: Callable[[PodManifest, Rules], PodRequest | None]
    """Parses a pod's request; None: it requests nothing in this dialect."""
    limits: Callable[[GpuRequest, PodRequest], dict[str, int]]
    """The limits with which a container of a pod requests this, for hints; empty: there are none
    for it among the resources that the pod requests."""
    part: str = ""
    """The field of `GpuRequest` in which a container with a whole device can request a part of its
    memory instead; empty: it cannot."""
    memory_step: int = MIB
    """Bytes of memory are requested in multiples of it."""
    binding_annotations: Callable[[Lease, float], dict[str, str]]
    """Annotations of the Binding, given the lease and the Unix time."""
    allocated_annotations: Callable[[Lease, frozenset[str]], dict[str, str]] = (
        lambda _lease, _done: {}
    )
    """Annotations after Allocate succeeded for these containers."""
    failed_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    """Annotations after Allocate was refused."""
    container_setup: Callable[[Lease, str, Mapping[DeviceUuid, Device], Paths], ContainerSetup]
    """The response to Allocate for one container of the lease."""
    advertise: Callable[[Sequence[Device], str], Advertisement]
    """The advertisement of the node, given its devices and the `Strategy`."""
    annotation_difference: Callable[[Lease, Mapping[str, str]], str] = lambda _lease, _found: ""
    """How a bound pod's annotations differ from its lease, for the audit; empty: they do not.
    Only for dialects whose annotations do not change after the Binding."""
    describe_node: Callable[[Sequence[Device], NodeSoftware], Advertisement] = (
        lambda _devices, _host: Advertisement()
    )
    """Further advertisement of the node: labels and objects that depend on its software."""
    id_count: Callable[[Share, str], int] = lambda _share, _resource: 1
    """The number of a share's device IDs of a served resource."""
    resized_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    """Annotations of a running pod after its lease was resized."""
    released_amounts: Callable[[Share], dict[str, int]] = lambda _: {}
    """Amounts of `patched` resources that a share's pod requests and a resize has released."""
    amount_changes: Callable[[Mapping[str, int]], dict[str, int | None]] = lambda _: {}
    """Changes of a container's amounts at admission, as by the vendor's webhook; None: the
    amount is removed."""
    added_annotations: Callable[[PodManifest], dict[str, str]] = lambda _: {}
    """Annotations that admission adds to a pod, as the vendor's webhook does."""
    vendor_denial: Callable[[PodManifest, bool], str] = lambda _pod, _refused: ""
    """The exact message with which the vendor's own webhook refuses a pod, given whether our rules
    refuse it; empty: it does not refuse it."""
    check_rules: Callable[[Rules], None] = lambda _: None
    """Raises RequestError naming one of the operator's choices that the dialect cannot accept."""
    scheduler: str = ""
    """`spec.schedulerName` of pods for the vendor's own scheduler; empty: it has none."""
    cordoned_devices: Callable[[Mapping[str, str]], Mapping[int, str]] = lambda _: {}
    """Indices of the devices that a node's annotations cordon."""
    mig_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of a container with MIG instances, besides the one that lists them."""
