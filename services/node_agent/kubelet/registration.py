"""Registration of our device plugins with a kubelet that may restart at any time.

The kubelet never reconnects on its own: a resource is served on a fresh socket and registered
again.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.kubelet.device_checkpoint import (
    Allocatable,
    FileIdentity,
    PluginResources,
    file_identity,
)
from services.node_agent.kubelet.device_plugin import (
    NO_NUMA,
    OPTIONS,
    PluginServer,
    check_socket,
    encode_list,
)
from services.node_agent.kubelet.pods import STILL_PLUGIN, UnservedResource, explain_unserved
from services.node_agent.node import Node
from shared.dialects.advertised import NumaNodes, PluginDeviceId
from shared.kubelet_api.deviceplugin import api_pb2, api_pb2_grpc
from shared.model.clock import until_tick, wait_for_event
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
LOOK_S = 2.0
"""Interval of looks at all sockets; the end of a stream is seen at once."""
LOOK_SOON_S = 0.05
"""While no kubelet listens: a starting one admits its pods 0.2 to 0.8 s after making its socket."""
REGISTER_S = 10.0
"""Time limit of a registration with a busy kubelet."""
REGISTER_AGAIN_S = 0.2
"""Pause after a kubelet refused a registration: it may still be starting."""
FIRST_LIST_S = 10.0
"""The kubelet requests the list within this time after it accepted a registration."""
MAX_PAUSE_S = 30.0
"""The longest pause between registrations that end at once; it doubles up to this."""
MIN_PAUSE_S = 1.0
"""The end of an old stream must reach the kubelet before a new registration does."""

MOST_ALIGNED_IDS = 10_000
AMOUNTS_S = 2.0
"""Interval of comparisons of the kubelet's checkpoint with the amounts in node status."""
NO_AMOUNTS: Mapping[str, frozenset[str]] = {}


