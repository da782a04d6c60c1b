"""The manifest of a pod to try; pure."""

from collections.abc import Iterable

MANIFEST = """\
apiVersion: v1
kind: Pod
metadata:
  name: first
spec:
  schedulerName: leasehold
  containers:
    - name: main
      image: busybox
      command: [sleep, "3600"]
      resources:
        limits:
"""
EXAMPLES = {
    "volcano.sh/vgpu-number": (
        "volcano.sh/vgpu-number: 1",
        "volcano.sh/vgpu-memory: 3000   # MiB",
        "volcano.sh/vgpu-cores: 30      # percent of a GPU",
    ),
    "nvidia.com/gpu": (
        "nvidia.com/gpu: 1",
        "nvidia.com/gpumem: 3000   # MiB",
        "nvidia.com/gpucores: 30   # percent of a GPU",
    ),
    "koordinator.sh/gpu.shared": (
        "koordinator.sh/gpu.shared: 1",
        "koordinator.sh/gpu-core: 30           # percent of a GPU",
        "koordinator.sh/gpu-memory-ratio: 30   # percent of its memory",
    ),
    "tencent.com/vcuda-core": (
        "tencent.com/vcuda-core: 30     # percent of a GPU",
        "tencent.com/vcuda-memory: 12   # blocks of 256 MiB",
    ),
    "volcano.sh/gpu-memory": ("volcano.sh/gpu-memory: 3000   # MiB",),
    "volcano.sh/gpu-number": ("volcano.sh/gpu-number: 1   # whole GPUs",),
}
"""Limits, by the resource that a node serves."""


def first_pod(served: Iterable[str]) -> str | None:
    """Return None if there is no example for any of these resources."""
    resources = set(served)
    limits = next((limits for resource, limits in EXAMPLES.items() if resource in resources), None)
    if limits is None:
        return None
    return MANIFEST + "".join(f"          {line}\n" for line in limits)
