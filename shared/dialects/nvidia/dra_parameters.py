"""Parameters of NVIDIA's DRA driver, in claims for ours; pure.

A claim's pods share its devices by time slices unless it selects MPS, and limits in parameters can
only repeat what it requests as capacity.
https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/tree/main/api/nvidia.com/resource/v1beta1
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from shared.model.bounds import NAME, cut
from shared.model.devices.time_slices import DEFAULT, Interval
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.events.claim_events import AllocatedDevice
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_quantity
from shared.model.requests.claim import demanded_mode
from shared.model.requests.request import ALL_PERCENT

NVIDIA_DRIVER = "gpu.nvidia.com"
NVIDIA_CLASSES: Mapping[str, str] = {
    "gpu.nvidia.com": "gpu.leasehold.dev",
    "mig.nvidia.com": "mig.leasehold.dev",
}
"""It takes the place of each of NVIDIA's."""
MOST_DEVICES = 128
NO_SLICES = (
    "sharing.strategy TimeSlicing of a MigDeviceConfig has no effect: an instance of MIG has no "
    "length of time slices to set"
)
MEMORY_LIMIT = "defaultPinnedDeviceMemoryLimit"
_DEVICE = re.compile(r"[0-9]{1,3}|GPU-[\w-]{1,64}", re.ASCII)
Quantity = Annotated[str, Meta(max_length=NAME)] | int


class _Strict(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class TimeSlicingConfig(_Strict, frozen=True, kw_only=True):
    interval: Interval | None = None


class MpsConfig(_Strict, frozen=True, kw_only=True):
    default_active_thread_percentage: Annotated[int, Meta(ge=0, le=100)] | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: Annotated[
        dict[str, Quantity], Meta(max_length=MOST_DEVICES)
    ] = msgspec.field(default_factory=dict)
    """By index in the claim, or by UUID."""
    multi_user: bool | None = None


class Sharing(_Strict, frozen=True, kw_only=True):
    strategy: Literal["TimeSlicing", "MPS"]
    time_slicing_config: TimeSlicingConfig | None = None
    mps_config: MpsConfig | None = None


class DeviceConfig(_Strict, frozen=True, kw_only=True):
    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["GpuConfig", "MigDeviceConfig"]
    sharing: Sharing | None = None


class Effects(NamedTuple):
    """What parameters ask for beside the claim's capacity."""

    interval: Interval | None = None
    """None if no length is named."""
    warning: str = ""
    """Parameters without effect, as a sentence, or ""."""


def read_parameters(
    parameters: bytes, devices: Sequence[AllocatedDevice], *, of_class: bool = False
) -> Effects:
    """Raise RequestError for invalid parameters, or if these devices cannot meet them.

    Only a class sets the length of time slices of parts of GPUs: others have turns of that length,
    too.

    >>> read_parameters(b'{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}', ())
    Effects(interval=None, warning='')
    """
    try:
        config = msgspec.json.decode(parameters, type=DeviceConfig)
    except UNDECODABLE as error:
        raise RequestError(f"parameters of the claim are invalid: {cut(str(error))}") from error
    sharing = config.sharing
    if sharing is None:
        return Effects()
    by_mps = [demanded_mode(device.device) == "mps" for device in devices]
    if sharing.strategy == "TimeSlicing":
        if sharing.mps_config is not None:
            raise RequestError("sharing.mpsConfig is set, and sharing.strategy is TimeSlicing")
        if any(by_mps):
            raise RequestError("sharing.strategy is TimeSlicing, and the claim has a GPU by MPS")
        if config.kind == "MigDeviceConfig":
            return Effects(warning=NO_SLICES)
        interval = (sharing.time_slicing_config or TimeSlicingConfig()).interval
        return Effects(interval=interval if of_class else _of_claim(interval, devices))
    if sharing.time_slicing_config is not None:
        raise RequestError("sharing.timeSlicingConfig is set, and sharing.strategy is MPS")
    limits = sharing.mps_config or MpsConfig()
    _check_fields(limits)
    if not all(by_mps):
        raise RequestError(
            "sharing.strategy is MPS, and the claim has a device without: select the DeviceClass "
            "mps.leasehold.dev, or leave the strategy out"
        )
    _check_limits(limits, devices)
    return Effects()


def _of_claim(interval: Interval | None, devices: Sequence[AllocatedDevice]) -> Interval | None:
    """Raise RequestError for a length that a claim may not ask for."""
    part = next((device.request for device in devices if device.memory_mib is not None), None)
    if part is None or interval is None:
        return interval
    if interval != DEFAULT:
        raise RequestError(
            f"sharing.timeSlicingConfig.interval is {interval}, and request {part} is for a part "
            "of a GPU, whose other users would have turns of that length, too: leave it out, "
            "request a whole GPU, or ask an administrator for a DeviceClass with these parameters"
        )
    return None


def _check_fields(config: MpsConfig) -> None:
    limits: dict[str, Quantity | None] = {MEMORY_LIMIT: config.default_pinned_device_memory_limit}
    for device, own_limit in config.default_per_device_pinned_memory_limit.items():
        field = _field_of(device)
        if not _DEVICE.fullmatch(device):
            raise RequestError(f"sharing.mpsConfig.{field}: its key is no index and no UUID")
        limits[field] = own_limit
    for field, limit in limits.items():
        if limit is not None and parse_quantity(limit) < MIB:
            raise RequestError(f"sharing.mpsConfig.{field} must be 1Mi or more, got {limit!r}")


def _field_of(device: str) -> str:
    return f"defaultPerDevicePinnedMemoryLimit[{cut(device[:NAME])}]"


def _check_limits(config: MpsConfig, devices: Sequence[AllocatedDevice]) -> None:
    """Raise RequestError for a limit that is not what was allocated.

    A device's UUID goes before its index, and its own limit before that of all.
    """
    if config.multi_user:
        raise RequestError(
            "sharing.mpsConfig.multiUser is true, and a claim's daemon serves one user: leave it "
            "out"
        )
    own_limits = {
        key.lower(): (_field_of(key), limit)
        for key, limit in config.default_per_device_pinned_memory_limit.items()
    }
    percentage = config.default_active_thread_percentage
    for index, device in enumerate(devices):
        by_index = own_limits.pop(
            str(index), (MEMORY_LIMIT, config.default_pinned_device_memory_limit)
        )
        field, limit = own_limits.pop(device.device.removesuffix("-mps"), by_index)
        if limit is not None and (mib := int(parse_quantity(limit) // MIB)) != device.memory_mib:
            raise RequestError(
                f"sharing.mpsConfig.{field} is {mib} MiB, and the claim has {device.memory_mib} "
                f'MiB: request it as capacity: memory: "{mib}Mi"'
            )
        if (
            percentage is not None
            and percentage % ALL_PERCENT != device.cores_percent % ALL_PERCENT
        ):
            raise RequestError(
                f"sharing.mpsConfig.defaultActiveThreadPercentage is {percentage}, and the claim "
                f"has {device.cores_percent or ALL_PERCENT} % of the cores: request it as "
                f'capacity: cores: "{percentage}"'
            )
    if own_limits:
        field = next(iter(own_limits.values()))[0]
        raise RequestError(f"sharing.mpsConfig.{field}: the claim has no such device")
