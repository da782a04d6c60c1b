"""The DRA drivers of one node: found by their sockets, called for claims.

As in a real kubelet, a driver's registration socket in `plugins_registry` makes the kubelet request
its information, and call it on the socket that this names. The ResourceSlices of a driver that is
away for 30 s are deleted, and all of the node's when the kubelet starts.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubelet_api.dra import api_pb2_grpc as dra_grpc
from shared.kubelet_api.plugin_registration import api_pb2 as registration
from shared.kubelet_api.plugin_registration import api_pb2_grpc as registration_grpc
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import at_path, name_of
from simcluster.kubelet.devices.kubelet_devices import AllocationError
from simcluster.ports import ClusterStore

log = logging.getLogger(__name__)

LOOK_S = 0.1
CALL_S = 45.0
"""Time limit of one call."""
AWAY_S = 30.0
SERVICE = "v1.DRAPlugin"
_OPTIONS = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
SocketIdentity = tuple[int, int]


class ClaimDrivers:
    """The registered drivers, from one start of the kubelet to the next."""

    def __init__(self, node: str, directory: Path, store: ClusterStore) -> None:
        self._node = node
        self._directory = directory
        self._store = store
        self._endpoints: dict[str, str] = {}
        self._sockets: dict[Path, tuple[SocketIdentity, str]] = {}
        self._away: dict[str, float] = {}

    async def run(self) -> None:
        """Find drivers until cancelled."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.delete_slices()
        while True:
            registered = {
                path: identity
                for path in self._directory.glob("*.sock")
                if (identity := _identity(path)) is not None
            }
            for path, (identity, name) in list(self._sockets.items()):
                if registered.get(path) != identity:
                    del self._sockets[path]
                    self._endpoints.pop(name, None)
                    self._away[name] = time.monotonic()
            for path in registered.keys() - self._sockets.keys():
                await self._register(path, registered[path])
            for name, since in list(self._away.items()):
                if time.monotonic() - since > AWAY_S:
                    del self._away[name]
                    self.delete_slices(name)
            await asyncio.sleep(LOOK_S)

    def delete_slices(self, driver: str | None = None) -> None:
        """Delete the node's slices: those of one driver, or all."""
        for resource_slice in self._store.list(
            "resourceslices", fields=f"spec.nodeName={self._node}"
        ):
            if driver in {None, at_path(resource_slice, "spec.driver")}:
                try:
                    self._store.delete("resourceslices", None, name_of(resource_slice))
                except ApiError as error:
                    log.info("slice %s: %s", name_of(resource_slice), error)

    async def _register(self, path: Path, identity: SocketIdentity) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
            stub = registration_grpc.RegistrationStub(channel)
            try:
                info = await stub.GetInfo(registration.InfoRequest(), timeout=1)
                registered = info.type == "DRAPlugin" and SERVICE in info.supported_versions
                error = "" if registered else f"no version of {info.type} is supported"
                if registered:
                    self._sockets[path] = identity, info.name
                    self._endpoints[info.name] = info.endpoint
                    self._away.pop(info.name, None)
                status = registration.RegistrationStatus(plugin_registered=registered, error=error)
                await stub.NotifyRegistrationStatus(status, timeout=1)
            except grpc.aio.AioRpcError as failure:
                log.debug("registering %s: %s", path, failure.details())

    async def prepare(self, driver: str, claim: dra.Claim) -> Sequence[dra.Device]:
        """Prepare a claim; raises AllocationError with the driver's message."""
        request = dra.NodePrepareResourcesRequest(claims=[claim])
        async with self._channel(driver) as channel:
            try:
                answer = await dra_grpc.DRAPluginStub(channel).NodePrepareResources(
                    request, timeout=CALL_S
                )
            except grpc.aio.AioRpcError as error:
                raise AllocationError(str(error.details())) from error
        if claim.uid not in answer.claims or answer.claims[claim.uid].error:
            detail = answer.claims[claim.uid].error or "the driver's answer lacks it"
            raise AllocationError(
                f"NodePrepareResources failed for ResourceClaim {claim.name}: {detail}"
            )
        return tuple(answer.claims[claim.uid].devices)

    async def unprepare(self, driver: str, claim: dra.Claim) -> None:
        """Unprepare a claim; raises AllocationError with the driver's message."""
        request = dra.NodeUnprepareResourcesRequest(claims=[claim])
        async with self._channel(driver) as channel:
            try:
                answer = await dra_grpc.DRAPluginStub(channel).NodeUnprepareResources(
                    request, timeout=CALL_S
                )
            except grpc.aio.AioRpcError as error:
                raise AllocationError(str(error.details())) from error
        if answer.claims[claim.uid].error:
            raise AllocationError(
                f"NodeUnprepareResources failed for ResourceClaim {claim.name}: "
                f"{answer.claims[claim.uid].error}"
            )

    def _channel(self, driver: str) -> grpc.aio.Channel:
        endpoint = self._endpoints.get(driver)
        if endpoint is None:
            raise AllocationError(f"DRA driver {driver} is not registered")
        return grpc.aio.insecure_channel(f"unix:{endpoint}", options=_OPTIONS)


def _identity(path: Path) -> SocketIdentity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
