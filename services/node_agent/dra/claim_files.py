"""The files with the CDI specifications of claims, one for each."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.node_agent.allocate.cdi import VERSION
from services.node_agent.allocate.cdi_files import write_specification
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

KIND = "leasehold.dev/claim"
PREFIX = "leasehold.dev-claim-"
_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate")


def file_name(claim: PodUid) -> str:
    """Return the name of a claim's file."""
    return f"{PREFIX}{claim}.json"


def claim_of_file(name: str) -> PodUid | None:
    """Return the claim whose file has this name, or None for another file."""
    if not (name.startswith(PREFIX) and name.endswith(".json")):
        return None
    return PodUid(name.removeprefix(PREFIX).removesuffix(".json"))


def build_claim_specification(entries: Iterable[CheckpointEntry]) -> dict[str, Any] | None:
    """Return the specification of a claim's requests, or None if all are for whole devices.

    One CDI device for each request carries the limits of all its devices: two that set the same
    variable would overwrite each other.
    """
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


class ClaimFiles:
    """The files of one node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def write(self, claim: PodUid, entries: Iterable[CheckpointEntry]) -> None:
        """Write a claim's file; raises UnavailableError naming what cannot be written."""
        specification = build_claim_specification(entries)
        if specification is not None:
            path = self.directory / file_name(claim)
            await asyncio.to_thread(write_specification, path, specification)

    async def remove(self, claim: PodUid) -> None:
        """Remove a claim's file; raises UnavailableError if it stays."""
        path = self.directory / file_name(claim)
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be removed: {error.strerror}") from error

    async def restore(self, claims: Mapping[PodUid, Sequence[CheckpointEntry]]) -> None:
        """Write the files of these claims if they are lost, as after a reboot; remove others."""
        for claim, entries in claims.items():
            await self.write(claim, entries)
        await asyncio.to_thread(self._remove_others, claims.keys())

    def _remove_others(self, claims: Iterable[PodUid]) -> None:
        live = set(claims)
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                claim = claim_of_file(path.name)
                if claim is not None and claim not in live:
                    path.unlink(missing_ok=True)
