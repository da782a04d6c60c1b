"""All fields of a pod that we read: those of `types`, and what a container gets; pure.

Long parts are counted before they are decoded, to bound the time.
"""

from collections.abc import Iterator
from datetime import datetime

import msgspec
from msgspec import Struct

from shared.kubernetes.types import (
    ApiPod,
    ApiPodSpec,
    Container,
    NamedReference,
    ObjectMeta,
    Volume,
    VolumeMount,
)
from shared.model.bounds import check_text
from shared.model.errors import UNDECODABLE, RequestError

MAX_CONTAINERS = 500
"""Of a kind, and volumes."""
MAX_ENTRIES = 10_000
MAX_PATH = 4_096
"""In characters, as in Linux."""


class EnvVar(Struct, frozen=True, rename="camel", gc=False):
    """`value` is empty if it has a `valueFrom`."""

    name: str = ""
    value: str = ""
    value_from: dict[str, object] | None = None


class EnvFromSource(Struct, frozen=True, rename="camel", gc=False):
    prefix: str = ""
    config_map_ref: NamedReference | None = None


class FullVolumeMount(VolumeMount, frozen=True, rename="camel", gc=False):
    name: str = ""
    sub_path: str = ""
    sub_path_expr: str = ""
    read_only: bool = False


class VolumeDevice(Struct, frozen=True, rename="camel", gc=False):
    device_path: str = ""
    name: str = ""


class FullContainer(Container, frozen=True, rename="camel", gc=False):
    image: str = ""
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFromSource, ...] = ()
    volume_mounts: tuple[FullVolumeMount, ...] = ()
    volume_devices: tuple[VolumeDevice, ...] = ()
    termination_message_path: str = ""
    target_container_name: str = ""


class FullVolume(Volume, frozen=True, rename="camel", gc=False):
    empty_dir: dict[str, object] | None = None


class FullPodSpec(ApiPodSpec, frozen=True, rename="camel", gc=False):
    containers: tuple[FullContainer, ...] = ()
    init_containers: tuple[FullContainer, ...] = ()
    ephemeral_containers: tuple[FullContainer, ...] = ()
    volumes: tuple[FullVolume, ...] = ()


class FullPod(ApiPod, frozen=True, gc=False):
    spec: FullPodSpec = FullPodSpec()


class DeletionMeta(Struct, frozen=True, rename="camel", gc=False):
    uid: str
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None


class DeletedPod(Struct, frozen=True, gc=False):
    """Only what says when the pod ends is decoded."""

    metadata: DeletionMeta


class PodTemplate(Struct, frozen=True, gc=False):
    spec: FullPodSpec = FullPodSpec()


class WorkloadSpec(Struct, frozen=True, gc=False):
    template: PodTemplate = PodTemplate()
    replicas: int = 1
    """A DaemonSet has none."""


class WorkloadStatus(Struct, frozen=True, rename="camel", gc=False):
    ready_replicas: int = 0
    desired_number_scheduled: int = 0
    number_ready: int = 0


class Workload(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()


class _CountedSpec(Struct, frozen=True, rename="camel"):
    containers: tuple[msgspec.Raw, ...] | None = None
    init_containers: tuple[msgspec.Raw, ...] | None = None
    ephemeral_containers: tuple[msgspec.Raw, ...] | None = None
    volumes: tuple[msgspec.Raw, ...] | None = None


class _CountedPod(Struct, frozen=True):
    spec: _CountedSpec


_decode_counted = msgspec.json.Decoder(_CountedPod).decode
_decode_pod = msgspec.json.Decoder(FullPod).decode


def decode_pod(document: bytes | msgspec.Raw) -> FullPod:
    """Raises RequestError for anything but a pod, and for a pod beyond the bounds."""
    try:
        counted = _decode_counted(document).spec
        for name in counted.__struct_fields__:
            _check_count(name, len(getattr(counted, name) or ()), MAX_CONTAINERS)
        pod = _decode_pod(document)
    except UNDECODABLE as error:
        raise RequestError(f"the object under review is not a pod: {error}") from error
    for name, count in _counts(pod):
        _check_count(name, count, MAX_ENTRIES)
    for path in _paths(pod.spec):
        check_text("a path in the pod", path, MAX_PATH)
    return pod


def _paths(spec: FullPodSpec) -> Iterator[str]:
    yield from (volume.host_path.path for volume in spec.volumes if volume.host_path)
    for container in _all_containers(spec):
        yield from (mount.mount_path for mount in container.volume_mounts)
        yield from (block.device_path for block in container.volume_devices)
        yield container.termination_message_path


def _all_containers(spec: FullPodSpec) -> tuple[FullContainer, ...]:
    return (*spec.containers, *spec.init_containers, *spec.ephemeral_containers)


def _counts(pod: FullPod) -> Iterator[tuple[str, int]]:
    yield "annotations", len(pod.metadata.annotations)
    yield "labels", len(pod.metadata.labels)
    yield "scheduling_gates", len(pod.spec.scheduling_gates)
    containers = _all_containers(pod.spec)
    for name in ("env", "env_from", "ports", "volume_mounts", "volume_devices"):
        yield name, sum(len(getattr(container, name)) for container in containers)
    for name in ("limits", "requests", "claims"):
        yield name, sum(len(getattr(container.resources, name)) for container in containers)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        first, *others = name.split("_")
        field_name = first + "".join(map(str.capitalize, others))
        raise RequestError(
            f"the pod has {count} entries of {field_name}; at most {most} can be reviewed: use "
            "fewer, or several pods"
        )
