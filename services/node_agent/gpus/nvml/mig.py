"""NVML's MIG calls, to be made through `with_nvml`; they block and raise NVML's own errors."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from services.node_agent.gpus.nvml.calls import NOT_AVAILABLE, if_available, memory_of, text_of
from services.node_agent.mig.instances import InstanceProfile, MigInstance, MigState
from shared.model.names import DeviceUuid

UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
EIGHTHS = 8


def state_of(handle: Any) -> MigState | None:
    """Return None without MIG, or without permission to read the mode.

    Without permission to list instances, the profiles are empty.
    """
    try:
        current, pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED | NOT_AVAILABLE:
            return None
        raise
    enabled = current == pynvml.NVML_DEVICE_MIG_ENABLE
    return MigState(
        enabled=enabled,
        pending=pending == pynvml.NVML_DEVICE_MIG_ENABLE,
        profiles=_permitted_profiles(handle) if enabled else (),
    )


def _permitted_profiles(handle: Any) -> tuple[InstanceProfile, ...]:
    try:
        return tuple(_profiles(handle))
    except pynvml.NVMLError_NoPermission:
        return ()


def instances_of(handle: Any, profiles: tuple[InstanceProfile, ...]) -> tuple[MigInstance, ...]:
    uuids = dict(_uuids(handle))
    busy = _busy(handle)
    return tuple(
        _instance(gpu_instance, profile, uuids, busy)
        for profile in profiles
        for gpu_instance in _gpu_instances(handle, profile)
    )


def instances(device: DeviceUuid) -> tuple[MigInstance, ...]:
    handle = _handle(device)
    return instances_of(handle, tuple(_profiles(handle)))


def create_instance(device: DeviceUuid, profile: int, start: int) -> int:
    handle = _handle(device)
    place = _first(place for place in _placements(handle, profile) if place.start == start)
    made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, ctypes.byref(place))
    return int(pynvml.nvmlGpuInstanceGetInfo(made).id)


def create_compute(device: DeviceUuid, gi: int) -> None:
    handle = _handle(device)
    gpu_instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, gi)
    number = pynvml.nvmlGpuInstanceGetInfo(gpu_instance).profileId
    slices = _first(p.compute_slices for p in _profiles(handle) if p.id == number)
    whole = _first(
        info.id
        for info in _compute_profiles(gpu_instance)
        if info.sliceCount == slices and info.instanceCount == 1
    )
    pynvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, whole)


def destroy_compute(device: DeviceUuid, gi: int, compute: int) -> None:
    gpu_instance = pynvml.nvmlDeviceGetGpuInstanceById(_handle(device), gi)
    pynvml.nvmlComputeInstanceDestroy(
        pynvml.nvmlGpuInstanceGetComputeInstanceById(gpu_instance, compute)
    )


def destroy_instance(device: DeviceUuid, gi: int) -> None:
    pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(_handle(device), gi))


def _handle(device: DeviceUuid) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(device)


def _profiles(handle: Any) -> Iterator[InstanceProfile]:
    get = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = _first_supported(
            functools.partial(get, handle, number), functools.partial(get, handle, number, 1)
        )
        places = list(_placements(handle, info.id)) if info is not None else []
        if info is not None and places:
            yield InstanceProfile(
                id=int(info.id),
                name=_name(handle, info),
                memory_mib=int(info.memorySizeMB),
                compute_slices=int(info.sliceCount),
                memory_slices=int(places[0].size),
                count=int(info.instanceCount),
                starts=tuple(int(place.start) for place in places),
            )


def _name(handle: Any, info: Any) -> str:
    """NVIDIA's rule for names: compute slices, then GB of memory, in eighths of the device's."""
    text = text_of(getattr(info, "name", b"")).removeprefix("MIG ").strip()
    if text:
        return text
    total = if_available(lambda: int(memory_of(handle).total), 0)
    if not total:
        return f"{info.sliceCount}g.{-(-int(info.memorySizeMB) // 1024)}gb"
    eighths = -(-int(info.memorySizeMB) * (1 << 20) * EIGHTHS // total)
    gigabytes = -(-total // (1 << 30))
    return f"{info.sliceCount}g.{round(eighths * gigabytes / EIGHTHS)}gb"


def _placements(handle: Any, profile: int) -> Iterator[Any]:
    count = ctypes.c_uint(0)
    get = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    with _none_if_unsupported():
        get(handle, profile, None, ctypes.byref(count))
        kind = pynvml.c_nvmlGpuInstancePlacement_t
        yield from _array(kind, count.value, functools.partial(get, handle, profile))


def _gpu_instances(handle: Any, profile: InstanceProfile) -> list[Any]:
    get = functools.partial(pynvml.nvmlDeviceGetGpuInstances, handle, profile.id)
    with _none_if_unsupported():
        return _array(pynvml.c_nvmlGpuInstance_t, profile.count, get)
    return []


def _array(kind: Any, most: int, fill: Callable[[Any, Any], object]) -> list[Any]:
    count = ctypes.c_uint(most)
    items = (kind * most)()
    fill(items, ctypes.byref(count))
    return list(items[: count.value])


def _instance(
    gpu_instance: Any,
    profile: InstanceProfile,
    uuids: dict[tuple[int, int], str],
    busy: frozenset[int],
) -> MigInstance:
    info = pynvml.nvmlGpuInstanceGetInfo(gpu_instance)
    gi = int(info.id)
    computes: dict[int, int] = {}
    for compute_profile in _compute_profiles(gpu_instance):
        get = functools.partial(
            pynvml.nvmlGpuInstanceGetComputeInstances, gpu_instance, compute_profile.id
        )
        for compute in _array(pynvml.c_nvmlComputeInstance_t, compute_profile.instanceCount, get):
            computes[int(pynvml.nvmlComputeInstanceGetInfo(compute).id)] = int(
                compute_profile.sliceCount
            )
    whole = [number for number, slices in computes.items() if slices == profile.compute_slices]
    return MigInstance(
        gi=gi,
        profile=profile.name,
        start=int(info.placement.start),
        memory_slices=int(info.placement.size),
        compute_slices=profile.compute_slices,
        compute_ids=tuple(sorted(computes)),
        uuid=uuids.get((gi, whole[0]), "") if whole else "",
        busy=gi in busy,
    )


def _compute_profiles(gpu_instance: Any) -> Iterator[Any]:
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    get = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        info = _first_supported(
            functools.partial(get, gpu_instance, number, shared),
            functools.partial(get, gpu_instance, number, shared, 1),
        )
        if info is not None:
            yield info


def _uuids(handle: Any) -> Iterator[tuple[tuple[int, int], str]]:
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            gi = int(pynvml.nvmlDeviceGetGpuInstanceId(device))
            compute = int(pynvml.nvmlDeviceGetComputeInstanceId(device))
            yield (gi, compute), text_of(pynvml.nvmlDeviceGetUUID(device))


def _busy(handle: Any) -> frozenset[int]:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return frozenset(
        int(process.gpuInstanceId) for process in processes if process.gpuInstanceId is not None
    )


def _first(options: Iterator[Any]) -> Any:
    for option in options:
        return option
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def _first_supported(*functions: Callable[[], Any]) -> Any:
    for function in functions:
        with _none_if_unsupported():
            return function()
    return None


@contextlib.contextmanager
def _none_if_unsupported() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
