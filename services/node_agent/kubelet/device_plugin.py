"""A device plugin: a gRPC server on one socket, for one resource and one registration."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc

from services.node_agent.allocate.handler import AllocationHandler
from shared.dialects.advertised import NumaNodes, PluginDeviceId
from shared.dialects.dialect import ContainerSetup
from shared.kubelet_api.deviceplugin import api_pb2
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

SERVICE = "v1beta1.DevicePlugin"
MAX_SOCKET_PATH = 107
MAX_RECEIVED_BYTES = 64 * 1024 * 1024
"""GetPreferredAllocation carries every ID that is free."""

NO_NUMA: Mapping[DeviceUuid, NumaNodes] = {}
_HEALTH = {True: b"\x12\x07Healthy", False: b"\x12\x09Unhealthy"}
OPTIONS = api_pb2.DevicePluginOptions(
    pre_start_required=True, get_preferred_allocation_available=True
)


def check_socket(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise RequestError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes a socket's path may have: set a "
            "shorter --kubelet-dir"
        )


def encode_list(
    ids: Mapping[str, PluginDeviceId], numa: Mapping[DeviceUuid, NumaNodes] = NO_NUMA
) -> bytes:
    """Encode by hand, as there may be 190,000 devices.

    Each entry is field 1 of the list, and in it field 1 is the ID, field 2 the health and field 3
    the NUMA nodes, all shorter than 128 bytes.
    """
    topologies = {device: _encode_topology(nodes) for device, nodes in numa.items()}
    return b"".join(
        _encode_entry(entry, topologies.get(entry.device, b"") if entry.device else b"")
        for entry in ids.values()
    )


def _encode_entry(entry: PluginDeviceId, topology: bytes) -> bytes:
    name = entry.id.encode()
    rest = _HEALTH[entry.healthy] + topology
    return b"\n%c\n%c%b%b" % (len(name) + len(rest) + 2, len(name), name, rest)


def _encode_topology(nodes: NumaNodes) -> bytes:
    listed = [api_pb2.NUMANode(ID=node) for node in nodes]
    encoded: bytes = api_pb2.Device(topology=api_pb2.TopologyInfo(nodes=listed)).SerializeToString()
    return encoded


def encode_setup(setup: ContainerSetup) -> bytes:
    answer = api_pb2.ContainerAllocateResponse(
        envs=dict(setup.environment),
        mounts=[
            api_pb2.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in setup.mounts
        ],
        annotations=dict(setup.annotations),
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in setup.cdi_devices],
    )
    encoded: bytes = api_pb2.AllocateResponse(container_responses=[answer]).SerializeToString(
        deterministic=True
    )
    return encoded


class PluginServer:
    def __init__(
        self,
        resource: str,
        socket: Path,
        handler: AllocationHandler,
        devices: bytes,
        *,
        on_watched: Callable[[], None],
    ) -> None:
        self.resource = resource
        self.socket = socket
        self.watched_at: float | None = None
        """By the monotonic clock."""
        self.ended = asyncio.Event()
        self.ended_by = ""
        self._handler = handler
        self._devices = devices
        self._on_watched = on_watched
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._starting: asyncio.Task[None]

    async def start(self) -> None:
        """Raises UnavailableError if the socket cannot be opened."""
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
                ("grpc.max_send_message_length", -1),
            )
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()),)
        )
        try:
            server.add_insecure_port(f"unix:{self.socket}")
        except RuntimeError as error:
            raise UnavailableError(f"no socket {self.socket}: {error}") from error
        self._server = server
        self._starting = asyncio.create_task(server.start())
        await asyncio.shield(self._starting)

    async def stop(self) -> None:
        """Also where `start` was cancelled."""
        self.end("it was stopped")
        if self._server is not None:
            await self._starting  # a server that is still starting cannot be stopped
            await self._server.stop(None)
        with contextlib.suppress(OSError):  # the directory may be gone
            self.socket.unlink(missing_ok=True)

    def end(self, reason: str) -> None:
        self.ended_by = self.ended_by or reason
        self.ended.set()

    def send(self, devices: bytes) -> None:
        self._devices = devices
        self._changed.set()
        self._changed = asyncio.Event()

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "GetDevicePluginOptions": unary(self._options, api_pb2.Empty.FromString, _serialize),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch, api_pb2.Empty.FromString, None
            ),
            "GetPreferredAllocation": unary(
                self._preferred, api_pb2.PreferredAllocationRequest.FromString, _serialize
            ),
            "Allocate": unary(self._allocate, api_pb2.AllocateRequest.FromString, None),
            "PreStartContainer": unary(
                self._pre_start, api_pb2.PreStartContainerRequest.FromString, _serialize
            ),
        }

    async def _options(
        self, _: api_pb2.Empty, __: grpc.aio.ServicerContext
    ) -> api_pb2.DevicePluginOptions:
        return OPTIONS

    async def _list_and_watch(
        self, _: api_pb2.Empty, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        context.add_done_callback(lambda _: self.end("the kubelet ended the stream"))
        while True:
            changed = self._changed
            yield self._devices
            if self.watched_at is None:
                self.watched_at = time.monotonic()
                self._on_watched()
            await changed.wait()

    async def _preferred(
        self, request: api_pb2.PreferredAllocationRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.PreferredAllocationResponse:
        responses = []
        for container in request.container_requests:
            try:
                chosen = await self._handler.get_preferred_allocation(
                    self.resource,
                    list(container.available_deviceIDs),
                    list(container.must_include_deviceIDs),
                    container.allocation_size,
                )
            except LeaseholdError:
                chosen = []  # Allocate, which follows, reports why
            responses.append(api_pb2.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return api_pb2.PreferredAllocationResponse(container_responses=responses)

    async def _allocate(
        self, request: api_pb2.AllocateRequest, context: grpc.aio.ServicerContext
    ) -> bytes:
        async with _errors_reported(context):
            setups = [
                await self._handler.allocate(self.resource, list(container.devices_ids))
                for container in request.container_requests  # the kubelet sends one
            ]
        return b"".join(map(encode_setup, setups))

    async def _pre_start(
        self, request: api_pb2.PreStartContainerRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.PreStartContainerResponse:
        async with _errors_reported(context):
            await self._handler.pre_start_container(self.resource, list(request.devices_ids))
        return api_pb2.PreStartContainerResponse()


@contextlib.asynccontextmanager
async def _errors_reported(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except LeaseholdError as error:
        is_temporary = isinstance(error, UnavailableError)
        code = grpc.StatusCode.UNAVAILABLE if is_temporary else grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, str(error))


def _serialize(message: object) -> bytes:
    encoded: bytes = message.SerializeToString()  # type: ignore[attr-defined]
    return encoded
