"""The Registration service: validates a device plugin and dials it within the call."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from shared.kubelet_api.deviceplugin import api_pb2, api_pb2_grpc
from simcluster.kubelet.devices.plugin_client import (
    MAX_SOCKET_PATH,
    PluginConnection,
    PluginError,
    checked_socket,
)

VERSION = "v1beta1"
SOCKET_NAME = "kubelet.sock"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_EXTENDED = re.compile(
    rf"(?P<prefix>{_LABEL}(\.{_LABEL})*)/[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?"
)
Accept = Callable[[PluginConnection], Awaitable[None]]


def is_extended_resource(name: str) -> bool:
    """Return whether a plugin may serve the resource: domain and name, not Kubernetes' own."""
    match = _EXTENDED.fullmatch(name)
    if match is None or name.startswith("requests."):
        return False
    prefix = match["prefix"]
    return prefix != "kubernetes.io" and not prefix.endswith(".kubernetes.io")


def registration_error(request: api_pb2.RegisterRequest) -> str | None:
    """Describe why a registration is invalid; None if it is valid."""
    if request.version != VERSION:
        return (
            f'requested API version "{request.version}" is not supported by kubelet. '
            f'Supported version is "{VERSION}"'
        )
    if not is_extended_resource(request.resource_name):
        return f'the ResourceName "{request.resource_name}" is invalid'
    return None


class RegistrationService(api_pb2_grpc.RegistrationServicer):  # type: ignore[misc]
    """Responds to Register after the plugin has responded to the kubelet."""

    def __init__(self, directory: Path, accept: Accept, *, dial_s: float) -> None:
        self._directory = directory
        self._accept = accept
        self._dial_s = dial_s

    async def Register(  # noqa: N802 - gRPC's name
        self, request: api_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.Empty:
        """Register one plugin; a kubelet ignores the options in the request."""
        error_text = registration_error(request)
        if error_text is not None:
            await context.abort(grpc.StatusCode.UNKNOWN, error_text)
        socket = self._directory / request.endpoint
        if len(str(socket)) > MAX_SOCKET_PATH:
            await context.abort(
                grpc.StatusCode.UNKNOWN, f"failed to dial device plugin at {socket}: path too long"
            )
        connection = PluginConnection(request.resource_name, socket, dial_s=self._dial_s)
        try:
            await connection.connect()
        except PluginError as error:
            await connection.close()
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        await self._accept(connection)
        return api_pb2.Empty()


def _clear(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    for path in directory.iterdir():
        if path.is_socket():
            path.unlink(missing_ok=True)


async def serve_registration(directory: Path, accept: Accept, *, dial_s: float) -> grpc.aio.Server:
    """Remove all sockets in the directory, as a starting kubelet does, and listen."""
    _clear(directory)
    server = grpc.aio.server()
    api_pb2_grpc.add_RegistrationServicer_to_server(
        RegistrationService(directory, accept, dial_s=dial_s), server
    )
    server.add_insecure_port(f"unix:{checked_socket(directory / SOCKET_NAME)}")
    await server.start()
    return server
