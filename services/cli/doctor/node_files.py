"""Node files that the doctor reads: checkpoints of agent and kubelet, CDI specifications."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.cli.doctor.findings import SkipError
from shared.model.errors import UnavailableError
from shared.model.events.node_events import Allocation


class _KubeletEntry(msgspec.Struct, frozen=True):
    pod: str = msgspec.field(name="PodUID")
    resource: str = msgspec.field(name="ResourceName")


class _KubeletData(msgspec.Struct, frozen=True):
    entries: list[_KubeletEntry] | None = msgspec.field(name="PodDeviceEntries", default=None)
    registered: dict[str, list[str] | None] | None = msgspec.field(
        name="RegisteredDevices", default=None
    )


class _KubeletCheckpoint(msgspec.Struct, frozen=True):
    data: _KubeletData = msgspec.field(name="Data")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletCheckpointDevices:
    """The devices in a kubelet's checkpoint."""

    registered: dict[str, frozenset[str]]
    """IDs by resource."""
    allocated: tuple[tuple[str, str], ...]
    """Resource and pod UID of each entry."""


def read_kubelet_devices(plugins: Path) -> KubeletCheckpointDevices:
    """Read the kubelet's checkpoint in its directory of plugin sockets.

    Raises SkipError if there is none, UnavailableError if it is not valid.
    """
    path = plugins / "kubelet_internal_checkpoint"
    try:
        data = msgspec.json.decode(path.read_bytes(), type=_KubeletCheckpoint).data
    except FileNotFoundError as error:
        raise SkipError(f"{path} is missing: the kubelet has no plugin yet") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"{path} is not a kubelet's checkpoint: {error}") from error
    registered = data.registered or {}
    return KubeletCheckpointDevices(
        registered={name: frozenset(ids or ()) for name, ids in registered.items()},
        allocated=tuple((entry.resource, entry.pod) for entry in data.entries or ()),
    )


def read_allocations(state_dir: Path) -> tuple[Allocation, ...]:
    """Read the checkpoint of an agent with this state directory; an unreadable one stays.

    Raises SkipError if no agent has run, UnavailableError if the checkpoint is not valid.
    """
    path = state_dir / "checkpoint.json"
    if not state_dir.is_dir():
        raise SkipError(f"{state_dir} is missing: no agent has run here")
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_text())
        entries = [entry["allocation"] for entry in content["entries"]]
        return msgspec.convert(entries, tuple[Allocation, ...])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnavailableError(f"{path} is not a checkpoint of an agent: {error}") from error


def read_cdi_kind(path: Path) -> str:
    """Return the kind of a CDI specification; empty: the file is not one."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        return ""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""
