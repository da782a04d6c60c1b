"""Pods in the words of KAI and Run:ai, as their users write them."""

from typing import Any

from tests.support.webhook.reviews import Obj, container, pod

SCHEDULER = "kai-scheduler"
QUEUE = {"kai.scheduler/queue": "default-queue"}
OWN_PREFIXES = ("nvidia.com/container.", "kai.scheduler/", "runai")
"""Of keys that KAI's components write and obey, or that pods' authors write for them."""


def is_kais_own(key: str) -> bool:
    return key.startswith(OWN_PREFIXES)


def kai_pod(*containers: Obj, init: tuple[Obj, ...] = (), **fields: Any) -> Obj:
    """Return a pod with annotations of the guide, `notes`, and a queue."""
    spec = {"schedulerName": SCHEDULER} | fields
    if init:
        spec["initContainers"] = list(init)
    return pod(*(containers or (container("main"),)), labels=QUEUE, **spec)


GUIDE: dict[str, tuple[Obj, tuple[str, int, int]]] = {
    "a fraction": (kai_pod(notes={"gpu-fraction": "0.5"}), ("main", 1, 7680)),
    "memory": (kai_pod(notes={"gpu-memory": "2000"}), ("main", 1, 2000)),
    "an init container": (
        kai_pod(
            container("app"),
            init=(container("warm-up"),),
            notes={"gpu-fraction": "0.5", "gpu-fraction-container-name": "warm-up"},
        ),
        ("warm-up", 1, 7680),
    ),
    "another container": (
        kai_pod(
            container("proxy"),
            container("model"),
            container("logs"),
            notes={"gpu-fraction": "0.5", "gpu-fraction-container-name": "model"},
        ),
        ("model", 1, 7680),
    ),
    "several devices": (
        kai_pod(notes={"gpu-fraction": "0.25", "gpu-fraction-num-devices": "3"}),
        ("main", 3, 3840),
    ),
    "NvFractions": (
        kai_pod(notes={"nvidia.com/container.main.gpu-memory.request": "4Gi"}),
        ("main", 1, 4096),
    ),
    "NvFractions with a limit, by turns": (
        kai_pod(
            notes={
                "nvidia.com/container.main.gpu-memory.request": "4Gi",
                "nvidia.com/container.main.gpu-memory.limit": "8Gi",
                "nvidia.com/container.main.gpu-compute.mode": "time-slicing",
            }
        ),
        ("main", 1, 4096),
    ),
}
"""Each example of KAI's guide to sharing, with the container, its GPUs, and MiB of each that has
15,360 MiB."""
