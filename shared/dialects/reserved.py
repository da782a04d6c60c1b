"""Fields that a pod must not set; pure.

A pod's own variables override those of the device plugin. Annotations grant nothing here, but
vendors' components may read them.
"""

from collections.abc import Mapping

from shared.model.events.event import ADMISSION
from shared.model.names import EXPECTED_RUN_TIME, ISOLATION, MAX_RUN_TIME

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""Read by NVIDIA's container runtime."""

CHOSEN = "CUDA_VISIBLE_DEVICES"
"""A program chooses by it among the GPUs that it sees. Pods may set it.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
"""
CUDA_VERSION = "CUDA_VERSION"
MPS_PREFIX = "CUDA_MPS_"
"""Programs use a server of MPS by these, which may hold memory for them."""

PREFIXES: Mapping[str, tuple[str, ...]] = {
    "CUDA_DEVICE_": (
        "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    ),
    MPS_PREFIX: (),
    "DOCKER_RESOURCE_": (),
    "LD_": ("LD_BIND_NOW", "LD_LIBRARY_PATH"),
    "LEASEHOLD_TIME_": (),
    "NVIDIA_": (
        "NVIDIA_API_KEY",
        "NVIDIA_BASE_URL",
        "NVIDIA_BUILD_",
        "NVIDIA_DISABLE_REQUIRE",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_NGC_",
        "NVIDIA_NIM_",
        "NVIDIA_PRODUCT_NAME",
        "NVIDIA_PYTORCH_",
        "NVIDIA_REQUIRE_",
        "NVIDIA_TENSORFLOW_",
        "NVIDIA_TENSORRT_",
        "NVIDIA_TF32_OVERRIDE",
        "NVIDIA_TRITON_",
    ),
    "VOLCANO_GPU_": (),
}
"""Each with beginnings of variables that only programs read, or that select no device."""
NAMES = frozenset(
    {
        "ACTIVE_OOM_KILLER",
        "CONTAINER_VGPU_MOUNT",
        "CUDA_DISABLE_CONTROL",
        "CUDA_OVERSUBSCRIBE",
        "CUDA_REDIRECT",
        "CUDA_TASK_PRIORITY",
        "GPU_CORE_UTILIZATION_POLICY",
        "RECORD_KERNEL_INTERVAL",
    }
)
"""HAMi-core's, without such a prefix."""
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Limits are by CUDA's numbers, which start with faster models otherwise."""
LIBRARY_DIRECTORY = "/usr/local/vgpu"
"""Of the isolation library inside containers."""
LIBRARY_SEARCH = "LD_LIBRARY_PATH"

DENIED_ANNOTATIONS = ("leasehold.dev/",)
"""Only Leasehold writes them, except `AUTHOR_ANNOTATIONS`."""
AUTHOR_ANNOTATIONS = (ISOLATION, MAX_RUN_TIME, EXPECTED_RUN_TIME)
"""A pod's author may write them."""
EXEMPT = "leasehold.dev/exempt"
"""A pod of an exempt namespace may mount protected paths and have more privileges."""
COMPLETED_ANNOTATIONS = (ADMISSION, EXEMPT)
"""The webhook replaces them on a copied pod or at a second call; they grant nothing."""
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
"""On a new pod they are copied or forged."""

CAPABILITIES = frozenset(
    {
        "ALL",
        "BPF",
        "CHECKPOINT_RESTORE",
        "DAC_READ_SEARCH",
        "PERFMON",
        "SYS_ADMIN",
        "SYS_BOOT",
        "SYS_MODULE",
        "SYS_PTRACE",
        "SYS_RAWIO",
    }
)
"""Programs can remove limits with them: mount, trace, or read and write memory."""

RUNTIME_CLASSES = "nvidia"
"""Such runtime classes add devices to containers."""

NOTHING_VISIBLE = "void"
"""With this value the runtime does not change the container."""
NO_DEVICE_VALUES = frozenset({"", "void", "none"})
CUDA_IMAGE_PREFIXES = ("nvcr.io/",)
CUDA_IMAGES = ("nvidia/", "cuda")
"""Such images set `VISIBLE` to all devices."""

DEVICE_NAME_MOUNTS = "nvidia-container-devices"
"""NVIDIA's runtime reads names of devices from mounts below it."""


def is_of_leasehold(annotation: str) -> bool:
    """Return whether only Leasehold writes this annotation, and not on new pods."""
    free = (*AUTHOR_ANNOTATIONS, *COMPLETED_ANNOTATIONS)
    return annotation.startswith(DENIED_ANNOTATIONS) and annotation not in free


def names_devices(variables: Mapping[str, str]) -> bool:
    """Return whether NVIDIA's runtime adds devices for a container's variables.

    Without `VISIBLE`, it adds all devices to an old CUDA image, which has the variable of CUDA's
    version.

    >>> names_devices({"NVIDIA_VISIBLE_DEVICES": "all"}), names_devices({})
    (True, False)
    """
    if VISIBLE in variables:
        return variables[VISIBLE] not in NO_DEVICE_VALUES
    return CUDA_VERSION in variables


def is_cuda_image(image: str) -> bool:
    """Return whether an image, by its name, sets `VISIBLE` to all devices."""
    return image.startswith(CUDA_IMAGE_PREFIXES) or any(part in image for part in CUDA_IMAGES)


def is_reserved(variable: str) -> bool:
    """Return whether a pod must not set this variable.

    >>> is_reserved("CUDA_DEVICE_SM_LIMIT"), is_reserved("OMP_NUM_THREADS")
    (True, False)
    """
    free = (name for prefix, names in PREFIXES.items() if variable.startswith(prefix)
            for name in names)  # fmt: skip
    return variable in NAMES or (
        variable.startswith(tuple(PREFIXES)) and not variable.startswith(tuple(free))
    )


def sets_reserved(variable: str, value: str) -> bool:
    return is_reserved(variable) and DEVICE_ORDER.get(variable) != value


def may_set_reserved(prefix: str) -> bool:
    """Return whether a source of `envFrom` may set a reserved variable, now or later."""
    reserved = (*PREFIXES, *NAMES)
    return prefix.startswith(tuple(PREFIXES)) or any(key.startswith(prefix) for key in reserved)


def is_device_name_mount(mount_path: str) -> bool:
    """Return whether NVIDIA's runtime may read a device's name from the mount."""
    return DEVICE_NAME_MOUNTS in mount_path
