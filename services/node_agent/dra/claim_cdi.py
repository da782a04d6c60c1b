"""The CDI specification of a claim: what its requests add to containers; pure.

One CDI device for each request carries the limits of all its devices: two that set the same
variable would overwrite each other.
"""

from collections.abc import Iterable
from typing import Any

from services.node_agent.allocate.cdi import VERSION
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.names import PodUid

KIND = "leasehold.dev/claim"
PREFIX = "leasehold.dev-claim-"
_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate")


def file_name(claim: PodUid) -> str:
    """Return the name of a claim's file."""
    return f"{PREFIX}{claim}.json"


def claim_of_file(name: str) -> PodUid | None:
    """Return the claim whose file has this name; None: it is another file."""
    if not (name.startswith(PREFIX) and name.endswith(".json")):
        return None
    return PodUid(name.removeprefix(PREFIX).removesuffix(".json"))


def build_claim_specification(entries: Iterable[CheckpointEntry]) -> dict[str, Any] | None:
    """Return the specification of a claim's requests; None: all are for whole devices."""
    devices = [
        {
            "name": _device_name(entry),
            "containerEdits": {
                "env": [f"{name}={text}" for name, text in entry.setup.environment.items()],
                "mounts": list(map(_mount, entry.setup.mounts)),
            },
        }
        for entry in entries
        if _is_limited(entry.setup)
    ]
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices} if devices else None


def cdi_names(entry: CheckpointEntry) -> tuple[str, ...]:
    """Return the qualified names that give a container one request: its devices, then limits."""
    own = (f"{KIND}={_device_name(entry)}",) if _is_limited(entry.setup) else ()
    return (*entry.setup.cdi_devices, *own)


def _is_limited(setup: ContainerSetup) -> bool:
    return bool(setup.environment or setup.mounts)


def _device_name(entry: CheckpointEntry) -> str:
    return f"{entry.allocation.pod}-{entry.allocation.container.replace('/', '.')}"


def _mount(mount: Mount) -> dict[str, Any]:
    access = "ro" if mount.read_only else "rw"
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": [access, *_OPTIONS],
    }
