"""A checkpoint without a file."""

from collections.abc import Callable
from pathlib import Path

from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry


class CheckpointOf(Checkpoint):
    """The entries that a test has now."""

    def __init__(self, read: Callable[[], tuple[CheckpointEntry, ...]]) -> None:
        super().__init__(Path("unused"), "node")
        self._entries = read

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        return self._entries()
