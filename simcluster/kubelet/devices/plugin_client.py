"""The client of one device plugin: connection, device stream and calls over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from shared.kubelet_api.deviceplugin import api_pb2, api_pb2_grpc
from simcluster.kubelet.devices.kubelet_devices import AllocationError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
PRE_START_S = 30
MAX_SOCKET_PATH = 107
_CLOSING = "rpc error: code = Canceled desc = grpc: the client connection is closing"
_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
Response = TypeVar("Response")


class PluginError(AllocationError):
    """A device plugin failed or refused; the texts are those of a kubelet."""


def checked_socket(path: Path) -> Path:
    """Return the path; raises ValueError if it is too long for a unix socket."""
    if len(str(path)) > MAX_SOCKET_PATH:
        raise ValueError(
            f"the socket path {path} has {len(str(path))} bytes, more than the maximum of "
            f"{MAX_SOCKET_PATH}; choose a shorter state directory"
        )
    return path


class PluginConnection:
    """One registration of one plugin; each registration has its own connection."""

    def __init__(self, resource: str, socket: Path, *, dial_s: float) -> None:
        self.resource = resource
        self.socket = socket
        self._dial_s = dial_s
        self.pre_start_required = False
        self.has_preferred_allocation = False
        self.closed = False
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._stub = api_pb2_grpc.DevicePluginStub(self._channel)

    async def connect(self) -> None:
        """Dial and get the options; raises PluginError after `dial_s` without a response."""
        try:
            async with asyncio.timeout(self._dial_s):
                await self._channel.channel_ready()
                options = await self._call(self._stub.GetDevicePluginOptions(api_pb2.Empty()))
        except TimeoutError:
            raise PluginError(f"failed to dial device plugin at {self.socket}") from None
        except PluginError as error:
            raise PluginError(f"failed to get device plugin options: {error}") from error
        self.pre_start_required = options.pre_start_required
        self.has_preferred_allocation = options.get_preferred_allocation_available

    async def follow(self, report: Callable[[Sequence[api_pb2.Device]], None]) -> str:
        """Report each device list of the stream; return why the stream ended."""
        try:
            async for message in self._stub.ListAndWatch(api_pb2.Empty()):
                report(message.devices)
        except grpc.aio.AioRpcError as error:
            return go_error_text(error)
        except asyncio.CancelledError:
            if not self._closed_by_us():
                raise
        return "EOF"

    def _require_open(self) -> None:
        if self.closed:
            raise PluginError(f"endpoint {self.resource} has been stopped")

    def _closed_by_us(self) -> bool:
        """Return whether `close` cancelled the call, not a cancellation of the calling task."""
        task = asyncio.current_task()
        return self.closed and (task is None or not task.cancelling())

    async def _call(self, call: Awaitable[Response]) -> Response:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise PluginError(go_error_text(error)) from error
        except asyncio.CancelledError:
            if not self._closed_by_us():
                raise
            raise PluginError(_CLOSING) from None

    async def get_preferred_allocation(
        self, available: Iterable[str], must_include: Iterable[str], size: int
    ) -> list[str]:
        """Return the plugin's preference among the available devices."""
        container_request = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        request = api_pb2.PreferredAllocationRequest(container_requests=[container_request])
        self._require_open()
        try:
            response = await self._call(self._stub.GetPreferredAllocation(request))
        except PluginError as error:
            raise PluginError(
                f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            ) from error
        return (
            list(response.container_responses[0].deviceIDs) if response.container_responses else []
        )

    async def allocate(self, devices: Iterable[str]) -> bytes:
        """Allocate devices for one container, which is not named; there is no deadline.

        Returns the response for the first container; a kubelet reads no other.
        """
        self._require_open()
        container_request = api_pb2.ContainerAllocateRequest(devices_ids=devices)
        request = api_pb2.AllocateRequest(container_requests=[container_request])
        response = await self._call(self._stub.Allocate(request))
        if not response.container_responses:
            raise PluginError("no containers return in allocation response")
        content: bytes = response.container_responses[0].SerializeToString()
        return content

    async def pre_start(self, devices: Iterable[str]) -> None:
        """Announce the start of a container; the plugin may refuse within 30 s."""
        self._require_open()
        request = api_pb2.PreStartContainerRequest(devices_ids=devices)
        try:
            await self._call(self._stub.PreStartContainer(request, timeout=PRE_START_S))
        except PluginError as error:
            raise PluginError(
                f"device plugin PreStartContainer rpc failed with err: {error}"
            ) from error

    async def close(self) -> None:
        """Close the connection; calls in progress fail."""
        self.closed = True
        await self._channel.close()


def go_error_text(error: grpc.aio.AioRpcError) -> str:
    """Format a gRPC error as Go does, because users search for that text."""
    name = error.code().name
    code = "".join(part.capitalize() for part in name.split("_")).replace("Cancelled", "Canceled")
    return f"rpc error: code = {code} desc = {error.details()}"
