"""Samples of device usage, as the driver reports it; pure."""

from dataclasses import dataclass

from shared.model.names import DeviceUuid


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process on a device."""

    pid: int
    memory_bytes: int | None = None
    """None: the driver does not report it."""
    busy_percent: int | None = 0
    """None: the driver does not report it, as in MIG mode."""
    instance: int | None = None
    """ID of the MIG instance that it uses; None: none, or it is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one moment."""

    device: DeviceUuid
    index: int
    model: str
    used_bytes: int = 0
    busy_percent: int | None = None
    memory_busy_percent: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    sampled_at_s: float | None = None
    """When the driver was queried, in seconds since the machine booted; None: unknown.

    A process that started later is not the one that the driver listed: it reuses the PID."""
