"""A pod's JSON under admission review, decoded and bounded; pure.

Only the fields that the decision needs are decoded. What is long is counted before it is decoded,
and each list has a bound: a review takes no longer than its bytes need to be read.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from shared.model.bounds import check_text
from shared.model.errors import RequestError

T = TypeVar("T")
MAX_CONTAINERS, MAX_ENTRIES, MAX_PATH, MAX_SHOWN = 500, 10_000, 4_096, 10
"""Containers of a kind, and volumes; entries of each list and map, of all containers together;
characters of a path, as in Linux; fields that a message shows. Pods beyond these are denied."""
Quantities = dict[str, str | int | float]


class RawNamed(msgspec.Struct, frozen=True):
    """An object of which only the name counts."""

    name: str


class RawEnvFrom(msgspec.Struct, frozen=True):
    """A source of variables."""

    prefix: str | None = None


class RawEnv(msgspec.Struct, frozen=True, rename="camel"):
    """A variable."""

    name: str
    value: str | None = None
    value_from: dict[str, object] | None = None

    @property
    def text(self) -> str:
        """The value; empty for one with `valueFrom`."""
        return self.value or ""


class RawResources(msgspec.Struct, frozen=True):
    """A container's resources."""

    limits: Quantities | None = None
    requests: Quantities | None = None
    claims: tuple[RawNamed, ...] | None = None

    @property
    def named(self) -> frozenset[str]:
        """Names in limits or requests."""
        return frozenset({*(self.limits or {}), *(self.requests or {})})


class RawCapabilities(msgspec.Struct, frozen=True):
    """A container's capabilities."""

    add: tuple[str, ...] | None = None


class RawSecurityContext(msgspec.Struct, frozen=True):
    """A container's security context."""

    privileged: bool | None = None
    capabilities: RawCapabilities | None = None


class RawMount(msgspec.Struct, frozen=True, rename="camel"):
    """A volume mounted in a container."""

    mount_path: str
    name: str = ""
    sub_path: str | None = None
    sub_path_expr: str | None = None
    read_only: bool | None = None


class RawBlockDevice(msgspec.Struct, frozen=True, rename="camel"):
    """A block device in a container."""

    device_path: str
    name: str = ""


class RawContainer(msgspec.Struct, frozen=True, rename="camel"):
    """A container."""

    name: str
    image: str | None = None
    resources: RawResources | None = None
    env: tuple[RawEnv, ...] | None = None
    env_from: tuple[RawEnvFrom, ...] | None = None
    ports: tuple[msgspec.Raw, ...] | None = None
    security_context: RawSecurityContext | None = None
    volume_mounts: tuple[RawMount, ...] | None = None
    volume_devices: tuple[RawBlockDevice, ...] | None = None
    target_container_name: str | None = None
    termination_message_path: str | None = None


class RawHostPath(msgspec.Struct, frozen=True):
    """A path of the node."""

    path: str


class RawVolume(msgspec.Struct, frozen=True, rename="camel"):
    """A volume."""

    name: str
    host_path: RawHostPath | None = None
    empty_dir: dict[str, object] | None = None


class RawMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's metadata."""

    name: str | None = None
    generate_name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    @property
    def labels_bytes(self) -> int:
        """Length of the labels as JSON."""
        return len(msgspec.json.encode(self.labels))


class RawPodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's spec."""

    containers: tuple[RawContainer, ...] | None = None
    init_containers: tuple[RawContainer, ...] | None = None
    ephemeral_containers: tuple[RawContainer, ...] | None = None
    scheduler_name: str | None = None
    node_name: str | None = None
    priority_class_name: str | None = None
    priority: int | None = None
    preemption_policy: str | None = None
    runtime_class_name: str | None = None
    scheduling_gates: tuple[RawNamed, ...] | None = None
    volumes: tuple[RawVolume, ...] | None = None
    host_pid: bool | None = msgspec.field(name="hostPID", default=None)
    host_ipc: bool | None = msgspec.field(name="hostIPC", default=None)
    share_process_namespace: bool | None = None
    node_selector: msgspec.Raw = msgspec.Raw()
    affinity: msgspec.Raw = msgspec.Raw()
    tolerations: msgspec.Raw = msgspec.Raw()


class RawPod(msgspec.Struct, frozen=True):
    """A pod."""

    spec: RawPodSpec
    metadata: RawMetadata | None = None


class _CountedSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: tuple[msgspec.Raw, ...] | None = None
    init_containers: tuple[msgspec.Raw, ...] | None = None
    ephemeral_containers: tuple[msgspec.Raw, ...] | None = None
    volumes: tuple[msgspec.Raw, ...] | None = None


class _CountedPod(msgspec.Struct, frozen=True):
    """Counts what takes long to decode, before it is decoded."""

    spec: _CountedSpec


def decode_pod(document: bytes | msgspec.Raw) -> RawPod:
    """Decode a pod. Raises RequestError for anything else, and for a pod beyond the bounds."""
    counted = decoded(document, _CountedPod).spec
    for name in counted.__struct_fields__:
        _check_count(name, len(getattr(counted, name) or ()), MAX_CONTAINERS)
    pod = decoded(document, RawPod)
    for name, count in _counts(pod.metadata or RawMetadata(), pod.spec):
        _check_count(name, count, MAX_ENTRIES)
    for path in _paths(pod.spec):
        check_text("a path in the pod", path, MAX_PATH)
    return pod


def _paths(spec: RawPodSpec) -> Iterator[str]:
    yield from (each.host_path.path for each in spec.volumes or () if each.host_path)
    for container in _all_containers(spec):
        yield from (mount.mount_path for mount in container.volume_mounts or ())
        yield from (block.device_path for block in container.volume_devices or ())
        yield container.termination_message_path or ""


def _all_containers(spec: RawPodSpec) -> Iterator[RawContainer]:
    for kind in (spec.containers, spec.init_containers, spec.ephemeral_containers):
        yield from kind or ()


def _counts(metadata: RawMetadata, spec: RawPodSpec) -> Iterator[tuple[str, int]]:
    yield "annotations", len(metadata.annotations or ())
    yield "labels", len(metadata.labels or ())
    yield "scheduling_gates", len(spec.scheduling_gates or ())
    containers = list(_all_containers(spec))
    for name in ("env", "env_from", "ports", "volume_mounts", "volume_devices"):
        yield name, sum(len(getattr(each, name) or ()) for each in containers)
    amounts = [each.resources for each in containers if each.resources]
    for name in ("limits", "requests", "claims"):
        yield name, sum(len(getattr(each, name) or ()) for each in amounts)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        first, *others = name.split("_")
        field_name = first + "".join(map(str.capitalize, others))
        raise RequestError(
            f"the pod has {count} entries of {field_name}; at most {most} can be reviewed: use "
            "fewer, or several pods"
        )


def decoded(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode a pod as some type. Raises RequestError for anything that is no pod."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the object under review is not a pod: {error}") from error
