"""What only a lease may say of a pod: environment variables, annotations, host paths; pure.

The kubelet puts a pod's own variables after those of the device plugin, so that the pod's win: a
pod that sets one of these would choose its own limits. Annotations grant nothing here, but other
vendors' components may still read theirs.
"""

from collections.abc import Iterable

from shared.dialects.strict_isolation import ISOLATION
from shared.model.trace_context import ADMISSION

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""What NVIDIA's container runtime goes by, wherever it is the default."""

PREFIXES = ("CUDA_DEVICE_", "VOLCANO_GPU_")
NAMES = frozenset(
    {
        "CUDA_DISABLE_CONTROL",
        "CUDA_REDIRECT",
        "GPU_CORE_UTILIZATION_POLICY",
        "LD_PRELOAD",
        VISIBLE,
    }
)
LIBRARY_DIRECTORY = "/usr/local/vgpu"
"""Where the isolation library lies inside containers."""
LIBRARY_SEARCH = "LD_LIBRARY_PATH"

DENIED_ANNOTATIONS = ("leasehold.dev/",)
"""Prefixes of annotations that a new pod has no reason to carry, but for the author's own."""
AUTHORS_ANNOTATIONS = (ISOLATION,)
"""Those of them that are for a pod's author to write."""
COMPLETED_ANNOTATIONS = (ADMISSION,)
"""Those that the webhook writes itself. A pod that brings one, copied from another or because the
webhook is asked a second time, has it replaced; it grants nothing."""
STRIPPED_ANNOTATIONS = (
    "volcano.sh/vgpu-node",
    "volcano.sh/vgpu-time",
    "volcano.sh/vgpu-ids-new",
    "volcano.sh/devices-to-allocate",
    "volcano.sh/bind-phase",
    "volcano.sh/bind-time",
    "volcano.sh/gpu-index",
    "volcano.sh/gpu-assigned",
    "volcano.sh/predicate-time",
    "tencent.com/predicate-",
    "tencent.com/gpu-assigned",
    "scheduling.koordinator.sh/device-allocated",
    "scheduling.koordinator.sh/gpu-minors",
    "scheduling.koordinator.sh/bind-timestamp",
    "hami.io/vgpu-",
    "hami.io/bind-",
)
"""Prefixes of annotations that a scheduler writes; on a new pod they are left-overs or forged."""

NOTHING_VISIBLE = "void"
"""The runtime then leaves the container as it is."""
UNSEEING = frozenset({"", "void", "none"})
"""Values with which no device is seen."""
SEEING_IMAGES_FROM = ("nvcr.io/",)
SEEING_IMAGES = ("nvidia/", "cuda")
"""Parts of names of images that set `VISIBLE` to all devices, as those built on CUDA's do."""

HOST_PATHS = ("/dev/nvidia", "/etc/ld.so.preload", LIBRARY_DIRECTORY)
"""Host paths, and all below them, that open a device or replace the library."""

NAMING_MOUNTS = "nvidia-container-devices"
"""NVIDIA's runtime takes what is mounted below a directory of this name for names of devices."""


def is_denied(annotation: str) -> bool:
    """Tell whether no new pod may carry this annotation."""
    free = (*AUTHORS_ANNOTATIONS, *COMPLETED_ANNOTATIONS)
    return annotation.startswith(DENIED_ANNOTATIONS) and annotation not in free


def sees_devices(image: str, variable: str | None) -> bool:
    """Tell whether a container without a request would see devices; `variable`: VISIBLE's value."""
    if variable is not None:
        return variable not in UNSEEING
    return image.startswith(SEEING_IMAGES_FROM) or any(part in image for part in SEEING_IMAGES)


def is_reserved(variable: str) -> bool:
    """Tell whether a pod may not set this variable."""
    return variable in NAMES or variable.startswith(PREFIXES)


def may_reserve(prefix: str) -> bool:
    """Tell whether variables with this prefix, whatever follows, are all reserved."""
    return prefix.startswith(PREFIXES)


def reserved_among(variables: Iterable[str], prefixes: Iterable[str]) -> str | None:
    """Say which of a container's variables is reserved, or None.

    What a config map or a secret adds is seen by its prefix only.
    """
    for variable in variables:
        if is_reserved(variable):
            return variable
    for prefix in prefixes:
        if may_reserve(prefix):
            return f"{prefix}* (from envFrom)"
    return None


def names_devices(mount_path: str) -> bool:
    """Tell whether NVIDIA's runtime may read a device's name from a mount at this path.

    It does so where it was told to take mounts for what a container is to see.
    """
    return NAMING_MOUNTS in mount_path


def opens_devices(host_path: str) -> bool:
    """Tell whether a pod that asks for a GPU may not mount this path of its node."""
    path = "/" + "/".join(part for part in host_path.split("/") if part not in {"", "."})
    if path in {"/", "/dev", "/etc", "/usr", "/usr/local"} or "/.." in path:
        return True
    return path.startswith("/dev/nvidia") or any(
        path == reserved or path.startswith(f"{reserved}/") for reserved in HOST_PATHS[1:]
    )
