"""A dialect: how a vendor's users request GPUs, and what their pods get; pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from shared.dialects.advertised import Advertisement, NodeSoftware
from shared.model.change import Hint
from shared.model.denial import Denial
from shared.model.devices.device import Device
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.names import DeviceUuid, Namespace
from shared.model.requests.request import GpuRequest, PodRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerManifest:
    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    init: bool = False
    sidecar: bool = False
    """An init container with `restartPolicy: Always`, which runs beside the next containers."""

    @property
    def amounts(self) -> dict[str, int]:
        """Limits, and requests where there is no limit."""
        return {**self.requests, **self.limits}

    @property
    def ends_first(self) -> bool:
        """Before the pod's next container starts."""
        return self.init and not self.sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class PodManifest:
    namespace: Namespace
    containers: tuple[ContainerManifest, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    """`spec.schedulerName`, which decides between dialects that share a resource name."""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    """Sizes, as JSON, of fields that the request keeps, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """An operator's settings for parsing requests."""

    enabled: tuple[str, ...] = ()
    """Names; empty for all."""
    disabled: tuple[str, ...] = ()
    """Even if `enabled` lists them."""
    schedule_policy: str = ""
    """Volcano's `deviceshare.SchedulePolicy`: empty, `binpack` or `spread`."""
    exclusive_labels: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Volcano's `deviceshare.GPUExclusiveRules`: pods with all labels of a rule never share a
    device."""
    node_scheduler_policy: str = "binpack"
    """HAMi's `--node-scheduler-policy`: `binpack` or `spread`; or `fragmentation` or `power`, for
    pods of all dialects and without GPUs."""
    gpu_scheduler_policy: str = "spread"
    """HAMi's `--gpu-scheduler-policy`: a chain of words, see `nvidia.dialect`."""
    scoring_strategy: str = "LeastAllocated"
    """Koordinator's `DeviceShareArgs.scoringStrategy`: `LeastAllocated` or `MostAllocated`."""
    strict_namespaces: tuple[str, ...] = ()
    """Namespaces in which isolation is strict, or `*` for all."""
    prefer_mig: bool = False
    """To shares in hami-core mode, for pods that accept both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """On the node, for containers to mount."""

    library: str
    preload: str
    """A file with the library's path inside the container."""
    containers: str
    """The parent of a directory per pod and container."""
    time_library: str = ""
    """Which holds cores by GPU time."""
    time_preload: str = ""
    """A file with the path of that library inside the container; `joint_preload` also has that of
    HAMi-core, in its second line."""
    joint_preload: str = ""
    mps: str = ""
    """The parent of a directory per control daemon of MPS."""

    @classmethod
    def below(cls, state_dir: PurePath, library: PurePath) -> "Paths":
        return cls(
            library=str(library),
            preload=str(state_dir / "ld.so.preload"),
            containers=str(state_dir / "containers"),
            time_library=str(state_dir / "libleasehold-time.so"),
            time_preload=str(state_dir / "ld.so.preload.time"),
            joint_preload=str(state_dir / "ld.so.preload.time-and-memory"),
            mps=str(state_dir / "mps"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    container_path: str
    host_path: str
    read_only: bool
    directory: bool
    """Whether the host path is a directory, created for the container if it is missing. Otherwise
    it is an existing file, or the container's own region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSetup:
    """The response to an Allocate call for a container."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Of the container in its runtime, not of the pod."""
    cdi_devices: tuple[str, ...] = ()
    """Qualified names in the Container Device Interface."""


def assigned_when_done(annotation: str) -> Callable[[Lease, frozenset[str]], dict[str, str]]:
    """Return a function that sets an annotation to `true` once all containers have their GPUs."""
    return lambda lease, done: {annotation: "true"} if done.issuperset(lease.containers) else {}


def list_entries(text: str) -> tuple[str, ...]:
    """Split at commas, without empty entries.

    >>> list_entries("a100, h100,")
    ('a100', 'h100')
    """
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """All functions are pure."""

    name: str
    resources: frozenset[str]
    """All names; they do not count as ordinary resources of a pod."""
    served: frozenset[str]
    """By the device plugin, with some `Strategy`; `TRIGGER` among them."""
    status_resources: frozenset[str]
    """Written by agents into node status. Other resources are only read."""
    node_wide: frozenset[str] = frozenset()
    """Those of `status_resources` that also count as ordinary resources of the node. A pod may
    request more of them than its shares hold, and the kubelet rejects it beyond the node's sum."""
    node_annotations: frozenset[str] = frozenset()
    """Written by agents, besides those in `shared.model.devices`."""
    node_labels: frozenset[str] = frozenset()
    """Written by agents."""
    node_objects: frozenset[str] = frozenset()
    """API paths of collections of custom objects that agents write, an object per node."""
    agent_annotations: frozenset[str] = frozenset()
    """Of pods, written by agents after Allocate."""
    request_annotations: frozenset[str]
    """Of pods, read by `parse`."""
    request_prefixes: tuple[str, ...] = ()
    """Of further annotations of pods, read by `parse`."""
    request_labels: frozenset[str] = frozenset()
    """Of pods, read by `parse`."""
    request_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The annotations that a field of a request, or of its selection of devices, comes from."""
    parse: Callable[[PodManifest, Rules], PodRequest | None]
    """Returns None for a pod that requests nothing in this dialect."""
    limits: Callable[[GpuRequest, PodRequest], dict[str, int]]
    """Returns the limits with which a container of this pod would request the same, for advice;
    empty if the pod's resources cannot express it."""
    annotations: Callable[[GpuRequest, PodRequest], dict[str, str]] = lambda _container, _pod: {}
    """Returns the annotations with which a container requests the same, where limits do not."""
    part: str = ""
    """The field of `GpuRequest` by which a container could request a part of a whole device's
    memory instead, or empty if it cannot."""
    memory_step: int = MIB
    """In which memory can be requested, in bytes."""
    binding_annotations: Callable[[Lease, float], dict[str, str]]
    """Returns the annotations of the Binding at a Unix time."""
    allocated_annotations: Callable[[Lease, frozenset[str]], dict[str, str]] = (
        lambda _lease, _done: {}
    )
    """Returns what to set once Allocate has succeeded for these containers."""
    failed_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    """Returns what to set after Allocate was refused."""
    container_setup: Callable[[Lease, str, Mapping[DeviceUuid, Device], Paths], ContainerSetup]
    """Returns the response to Allocate for a container of the lease."""
    advertise: Callable[[Sequence[Device], str], Advertisement]
    """Returns the advertisement of a node with these devices, for a `Strategy`."""
    annotation_difference: Callable[[Lease, Mapping[str, str]], str] = lambda _lease, _found: ""
    """Returns how a bound pod's annotations differ from its lease, for the audit, or "". Only for
    dialects whose annotations do not change after the Binding."""
    describe_node: Callable[[Sequence[Device], NodeSoftware], Advertisement] = (
        lambda _devices, _host: Advertisement()
    )
    """Returns further labels and objects of the node, which depend on its software."""
    id_count: Callable[[Share, str], int] = lambda _share, _resource: 1
    """Returns how many device IDs of a served resource a share takes."""
    resized_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    """Returns what to set after the lease of a running pod was resized."""
    released_amounts: Callable[[Share], dict[str, int]] = lambda _: {}
    """Returns the amounts of `status_resources` that a pod requests for a share and that a resize
    has released."""
    amount_changes: Callable[[Mapping[str, int]], dict[str, int | None]] = lambda _: {}
    """Returns what admission changes in a container's amounts, as the vendor's webhook does; None
    removes an amount."""
    annotated_amounts: Callable[[PodManifest], dict[str, dict[str, int | None]]] = lambda _: {}
    """Returns what admission adds to the amounts of containers, by name, if a pod requests GPUs by
    annotations. Raises RequestError if it does so wrongly."""
    warnings: Callable[[PodManifest], Iterable[Hint]] = lambda _: ()
    """Returns what admission warns of in a pod that requests GPUs in this dialect."""
    added_annotations: Callable[[PodManifest], dict[str, str]] = lambda _: {}
    """Returns what admission adds to a pod, as the vendor's webhook does."""
    vendor_denial: Callable[[PodManifest, bool], Denial | None] = lambda _pod, _refused: None
    """Returns the exact message with which the vendor's webhook refuses a pod, or None. The flag is
    whether our rules refuse it."""
    check_rules: Callable[[Rules], None] = lambda _: None
    """Raises RequestError for an operator's setting that the dialect cannot accept."""
    scheduler: str = ""
    """`spec.schedulerName` of pods for the vendor's scheduler, or empty if it has none."""
    read_for: str = ""
    """`spec.schedulerName` that pods need for their annotations to be read; or empty if they need
    none. Leasehold serves such pods only where an administrator has it do so."""
    cordoned_devices: Callable[[Mapping[str, str]], Mapping[int, str]] = lambda _: {}
    """Returns the indices of devices that a node's annotations cordon, with the annotation or
    reason."""
    mig_variables: Mapping[str, str] = field(default_factory=dict)
    """Of a container with MIG instances, besides the list of them."""
