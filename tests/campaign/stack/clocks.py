"""Wall clocks that are off: a preloaded library shifts the clock of one part while it runs."""

import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")


class Clocks:
    """The offsets of the parts' clocks. Without a C compiler no clock can be shifted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.library = directory / "clock.so"
        self.compiler = shutil.which("cc") or shutil.which("gcc")
        if self.compiler:
            directory.mkdir(parents=True, exist_ok=True)
            command = (self.compiler, "-shared", "-fPIC", "-O1", "-o", str(self.library))
            subprocess.run((*command, str(SOURCE), "-ldl"), check=True)

    def environment(self, part: str) -> dict[str, str]:
        """Return the variables with which a part's process is started."""
        if not self.compiler:
            return {}
        self.shift(part, 0.0)
        return {"LD_PRELOAD": str(self.library), "CAMPAIGN_CLOCK": str(self.directory / part)}

    def environment_of_all(self, parts: Iterable[str]) -> dict[str, str]:
        """Return the variables of a process that starts these parts, each with its own clock."""
        if not self.compiler:
            return {}
        for part in parts:
            self.shift(part, 0.0)
        return {"LD_PRELOAD": str(self.library), "CAMPAIGN_CLOCK": str(self.directory)}

    def shift(self, part: str, offset_s: float) -> None:
        """Set a part's clock forward, or backward if negative, from now on."""
        path = self.directory / part
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("<q", int(offset_s * 1e9)))
