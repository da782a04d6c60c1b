"""The DRA driver's gRPC servers: registration, claims and health.

https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc

from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.kubelet.device_plugin import check_socket
from services.node_agent.node import Node
from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubelet_api.dra import api_pb2_grpc as dra_grpc
from shared.kubelet_api.dra_health import api_pb2 as health
from shared.kubelet_api.dra_health import api_pb2_grpc as health_grpc
from shared.kubelet_api.plugin_registration import api_pb2 as registration
from shared.kubelet_api.plugin_registration import api_pb2_grpc as registration_grpc
from shared.model.clock import until_tick, wait_for_event
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import LeaseHolder
from shared.model.names import Namespace, PodUid
from shared.model.requests.claim import DRIVER, claimable

logger = logging.getLogger(__name__)

VERSIONS = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
UID_LENGTH = 64
UID = re.compile(rf"[A-Za-z0-9-]{{1,{UID_LENGTH}}}")
UNREGISTERED = "the kubelet has not registered the DRA driver"
LOOK_S = 1.0
"""Interval of checks of both sockets."""
HEALTH_REPEAT_S = 10.0
"""Interval of updates of the devices' health."""
HEALTH_TIMEOUT_S = 30
"""After this time without an update the kubelet shows a device's health as unknown."""


class ClaimPlugin(
    registration_grpc.RegistrationServicer,  # type: ignore[misc]
    dra_grpc.DRAPluginServicer,  # type: ignore[misc]
    health_grpc.DRAResourceHealthServicer,  # type: ignore[misc]
):
    def __init__(
        self,
        node: Node,
        kubelet_directory: Path,
        preparation: ClaimPreparation,
        *,
        on_registered: Callable[[], None],
    ) -> None:
        self.node = node
        self.endpoint = kubelet_directory / "plugins" / DRIVER / "dra.sock"
        self.registration_socket = kubelet_directory / "plugins_registry" / f"{DRIVER}-reg.sock"
        self.preparation = preparation
        self.on_registered = on_registered
        self.unregistered_reason: str | None = UNREGISTERED
        """None while the driver is registered."""
        for socket in (self.endpoint, self.registration_socket):
            check_socket(socket)

    async def run(self) -> None:
        while True:
            try:
                await self._serve()
            except UnavailableError as error:
                self.unregistered_reason = str(error)
                logger.warning("the DRA driver is not served: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _serve(self) -> None:
        server = grpc.aio.server()
        dra_grpc.add_DRAPluginServicer_to_server(self, server)
        health_grpc.add_DRAResourceHealthServicer_to_server(self, server)
        registration_grpc.add_RegistrationServicer_to_server(self, server)
        sockets = (self.endpoint, self.registration_socket)  # the kubelet looks for the latter
        try:
            for socket in sockets:
                _listen(server, socket)
            await server.start()
            while all(socket.exists() for socket in sockets):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(until_tick(LOOK_S))
            logger.warning("the DRA driver is served on new sockets: one was removed")
        finally:
            self.unregistered_reason = UNREGISTERED
            for socket in reversed(sockets):
                with contextlib.suppress(OSError):
                    socket.unlink(missing_ok=True)
            await asyncio.shield(server.stop(None))

    async def GetInfo(  # noqa: N802 - the interface's name
        self, request: registration.InfoRequest, context: grpc.aio.ServicerContext
    ) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=str(self.endpoint),
            supported_versions=VERSIONS,
        )

    async def NotifyRegistrationStatus(  # noqa: N802 - the interface's name
        self, request: registration.RegistrationStatus, context: grpc.aio.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        if request.plugin_registered:
            self.unregistered_reason = None
            logger.info("the kubelet has registered the DRA driver %s", DRIVER)
            self.on_registered()
        else:
            self.unregistered_reason = request.error or "it gives no reason"
            logger.error(
                "the kubelet does not register the DRA driver: %s", self.unregistered_reason
            )
        return registration.RegistrationStatusResponse()

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
            devices = await self.preparation.prepare(_reference(claim))
        except LeaseholdError as error:
            return dra.NodePrepareResourceResponse(error=str(error))
        return dra.NodePrepareResourceResponse(devices=devices)

    async def _unprepare(self, claim: dra.Claim) -> str:
        try:
            await self.preparation.unprepare(_reference(claim))
        except LeaseholdError as error:
            return str(error)
        return ""

    async def NodeWatchResources(  # noqa: N802 - the interface's name
        self, request: health.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        changed = asyncio.Event()
        self.node.on_devices.append(changed.set)
        try:
            while True:
                changed.clear()
                yield health.NodeWatchResourcesResponse(devices=self._devices())
                await wait_for_event(changed, until_tick(HEALTH_REPEAT_S))
        finally:
            self.node.on_devices.remove(changed.set)

    def _devices(self) -> Iterator[health.DeviceHealth]:
        for device in self.node.devices:
            for name in claimable(device):
                yield health.DeviceHealth(
                    device=health.DeviceIdentifier(pool_name=self.node.name, device_name=name),
                    health=health.HEALTHY if device.healthy else health.UNHEALTHY,
                    last_updated_time=int(self.node.clock.now()),
                    health_check_timeout_seconds=HEALTH_TIMEOUT_S,
                    message="" if device.healthy else device.health_text,
                )


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


def _reference(claim: dra.Claim) -> LeaseHolder:
    """Names of files contain the UID."""
    if not UID.fullmatch(claim.uid):
        raise RequestError(f"{claim.uid[:UID_LENGTH]!r} is no UID of a ResourceClaim")
    return LeaseHolder(
        pod=PodUid(claim.uid), namespace=Namespace(claim.namespace), name=claim.name, claim=True
    )
