"""The device manager: allocates devices to one container at a time, and calls the plugins.

It holds no lock while it calls a plugin. When a plugin is called for a container, PodResources
already shows the containers that were served before it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.kubelet.containers.container_spec import ContainerSpec, PodSpec
from simcluster.kubelet.devices.checkpoint import load_checkpoint, save_checkpoint
from simcluster.kubelet.devices.kubelet_devices import (
    AllocationError,
    KubeletDevices,
    PluginAllocation,
    align_devices,
    choose_devices,
    pick_devices,
)
from simcluster.kubelet.devices.plugin_client import PluginConnection

log = logging.getLogger(__name__)


def _load_state(directory: Path) -> KubeletDevices:
    """Return the checkpoint's content; an unreadable checkpoint counts as none."""
    try:
        return load_checkpoint(directory) or KubeletDevices()
    except (ValueError, KeyError, TypeError) as error:
        log.warning("cannot read the device checkpoint", extra={"error": str(error)})
        return KubeletDevices()


class DeviceManager:
    """The devices of one kubelet, from one restart to the next."""

    def __init__(
        self,
        directory: Path,
        *,
        grace_s: float,
        stale_stream_race: bool,
        aligns_numa: bool,
        changed: Callable[[], None],
    ) -> None:
        self.state = _load_state(directory)
        self._directory = directory
        self._grace_s = grace_s
        self._stale_stream_race = stale_stream_race
        self._aligns_numa = aligns_numa
        self._on_change = changed
        self._connections: dict[str, PluginConnection] = {}
        self._stream_tasks: set[asyncio.Task[None]] = set()
        self._stopped_at = dict.fromkeys(self.state.healthy, time.monotonic())
        self._expired: set[str] = set()

    # Plugins

    async def accept(self, connection: PluginConnection, group: asyncio.TaskGroup) -> None:
        """Use a plugin that has registered; the latest one of a resource counts.

        The connection of the earlier one stays open: its calls end normally, its stream is ignored.
        """
        self._connections[connection.resource] = connection
        self._stopped_at.pop(connection.resource, None)
        self._expired.discard(connection.resource)
        following = self._follow(connection)
        try:
            task = group.create_task(following)
        except RuntimeError:  # the group ends
            following.close()
            await connection.close()
            raise
        self._stream_tasks.add(task)
        task.add_done_callback(self._stream_tasks.discard)

    async def _follow(self, connection: PluginConnection) -> None:
        try:
            detail = await connection.follow(lambda devices: self._report(connection, devices))
            log.info(
                "device plugin stream ended",
                extra={"resource": connection.resource, "reason": detail},
            )
            current = self._connections.get(connection.resource)
            if current is connection or (self._stale_stream_race and current is not None):
                await current.close()
                self._mark_unhealthy(connection.resource)
        finally:
            await connection.close()

    def _report(self, connection: PluginConnection, devices: Sequence[api_pb2.Device]) -> None:
        if self._connections.get(connection.resource) is connection or self._stale_stream_race:
            numa = {d.ID: frozenset(n.ID for n in d.topology.nodes) for d in devices}
            self.state.update(connection.resource, {d.ID: d.health for d in devices}, numa)
            self.save()
            self._on_change()

    def _mark_unhealthy(self, resource: str) -> None:
        self._stopped_at[resource] = time.monotonic()
        self.state.mark_unhealthy(resource)
        self._on_change()

    def expire(self) -> float | None:
        """Drop resources whose plugin is gone for too long; return seconds until the next one."""
        now = time.monotonic()
        for resource, since in list(self._stopped_at.items()):
            if now - since >= self._grace_s:
                del self._stopped_at[resource]
                self._connections.pop(resource, None)
                self.state.forget(resource)
                self._expired.add(resource)
                self.save()
        waits = [since + self._grace_s - now for since in self._stopped_at.values()]
        return max(min(waits), 0.0) if waits else None

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return capacity and allocatable per resource; 0 for dropped resources."""
        zero = dict.fromkeys(self._expired, 0)
        return zero | self.state.capacity(), zero | self.state.allocatable()

    # Containers

    async def allocate(self, pod: PodSpec, running: Set[str], active: Set[str] | None) -> None:
        """Allocate devices to all containers of a pod, in order.

        `running` names the containers that run already (after a restart): they keep their devices.
        `active` are the pods that may hold devices; the devices of all others are freed first. None
        means that the active pods are not known yet, so all allocations of the checkpoint stay.
        Raises AllocationError if a container cannot get its devices.
        """
        reusable: dict[str, set[str]] = {}
        for container in pod.containers:
            for resource, required in container.limits.items():
                if self.state.manages(resource) and required:
                    if active is not None:
                        self.retain(active | {pod.uid})
                    offered = reusable.get(resource, set())
                    await self._allocate_resource(
                        pod,
                        container,
                        resource=resource,
                        required=required,
                        reusable=offered,
                        running=running,
                    )
            self._update_reusable(pod, container, reusable)

    def _update_reusable(
        self, pod: PodSpec, container: ContainerSpec, reusable: dict[str, set[str]]
    ) -> None:
        """Let later containers reuse the devices of init containers that end before them."""
        for allocation in self.state.container_allocations(pod.uid, container.name):
            offered = reusable.setdefault(allocation.resource, set())
            if container.runs_to_completion_first:
                offered |= allocation.devices
            else:
                offered -= allocation.devices

    async def _allocate_resource(
        self,
        pod: PodSpec,
        container: ContainerSpec,
        *,
        resource: str,
        required: int,
        reusable: Iterable[str],
        running: Set[str],
    ) -> None:
        existing = self.state.get(pod.uid, container.name, resource)
        if existing is not None and container.name in running:
            return
        if existing is not None:
            self._check_still_healthy(existing)
            return
        choice = choose_devices(self.state, resource, required, reusable)
        if self._aligns_numa:
            choice = align_devices(choice, self.state.numa.get(resource, {}))
        connection = self._connection(resource)
        preferred: list[str] = []
        if connection.has_preferred_allocation and choice.needed:
            offered = sorted(choice.available | choice.reused)
            preferred = await connection.get_preferred_allocation(
                offered, sorted(choice.reused), required
            )
        devices = pick_devices(choice, preferred)
        reserved = self.state.reserved.setdefault(resource, set())
        reserved |= devices
        try:
            response = await connection.allocate(sorted(devices))
        finally:
            reserved -= devices
        self.state.record(PluginAllocation(pod.uid, container.name, resource, devices, response))
        self.save()

    def _check_still_healthy(self, allocation: PluginAllocation) -> None:
        choose_devices(self.state, allocation.resource, 0, ())
        if not allocation.devices <= self.state.healthy[allocation.resource]:
            raise AllocationError(
                "previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {allocation.resource}"
            )

    def _connection(self, resource: str) -> PluginConnection:
        connection = self._connections.get(resource)
        if connection is None:
            raise AllocationError(f"endpoint {resource} has been stopped")
        return connection

    async def pre_start(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Call PreStartContainer of the plugins that require it; AllocationError if one refuses.

        Skipped, as in a real kubelet, for a plugin that has not registered since a restart.
        """
        for allocation in self.state.container_allocations(pod.uid, container.name):
            if allocation.resource in self._expired:
                raise AllocationError(
                    f"endpoint not found in cache for a registered resource: {allocation.resource}"
                )
            connection = self._connections.get(allocation.resource)
            if connection is not None and connection.pre_start_required:
                await connection.pre_start(sorted(allocation.devices))

    def allocate_responses(
        self, pod_uid: str, container: str
    ) -> list[api_pb2.ContainerAllocateResponse]:
        """Return the plugins' Allocate responses for a container."""
        return [
            api_pb2.ContainerAllocateResponse.FromString(allocation.response)
            for allocation in self.state.container_allocations(pod_uid, container)
        ]

    def retain(self, active: Set[str]) -> None:
        """Free the devices of all pods outside `active`, without saving a checkpoint."""
        self.state.retain(active)

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(self._directory, self.state)

    async def close(self) -> None:
        """Close the connections to all plugins: the kubelet stops."""
        for task in list(self._stream_tasks):
            task.cancel()
        for connection in list(self._connections.values()):
            await connection.close()
