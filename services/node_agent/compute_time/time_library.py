"""The library of compute time on the host, from which containers mount it."""

import asyncio
import logging
from pathlib import Path

from services.node_agent.compute_time.build_library import BUILT, LIBRARY
from services.node_agent.files import replace_file

logger = logging.getLogger(__name__)


class TimeLibrary:
    """The library is replaced whole: containers keep the one they have."""

    def __init__(self, state_dir: Path, built: Path = BUILT) -> None:
        self.path = state_dir / LIBRARY
        self.built = built
        self.missing_reason = "the agent has not installed its library of compute time yet"

    async def install(self) -> None:
        self.missing_reason = await asyncio.to_thread(self._install)

    def _install(self) -> str:
        try:
            content = self.built.read_bytes()
        except OSError as error:
            return (
                f"the library {self.built} is missing ({error.strerror}): the image has it, and "
                "`make native` compiles it"
            )
        try:
            if not self.path.is_file() or self.path.read_bytes() != content:
                replace_file(self.path, content)
                logger.info("the library of compute time is installed as %s", self.path)
        except OSError as error:
            return f"the library {self.path} cannot be installed: {error.strerror}"
        return ""
