"""Reports settings of the container runtime by which pods can get GPUs without a lease."""

import asyncio
import logging
from pathlib import Path

from services.node_agent.container_runtime.runtime_settings import OpenSetting, open_settings
from services.node_agent.metrics import OPEN_RUNTIME
from shared.model.errors import LeaseholdError
from shared.model.findings import SkipError

logger = logging.getLogger(__name__)


class RuntimeWatch:
    """`root` is None for simulated nodes."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._logged: set[str] = set()

    async def check(self) -> None:
        if self.root is None:
            return
        try:
            settings = await asyncio.to_thread(open_settings, self.root)
        except (LeaseholdError, SkipError, OSError) as error:
            settings = [OpenSetting("unreadable", str(error), "`leasehold doctor` shows this, too")]
        OPEN_RUNTIME.clear()
        for setting in settings:
            OPEN_RUNTIME.labels(setting.name).set(1)
            if setting.text not in self._logged:
                logger.warning("the container runtime: %s; %s", setting.text, setting.remedy)
        self._logged = {setting.text for setting in settings}
