"""The devices that the container runtime lets each container use, read from the OCI bundles.

Nothing that a pod can write counts.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from services.node_agent.kubelet.cgroups import parse_cgroup
from services.node_agent.kubelet.pods import ContainerDevices
from shared.model.errors import UNDECODABLE, RequestError

BUNDLES = (
    "run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
    "run/containers/storage/overlay-containers",
)
"""Of containerd, k3s' containerd, and CRI-O."""
GPU_MAJOR = 195
MOST_GPUS = 254
"""Later minor numbers of the driver are not of GPUs."""
MOST_BYTES = 16 << 20
_GPU_NODE = re.compile(r"/dev/nvidia(\d{1,3})")
ID_LENGTH = 64


class _Device(Struct, frozen=True, gc=False):
    path: str = ""
    type: str = ""
    major: int = -1
    minor: int = -1


class _Rule(Struct, frozen=True, gc=False):
    """None is every number."""

    allow: bool = False
    type: str = ""
    major: int | None = None
    minor: int | None = None
    access: str = "rwm"


class _Resources(Struct, frozen=True, gc=False):
    devices: tuple[_Rule, ...] | None = None


class _Linux(Struct, frozen=True, rename="camel", gc=False):
    cgroups_path: str = ""
    devices: tuple[_Device, ...] | None = None
    resources: _Resources | None = None


class _Mount(Struct, frozen=True, gc=False):
    destination: str = ""


class _Specification(Struct, frozen=True, gc=False):
    """https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md."""

    linux: _Linux = _Linux()
    mounts: tuple[_Mount, ...] | None = None


_decode = msgspec.json.Decoder(_Specification).decode


def list_bundles(directories: Iterable[Path]) -> dict[str, Path]:
    """A missing directory has none. Raises OSError for one that cannot be read."""
    bundles: dict[str, Path] = {}
    for directory in directories:
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            bundles.update(
                (entry.name, directory) for entry in entries if len(entry.name) == ID_LENGTH
            )
    return bundles


def read_bundle(bundle: Path, proc: Path) -> ContainerDevices | None:
    """Return None until the container is created.

    Raises RequestError if the runtime's file is not a specification.
    """
    try:
        folder = bundle / "userdata" if (bundle / "userdata").is_dir() else bundle
        text = _read(folder / "config.json")
        pid = _read(folder / ("pidfile" if folder != bundle else "init.pid")).decode().strip()
    except (OSError, ValueError):
        return None
    mounts = b""
    with contextlib.suppress(OSError):  # it has ended
        mounts = _read(proc / pid / "mountinfo")
    try:
        specification = _decode(text)
    except UNDECODABLE as error:
        raise RequestError(f"{folder}/config.json is not an OCI specification: {error}") from error
    pod, _ = parse_cgroup(f"0::{specification.linux.cgroups_path}")
    every_device, gpus = _allowed(specification.linux)
    return ContainerDevices(
        pod=pod,
        container_id=bundle.name,
        gpus=gpus | _added(mounts.decode(errors="replace"), specification.mounts or ()),
        every_device=every_device,
    )


def _read(path: Path) -> bytes:
    """One call of the kernel returns a page at most of a file in /proc."""
    with path.open("rb") as file:
        return file.read(MOST_BYTES)


def _allowed(linux: _Linux) -> tuple[bool, frozenset[int]]:
    every_device = False
    gpus = {minor for device in linux.devices or () for minor in _gpu_of(device)}
    for rule in linux.resources.devices or () if linux.resources else ():
        if rule.type == "b" or not {"r", "w"} & set(rule.access):
            continue  # of disks, or to make device files only
        if rule.major is None:
            every_device = rule.allow
        elif rule.allow and rule.major == GPU_MAJOR:
            gpus |= set(range(MOST_GPUS)) if rule.minor is None else {rule.minor}
    return every_device, frozenset(minor for minor in gpus if 0 <= minor < MOST_GPUS)


def _gpu_of(device: _Device) -> Iterator[int]:
    node = _GPU_NODE.fullmatch(device.path)
    if device.major == GPU_MAJOR:
        yield device.minor
    elif node is not None and device.major < 0:
        yield int(node[1])


def _added(mountinfo: str, specified: Sequence[_Mount]) -> frozenset[int]:
    """A host path that the pod mounts itself is in the specification, and may not be opened."""
    own = {mount.destination for mount in specified}
    places = (line.split(" ", 5)[4] for line in mountinfo.splitlines() if line.count(" ") > 4)
    nodes = ((place, _GPU_NODE.fullmatch(place)) for place in places if place not in own)
    return frozenset(int(node[1]) for _, node in nodes if node is not None)
