"""Directories of the daemons of MPS of a node, and the programs that run there."""

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.mps.control import (
    MOST_PATH,
    PROBE,
    PROBE_S,
    PROGRAM,
    SOCKET,
    MpsControl,
)
from services.node_agent.mps.daemon import MpsTarget
from shared.model.errors import UNDECODABLE, UnavailableError

Record = TypeVar("Record", bound=msgspec.Struct)
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MpsNode:
    root: Path
    program: Sequence[str] = (PROGRAM,)
    probe_program: Sequence[str] = PROBE
    """It ends with 0 once a client has initialised CUDA."""
    proc: Path = Path("/proc")
    probe_s: float = PROBE_S

    def missing_reason(self, *longest: str) -> str:
        """`longest` are the parts of the longest socket's directory, below the root."""
        path = self.root.joinpath(*longest, SOCKET)
        if len(os.fsencode(path)) > MOST_PATH:
            return f"the path {path} is longer than {MOST_PATH} bytes: set a shorter directory"
        if shutil.which(self.program[0]) is None:
            return (
                f"{self.program[0]} is not on the path: it comes with the driver, in containers "
                "with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return ""

    def control(self, name: str) -> MpsControl:
        return MpsControl(self.root / name, self.program, self.proc)

    async def probe(self, target: MpsTarget, control: MpsControl, *below: str) -> None:
        """Raises WedgedError if the client hangs."""
        pipes = control.pipes.joinpath(*below)
        code = await control.probe(self.probe_program, pipes, self.probe_s)
        if code:
            logger.info("the probe of MPS for %s ended with code %d", target, code)


class DaemonRecords(Generic[Record]):
    """It is on disk before the daemon has it."""

    def __init__(self, root: Path, file: str, record_type: type[Record]) -> None:
        self.root = root
        self.file = file
        self._type = record_type
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    def lock(self, name: str) -> AbstractAsyncContextManager[None]:
        return self._locks.setdefault(name, asyncio.Lock())

    async def load(self, name: str) -> Record | None:
        """Return None if there is no record that can be read."""
        return await asyncio.to_thread(self._load, self.root / name / self.file)

    async def load_all(self) -> tuple[Record, ...]:
        return await asyncio.to_thread(self._load_all)

    async def save(self, name: str, record: Record) -> None:
        """Raise UnavailableError if the disk does not take it."""
        path = self.root / name / self.file
        try:
            await asyncio.to_thread(replace_file, path, msgspec.json.encode(record))
        except OSError as error:
            raise UnavailableError(f"{path}: {error.strerror}") from error

    def _load_all(self) -> tuple[Record, ...]:
        records = map(self._load, sorted(self.root.glob(f"*/{self.file}")))
        return tuple(record for record in records if record is not None)

    def _load(self, path: Path) -> Record | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=self._type)
        except (OSError, *UNDECODABLE):
            return None
