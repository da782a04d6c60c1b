"""HAMi's annotations on pods and nodes, as its scheduler and device plugin write them; pure."""

import json
from collections.abc import Mapping, Sequence

from shared.dialects.hami_core import decode_memo, encode_share, shares_by_index
from shared.model.devices.device import Device
from shared.model.leases.lease import Lease

NODE = "hami.io/vgpu-node"
TIME = "hami.io/vgpu-time"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
ALLOCATED = "hami.io/vgpu-devices-allocated"
BIND_TIME = "hami.io/bind-time"
PHASE = "hami.io/bind-phase"

REGISTER = "hami.io/node-nvidia-register"
SCORES = "hami.io/node-nvidia-score"
CORDON = "hami.io/device-cordon"
"""On a node, by an operator: UUIDs, with commas, of devices that get no new shares."""


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    devices = encode_devices(lease)
    seconds = str(int(now_s))
    return {
        NODE: lease.node,
        TIME: seconds,
        TO_ALLOCATE: devices,
        ALLOCATED: devices,
        BIND_TIME: seconds,
        PHASE: "allocating",
    }


def allocated_annotations(lease: Lease, done: frozenset[str]) -> dict[str, str]:
    left = {TO_ALLOCATE: encode_devices(lease, done)}
    if not done.issuperset(lease.containers):
        return left
    return {**left, PHASE: "success"}


def encode_devices(lease: Lease, done: frozenset[str] = frozenset()) -> str:
    """Encode `id,NVIDIA,MiB,cores:` for each device, and `;` after each container.

    Init containers come first. Containers without a GPU, and those in `done`, are empty.
    """
    memo = decode_memo(lease)
    return "".join(
        f"{'' if container in done else _element(lease, container)};"
        for container in (*memo.init, *memo.containers)
    )


def _element(lease: Lease, container: str) -> str:
    return "".join(
        encode_share(share, share.memory_mib) for share in shares_by_index(lease, container)
    )


def device_type(model: str) -> str:
    """Return the name that HAMi gives a model in annotations and metrics.

    >>> device_type("A100-SXM4-80GB")
    'NVIDIA-A100-SXM4-80GB'
    """
    return model if model.startswith("NVIDIA") else f"NVIDIA-{model}"


def encode_register(devices: Sequence[Device]) -> str:
    records = (
        {
            "id": device.uuid,
            "index": device.index,
            "count": slot_count(device),
            "devmem": device.memory_mib,
            "devcore": 100,
            "type": device_type(device.model),
            "numa": device.numa or 0,
            "mode": device.mode.value,
            "health": device.healthy,
        }
        for device in devices
    )
    return _json([{key: fact for key, fact in record.items() if fact} for record in records])


def encode_scores(devices: Sequence[Device]) -> str | None:
    """Return None if the link scores are unknown."""
    if not any(device.links for device in devices):
        return None
    scores: list[dict[str, object]] = [
        {"uuid": device.uuid, "score": dict(device.links)} for device in devices
    ]
    return _json(scores)


def slot_count(device: Device) -> int:
    """Of a device in MIG mode, return the most instances."""
    instances = (len(layout.positions) for layout in device.layouts)
    return max(instances, default=device.slots)


def cordoned_devices(annotations: Mapping[str, str]) -> dict[int, str]:
    """The operator lists UUIDs, which the register on the same node maps to indices."""
    named = {entry.strip() for entry in annotations.get(CORDON, "").split(",")} - {""}
    if not named:
        return {}
    indices = _indices(annotations.get(REGISTER, ""))
    return {indices[uuid]: CORDON for uuid in named & indices.keys()}


def _indices(register: str) -> dict[str, int]:
    try:
        records = json.loads(register)
        return {str(record["id"]): int(record.get("index", 0)) for record in records}
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
