"""Parameters of NVIDIA's DRA driver, in claims for ours; pure.

A claim's containers and pods share its devices, by time slices unless its parameters name MPS.
https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/tree/main/api/nvidia.com/resource/v1beta1
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared.model.bounds import NAME, cut
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_quantity

MOST_DEVICES = 128
NO_SLICES = (
    "sharing.strategy TimeSlicing of a MigDeviceConfig has no effect: an instance of MIG has no "
    "length of time slices to set"
)
_DEVICE = re.compile(r"[0-9]{1,3}|GPU-[\w-]{1,64}", re.ASCII)
Quantity = Annotated[str, Meta(max_length=NAME)] | int


class _Strict(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class TimeSlicingConfig(_Strict, frozen=True, kw_only=True):
    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


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


def check_parameters(parameters: bytes) -> str:
    """Return which parameters have no effect, as a sentence, or an empty text.

    Raises RequestError for parameters that are invalid, or that no node can meet. Time slices of
    the default length are what the containers of a claim have anyway. Those of an instance of MIG
    have no length to set.

    >>> check_parameters(b'{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}')
    ''
    """
    try:
        config = msgspec.json.decode(parameters, type=DeviceConfig)
    except UNDECODABLE as error:
        raise RequestError(f"parameters of the claim are invalid: {cut(str(error))}") from error
    sharing = config.sharing
    if sharing is None:
        return ""
    if sharing.strategy == "TimeSlicing":
        of_gpu = config.kind == "GpuConfig"
        _check_time_slicing(sharing, of_gpu=of_gpu)
        return "" if of_gpu else NO_SLICES
    if sharing.time_slicing_config is not None:
        raise RequestError("sharing.timeSlicingConfig is set, and sharing.strategy is MPS")
    _check_limits(sharing.mps_config or MpsConfig())
    raise RequestError(
        "sharing.strategy is MPS, which no node of this version offers: leave it out, and request "
        "memory and cores as capacity of the device"
    )


def _check_time_slicing(sharing: Sharing, *, of_gpu: bool) -> None:
    if sharing.mps_config is not None:
        raise RequestError("sharing.mpsConfig is set, and sharing.strategy is TimeSlicing")
    interval = (sharing.time_slicing_config or TimeSlicingConfig()).interval
    if of_gpu and interval != "Default":
        raise RequestError(
            f"sharing.timeSlicingConfig.interval is {interval}, and nodes of this version set none "
            "but Default: leave it out"
        )


def _check_limits(config: MpsConfig) -> None:
    limits: dict[str, Quantity | None] = {
        "defaultPinnedDeviceMemoryLimit": config.default_pinned_device_memory_limit
    }
    for device, own_limit in config.default_per_device_pinned_memory_limit.items():
        field = f"defaultPerDevicePinnedMemoryLimit[{cut(device[:NAME])}]"
        if not _DEVICE.fullmatch(device):
            raise RequestError(f"sharing.mpsConfig.{field}: its key is no index and no UUID")
        limits[field] = own_limit
    for field, limit in limits.items():
        if limit is not None and parse_quantity(limit) < MIB:
            raise RequestError(f"sharing.mpsConfig.{field} must be 1Mi or more, got {limit!r}")
