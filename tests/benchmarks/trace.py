"""Traces: CSV files of pods with their lifetimes, and of nodes; pure.

The columns are those of the cluster traces that Alibaba publishes: of 2023 for GPU sharing, see
`POD_COLUMNS` and `NODE_COLUMNS`, or of 2025 for inference, see `INSTANCE_COLUMNS`. Others are
ignored.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from msgspec import structs

from shared.model.devices.device import Device, DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.errors import RequestError
from shared.model.leases.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    GpuRequest,
    NodeOrder,
    PodRequest,
)

PARTS = 1000
"""A share is in thousandths of a GPU: each is one MiB of a device with so many."""
MIB = 1 << 20
POD_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
"""cpu in thousandths, memory in MiB, GPUs, thousandths of each GPU."""
SPEC_COLUMN = "gpu_spec"
"""Models separated by |; empty, or no such column: any model."""
INSTANCE_COLUMNS = (
    "app_name", "cpu_request", "memory_request", "gpu_request", "max_instance_per_node",
)  # fmt: skip
"""A name, cpus, memory in GiB, whole GPUs, pods of that app that may share a node; -1: any."""
TIME_COLUMNS = ("creation_time", "deletion_time", "scheduled_time")
"""Seconds. A pod runs from its scheduling, or else its creation, or else 0, to its deletion;
without `deletion_time` it never ends."""
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
"""The node's name, its cpu in thousandths, its memory in MiB, its GPUs, their model."""

GANG_SIZES = (2, 16, 4, 8, 3, 12, 6)

Row = dict[str, str]
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePod:
    """A pod of a trace."""

    request: PodRequest
    created_s: float = 0.0
    runs_s: float | None = None
    """None if it never ends."""
    members: int = 1
    """Such pods that start at once or not at all."""
    density: tuple[str, int] | None = None
    """A resource of which the pod takes one, and how much of it each node has."""


def read_pods(lines: Iterable[str], source: str, *, timed: bool = False) -> list[TracePod]:
    """Return the pods of a trace; with `timed`, in order of creation, and times are required.

    Raises RequestError for a missing column, or a value that is no number or is out of range.
    """
    reader = csv.DictReader(lines)
    times = TIME_COLUMNS[:2] if timed else ()
    if set(INSTANCE_COLUMNS).isdisjoint(reader.fieldnames or ()):
        pods = _parsed(reader, source, (*POD_COLUMNS, *times), _pod)
    else:
        pods = _parsed(reader, source, (*INSTANCE_COLUMNS, *times), _instance)
    return sorted(pods, key=lambda pod: pod.created_s) if timed else pods


def read_nodes(lines: Iterable[str], source: str) -> list[LedgerNode]:
    """Return idle nodes whose devices have 1000 MiB each. Raises RequestError as `read_pods`."""
    return _parsed(csv.DictReader(lines), source, NODE_COLUMNS, _node)


def with_density(nodes: Iterable[LedgerNode], pods: Iterable[TracePod]) -> list[LedgerNode]:
    """Return the nodes, each with the resources that limit how many pods of an app share it."""
    limits = dict(pod.density for pod in pods if pod.density)
    return [
        replace(node, facts=replace(node.facts, allocatable={**node.facts.allocatable, **limits}))
        for node in nodes
    ]


