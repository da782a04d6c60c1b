"""Writes the node's ResourceSlice, and writes it again whenever it differs from what it should be.

A kubelet that starts deletes all slices of its node, and those of a driver that is away for 30 s.
An API server whose feature gates are disabled drops fields without an error: such a slice would
promise devices without the guard of the ledger, and is deleted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import msgspec

from services.node_agent.dra.slices import (
    ClaimableNode,
    HeldAllocation,
    build_slice,
    find_dropped_fields,
    is_current,
    slice_name,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.known_objects import ListSynced, ObjectDeleted, newer
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ObjectMeta
from shared.model.claim import DRIVER
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

COLLECTION = "/apis/resource.k8s.io/v1/resourceslices"
DEBOUNCE_S = 0.2
RETRY_S = 1.0
UNSUPPORTED_RETRY_S = 60.0
"""Before slices are written again to a cluster that does not support them."""

ListDeallocated = Callable[[], Awaitable[Collection[HeldAllocation]]]
"""Returns the allocations that leases on the node are for, and that claims no longer have."""


class StoredSlice(msgspec.Struct, frozen=True):
    """A ResourceSlice as stored."""

    metadata: ObjectMeta = ObjectMeta()
    spec: dict[str, Any] = {}


class _NodeIdentity(msgspec.Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class UnsupportedError(RequestError):
    """The cluster does not serve ResourceSlices, or not with the fields that we need."""


class SliceWriter:
    """Writes the slice of one node."""

    def __init__(
        self,
        client: KubernetesClient,
        node: NodeName,
        *,
        get_node: Callable[[str], ClaimableNode | None],
        list_deallocated: ListDeallocated,
        clock: Clock,
    ) -> None:
        self.client = client
        self.node = node
        self.get_node = get_node
        """Returns the node with this UID as it is now; None: its devices are not known yet."""
        self.list_deallocated = list_deallocated
        self.clock = clock
        self.path = f"{COLLECTION}/{quote(slice_name(node), safe='')}"
        self.unwritten_reason: str | None = "the ResourceSlice has not been written yet"
        """Why the slice is not as it should be; None: it is."""
        self._deallocated: Collection[HeldAllocation] = ()
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stored: StoredSlice | None = None
        self._node_uid = ""

    def request(self) -> None:
        """Compare the slice soon: devices, leases or the kubelet's registration have changed."""
        self._due.set()

    def write_anew(self) -> None:
        """Write the slice soon, whatever was stored: a kubelet that starts deletes it."""
        self._stored = None
        self._node_uid = ""  # the node may have been registered anew, too
        self.request()

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._write_changes())

    async def write_now(self) -> str:
        """Write the slice for the leases that are known; return why it was not, or nothing.

        What claims hold without an allocation, which the scheduler does not know, is left out of
        it until their leases have ended.
        """
        try:
            self._deallocated = await self.list_deallocated()
            await self._write()
        except LeaseholdError as error:
            return str(error)
        return ""

    async def _write_changes(self) -> None:
        self._due.set()
        while True:
            await self._due.wait()
            await self.clock.sleep(DEBOUNCE_S)
            self._due.clear()
            try:
                await self._write()
            except LeaseholdError as error:
                if self.unwritten_reason != str(error):
                    logger.warning("the ResourceSlice is not written: %s", error)
                self.unwritten_reason = str(error)
                unsupported = isinstance(error, UnsupportedError)
                await self.clock.sleep(UNSUPPORTED_RETRY_S if unsupported else RETRY_S)
                self._due.set()

    async def _write(self) -> None:
        async with self._writing:
            node = self.get_node(await self._read_node_uid())
            if node is None:
                raise UnavailableError("the node's GPUs or its leases are not known yet")
            stored = self._stored
            generation = (stored.spec["pool"]["generation"] if stored else 0) + 1
            wanted = build_slice(node, generation=generation, deallocated=self._deallocated)
            if stored is None or not is_current(wanted["spec"], stored.spec):
                self._stored = await self._put(wanted)
            self.unwritten_reason = None

    async def _put(self, wanted: dict[str, Any]) -> StoredSlice:
        """Create or change the slice; return it as stored, if that is what was written."""
        stored = await self._create_or_change(wanted)
        dropped = find_dropped_fields(wanted["spec"], stored.spec)
        if dropped:
            self._stored = None
            with contextlib.suppress(NotFoundError):
                await self.client.delete(self.path)
            raise UnsupportedError(
                f"the API server has dropped {', '.join(sorted(dropped))} of the devices: enable "
                "the feature gates DRAConsumableCapacity, DRADeviceBindingConditions and "
                "DRADeviceTaints (on by default from Kubernetes 1.36), or set dra to off"
            )
        return stored

    async def _create_or_change(self, wanted: dict[str, Any]) -> StoredSlice:
        if self._stored is None:
            try:
                return await self._create(wanted)
            except KubernetesConflictError:  # of an earlier run of the agent
                found = await self.client.read(self.path, StoredSlice)
                if is_current(wanted["spec"], found.spec):
                    return found
                wanted["spec"]["pool"]["generation"] = found.spec["pool"]["generation"] + 1
        changes = {"metadata": wanted["metadata"], "spec": wanted["spec"]}
        try:
            return await self.client.patch_merge(self.path, changes, StoredSlice)
        except NotFoundError:  # the kubelet has just deleted it
            return await self._create(wanted)

    async def _create(self, wanted: dict[str, Any]) -> StoredSlice:
        try:
            return await self.client.create(COLLECTION, wanted, StoredSlice)
        except NotFoundError as error:
            raise UnsupportedError(
                "the API server does not serve resource.k8s.io/v1, which ResourceClaims need: "
                "Kubernetes 1.36 does; set dra to off on older clusters"
            ) from error

    async def _read_node_uid(self) -> str:
        if not self._node_uid:
            path = f"/api/v1/nodes/{quote(self.node, safe='')}"
            self._node_uid = (await self.client.read(path, _NodeIdentity)).metadata.uid
        return self._node_uid

    async def _watch(self) -> None:
        """Notice when the kubelet, or somebody, deletes or changes the slice."""
        while True:
            reflector = Reflector(
                self.client,
                COLLECTION,
                StoredSlice,
                field_selector=f"spec.driver={DRIVER},spec.nodeName={self.node}",
            )
            try:
                async with aclosing(reflector.batches()) as batches:
                    async for batch in batches:
                        for change in batch:
                            if not isinstance(change, ListSynced):
                                deleted = isinstance(change, ObjectDeleted)
                                self._observe(change.item, deleted=deleted)
            except RequestError as error:
                logger.debug("ResourceSlices are not watched: %s", error)
            await self.clock.sleep(UNSUPPORTED_RETRY_S)

    def _observe(self, found: StoredSlice | None, *, deleted: bool) -> None:
        if found is None or found.metadata.name != slice_name(self.node):
            return
        known = self._stored.metadata if self._stored else ObjectMeta()
        if deleted:
            if known.uid == found.metadata.uid:
                self.write_anew()
        elif known.uid != found.metadata.uid or newer(
            found.metadata.resource_version, known.resource_version
        ):
            self._stored = found
            self.request()
