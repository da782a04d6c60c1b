"""The claims of a node's pods: prepared once each, released after the last pod's containers.

A prepared claim is kept in a checkpoint, `dra_manager_state`: a kubelet that restarts does not
prepare it again.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.kubelet_api.deviceplugin import api_pb2
from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubelet_api.podresources import api_pb2 as podresources
from simcluster.apimachinery.objects import Json, at_path, list_at
from simcluster.kubelet.claims.drivers import ClaimDrivers
from simcluster.kubelet.containers.cdi_files import read_specifications
from simcluster.kubelet.containers.container_spec import ContainerSpec, PodSpec
from simcluster.kubelet.devices.kubelet_devices import AllocationError
from simcluster.kubelet.settings import replace_file
from simcluster.ports import ClusterStore


def container_edits(
    directory: Path, names: Iterable[str]
) -> api_pb2.ContainerAllocateResponse | None:
    """Return what CDI specifications add to a container for devices, or None if nothing.

    The part of a container runtime with CDI: https://github.com/cncf-tags/container-device-interface.
    Hooks are run by `Cgroups`. Raises AllocationError for a device that no specification has.
    """
    wanted = tuple(dict.fromkeys(names))
    if not wanted:
        return None
    devices = _devices(directory)
    missing = [name for name in wanted if name not in devices]
    if missing:
        raise AllocationError(f"unresolvable CDI devices {', '.join(missing)}")
    environment: dict[str, str] = {}
    mounts: list[api_pb2.Mount] = []
    nodes: list[api_pb2.DeviceSpec] = []
    for name in wanted:
        for edits in devices[name]:
            environment |= dict(entry.split("=", 1) for entry in edits.get("env") or ())
            mounts += map(_mount, edits.get("mounts") or ())
            nodes += [
                api_pb2.DeviceSpec(container_path=node["path"], host_path=node["path"])
                for node in edits.get("deviceNodes") or ()
            ]
    return api_pb2.ContainerAllocateResponse(
        envs=environment,
        mounts=mounts,
        devices=nodes,
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in wanted],
    )


def _devices(directory: Path) -> dict[str, list[Json]]:
    """Return the edits of each device in a directory, with those that its whole file adds."""
    by_driver: dict[str, list[Json]] = {}
    for specification in read_specifications(directory):
        common = [specification["containerEdits"]] if "containerEdits" in specification else []
        for device in specification["devices"]:
            name = f"{specification['kind']}={device['name']}"
            by_driver[name] = [*common, device["containerEdits"]]
    return by_driver


def _mount(mount: Json) -> api_pb2.Mount:
    return api_pb2.Mount(
        container_path=mount["containerPath"],
        host_path=mount["hostPath"],
        read_only="ro" in (mount.get("options") or ()),
    )


log = logging.getLogger(__name__)

CHECKPOINT = "dra_manager_state"
RETRY_S = 0.5
EXTENDED = ""
"""Stands for the name in the pod of the claim that serves its extended resources."""


class ClaimError(AllocationError):
    """A claim of the pod cannot be prepared yet."""


@dataclass(slots=True)
class PreparedClaimDevice:
    """A device of a prepared claim."""

    driver: str
    pool: str
    device: str
    share_id: str
    requests: list[str]


@dataclass(slots=True)
class PreparedClaim:
    """A claim that drivers have prepared."""

    uid: str
    namespace: str
    name: str
    pods: set[str] = field(default_factory=set)
    cdi_names: dict[str, list[str]] = field(default_factory=dict)
    """CDI names of the devices, by request."""
    drivers: list[str] = field(default_factory=list)
    devices: list[PreparedClaimDevice] = field(default_factory=list)


class ClaimManager:
    """The prepared claims of one kubelet, from one start to the next."""

    def __init__(
        self, directory: Path, cdi: Path, *, drivers: ClaimDrivers, store: ClusterStore
    ) -> None:
        self._path = directory / CHECKPOINT
        self._cdi = cdi
        self._drivers = drivers
        self._store = store
        self._locks: dict[str, asyncio.Lock] = {}
        self.claims: dict[str, PreparedClaim] = {}
        if self._path.exists():
            stored = msgspec.json.decode(self._path.read_bytes(), type=dict[str, PreparedClaim])
            self.claims = stored

    async def prepare(self, pod: PodSpec) -> None:
        """Prepare the claims of a pod; ClaimError with the reason if one cannot be."""
        for _, claim in self._claims_of(pod):
            await self._prepare(pod, claim)

    def has_claims(self, pod: str) -> bool:
        """Return whether claims are prepared for a pod, by uid."""
        return any(pod in claim.pods for claim in self.claims.values())

    async def release(self, pod: str) -> None:
        """Release the claims of a pod, by uid, whose containers have ended; retries until done."""
        while held := [claim for claim in self.claims.values() if pod in claim.pods]:
            for claim in held:
                try:
                    await self._release(pod, claim)
                except AllocationError as error:
                    log.info("claim %s/%s: %s", claim.namespace, claim.name, error)
            if self.has_claims(pod):
                await asyncio.sleep(RETRY_S)

    def response(
        self, pod: PodSpec, container: ContainerSpec, named: Iterable[str]
    ) -> api_pb2.ContainerAllocateResponse | None:
        """Return what CDI devices add to a container, in the form of a plugin's response.

        These are the devices of its claims, and those that its plugins have `named`.
        """
        claimed = [
            cdi_name
            for name, claim in self._claims_of(pod)
            for request in self._requests(pod, container.name, name)
            for cdi_name in self._cdi_names(claim, request)
        ]
        return container_edits(self._cdi, [*named, *claimed])

    def resources(self, pod: PodSpec, container: str) -> list[podresources.DynamicResource]:
        """Return the devices that a container has by claims, as PodResources shows them."""
        try:
            claims = list(self._claims_of(pod))
        except ClaimError:
            return []
        resources: list[podresources.DynamicResource] = []
        for name, claim in claims:
            prepared = self.claims.get(claim["metadata"]["uid"])
            wanted = self._requests(pod, container, name)
            devices = [
                podresources.ClaimResource(
                    driver_name=device.driver,
                    pool_name=device.pool,
                    device_name=device.device,
                    share_id=device.share_id or None,
                )
                for device in (prepared.devices if prepared else ())
                if {"", *device.requests} & set(wanted)
            ]
            if prepared and devices:
                resources.append(
                    podresources.DynamicResource(
                        claim_name=prepared.name,
                        claim_namespace=prepared.namespace,
                        claim_resources=devices,
                    )
                )
        return resources

    def _requests(self, pod: PodSpec, container: str, claim: str) -> Sequence[str]:
        """Return the requests of a claim that a container uses; an empty one is all of them."""
        if claim != EXTENDED:
            return _uses(pod.obj, container).get(claim, ())
        current = self._store.find("pods", pod.namespace, pod.name)
        mappings = list_at(
            current.obj if current else {}, "status.extendedResourceClaimStatus.requestMappings"
        )
        return [
            mapping["requestName"] for mapping in mappings if mapping["containerName"] == container
        ]

    def _cdi_names(self, claim: Json, request: str) -> Iterator[str]:
        prepared = self.claims.get(claim["metadata"]["uid"])
        for own, names in (prepared.cdi_names if prepared else {}).items():
            if request in {"", own}:
                yield from names

    def _claims_of(self, pod: PodSpec) -> Iterator[tuple[str, Json]]:
        """Yield the pod's claims by their name in the pod."""
        entries = list_at(pod.obj, "spec.resourceClaims")
        current = self._store.find("pods", pod.namespace, pod.name)
        path = "status.extendedResourceClaimStatus.resourceClaimName"
        extended = at_path(current.obj, path) if current else None
        if not (entries or extended):
            return
        if current is None:
            raise ClaimError(f"pod {pod.name} was deleted")
        generated: Mapping[str, str] = {
            status["name"]: status.get("resourceClaimName", "")
            for status in list_at(current.obj, "status.resourceClaimStatuses")
        }
        for entry in entries:
            name = entry.get("resourceClaimName") or generated.get(entry["name"], "")
            record = self._store.find("resourceclaims", pod.namespace, name) if name else None
            if record is None:
                raise ClaimError(f"ResourceClaim {name or entry['name']} does not exist")
            yield entry["name"], record.obj
        if extended:
            record = self._store.find("resourceclaims", pod.namespace, str(extended))
            if record is None:
                raise ClaimError(f"ResourceClaim {extended} does not exist")
            yield EXTENDED, record.obj

    async def _prepare(self, pod: PodSpec, claim: Json) -> None:
        meta = claim["metadata"]
        reserved = {consumer.get("uid") for consumer in list_at(claim, "status.reservedFor")}
        if pod.uid not in reserved:
            raise ClaimError(f"ResourceClaim {meta['name']} is not reserved for the pod")
        async with self._locks.setdefault(meta["uid"], asyncio.Lock()):
            prepared = self.claims.get(meta["uid"])
            if prepared is None:
                prepared = PreparedClaim(meta["uid"], meta["namespace"], meta["name"])
                results = list_at(claim, "status.allocation.devices.results")
                for driver in sorted({str(result["driver"]) for result in results}):
                    await self._call(prepared, driver)
                self.claims[prepared.uid] = prepared
            prepared.pods.add(pod.uid)
            self._save()

    async def _call(self, claim: PreparedClaim, driver: str) -> None:
        try:
            devices = await self._drivers.prepare(driver, _reference(claim))
        except AllocationError as error:
            raise ClaimError(str(error)) from error
        claim.drivers.append(driver)
        for device in devices:
            for request in device.request_names:
                names = claim.cdi_names.setdefault(request, [])
                names += device.cdi_device_ids
            claim.devices.append(
                PreparedClaimDevice(
                    driver,
                    device.pool_name,
                    device.device_name,
                    device.share_id,
                    list(device.request_names),
                )
            )

    async def _release(self, pod: str, claim: PreparedClaim) -> None:
        async with self._locks.setdefault(claim.uid, asyncio.Lock()):
            if claim.pods == {pod}:
                for driver in claim.drivers:
                    await self._drivers.unprepare(driver, _reference(claim))
                self.claims.pop(claim.uid, None)
                self._locks.pop(claim.uid, None)
            claim.pods.discard(pod)
            self._save()

    def _save(self) -> None:
        replace_file(self._path, msgspec.json.encode(self.claims))


def _reference(claim: PreparedClaim) -> dra.Claim:
    return dra.Claim(namespace=claim.namespace, uid=claim.uid, name=claim.name)


def _uses(pod: Json, container: str) -> dict[str, list[str]]:
    """Return the requests that a container uses, by claim; an empty one is all of them."""
    spec = next(
        each
        for each in [*list_at(pod, "spec.initContainers"), *list_at(pod, "spec.containers")]
        if each["name"] == container
    )
    uses: dict[str, list[str]] = {}
    for entry in at_path(spec, "resources.claims") or ():
        uses.setdefault(entry["name"], []).append(entry.get("request", ""))
    return uses
