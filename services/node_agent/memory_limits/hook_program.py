"""The program of the OCI hook on the host, and the CDI files that have runtimes call it."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from services.node_agent.allocate.cdi import build_limits_specification, limits_device
from services.node_agent.allocate.cdi_files import write_specification
from services.node_agent.files import replace_file
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

PROGRAM = "leasehold-limit-hook"
BUILT = Path(sys.prefix) / "libexec" / PROGRAM
SOCKET = "limits.sock"
PREFIX = "leasehold.dev-limits-"


class HookProgram:
    """`state_dir` has the same path on the host."""

    def __init__(self, state_dir: Path, cdi_directory: Path, built: Path = BUILT) -> None:
        self.path = state_dir / PROGRAM
        self.socket = state_dir / SOCKET
        self.cdi_directory = cdi_directory
        self.built = built
        self.missing_reason = "the agent has not installed its hook yet"

    async def install(self) -> None:
        self.missing_reason = await asyncio.to_thread(self._install)

    async def write(self, holder: PodUid, container: str, fence: int) -> None:
        """Raises UnavailableError if the program or the file cannot be written."""
        await self.install()
        if self.missing_reason:
            raise UnavailableError(self.missing_reason)
        specification = build_limits_specification(
            (str(self.path), str(self.socket)), holder, container, fence
        )
        await asyncio.to_thread(self._write, holder, container, specification)

    async def remove_others(self, live: Collection[PodUid]) -> None:
        await asyncio.to_thread(self._remove_others, live)

    def _write(self, holder: PodUid, container: str, specification: Mapping[str, Any]) -> None:
        write_specification(self._file(limits_device(holder, container)), specification)

    def _file(self, name: str) -> Path:
        return self.cdi_directory / f"{PREFIX}{name}.json"

    def _install(self) -> str:
        try:
            content = self.built.read_bytes()
        except OSError as error:
            return (
                f"the hook {self.built} is missing ({error.strerror}): the driver limits "
                "containers only with the program of the image, or of `python -m "
                "services.node_agent.memory_limits.build_hook`"
            )
        try:
            if not self.path.is_file() or self.path.read_bytes() != content:
                replace_file(self.path, content)
                logger.info("the hook of container runtimes is installed as %s", self.path)
            self.path.chmod(0o755)
        except OSError as error:
            return f"the hook {self.path} cannot be installed: {error.strerror}"
        return ""

    def _remove_others(self, live: Collection[PodUid]) -> None:
        with contextlib.suppress(OSError):
            for path in self.cdi_directory.glob(f"{PREFIX}*.json"):
                name = path.name.removeprefix(PREFIX)
                if not any(name.startswith(f"{holder}-") for holder in live):
                    path.unlink(missing_ok=True)
