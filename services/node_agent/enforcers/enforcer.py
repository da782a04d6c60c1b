"""The port of an enforcer: what it holds and needs, and how the agent drives it."""

from collections.abc import Set
from dataclasses import dataclass

from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.devices.enforcers import Enforcer as EnforcerName
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What operators read about an enforcer; `docs/limits.md` has these sentences."""

    name: EnforcerName
    memory: str
    """What of a share's memory it holds; empty if nothing."""
    compute: str
    """What of a share's cores it holds; empty if nothing."""
    parts: bool
    """Whether it divides a device among shares; else a device or an instance is one share."""
    not_held: str
    needs: str
    resize: str
    shown: str
    """How it is seen whether it holds."""


class Enforcer:
    """Does nothing by default: what hardware holds needs nothing.

    A subclass in a module of its own, and its entry in `table.py`, are a new enforcer. All calls
    may be repeated.
    """

    facts: Facts

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        """Return why it cannot hold parts of this GPU now, or an empty text."""
        return ""

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        """Set the limits of a container before its first process runs, and read them back.

        `new` is a container that cannot have changed its files, `starting` one without processes.
        Raises UnavailableError if they cannot be set: the container must not start then.
        """

    async def resize(self, entry: CheckpointEntry) -> None:
        """Set the limits of a running container to those of its entry.

        Raises UnavailableError if they hold only when the container starts again.
        """

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """Remove what it keeps for pods other than `live`.

        `mounted` are paths that containers have mounted, or None if that is not known.
        """
