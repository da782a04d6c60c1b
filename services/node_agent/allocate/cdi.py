"""CDI specifications of devices and of requests of ResourceClaims; pure.

https://github.com/cncf-tags/container-device-interface. Libraries for graphics and video are left
out, since HAMi-core does not limit them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.dialect import ContainerSetup
from shared.dialects.reserved import NOTHING_VISIBLE, VISIBLE
from shared.model.devices.device import DeviceMode
from shared.model.names import PodUid
from shared.model.quantity import parse_decimal

VERSION = "0.5.0"
"""The lowest with all fields used here."""
KIND = "leasehold.dev/gpu"
FILE = "leasehold.dev-gpu.json"
NOT_BY_NVIDIA = f"{VISIBLE}={NOTHING_VISIBLE}"
"""Overrides the image's variable, so that NVIDIA's own runtime adds no devices."""
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
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
PROGRAMS = ("nvidia-smi",)
CLAIM_KIND = "leasehold.dev/claim"
LIMITS_KIND = "leasehold.dev/limits"
HOOK_TIMEOUT_S = 6
"""Of the runtime; the program itself gives up after 5 s."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_MOUNTED = ("nosuid", "nodev", "rbind", "rprivate")


def qualified_name(device: str) -> str:
    return f"{KIND}={device}"


def build_specification(
    gpus: Iterable[Gpu],
    minors: Mapping[str, int],
    common: Mapping[str, Any] | None,
    devices_at: str = "",
) -> dict[str, Any]:
    """An instance without all its `minors`, the numbers of MIG's device nodes, is left out.

    `common` are the driver's edits, None for simulated GPUs. `devices_at` is the host's directory
    with its /dev.
    """
    devices = [
        {"name": name, "containerEdits": _edits(nodes if common is not None else (), devices_at)}
        for gpu in gpus
        for name, nodes in _devices_of(gpu, minors)
        if common is None or all(nodes)
    ]
    specification: dict[str, Any] = {"cdiVersion": VERSION, "kind": KIND, "devices": devices}
    return specification if common is None else {**specification, "containerEdits": common}


def names_in(specification: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(qualified_name(device["name"]) for device in specification["devices"])


def parse_minors(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {
        pair[0]: minor
        for pair in pairs
        if len(pair) == 2 and (minor := parse_decimal(pair[1])) is not None
    }


def names_of(gpu: Gpu) -> tuple[str, ...]:
    return tuple(name for name, _ in _devices_of(gpu, {}))


def _devices_of(gpu: Gpu, minors: Mapping[str, int]) -> list[tuple[str, tuple[str, ...]]]:
    whole = f"/dev/nvidia{gpu.index}"
    if gpu.mode is not DeviceMode.MIG:
        return [(gpu.uuid, (whole,))]
    return [
        (instance.uuid, (whole, *_capabilities(gpu, instance, minors)))
        for instance in gpu.instances
        if instance.uuid
    ]


def _capabilities(gpu: Gpu, instance: MigInstance, minors: Mapping[str, int]) -> tuple[str, ...]:
    """Paths are empty for unknown numbers."""
    within = f"gpu{gpu.index}/gi{instance.gi}"
    keys = (f"{within}/access", *(f"{within}/ci{ci}/access" for ci in instance.compute_ids))
    return tuple(
        f"/dev/nvidia-caps/nvidia-cap{minors[key]}" if key in minors else "" for key in keys
    )


def _edits(nodes: Sequence[str], devices_at: str) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [NOT_BY_NVIDIA]}
    return {**edits, "deviceNodes": device_nodes(nodes, devices_at)} if nodes else edits


def device_nodes(paths: Iterable[str], devices_at: str) -> list[dict[str, str]]:
    where = devices_at.rstrip("/")
    return [
        {"path": path, **({"hostPath": f"{where}{path}"} if where else {}), "permissions": "rw"}
        for path in paths
    ]


def driver_edits(
    root: str, *, nodes: Sequence[dict[str, str]], files: Iterable[str], folder: str, hook: str
) -> dict[str, Any]:
    """Paths are below the driver's root; `hook` is NVIDIA's program on the host."""
    link = f"libcuda.so.1::{folder}/libcuda.so"
    return {
        "deviceNodes": list(nodes),
        "mounts": [_mount(f"{root.rstrip('/')}{path}", path) for path in files],
        "hooks": [
            _hook(hook, "create-symlinks", "--link", link),
            _hook(hook, "update-ldcache", "--folder", folder),
        ],
    }


def _mount(host_path: str, container_path: str, *, read_only: bool = True) -> dict[str, Any]:
    options = ["ro" if read_only else "rw", *_MOUNTED]
    return {"hostPath": host_path, "containerPath": container_path, "options": options}


def _hook(path: str, *words: str) -> dict[str, Any]:
    name = path.rpartition("/")[2]
    before = () if name == "nvidia-cdi-hook" else ("hook",)  # a command of nvidia-ctk
    return {"hookName": "createContainer", "path": path, "args": [name, *before, *words]}


def build_claim_specification(entries: Iterable[CheckpointEntry]) -> dict[str, Any] | None:
    """Return None if all requests are for whole devices.

    Each request is a CDI device: two with the same variable would overwrite each other.
    """
    devices = [
        {
            "name": _claim_device(entry),
            "containerEdits": {
                "env": [f"{name}={text}" for name, text in entry.setup.environment.items()],
                "mounts": [
                    _mount(mount.host_path, mount.container_path, read_only=mount.read_only)
                    for mount in entry.setup.mounts
                ],
            },
        }
        for entry in entries
        if _is_limited(entry.setup)
    ]
    return {"cdiVersion": VERSION, "kind": CLAIM_KIND, "devices": devices} if devices else None


def cdi_names(entry: CheckpointEntry) -> tuple[str, ...]:
    own = (f"{CLAIM_KIND}={_claim_device(entry)}",) if _is_limited(entry.setup) else ()
    return (*entry.setup.cdi_devices, *own)


def _is_limited(setup: ContainerSetup) -> bool:
    return bool(setup.environment or setup.mounts)


def _claim_device(entry: CheckpointEntry) -> str:
    return f"{entry.allocation.pod}-{entry.allocation.container.replace('/', '.')}"


def limits_device(holder: PodUid, container: str) -> str:
    """A request of a prioritized list has a slash, which no name of CDI has."""
    return f"{holder}-{_NOT_IN_NAMES.sub('.', container)}"


def qualified_limits(holder: PodUid, container: str) -> str:
    return f"{LIMITS_KIND}={limits_device(holder, container)}"


def build_limits_specification(
    program: tuple[str, str], holder: PodUid, container: str, fence: int
) -> dict[str, Any]:
    """`program` is the hook's path on the host and its socket."""
    path, socket = program
    hook = {
        "hookName": "createRuntime",
        "path": path,
        "args": [path.rpartition("/")[2], socket, holder, container, str(fence)],
        "timeout": HOOK_TIMEOUT_S,
    }
    device = {"name": limits_device(holder, container), "containerEdits": {"hooks": [hook]}}
    return {"cdiVersion": VERSION, "kind": LIMITS_KIND, "devices": [device]}
