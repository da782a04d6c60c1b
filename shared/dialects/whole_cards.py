"""Whose `nvidia.com/gpu` is: the one resource name that two dialects read, and never both of them.

Pods for Koordinator's scheduler mean whole cards by it, as that scheduler does; for all other pods
the NVIDIA dialect reads it. Who serves it to the kubelet is the same in both cases.
"""

from shared.dialects.dialect import PodAsks, Rules

CARDS = "nvidia.com/gpu"
KOORDINATOR = "koordinator"
"""Name of the Koordinator dialect."""
KOORD_SCHEDULER = "koord-scheduler"
"""`spec.schedulerName` of pods that were written for Koordinator."""


def read_as_koordinator(asks: PodAsks, rules: Rules) -> bool:
    """Say whether `nvidia.com/gpu` in this pod is the Koordinator dialect's to read.

    Where that dialect is switched off, the NVIDIA dialect reads such pods too, so that no pod with
    the resource is ever taken for one without a GPU.
    """
    spoken = KOORDINATOR in (rules.enabled or {KOORDINATOR}) and KOORDINATOR not in rules.disabled
    return spoken and asks.scheduler == KOORD_SCHEDULER
