"""A node's advertisement: device lists for the kubelet, status, annotations, labels; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shared.dialects.advertised import Advertisement, NodeObject, NodeSoftware, PluginDeviceId
from shared.dialects.dialect import Dialect
from shared.model.devices.device import Device
from shared.model.devices.node import AGENT_ANNOTATION
from shared.model.errors import RequestError

T = TypeVar("T")

MAX_LIST_BYTES = 4_000_000
"""The kubelet receives at most 4 MiB in one message."""
MAX_ID_LENGTH = 63
UNKNOWN_SOFTWARE = NodeSoftware()
_HEALTH_LENGTHS = {True: len("Healthy"), False: len("Unhealthy")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdvertisement:
    served: Mapping[str, Mapping[str, PluginDeviceId]] = field(default_factory=dict)
    amounts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Pods request them beside a served resource."""
    node_status: Mapping[str, int] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)
    own_labels: Mapping[str, str] = field(default_factory=dict)
    annotation_entries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    objects: tuple[NodeObject, ...] = ()
    sharing_problem: str = ""

    def with_more(self, more: Mapping[str, int]) -> "NodeAdvertisement":
        node_status = {
            name: amount + more.get(name, 0) for name, amount in self.node_status.items()
        }
        return replace(self, node_status=node_status)


def advertisement_of(
    dialects: Iterable[Dialect],
    devices: Sequence[Device],
    strategy: str,
    software: NodeSoftware = UNKNOWN_SOFTWARE,
) -> NodeAdvertisement:
    """Raises RequestError if a list or an ID is too long for the kubelet."""
    parts = [
        part
        for dialect in dialects
        for part in (dialect.advertise(devices, strategy), dialect.describe_node(devices, software))
    ]
    lists = _merged(part.served for part in parts)
    for resource, ids in lists.items():
        check_list(resource, ids)
    return NodeAdvertisement(
        served={name: {entry.id: entry for entry in ids} for name, ids in lists.items()},
        amounts=_amounts(parts),
        node_status=_merged(part.node_status for part in parts),
        annotations={AGENT_ANNOTATION: "true"} | _merged(part.annotations for part in parts),
        labels=_merged(part.labels for part in parts),
        own_labels=_merged(part.own_labels for part in parts),
        annotation_entries=_merged(part.annotation_entries for part in parts),
        objects=tuple(obj for part in parts for obj in part.objects),
    )


def _amounts(parts: Iterable[Advertisement]) -> dict[str, frozenset[str]]:
    amounts: dict[str, frozenset[str]] = {}
    for part in parts:
        for name in part.served:
            amounts[name] = amounts.get(name, frozenset()).union(part.node_status)
    return amounts


def _merged(maps: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in maps for name, value in part.items()}


def check_list(resource: str, ids: Sequence[PluginDeviceId]) -> None:
    size = list_size_bytes(ids)
    if size > MAX_LIST_BYTES:
        raise RequestError(
            f"the list of {len(ids)} devices for {resource} has {size} bytes, and the kubelet "
            f"accepts {MAX_LIST_BYTES}: multiply --memory-factor by "
            f"{-(-size // MAX_LIST_BYTES)}, or use --gpu-strategy auto"
        )
    long = next((entry.id for entry in ids if len(entry.id) > MAX_ID_LENGTH), None)
    if long is not None:
        raise RequestError(
            f"the device ID {long} for {resource} has {len(long)} characters, at most "
            f"{MAX_ID_LENGTH} are allowed"
        )


def list_size_bytes(ids: Iterable[PluginDeviceId]) -> int:
    """Each ID and health has a tag and a length below 128, and each device both, too."""
    return sum(6 + len(entry.id) + _HEALTH_LENGTHS[entry.healthy] for entry in ids)
