"""The GPUs that the container runtime of a node gives to a container; pure.

A runtime gives what device plugins and claims name. One that is open, as NVIDIA's is as installed,
also gives what a container's variables, those of its image, and its pod's annotations name.
"""

from collections.abc import Iterable, Mapping

from shared.kubelet_api.deviceplugin import api_pb2

OPEN_RUNTIME = "sim.leasehold.dev/open-runtime"
"""Label of a node; `true`: its runtime is open."""
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CUDA_VERSION = "CUDA_VERSION"
ALL = "all"
_NOTHING = frozenset({"", "void", "none"})
_MOUNTS = "/var/run/nvidia-container-devices"
_KINDS = ("nvidia.com/gpu=", "leasehold.dev/gpu=")
_ANNOTATIONS = ("cdi.k8s.io/", "nvidia.cdi.k8s.io/")


def given_gpus(responses: Iterable[api_pb2.ContainerAllocateResponse]) -> list[str]:
    """Return what the responses of device plugins name, and those that stand for claims."""
    gpus: list[str] = []
    for response in responses:
        gpus += _in_variable(response.envs.get(VISIBLE, ""))
        gpus += [
            mount.container_path.rpartition("/")[2]
            for mount in response.mounts
            if mount.container_path.startswith(f"{_MOUNTS}/")
        ]
        gpus += _of_cdi(device.name for device in response.cdi_devices)
    return list(dict.fromkeys(gpus))


def named_gpus(env: Mapping[str, str], annotations: Mapping[str, str]) -> list[str]:
    """Return what a container names itself: by its variables, or by its pod's annotations.

    Without the variable, an image with CUDA's version gets all GPUs.
    """
    default = ALL if CUDA_VERSION in env else ""
    values = [text for key, text in annotations.items() if key.startswith(_ANNOTATIONS)]
    annotated = _of_cdi(name.strip() for text in values for name in text.split(","))
    return [*_in_variable(env.get(VISIBLE, default)), *annotated]


def visible_variable(gpus: Iterable[str]) -> str:
    """Return how the simulated driver's variable names these GPUs."""
    names = list(dict.fromkeys(gpus))
    return ALL if ALL in names else ",".join(names) or "void"


def _in_variable(value: str) -> list[str]:
    if value in _NOTHING or value.startswith("/"):
        return []
    return value.split(",")


def _of_cdi(names: Iterable[str]) -> list[str]:
    return [name.partition("=")[2] for name in names if name.startswith(_KINDS)]
