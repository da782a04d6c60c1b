"""Containers that have just been given devices, until the kubelet has asked to start them.

The kubelet calls PreStartContainer once the pod's sandbox exists, some time after Allocate. If the
plugin is gone by then, the container fails, and the kubelet tries again after 10 seconds only.
"""

import time
from collections.abc import Callable, Sequence

from services.node_agent.kubelet.device_plugin import DevicePluginHandler
from shared.dialects.dialect import ContainerSetup

START_S = 3.0
"""A container that is not started within this time may pull its image, or follow another one."""
REPLY_S = 0.2
"""By this time, a reply has reached the kubelet."""


class ContainerStarts:
    """Passes the kubelet's calls on to the handler, and knows which containers start."""

    def __init__(
        self, handler: DevicePluginHandler, *, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self.handler = handler
        self._ticks = ticks
        self._until: dict[tuple[str, frozenset[str]], float] = {}
        """Until when each container counts, by resource and device IDs."""

    def any_due(self) -> bool:
        """Return whether the kubelet is soon to call PreStartContainer, or to get its reply."""
        now = self._ticks()
        self._until = {key: until for key, until in self._until.items() if now < until}
        return bool(self._until)

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """Choose among the free IDs."""
        return await self.handler.get_preferred_allocation(resource, available, must_include, size)

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        """Return the container's setup; the container counts as starting from now on."""
        setup = await self.handler.allocate(resource, device_ids)
        self._count(resource, device_ids, START_S)
        return setup

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        """Allow the start of the container, which counts only until the reply has arrived."""
        try:
            await self.handler.pre_start_container(resource, device_ids)
        finally:
            self._count(resource, device_ids, REPLY_S)

    def _count(self, resource: str, device_ids: Sequence[str], for_s: float) -> None:
        self.any_due()  # forgets those that no longer count
        self._until[resource, frozenset(device_ids)] = self._ticks() + for_s
