"""Identities, each a type of its own so that one cannot be passed for another."""

from typing import NewType

PodUid = NewType("PodUid", str)
NodeName = NewType("NodeName", str)
Namespace = NewType("Namespace", str)
DeviceUuid = NewType("DeviceUuid", str)
"""NVML's UUID of a physical GPU, `GPU-…`: the only key a device has (indices move)."""

OWN_SCHEDULER = "leasehold"
"""`spec.schedulerName` of pods that name us as their scheduler."""
BUDGET_GATE = "leasehold.dev/budget"
"""Scheduling gate of pods whose namespace's budget is exhausted and queues new pods."""
