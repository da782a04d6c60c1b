"""How Volcano's vGPU device plugin registers a node's devices, and shows that it lives; pure.

Devices are in the annotation `volcano.sh/node-vgpu-register`. In `volcano.sh/node-vgpu-handshake`
the plugin writes `Reported <time>`; schedulers before Volcano 1.14.3 turn it into
`Requesting_<time>`, and into `Deleted_<time>` when no new report comes for a minute. Times here are
UTC; those schedulers write their local time and read it as UTC, which only they can mend.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from shared.model.device import Device, DeviceMode
from shared.model.names import DeviceUuid

NUMBER = "volcano.sh/vgpu-number"
SERVED = (NUMBER,)
"""Resources that Volcano's plugin serves to the kubelet."""
REGISTER = "volcano.sh/node-vgpu-register"
HANDSHAKE = "volcano.sh/node-vgpu-handshake"
REPORT_S = 20.0
"""How often a plugin reports: Volcano's own does so every 30 s."""
SILENCE_S = 60.0
"""Age of an unanswered request from which on the node is taken for gone."""
_REQUESTING, _DELETED = "Requesting_", "Deleted_"


def reported(now_s: float) -> str:
    """Return what a plugin that lives writes, in the text form that Go gives a time."""
    at = datetime.fromtimestamp(now_s, tz=UTC)
    return f"Reported {at:%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


def is_gone(text: str | None, now_s: float) -> bool:
    """Say whether a handshake means that the node's plugin is gone; without one it does not."""
    if text is None:
        return False
    if text.startswith(_DELETED):
        return True
    if not text.startswith(_REQUESTING):
        return False
    try:
        asked = datetime.strptime(text.removeprefix(_REQUESTING) + "+0000", "%Y.%m.%d %H:%M:%S%z")
    except ValueError:
        return True
    return now_s - asked.timestamp() > SILENCE_S


def registered_devices(
    annotations: Mapping[str, str], allocatable: Mapping[str, int], *, now_s: float
) -> tuple[Device, ...]:
    """Return the devices that Volcano's own plugin registered on a node.

    There are none without a slot in the node's allocatable resources, and none of a plugin that a
    scheduler before Volcano 1.14.3 has found silent.
    """
    if not allocatable.get(NUMBER) or is_gone(annotations.get(HANDSHAKE), now_s):
        return ()
    return parse_register(annotations.get(REGISTER, ""))


def encode_register(devices: Sequence[Device]) -> str:
    """Write `node-vgpu-register`: one record per device, by minor number, each ended by `:`."""
    return "".join(
        f"{device.uuid},{device.slots},{device.memory_mib // device.unit_mib},"
        f"NVIDIA-{device.model},{str(device.healthy).lower()},{device.mode}:"
        for device in sorted(devices, key=lambda device: (device.index, device.uuid))
    )


def parse_register(text: str, *, unit_mib: int = 1) -> tuple[Device, ...]:
    """Read `node-vgpu-register`, as another plugin wrote it; what is no record is skipped.

    Five fields are HAMi-core without a word on health (that generation always wrote `false`); of
    six, `false` is believed. A device without memory or slots is sick, whatever it says.
    """
    records = [record.split(",") for record in text.split(":") if record.count(",") >= 4]
    return tuple(
        Device(
            uuid=DeviceUuid(fields[0]),
            index=index,
            model=fields[3].removeprefix("NVIDIA-"),
            memory_mib=_number(fields[2]) * unit_mib,
            slots=_number(fields[1]),
            unit_mib=unit_mib,
            mode=DeviceMode.MIG if fields[5:6] == ["mig"] else DeviceMode.HAMI_CORE,
            healthy=(len(fields) == 5 or fields[4] == "true")
            and min(_number(fields[1]), _number(fields[2])) > 0,
        )
        for index, fields in enumerate(records)
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
