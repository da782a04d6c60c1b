"""The device register of Volcano's vGPU device plugin, and its handshake; pure.

Schedulers before Volcano 1.14.3 answer `Reported <time>` with `Requesting_<time>`, and with
`Deleted_<time>` after a minute without a report. Times are UTC. Those schedulers write local time
and read it as UTC, which we cannot correct.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from shared.dialects.nvidia.annotations import device_type
from shared.model.devices.device import Device, DeviceMode
from shared.model.names import DeviceUuid
from shared.model.quantity import parse_decimal

NUMBER = "volcano.sh/vgpu-number"
SERVED = (NUMBER,)
"""By Volcano's plugin, to the kubelet."""
REGISTER = "volcano.sh/node-vgpu-register"
HANDSHAKE = "volcano.sh/node-vgpu-handshake"
REPORT_S = 20.0
"""The interval of our reports; Volcano's plugin reports every 30 s."""
SILENCE_S = 60.0
"""Age of an unanswered request at which the plugin counts as gone."""
_REQUESTING = "Requesting_"
_DELETED = "Deleted_"


def reported(now_s: float) -> str:
    """Format the time as Go does.

    >>> reported(0)
    'Reported 1970-01-01 00:00:00.000000 +0000 UTC'
    """
    at = datetime.fromtimestamp(now_s, tz=UTC)
    return f"Reported {at:%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


def is_gone(text: str | None, now_s: float) -> bool:
    """Return whether the plugin is gone; no handshake means False."""
    if text is None:
        return False
    if text.startswith(_DELETED):
        return True
    if not text.startswith(_REQUESTING):
        return False
    try:
        requested = datetime.strptime(
            text.removeprefix(_REQUESTING) + "+0000", "%Y.%m.%d %H:%M:%S%z"
        )
    except ValueError:
        return True
    return now_s - requested.timestamp() > SILENCE_S


def registered_devices(
    annotations: Mapping[str, str], allocatable: Mapping[str, int], *, now_s: float
) -> tuple[Device, ...]:
    """There are none without an allocatable slot, or if the plugin is gone."""
    if not allocatable.get(NUMBER) or is_gone(annotations.get(HANDSHAKE), now_s):
        return ()
    return parse_register(annotations.get(REGISTER, ""))


def encode_register(devices: Sequence[Device]) -> str:
    return "".join(
        f"{device.uuid},{device.slots},{device.memory_mib // device.unit_mib},"
        f"{device_type(device.model)},{str(device.healthy).lower()},{device.mode}:"
        for device in sorted(devices, key=lambda device: (device.index, device.uuid))
    )


def parse_register(text: str) -> tuple[Device, ...]:
    """Leave out malformed records.

    With five fields in a record, plugins always wrote `false` as health, which is ignored; with six
    it counts. A device without memory or slots is unhealthy.
    """
    records = [record.split(",") for record in text.split(":") if record.count(",") >= 4]
    return tuple(
        Device(
            uuid=DeviceUuid(fields[0]),
            index=index,
            model=fields[3].removeprefix("NVIDIA-"),
            memory_mib=_number(fields[2]),
            slots=_number(fields[1]),
            mode=DeviceMode.MIG if fields[5:6] == ["mig"] else DeviceMode.HAMI_CORE,
            healthy=(len(fields) == 5 or fields[4] == "true")
            and min(_number(fields[1]), _number(fields[2])) > 0,
        )
        for index, fields in enumerate(records)
    )


def _number(text: str) -> int:
    return parse_decimal(text) or 0
