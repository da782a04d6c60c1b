"""Telling schedulers of Volcano's older generation that the node's plugin lives."""

import asyncio
import logging

from shared.dialects.volcano.device_register import HANDSHAKE, REPORT_S, reported
from shared.kubernetes.client import KubernetesClient
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError

logger = logging.getLogger(__name__)


class Handshake:
    """Writes the node's handshake annotation, over whatever a scheduler has made of it."""

    def __init__(self, kube: KubernetesClient, path: str, clock: Clock) -> None:
        self.kube = kube
        self.path = path
        self.clock = clock

    async def run(self) -> None:
        """Report until cancelled; a report that is not taken is made again with the next."""
        while True:
            body = {"metadata": {"annotations": {HANDSHAKE: reported(self.clock.now())}}}
            try:
                await self.kube.patch_merge(self.path, body)
            except LeaseholdError as error:
                logger.warning("the handshake was not written: %s", error)
            await asyncio.sleep(REPORT_S)
