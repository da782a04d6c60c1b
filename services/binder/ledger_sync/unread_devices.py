"""Devices that a node's agent cannot read: the node keeps them, and they get no pods; pure."""

from collections.abc import Iterable
from dataclasses import replace

from shared.model.bounds import MOST_DEVICES
from shared.model.devices.device import UNNAMED, Device, UnreadDevice
from shared.model.events.node_events import DeviceReported

UNMEASURED_MIB = 1
"""Of a device that no agent could read so far."""


def with_unread(report: DeviceReported, stored: Iterable[Device]) -> DeviceReported:
    """An unread device is unhealthy, and keeps its size from the `stored` ones.

    While a GPU of the node has no UUID, it may be any of these, so all stay.
    """
    reported = {device.uuid for device in report.devices}
    unread = {gpu.uuid: gpu for gpu in report.unread if gpu.uuid not in reported}
    unnamed = unread.pop(UNNAMED, None)
    sizes = {device.uuid: device for device in stored if device.uuid not in reported}
    named = [
        replace(sizes[uuid], healthy=False, fault=gpu.fault) if uuid in sizes else _unmeasured(gpu)
        for uuid, gpu in unread.items()
    ]
    others = [
        replace(device, healthy=False, fault=unnamed.fault)
        for uuid, device in sizes.items()
        if unnamed is not None and uuid not in unread
    ]
    devices = (*report.devices, *named, *others)
    return replace(report, devices=devices[:MOST_DEVICES])


def _unmeasured(gpu: UnreadDevice) -> Device:
    return Device(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_mib=UNMEASURED_MIB,
        slots=0,
        bus=gpu.bus,
        healthy=False,
        fault=gpu.fault,
    )
