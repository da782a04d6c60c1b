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
    """It runs beside the next containers: `restartPolicy: Always`."""

    @property
    def amounts(self) -> dict[str, int]:
        return {**self.requests, **self.limits}

    @property
    def ends_first(self) -> bool:
        return self.init and not self.sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class PodManifest:
    namespace: Namespace
    containers: tuple[ContainerManifest, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    """It decides between dialects that share a resource name."""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    """JSON sizes of fields that the request keeps, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    enabled: tuple[str, ...] = ()
    """Names of dialects; empty for all."""
    disabled: tuple[str, ...] = ()
    """Overrides `enabled`."""
    schedule_policy: str = ""
    """Volcano's `deviceshare.SchedulePolicy`: empty, `binpack` or `spread`."""
    exclusive_labels: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Volcano's `deviceshare.GPUExclusiveRules`: pods with all labels of a rule never share a
    device.
    """
    node_scheduler_policy: str = "binpack"
    """HAMi's `--node-scheduler-policy`: `binpack` or `spread`; or `fragmentation` or `power`, for
    pods of all dialects and without GPUs.
    """
    gpu_scheduler_policy: str = "spread"
    """HAMi's `--gpu-scheduler-policy`: a chain of words, see `nvidia.dialect`."""
    scoring_strategy: str = "LeastAllocated"
    """Koordinator's `DeviceShareArgs.scoringStrategy`: `LeastAllocated` or `MostAllocated`."""
    strict_namespaces: tuple[str, ...] = ()
    """Namespaces in which isolation is strict, or `*` for all."""
    prefer_mig: bool = False
    """Over shares in hami-core mode, for pods that accept both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """On the node."""

    library: str
    preload: str
    """A file with the library's path."""
    containers: str
    time_library: str = ""
    """Holds cores by GPU time."""
    time_preload: str = ""
    """As `preload`, for `time_library`; `joint_preload` has HAMi-core's path in its second line,
    too.
    """
    joint_preload: str = ""
    mps: str = ""

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
    """A directory is created where it is missing; a file exists, or is the container's own region.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSetup:
    """For an Allocate call."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Of the container in its runtime, not of the pod."""
    cdi_devices: tuple[str, ...] = ()
    """Qualified names in the Container Device Interface."""


def assigned_when_done(annotation: str) -> Callable[[Lease, frozenset[str]], dict[str, str]]:
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
    """They are no ordinary resources of a pod."""
    served: frozenset[str]
    """By the device plugin with some `Strategy`, `TRIGGER` among them."""
    status_resources: frozenset[str]
    """Written by agents into node status."""
    node_wide: frozenset[str] = frozenset()
    """They also count as ordinary resources of the node. Beyond the node's sum the kubelet rejects
    a pod, which may request more of them than its shares hold.
    """
    node_annotations: frozenset[str] = frozenset()
    """Written by agents, besides those in `shared.model.devices`."""
    node_labels: frozenset[str] = frozenset()
    """Written by agents."""
    node_objects: frozenset[str] = frozenset()
    """API paths; agents write an object per node."""
    agent_annotations: frozenset[str] = frozenset()
    """Of pods, written by agents after Allocate."""
    request_annotations: frozenset[str]
    """Of pods, read by `parse`."""
    request_prefixes: tuple[str, ...] = ()
    """Of further annotations that `parse` reads."""
    request_labels: frozenset[str] = frozenset()
    """Of pods, read by `parse`."""
    request_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Annotations by the field of a request, or of its selection of devices, that they set."""
    parse: Callable[[PodManifest, Rules], PodRequest | None]
    """None for a pod that requests nothing in this dialect."""
    limits: Callable[[GpuRequest, PodRequest], dict[str, int]]
    """Limits that request the same, for advice, or {} if none can express it."""
    annotations: Callable[[GpuRequest, PodRequest], dict[str, str]] = lambda _container, _pod: {}
    """What limits cannot express."""
    part: str = ""
    """The field of `GpuRequest` for a part of a device's memory, or ""."""
    memory_step: int = MIB
    """In bytes."""
    binding_annotations: Callable[[Lease, float], dict[str, str]]
    """Of the Binding, at a Unix time."""
    allocated_annotations: Callable[[Lease, frozenset[str]], dict[str, str]] = (
        lambda _lease, _done: {}
    )
    """Set once Allocate has succeeded for these containers."""
    failed_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    container_setup: Callable[[Lease, str, Mapping[DeviceUuid, Device], Paths], ContainerSetup]
    advertise: Callable[[Sequence[Device], str], Advertisement]
    annotation_difference: Callable[[Lease, Mapping[str, str]], str] = lambda _lease, _found: ""
    """How a bound pod's annotations differ from its lease, or ""; for annotations that do not
    change after the Binding.
    """
    describe_node: Callable[[Sequence[Device], NodeSoftware], Advertisement] = (
        lambda _devices, _host: Advertisement()
    )
    """What depends on the node's software."""
    id_count: Callable[[Share, str], int] = lambda _share, _resource: 1
    """Device IDs of a served resource that a share takes."""
    resized_annotations: Callable[[Lease], dict[str, str]] = lambda _: {}
    released_amounts: Callable[[Share], dict[str, int]] = lambda _: {}
    """Requested amounts of `status_resources` that a resize has released."""
    amount_changes: Callable[[Mapping[str, int]], dict[str, int | None]] = lambda _: {}
    """What admission changes; None removes an amount."""
    annotated_amounts: Callable[[PodManifest], dict[str, dict[str, int | None]]] = lambda _: {}
    """What admission adds for annotations, by container. Raises RequestError for wrong ones."""
    warnings: Callable[[PodManifest], Iterable[Hint]] = lambda _: ()
    added_annotations: Callable[[PodManifest], dict[str, str]] = lambda _: {}
    vendor_denial: Callable[[PodManifest, bool], Denial | None] = lambda _pod, _refused: None
    """The exact message of the vendor's webhook. The flag is whether our rules refuse the pod."""
    check_rules: Callable[[Rules], None] = lambda _: None
    """Raises RequestError for a setting that the dialect cannot accept."""
    scheduler: str = ""
    """`spec.schedulerName` of the vendor's scheduler, or ""."""
    read_for: str = ""
    """`spec.schedulerName` of pods whose annotations are read, or "". Leasehold serves such pods
    only where an administrator has it do so.
    """
    cordoned_devices: Callable[[Mapping[str, str]], Mapping[int, str]] = lambda _: {}
    """Indices that a node's annotations cordon, with the annotation or reason."""
    mig_variables: Mapping[str, str] = field(default_factory=dict)
