"""Filters for devices by a pod's selection: model, UUID and mode; pure."""

from functools import lru_cache

from shared.model.device import Device, DeviceRefusal, model_label
from shared.model.request import DeviceSelection

CACHED_MODELS = 4096
"""Verdicts on so many models by selections are remembered."""
TYPE_PREFIX = "NVIDIA-"
"""Types in annotations are matched against the model with this prefix, as Volcano registers it."""


def is_selective(selection: DeviceSelection) -> bool:
    """Return whether the selection constrains anything."""
    return bool(
        selection.types
        or selection.not_types
        or selection.models
        or selection.not_models
        or selection.uuids
        or selection.not_uuids
        or selection.mode is not None
    )


def device_excluded(selection: DeviceSelection, device: Device) -> DeviceRefusal | None:
    """Return why the pod excludes the device, or None. A UUID both allowed and denied is denied."""
    if not is_selective(selection):
        return None
    if selection.mode is not None and device.mode.value != selection.mode:
        return DeviceRefusal("GpuModeMismatch", f"it is in {device.mode} mode")
    if selection.uuids and device.uuid not in selection.uuids:
        return DeviceRefusal("GpuUuidExcluded", "its UUID is not among those the pod allows")
    if device.uuid in selection.not_uuids:
        return DeviceRefusal("GpuUuidExcluded", "the pod denies its UUID")
    return model_excluded(selection, device.model)


def selects_only_models(selection: DeviceSelection) -> bool:
    """Return whether the model alone decides about a device."""
    return not (selection.uuids or selection.not_uuids or selection.mode is not None)


@lru_cache(CACHED_MODELS)
def model_excluded(selection: DeviceSelection, model: str) -> DeviceRefusal | None:
    """Return why the pod excludes devices of a model, or None."""
    kind, label = f"{TYPE_PREFIX}{model}".lower(), model_label(model)
    type_allowed = not selection.types or any(part.lower() in kind for part in selection.types)
    if not type_allowed or (selection.models and label not in selection.models):
        allowed = ", ".join(selection.types + selection.models)
        return DeviceRefusal("GpuTypeExcluded", f"{model} is none of {allowed}")
    denied = [part for part in selection.not_types if part.lower() in kind]
    denied += [name for name in selection.not_models if name == label]
    if denied:
        return DeviceRefusal("GpuTypeExcluded", f"the pod denies {denied[0]}: {model}")
    return None
