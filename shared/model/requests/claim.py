"""ResourceClaims: the names that our DRA driver, its slices and the binder agree on; pure.

The API is `resource.k8s.io/v1`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, NamedTuple

from shared.model.devices.device import Device, DeviceMode, MigProfile
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid

DRIVER = "gpu.leasehold.dev"
"""Of our ResourceSlices and allocation results. The pool is the name of the node."""
LEASED = "leasehold.dev/Leased"
"""Binding condition of the devices: True once the ledger has the claim's lease."""
REFUSED = "leasehold.dev/Refused"
"""Binding failure condition of the devices: True if the ledger refuses the lease."""
CLAIM_ENDED = "the claim is neither allocated nor prepared any more"

CLAIMS_FIELD = "spec.resourceClaims"

RETRIED_AT = "leasehold.dev/claims-retried-at"
"""Of a pod that waited on its node although its claims had leases. A change makes the kubelet try
again."""

EXTENDED_RESOURCES = ("leasehold.dev/whole-gpu", "deviceclass.resource.kubernetes.io/")
"""For which schedulers create claims: of our class, and of any class by its name."""

MEMORY = "memory"
CORES = "cores"
SLOTS = "slots"


ClaimMode = Literal["", "mps", "time"]
"""Demanded by the device that a claim selects."""
DEMANDED_MODES: tuple[ClaimMode, ...] = ("mps", "time")
PROFILE_LENGTH = 22
"""Characters of a profile's name in the name of a device, which has at most 63."""
_NO_LABEL = re.compile(r"[^a-z0-9]+")


class TaintEffect(StrEnum):
    """What the taint of an unhealthy device does.

    https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#device-taints-and-tolerations
    """

    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"
    """Besides, Kubernetes deletes the pods that use it and do not tolerate it."""


class DraMode(StrEnum):
    OFF = "off"
    CONDITIONS = "conditions"
    """With any scheduler, 5 s more until the pod is bound."""


class ClaimableDevice(NamedTuple):
    profile: MigProfile | None = None
    mode: ClaimMode = ""


def device_name(uuid: DeviceUuid, part: str = "") -> str:
    """Return the name of a device in ResourceSlices, or of one of its MIG profiles or modes.

    It is a DNS label: `1g.5gb+me` of `GPU-3F2A-1` becomes `gpu-3f2a-1-1g-5gb-plus-me`.
    """
    name = uuid.lower()
    if not part:
        return name
    label = _NO_LABEL.sub("-", part.lower().replace("+", "-plus-"))
    return f"{name}-{label[:PROFILE_LENGTH].strip('-')}"


def allocated_name(share: Share) -> str:
    if share.mig:
        return device_name(share.device, share.mig.profile)
    return device_name(share.device, share.mode if share.mode in DEMANDED_MODES else "")


def demanded_mode(name: str) -> ClaimMode:
    """Return the mode that a claim demands by a device of this name.

    >>> demanded_mode("gpu-3f2a-1-mps")
    'mps'
    """
    return next((mode for mode in DEMANDED_MODES if name.endswith(f"-{mode}")), "")


def claimable(device: Device) -> dict[str, ClaimableDevice]:
    """Return what claims can be allocated of a device, by name.

    In MIG mode each profile, the smallest first; else the device for each mode.
    """
    if device.replicas is not None:
        return {}
    if device.mode is not DeviceMode.MIG:
        modes: list[ClaimMode] = [""]
        if device.holds_parts:
            modes += [mode for mode in DEMANDED_MODES if mode in device.offer.compute]
        return {device_name(device.uuid, mode): ClaimableDevice(mode=mode) for mode in modes}
    profiles = (profile for layout in device.layouts for profile in layout.profiles)
    return {
        device_name(device.uuid, profile.name): ClaimableDevice(profile=profile)
        for profile in sorted(profiles, key=lambda profile: (profile.memory_mib, profile.name))
    }


def generation_of(allocated_at: str, devices: Iterable[tuple[str, str, str]]) -> str:
    """Each of `devices` has a request, a device's name and a share ID."""
    return " ".join([allocated_at, *sorted("/".join(result) for result in devices)])