class DevicePlugins:
    def __init__(
        self, node: Node, directory: Path, handler: AllocationHandler, allocatable: Allocatable
    ) -> None:
        self.node = node
        self.directory = directory
        self.kubelet = directory / KUBELET_SOCKET
        self.handler = handler
        self.allocatable = allocatable
        self.plugin_resources = PluginResources(node, directory, allocatable)
        self.amounts: Mapping[str, frozenset[str]] = {}
        """Pods request them beside a served resource."""
        self._examined: frozenset[str] = frozenset()
        self.endpoints: dict[str, PluginEndpoint] = {}
        self.numa: Mapping[DeviceUuid, NumaNodes] = NO_NUMA
        self.served_changed = asyncio.Event()
        self.registered = asyncio.Event()
        self._changed = asyncio.Event()

    def serve(
        self,
        served: Mapping[str, Mapping[str, PluginDeviceId]],
        amounts: Mapping[str, frozenset[str]] = NO_AMOUNTS,
    ) -> None:
        """`amounts` are those in node status that pods request beside each resource.

        Raises RequestError if the directory's path is too long for a socket.
        """
        self.amounts = amounts
        for resource in self.endpoints.keys() - served.keys():
            del self.endpoints[resource]
        for resource, ids in served.items():
            endpoint = self.endpoints.get(resource)
            if endpoint is None:
                self.endpoints[resource] = PluginEndpoint(resource, self, ids)
            else:
                endpoint.update(ids, self.numa)
        self._changed.set()
        self.served_changed.set()

    def show_numa(self, numa: Mapping[DeviceUuid, NumaNodes]) -> None:
        self.numa = numa
        for endpoint in self.endpoints.values():
            endpoint.update(endpoint.ids, numa)

    def are_shown(self, taken: Mapping[str, Mapping[str, NumaNodes]]) -> bool:
        return all(
            taken.get(name, {}).get(entry.id, ()) == self.numa.get(entry.device, ())
            for name, endpoint in self.endpoints.items()
            if endpoint.is_served and endpoint.shows_numa
            for entry in endpoint.ids.values()
            if entry.healthy and entry.device is not None
        )

    @property
    def registrations(self) -> int:
        return sum(endpoint.registrations for endpoint in self.endpoints.values())

    async def run(self) -> None:
        tasks: dict[PluginEndpoint, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            group.create_task(self._watch_amounts())
            while True:
                self._changed.clear()
                wanted = set(self.endpoints.values())
                for endpoint in tasks.keys() - wanted:
                    tasks.pop(endpoint).cancel()
                for endpoint in wanted - tasks.keys():
                    tasks[endpoint] = group.create_task(endpoint.run())
                await self._changed.wait()

    async def _look(self) -> None:
        while True:
            kubelet = file_identity(self.kubelet)
            for endpoint in self.endpoints.values():
                endpoint.look(kubelet)
            await asyncio.sleep(until_tick(LOOK_S))

    async def _watch_amounts(self) -> None:
        while True:
            amounts = frozenset().union(*self.amounts.values()) - self.endpoints.keys()
            before = self.plugin_resources.since.keys()
            try:
                await self.plugin_resources.refresh(amounts)
                for amount in sorted(self.plugin_resources.since.keys() - before):
                    logger.warning("new pods wait: %s", STILL_PLUGIN.format(amount))
            except LeaseholdError as error:
                logger.debug("amounts that are allocated by device plugin: %s", error)
            if (amounts, before) != (self._examined, self.plugin_resources.since.keys()):
                self.served_changed.set()
            self._examined = amounts
            await asyncio.sleep(until_tick(AMOUNTS_S))

    def unserved(self) -> dict[str, UnservedResource]:
        """Include resources whose amount is still allocated by device plugin, or not examined."""
        now = time.monotonic()
        since = self.plugin_resources.since
        unserved: dict[str, UnservedResource] = {}
        for name, endpoint in self.endpoints.items():
            amounts = self.amounts.get(name, frozenset()) - self.endpoints.keys()
            claimed = sorted(amounts & since.keys())
            if claimed:
                unserved[name] = UnservedResource(now - since[claimed[0]], claimed[0])
            elif not (endpoint.is_served and amounts <= self._examined):
                unserved[name] = UnservedResource(now - endpoint.lost_at)
        return unserved

    def newly_served(self) -> frozenset[str]:
        return frozenset(
            name for name, endpoint in self.endpoints.items() if endpoint.is_newly_served
        )

    def unready_reason(self) -> str | None:
        missing = {
            n: resource for n, resource in self.unserved().items() if not resource.plugin_amount
        }
        return explain_unserved(missing) or None


class PluginEndpoint:
    def __init__(
        self, resource: str, plugins: DevicePlugins, ids: Mapping[str, PluginDeviceId]
    ) -> None:
        self.resource = resource
        self.registered = False
        self._registered_with: tuple[FileIdentity | None, FileIdentity | None] = None, None
        self._registered_at = 0.0
        self.registrations = 0
        self.lost_at = time.monotonic()
        self._plugins = plugins
        self.ids = ids
        self._numa = plugins.numa
        self._devices = self._encoded()
        self._server: PluginServer | None = None
        self._stem = f"leasehold-{resource.rpartition('/')[2]}"
        self._kubelet = plugins.kubelet
        check_socket(self._socket())

    @property
    def is_served(self) -> bool:
        return self._watched_at is not None

    def _socket(self) -> Path:
        return self._plugins.directory / f"{self._stem}-{os.urandom(3).hex()}.sock"

    @property
    def is_newly_served(self) -> bool:
        at = self._watched_at
        late_s = self._plugins.node.timing.status_late_s
        return at is not None and time.monotonic() - at < late_s

    @property
    def _watched_at(self) -> float | None:
        return self._server.watched_at if self.registered and self._server is not None else None

    def update(
        self, ids: Mapping[str, PluginDeviceId], numa: Mapping[DeviceUuid, NumaNodes]
    ) -> None:
        if ids == self.ids and numa == self._numa:
            return
        self.ids = ids
        self._numa = numa
        self._devices = self._encoded()
        if self._server is not None:
            self._server.send(self._devices)

    @property
    def shows_numa(self) -> bool:
        """Too many IDs would take too long to list again for each pod."""
        return len(self.ids) <= MOST_ALIGNED_IDS

    def _encoded(self) -> bytes:
        return encode_list(self.ids, self._numa if self.shows_numa else NO_NUMA)

    async def run(self) -> None:
        self._remove_old_sockets()
        pause_s = 0.0
        before: FileIdentity | None = None
        while True:
            await self._pause(pause_s, before)
            before = await self._kubelet_socket()
            reason, was_registered = await self._serve_once(before)
            logger.info("%s is registered again: %s", self.resource, reason)
            if file_identity(self._kubelet) != before:
                pause_s = 0.0
            elif was_registered:
                pause_s = MIN_PAUSE_S
            else:
                pause_s = min(max(2 * pause_s, MIN_PAUSE_S), MAX_PAUSE_S)

    async def _pause(self, pause_s: float, before: FileIdentity | None) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + pause_s
        while (left_s := until - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_SOON_S, left_s))
            if file_identity(self._kubelet) != before:
                return

    def _remove_old_sockets(self) -> None:
        for path in self._plugins.directory.glob(f"{self._stem}-{6 * '[0-9a-f]'}.sock"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    async def _kubelet_socket(self) -> FileIdentity:
        if file_identity(self._kubelet) is None:
            logger.info("waiting for the kubelet's socket %s", self._kubelet)
        while (identity := file_identity(self._kubelet)) is None:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(LOOK_SOON_S)
        return identity

    async def _serve_once(self, before: FileIdentity) -> tuple[str, bool]:
        server = PluginServer(
            self.resource,
            self._socket(),
            self._plugins.handler,
            self._devices,
            on_watched=self._plugins.served_changed.set,
        )
        self._server = server
        try:
            await server.start()
            await self._register(server, before)
            self._registered_with = before, file_identity(server.socket)
            self._registered_at = time.monotonic()
            self.registered = True
            self._plugins.served_changed.set()
            self.registrations += 1
            self._plugins.handler.note_registered()
            self._plugins.registered.set()
            logger.info("%s is registered on %s", self.resource, server.socket.name)
            return await self._watch(server), True
        except UnavailableError as error:
            return str(error), False
        finally:
            if self.is_served:
                self.lost_at = time.monotonic()
            self.registered = False
            self._server = None
            self._plugins.served_changed.set()
            await server.stop()

    async def _register(self, server: PluginServer, before: FileIdentity) -> None:
        """A starting kubelet empties the directory, then listens.

        It would dial a socket that it has removed for 10 seconds, so such a request is cancelled.
        """
        own = file_identity(server.socket)
        deadline = asyncio.get_running_loop().time() + REGISTER_S
        while file_identity(self._kubelet) == before and file_identity(server.socket) == own:
            call = asyncio.create_task(register(self._kubelet, server.socket.name, self.resource))
            try:
                while not call.done() and file_identity(server.socket) == own:
                    await asyncio.wait({call}, timeout=LOOK_SOON_S)
                if call.done():
                    return call.result()
            except UnavailableError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await self._pause(REGISTER_AGAIN_S, before)
            finally:
                call.cancel()
        raise UnavailableError("the kubelet's socket was replaced, or ours removed")

    def look(self, kubelet: FileIdentity | None) -> None:
        server = self._server if self.registered else None
        if server is None:
            return
        of_kubelet, own = self._registered_with
        if kubelet != of_kubelet:
            server.end("the kubelet's socket was replaced")
        elif own is None or file_identity(server.socket) != own:
            server.end("our own socket was removed")
        elif server.watched_at is None and time.monotonic() - self._registered_at > FIRST_LIST_S:
            server.end(f"the kubelet did not request the list within {FIRST_LIST_S:g} s")

    async def _watch(self, server: PluginServer) -> str:
        pause_s = self._plugins.node.timing.registration_check_s
        check_s = pause_s
        while not await wait_for_event(server.ended, pause_s):
            if await self._is_unallocatable():
                return "the node shows none of it as allocatable"
            pause_s = until_tick(check_s)
        return server.ended_by

    async def _is_unallocatable(self) -> bool:
        if not any(entry.healthy for entry in self.ids.values()):
            return False
        try:
            return await self._plugins.allocatable(self.resource) == 0
        except LeaseholdError as error:
            logger.debug("allocatable of %s is not known: %s", self.resource, error)
            return False


async def register(kubelet: Path, endpoint: str, resource: str) -> None:
    options = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
    request = api_pb2.RegisterRequest(
        version=VERSION, endpoint=endpoint, resource_name=resource, options=OPTIONS
    )
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=options) as channel:
        try:
            await api_pb2_grpc.RegistrationStub(channel).Register(request, timeout=REGISTER_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"the kubelet did not register {resource}: {error.details()}"
            ) from error
