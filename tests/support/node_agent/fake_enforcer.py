"""An enforcer that is no part of the product: all that it takes is in this file."""

from collections.abc import Set

from services.node_agent.enforcers.enforcer import Enforcer, Facts, HeldLimit, ReadBack
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

Place = tuple[PodUid, str]


class FakeEnforcer(Enforcer):
    """Holds memory and cores of parts, in a table of its own."""

    is_exact = True
    facts = Facts(
        name="mps",
        memory="all",
        compute="all",
        parts=True,
        not_held="nothing",
        needs="nothing",
        resize="at once",
        shown="its table",
    )

    def __init__(self) -> None:
        self.table: dict[Place, tuple[HeldLimit, ...]] = {}
        self.reason = ""
        self.unread = ""
        """Why its limits cannot be read now."""
        self.ignores = False
        """Whether limits that are set again stay as they are."""
        self.is_broken = False
        """Whether no limits can be set."""

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        return self.reason

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        await self.resize(entry)

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        if self.unread:
            return ReadBack(unread=self.unread)
        limits = self.table.get(place_of(entry))
        return ReadBack(problem="no limits are set") if limits is None else ReadBack(limits=limits)

    async def resize(self, entry: CheckpointEntry) -> None:
        if self.is_broken:
            raise UnavailableError("its daemon does not run")
        if not (self.ignores and place_of(entry) in self.table):
            self.table[place_of(entry)] = self.wanted(entry)

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        self.table = {place: limits for place, limits in self.table.items() if place[0] in live}


def place_of(entry: CheckpointEntry) -> Place:
    return entry.allocation.pod, entry.allocation.container
