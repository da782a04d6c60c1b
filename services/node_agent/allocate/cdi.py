"""The CDI specification of a node's devices: what a runtime adds to a container that names one.

Container Device Interface, https://github.com/cncf-tags/container-device-interface. The kind is our
own: of devices that two files name alike, runtimes give neither, and other plugins write files too.
What graphics and video programs need is left out, for HAMi-core does not hold them to any limit.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.instances import MigInstance
from shared.dialects.reserved import NOTHING_VISIBLE, VISIBLE
from shared.model.device import DeviceMode

VERSION = "0.5.0"
"""The lowest version of the specification that knows all fields used."""
KIND = "leasehold.dev/gpu"
FILE = "leasehold.dev-gpu.json"
NOT_BY_NVIDIA = f"{VISIBLE}={NOTHING_VISIBLE}"
"""Whatever the image says: NVIDIA's own runtime leaves the container as it is."""
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Device nodes that all devices share; those that are there."""
LIBRARIES = (
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
    "libnvidia-compiler.so",
    "libnvidia-gpucomp.so",
    "libnvidia-ml.so",
    "libnvidia-nvvm.so",
    "libnvidia-nvvm70.so",
    "libnvidia-opencl.so",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so",
)
"""The driver's libraries for computing and looking, each followed by the driver's version."""
PROGRAMS = ("nvidia-smi",)
_MOUNTED = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDriver:
    """The driver's files on the host; paths are those of its root."""

    root: str = "/"
    """Where the host has that root."""
    nodes: tuple[str, ...] = ()
    """Of `CONTROL_NODES`, those that are there."""
    files: tuple[str, ...] = ()
    """Libraries and programs, all in the same places inside containers."""
    folder: str = ""
    """Where the libraries are."""
    hook: str = ""
    """NVIDIA's program that completes a container's file system, on the host."""


def qualified_name(device: str) -> str:
    """Return the name by which a container asks for a GPU or an instance."""
    return f"{KIND}={device}"


def build_specification(
    gpus: Iterable[Gpu], minors: Mapping[str, int], driver: HostDriver | None
) -> dict[str, Any]:
    """Return the specification of all GPUs and MIG instances.

    `minors` are the numbers of the device nodes of MIG's capabilities; an instance of which one is
    missing is left out. Without a driver, as where GPUs are simulated, there are no device nodes.
    """
    devices = [
        {"name": name, "containerEdits": _edits(nodes if driver is not None else ())}
        for gpu in gpus
        for name, nodes in _devices_of(gpu, minors)
        if driver is None or all(nodes)
    ]
    found: dict[str, Any] = {"cdiVersion": VERSION, "kind": KIND, "devices": devices}
    return found if driver is None else {**found, "containerEdits": _common(driver)}


def encode_specification(specification: Mapping[str, Any]) -> bytes:
    """Return the file; equal specifications are equal files."""
    return json.dumps(specification, indent=2).encode() + b"\n"


def names_in(specification: Mapping[str, Any]) -> frozenset[str]:
    """Return the names by which containers may ask."""
    return frozenset(qualified_name(device["name"]) for device in specification["devices"])


def parse_minors(text: str) -> dict[str, int]:
    """Read `/proc/driver/nvidia-caps/mig-minors`: a capability and its number on each line."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def names_of(gpu: Gpu) -> tuple[str, ...]:
    """Return what can be asked for of a GPU: itself, or its instances."""
    if gpu.mode is not DeviceMode.MIG:
        return (gpu.uuid,)
    return tuple(instance.uuid for instance in gpu.instances if instance.uuid)


def _devices_of(gpu: Gpu, minors: Mapping[str, int]) -> list[tuple[str, tuple[str, ...]]]:
    """Return what can be asked for of a GPU, each with its device nodes."""
    whole = f"/dev/nvidia{gpu.index}"
    instances = {instance.uuid: instance for instance in gpu.instances}
    return [
        (name, (whole, *(_capabilities(gpu, instances[name], minors) if name in instances else ())))
        for name in names_of(gpu)
    ]


def _capabilities(gpu: Gpu, instance: MigInstance, minors: Mapping[str, int]) -> tuple[str, ...]:
    """Return the device nodes that open an instance, and it alone; empty: not known."""
    within = f"gpu{gpu.index}/gi{instance.gi}"
    keys = (f"{within}/access", *(f"{within}/ci{ci}/access" for ci in instance.compute_ids))
    return tuple(
        f"/dev/nvidia-caps/nvidia-cap{minors[key]}" if key in minors else "" for key in keys
    )


def _edits(nodes: Sequence[str]) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [NOT_BY_NVIDIA]}
    return {**edits, "deviceNodes": list(map(_node, nodes))} if nodes else edits


def _node(path: str) -> dict[str, str]:
    return {"path": path, "permissions": "rw"}


def _common(driver: HostDriver) -> dict[str, Any]:
    root = driver.root.rstrip("/")
    link = f"libcuda.so.1::{driver.folder}/libcuda.so"
    return {
        "deviceNodes": [_node(f"/dev/{name}") for name in driver.nodes],
        "mounts": [
            {"hostPath": f"{root}{path}", "containerPath": path, "options": list(_MOUNTED)}
            for path in driver.files
        ],
        "hooks": [
            _hook(driver.hook, "create-symlinks", "--link", link),
            _hook(driver.hook, "update-ldcache", "--folder", driver.folder),
        ],
    }


def _hook(path: str, *words: str) -> dict[str, Any]:
    name = path.rpartition("/")[2]
    before = () if name == "nvidia-cdi-hook" else ("hook",)  # a command of nvidia-ctk
    return {"hookName": "createContainer", "path": path, "args": [name, *before, *words]}
