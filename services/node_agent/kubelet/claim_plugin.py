"""The DRA driver's gRPC servers: registration, claims and health, on two sockets for the kubelet.

The kubelet finds the registration socket in its directory `plugins_registry`, requests the
driver's information, and then calls it on its own socket. A kubelet that restarts does so again.
https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from proto.dra import api_pb2 as dra
from proto.dra import api_pb2_grpc as dra_grpc
from proto.dra_health import api_pb2 as health
from proto.dra_health import api_pb2_grpc as health_grpc
from proto.plugin_registration import api_pb2 as registration
from proto.plugin_registration import api_pb2_grpc as registration_grpc
from shared.model.clock import until_tick
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import Namespace, PodUid

logger = logging.getLogger(__name__)

VERSIONS = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
UID_LENGTH = 64
UID = re.compile(rf"[A-Za-z0-9-]{{1,{UID_LENGTH}}}")
MAX_SOCKET_PATH = 107
LOOK_S = 1.0
"""How often it is checked that both sockets still exist."""
HEALTH_REPEAT_S = 10.0
HEALTH_TIMEOUT_S = 30
"""After this time without an update the kubelet shows a device's health as unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReference:
    """A ResourceClaim as the kubelet names it."""

    uid: PodUid
    namespace: Namespace
    name: str

    def __str__(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One device of a prepared claim."""

    request: str
    pool: str
    device: str
    share_id: str
    cdi_devices: tuple[str, ...]
    """Qualified CDI names that the runtime injects into containers with this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDeviceHealth:
    """The health of one device of the pool."""

    device: str
    healthy: bool
    message: str
    checked_at: float
    """Unix seconds."""


class ClaimHandler(Protocol):
    """Prepares claims. The texts of its errors reach the pod's owner as events."""

    async def prepare(self, claim: ClaimReference) -> Sequence[PreparedDevice]:
        """Return the devices of a claim, which containers may use from now on; idempotent."""
        ...

    async def unprepare(self, claim: ClaimReference) -> None:
        """Release a claim: no container uses it any more; idempotent."""
        ...


class DeviceHealthSource(Protocol):
    """The health of all devices."""

    def device_health(self) -> Sequence[ClaimDeviceHealth]:
        """Return the current health of every device."""
        ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until the health of a device may have changed, at most for this time."""
        ...


class ClaimPlugin:
    """Serves the kubelet from `run` until that is cancelled."""

    def __init__(
        self,
        driver: str,
        pool: str,
        kubelet_directory: Path,
        *,
        handler: ClaimHandler,
        health_source: DeviceHealthSource,
        on_registered: Callable[[], None],
    ) -> None:
        self.driver = driver
        self.pool = pool
        self.endpoint = kubelet_directory / "plugins" / driver / "dra.sock"
        self.registration_socket = kubelet_directory / "plugins_registry" / f"{driver}-reg.sock"
        self.handler = handler
        self.health_source = health_source
        self.on_registered = on_registered
        """Called each time the kubelet has registered the driver."""
        self.unregistered_reason: str | None = "the kubelet has not registered the DRA driver"
        """Why the kubelet does not call the driver; None: it is registered."""
        for socket in (self.endpoint, self.registration_socket):
            if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
                raise RequestError(
                    f"{socket} is longer than the {MAX_SOCKET_PATH} bytes a socket's path may "
                    "have: set a shorter --kubelet-dir"
                )

    async def run(self) -> None:
        """Serve until cancelled; on new sockets whenever one of them has been removed."""
        while True:
            try:
                await self._serve()
            except UnavailableError as error:
                self.unregistered_reason = str(error)
                logger.warning("the DRA driver is not served: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _serve(self) -> None:
        server = grpc.aio.server()
        dra_grpc.add_DRAPluginServicer_to_server(_ClaimServicer(self.handler), server)
        health_grpc.add_DRAResourceHealthServicer_to_server(
            _HealthServicer(self.pool, self.health_source), server
        )
        registration_grpc.add_RegistrationServicer_to_server(
            _RegistrationServicer(self.driver, self.endpoint, self._registered), server
        )
        sockets = (self.endpoint, self.registration_socket)  # the kubelet looks for the latter
        try:
            for socket in sockets:
                _listen(server, socket)
            await server.start()
            while all(socket.exists() for socket in sockets):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(until_tick(LOOK_S))
            logger.warning("the DRA driver is served on new sockets: one was removed")
        finally:
            self.unregistered_reason = "the kubelet has not registered the DRA driver"
            for socket in reversed(sockets):
                with contextlib.suppress(OSError):
                    socket.unlink(missing_ok=True)
            await asyncio.shield(server.stop(None))

    def _registered(self, error: str) -> None:
        self.unregistered_reason = error or None
        if error:
            logger.error("the kubelet does not register the DRA driver: %s", error)
            return
        logger.info("the kubelet has registered the DRA driver %s", self.driver)
        self.on_registered()


def _listen(server: grpc.aio.Server, socket: Path) -> None:
    try:
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{socket}")
    except (OSError, RuntimeError) as error:
        raise UnavailableError(
            f"no socket {socket}: {error}; --kubelet-dir must be the kubelet's directory, with "
            "plugins and plugins_registry writable by the node agent"
        ) from error


class _RegistrationServicer(registration_grpc.RegistrationServicer):  # type: ignore[misc]
    def __init__(self, driver: str, endpoint: Path, registered: Callable[[str], None]) -> None:
        self.driver = driver
        self.endpoint = endpoint
        self.registered = registered

    async def GetInfo(  # noqa: N802 - the interface's name
        self, request: registration.InfoRequest, context: grpc.aio.ServicerContext
    ) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin",
            name=self.driver,
            endpoint=str(self.endpoint),
            supported_versions=VERSIONS,
        )

    async def NotifyRegistrationStatus(  # noqa: N802 - the interface's name
        self, request: registration.RegistrationStatus, context: grpc.aio.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        error = "" if request.plugin_registered else request.error or "it gives no reason"
        self.registered(error)
        return registration.RegistrationStatusResponse()


class _ClaimServicer(dra_grpc.DRAPluginServicer):  # type: ignore[misc]
    def __init__(self, handler: ClaimHandler) -> None:
        self.handler = handler

    async def NodePrepareResources(  # noqa: N802 - the interface's name
        self, request: dra.NodePrepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> dra.NodePrepareResourcesResponse:
        replies = await asyncio.gather(*map(self._prepare, request.claims))
        uids = (claim.uid for claim in request.claims)
        return dra.NodePrepareResourcesResponse(claims=dict(zip(uids, replies, strict=True)))

    async def NodeUnprepareResources(  # noqa: N802 - the interface's name
        self, request: dra.NodeUnprepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> dra.NodeUnprepareResourcesResponse:
        errors = await asyncio.gather(*(self._unprepare(claim) for claim in request.claims))
        return dra.NodeUnprepareResourcesResponse(
            claims={
                claim.uid: dra.NodeUnprepareResourceResponse(error=error)
                for claim, error in zip(request.claims, errors, strict=True)
            }
        )

    async def _prepare(self, claim: dra.Claim) -> dra.NodePrepareResourceResponse:
        try:
            devices = await self.handler.prepare(_reference(claim))
        except LeaseholdError as error:
            return dra.NodePrepareResourceResponse(error=str(error))
        return dra.NodePrepareResourceResponse(devices=map(_encode_device, devices))

    async def _unprepare(self, claim: dra.Claim) -> str:
        """Return why the claim stays prepared; empty: it does not."""
        try:
            await self.handler.unprepare(_reference(claim))
        except LeaseholdError as error:
            return str(error)
        return ""


def _reference(claim: dra.Claim) -> ClaimReference:
    """Raise RequestError for what is no UID: names of files contain it."""
    if not UID.fullmatch(claim.uid):
        raise RequestError(f"{claim.uid[:UID_LENGTH]!r} is no UID of a ResourceClaim")
    return ClaimReference(
        uid=PodUid(claim.uid), namespace=Namespace(claim.namespace), name=claim.name
    )


def _encode_device(device: PreparedDevice) -> dra.Device:
    return dra.Device(
        request_names=[device.request],
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_devices,
        share_id=device.share_id or None,
    )


class _HealthServicer(health_grpc.DRAResourceHealthServicer):  # type: ignore[misc]
    def __init__(self, pool: str, source: DeviceHealthSource) -> None:
        self.pool = pool
        self.source = source

    async def NodeWatchResources(  # noqa: N802 - the interface's name
        self, request: health.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        while True:
            found = self.source.device_health()
            yield health.NodeWatchResourcesResponse(devices=map(self._encode, found))
            await self.source.wait_for_change(until_tick(HEALTH_REPEAT_S))

    def _encode(self, device: ClaimDeviceHealth) -> health.DeviceHealth:
        return health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name=self.pool, device_name=device.device),
            health=health.HEALTHY if device.healthy else health.UNHEALTHY,
            last_updated_time=int(device.checked_at),
            health_check_timeout_seconds=HEALTH_TIMEOUT_S,
            message=device.message,
        )