def with_gangs(pods: Sequence[TracePod]) -> list[TracePod]:
    """Make every fifth of the pods with several GPUs a gang of 2 to 16 such pods."""
    all_pods = list(pods)
    several = 0
    for number, pod in enumerate(pods):
        if sum(container.gpus for container in pod.request.containers) > 1:
            several += 1
            if several % 5 == 0:
                size = GANG_SIZES[several // 5 % len(GANG_SIZES)]
                all_pods[number] = replace(pod, members=size)
    return all_pods


def with_order(request: PodRequest, order: NodeOrder) -> PodRequest:
    """Return the request placed by a policy; spread also chooses devices so."""
    devices = DeviceOrder.SPREAD if order is NodeOrder.SPREAD else DeviceOrder.BINPACK
    return structs.replace(request, node_order=order, device_order=devices)


def parts_of(request: PodRequest) -> int:
    """Return the thousandths of GPUs that a pod requests."""
    return sum(container.gpus * (container.memory_units or 0) for container in request.containers)


def _parsed(
    reader: "csv.DictReader[str]",
    source: str,
    columns: Sequence[str],
    parse: Callable[[Row], _Parsed],
) -> list[_Parsed]:
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise RequestError(
            f"{source} has no column {', '.join(missing)}; its first line must name the columns "
            f"{', '.join(columns)}"
        )
    return list(_rows(reader, source, parse))


def _rows(
    reader: "csv.DictReader[str]", source: str, parse: Callable[[Row], _Parsed]
) -> Iterator[_Parsed]:
    for row in reader:
        try:
            yield parse(row)
        except ValueError as error:
            raise RequestError(f"{source}, line {reader.line_num}: {error}") from error


def _number(row: Row, column: str, least: float = 0.0) -> float:
    text = row[column] or ""
    try:
        number = float(text)
    except ValueError:
        number = inf
    if not least <= number < inf:
        raise ValueError(f"column {column}: {text!r} is not a number of {least:g} or more")
    return number


def _whole(row: Row, column: str, least: float = 0.0) -> int:
    number = _number(row, column, least)
    if not number.is_integer():
        raise ValueError(f"column {column}: {row[column]!r} is not a whole number")
    return int(number)


def _time_s(row: Row, column: str, default: float) -> float:
    return _number(row, column) if row.get(column) else default


def _pod(row: Row) -> TracePod:
    models = tuple(filter(None, (row.get(SPEC_COLUMN) or "").split("|")))
    gpus = _whole(row, "num_gpu")
    parts = _whole(row, "gpu_milli")
    return _trace_pod(row, _resources(row, pods=1), gpus, parts, models)


def _instance(row: Row) -> TracePod:
    cpu = _number(row, "cpu_request")
    memory_gib = _number(row, "memory_request")
    resources = {"cpu": round(cpu * 1000), "memory": round(memory_gib * 1024) * MIB, "pods": 1}
    gpus = _whole(row, "gpu_request")
    limit = _whole(row, "max_instance_per_node", -1)
    if limit < 0:
        return _trace_pod(row, resources, gpus)
    # The limits of one app can differ; instances with the same one are counted together.
    name = f"{row['app_name']}/{limit}-per-node"
    return replace(_trace_pod(row, {**resources, name: 1}, gpus), density=(name, limit))


def _trace_pod(
    row: Row,
    resources: dict[str, int],
    gpus: int,
    parts: int = PARTS,
    models: tuple[str, ...] = (),
) -> TracePod:
    container = GpuRequest(container="main", gpus=gpus, memory_units=parts)
    request = PodRequest(
        dialect="volcano-vgpu" if gpus else "",
        containers=(container,) if gpus else (),
        selection=DeviceSelection(models=models if gpus else ()),
        resources=resources,
    )
    created_s = _time_s(row, "creation_time", 0.0)
    runs_s = _time_s(row, "deletion_time", inf) - _time_s(row, "scheduled_time", created_s)
    return TracePod(
        request=request, created_s=created_s, runs_s=max(runs_s, 0.0) if runs_s < inf else None
    )


def _node(row: Row) -> LedgerNode:
    name = NodeName(row["sn"])
    devices = tuple(
        Device(
            uuid=DeviceUuid(f"{name}-{index}"),
            index=index,
            model=row["model"],
            memory_mib=PARTS,
            slots=PARTS,
        )
        for index in range(_whole(row, "gpu"))
    )
    return LedgerNode(
        facts=NodeFacts(name=name, allocatable=_resources(row, pods=10_000)),
        version=1,
        devices=tuple((device, DeviceUse()) for device in devices),
    )


def _resources(row: Row, *, pods: int) -> dict[str, int]:
    memory = _whole(row, "memory_mib") * MIB
    return {"cpu": _whole(row, "cpu_milli"), "memory": memory, "pods": pods}
