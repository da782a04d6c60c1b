"""How manifests are read, as text and as JSON.

JSON: {"pods": [{"origin", "scheduler", "ours", "fault", "refusal", "dialect", "example_node",
"containers": [{"container", "asks", "devices": [{"device", "index", "memory_mib", "limit_bytes",
"cores_percent"}], "environment": {...}, "mounts": [{"container_path", "host_path", "read_only"}]}],
"binding": {annotation: text}}]}; amounts are MiB, bytes and percent of one device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.request.manifest_reader import Given, Reading, request_text


def text(readings: Sequence[Reading]) -> RenderableType:
    """Write each pod: what it asks for, its Binding, its containers."""
    return Group(*(line for reading in readings for line in _lines(reading)))


def _lines(reading: Reading) -> Iterable[Text]:
    yield Text(reading.origin, style="bold")
    if not reading.ours:
        yield Text(
            f"  schedulerName is {reading.scheduler!r}: it is not ours until that is changed",
            style="yellow",
        )
    if reading.fault:
        yield Text(f"  cannot be granted as written: {reading.fault}", style="red")
        return
    request = reading.request
    if request is None or not request.containers:
        yield Text("  asks for no GPU in any vocabulary we know")
        return
    yield Text(f"  dialect     {request.dialect}")
    for asked in request.containers:
        yield Text(f"  container   {asked.container}: {request_text(asked)}")
    yield Text(f"  tried on    {reading.node}")
    if reading.refusal is not None:
        yield Text(f"  refused     {reading.refusal.text}", style="red")
        return
    yield Text("  Binding carries")
    for key, value in (reading.annotations or {}).items():
        yield Text(f"    {key}: {value}")
    for given in reading.given:
        yield from _given_lines(given)


def _given_lines(given: Given) -> Iterable[Text]:
    yield Text(f"  container {given.container} gets")
    for name, value in given.setup.environment.items():
        yield Text(f"    {name}={value}")
    for mount in given.setup.mounts:
        mode = "read-only" if mount.read_only else "read-write"
        yield Text(f"    mount {mount.host_path} at {mount.container_path}, {mode}")


def shape(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the JSON form."""
    return {"pods": [_shape(reading) for reading in readings]}


def _shape(reading: Reading) -> dict[str, Any]:
    request = reading.request
    given = {one.container: one for one in reading.given}
    return {
        "origin": reading.origin,
        "scheduler": reading.scheduler,
        "ours": reading.ours,
        "fault": reading.fault,
        "refusal": "" if reading.refusal is None else reading.refusal.text,
        "dialect": "" if request is None else request.dialect,
        "example_node": reading.node,
        "containers": [
            {
                "container": asked.container,
                "asks": request_text(asked),
                **(_given_shape(given[asked.container]) if asked.container in given else {}),
            }
            for asked in (request.containers if request else ())
        ],
        "binding": dict(reading.annotations or {}),
    }


def _given_shape(given: Given) -> dict[str, Any]:
    return {
        "devices": [
            {
                "device": share.device,
                "index": share.index,
                "memory_mib": share.memory_mib,
                "limit_bytes": share.limit_bytes,
                "cores_percent": share.cores_percent,
            }
            for share in given.shares
        ],
        "environment": dict(given.setup.environment),
        "mounts": [
            {
                "container_path": mount.container_path,
                "host_path": mount.host_path,
                "read_only": mount.read_only,
            }
            for mount in given.setup.mounts
        ],
    }
