"""Writes the node's ResourceSlices, again whenever they are not as they should be.

A kubelet that starts deletes all slices of its node. An API server whose feature gates are disabled
drops fields without an error: such a slice would promise devices without the guard of the ledger,
so a dry run comes first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from services.node_agent.dra.resource_claims import list_deallocated
from services.node_agent.dra.slices import (
    GROUPS,
    ClaimableNode,
    HeldAllocation,
    build_slices,
    find_dropped_fields,
    groups_trial,
    is_current,
)
from services.node_agent.node import Node
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.known_objects import Named, newer
from shared.kubernetes.paths import node_path
from shared.kubernetes.reflector import follow
from shared.kubernetes.types import ApiObject, ObjectMeta, RawObject
from shared.model.clock import until_tick
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.requests.claim import DRIVER, TaintEffect

logger = logging.getLogger(__name__)

COLLECTION = "/apis/resource.k8s.io/v1/resourceslices"
DEBOUNCE_S = 0.2
"""Changes of devices within this time are written together."""
RETRY_S = 1.0
"""Pause before slices are written again after an error."""
RECHECK_S = 2.0
"""Interval of comparisons between devices and slices."""
LISTED = 500
GROUP_FIELDS = {GROUPS, "consumesCounters"}
"""Dropped by an API server that does not store compatibility groups."""
UNSUPPORTED_RETRY_S = 60.0
"""Pause before slices are written again to a cluster that does not support them."""


class UnsupportedError(RequestError):
    """The cluster does not serve ResourceSlices, or not with the required fields."""


class SliceWriter:
    def __init__(
        self,
        node: Node,
        *,
        taint_effect: TaintEffect,
        least_share_mib: int,
    ) -> None:
        self.node = node
        self.client = node.kubernetes
        self.taint_effect = taint_effect
        self.least_share_mib = least_share_mib
        self.clock = node.clock
        self.selector = f"spec.driver={DRIVER},spec.nodeName={node.name}"
        self.unwritten_reason: str | None = "the ResourceSlices have not been written yet"
        self._deallocated: Collection[HeldAllocation] = ()
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stored: dict[str, RawObject] | None = None
        """None if they must be listed."""
        self._deleted: set[str] = set()
        self._node_uid = ""
        self._has_groups: bool | None = None
        """None until a dry run has shown whether the API server stores compatibility groups."""

    def request(self) -> None:
        self._due.set()

    def write_anew(self) -> None:
        """A kubelet that starts deletes the slices."""
        self._stored = None
        self._node_uid = ""  # the node may have been registered anew, too
        self._has_groups = None
        self.request()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._write_changes())
            group.create_task(self._recheck_deallocated())

    async def write_now(self, *, renewed: bool = False) -> str:
        """Return why the slices are not written, or an empty text.

        If `renewed`, they get a higher generation in any case.
        """
        try:
            self._deallocated = await list_deallocated(self.node)
            await self._write(renewed=renewed)
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
                    logger.warning("the ResourceSlices are not written: %s", error)
                self.unwritten_reason = str(error)
                unsupported = isinstance(error, UnsupportedError)
                await self.clock.sleep(UNSUPPORTED_RETRY_S if unsupported else RETRY_S)
                self._due.set()

    async def _recheck_deallocated(self) -> None:
        while True:
            await self.clock.sleep(until_tick(RECHECK_S))
            if self._deallocated:
                with contextlib.suppress(LeaseholdError):
                    self._deallocated = await list_deallocated(self.node)
                    self.request()

    async def _write(self, *, renewed: bool = False) -> None:
        async with self._writing:
            node = self._claimable_node(await self._read_node_uid())
            node = replace(node, has_groups=await self._may_use_groups(node))
            if self._stored is None:
                self._stored = await self._list()
            generations = {stored.spec["pool"]["generation"] for stored in self._stored.values()}
            wanted = {
                built["metadata"]["name"]: built
                for built in build_slices(
                    node, generation=max(generations, default=0) + 1, deallocated=self._deallocated
                )
            }
            if renewed or len(generations) != 1 or not _are_current(wanted, self._stored):
                await self._replace(wanted, self._stored)
            self.unwritten_reason = None

    async def _may_use_groups(self, node: ClaimableNode) -> bool:
        trial = groups_trial(node)
        if trial is None:
            return False
        if self._has_groups is None:
            stored = await self.client.create(f"{COLLECTION}?dryRun=All", trial, RawObject)
            self._has_groups = not find_dropped_fields(trial["spec"], stored.spec) & GROUP_FIELDS
        return self._has_groups

    def _claimable_node(self, uid: str) -> ClaimableNode:
        if not (self.node.devices and self.node.leases.synced):
            raise UnavailableError("the node's GPUs or its leases are not known yet")
        return ClaimableNode(
            name=self.node.name,
            uid=uid,
            devices=self.node.devices,
            leases=tuple(self.node.leases.leases.values()),
            driver_version=self.node.software.driver_version,
            taint_effect=self.taint_effect,
            least_share_mib=self.least_share_mib,
        )

    async def _list(self) -> dict[str, RawObject]:
        query = {"fieldSelector": self.selector}
        try:
            page = await self.client.list_page(COLLECTION, query=query, limit=LISTED)
        except NotFoundError as error:
            raise UnsupportedError(
                "the API server does not serve resource.k8s.io/v1, which ResourceClaims need: "
                "Kubernetes 1.36 does; set dra to off on older clusters"
            ) from error
        return {stored.metadata.name: stored for stored in page.read(RawObject)}

    async def _replace(
        self, wanted: Mapping[str, dict[str, Any]], stored: Mapping[str, RawObject]
    ) -> None:
        self._stored = None
        self._deleted.clear()
        written: dict[str, RawObject] = {}
        for name, slice_ in wanted.items():
            try:
                written[name] = await self._write_one(slice_, exists=name in stored)
            except UnsupportedError:
                self._has_groups = None
                await self._delete({*stored, *wanted})
                raise
        await self._delete(stored.keys() - wanted.keys())
        self._stored = written
        if self._deleted & {slice_.metadata.uid for slice_ in written.values()}:
            self.write_anew()

    async def _write_one(self, wanted: dict[str, Any], *, exists: bool) -> RawObject:
        if exists:
            path = slice_path(wanted["metadata"]["name"])
            changes = {"metadata": wanted["metadata"], "spec": wanted["spec"]}
            with contextlib.suppress(NotFoundError):  # the kubelet has just deleted it
                stored = await self.client.patch_merge(path, changes, RawObject)
                return _complete(stored, wanted)
        rehearsed = await self.client.create(f"{COLLECTION}?dryRun=All", wanted, RawObject)
        _complete(rehearsed, wanted)
        return _complete(await self.client.create(COLLECTION, wanted, RawObject), wanted)

    async def _delete(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            with contextlib.suppress(NotFoundError):
                await self.client.delete(slice_path(name))

    async def _read_node_uid(self) -> str:
        if not self._node_uid:
            node = await self.client.read(node_path(self.node.name), ApiObject)
            self._node_uid = node.metadata.uid
        return self._node_uid

    async def _watch(self) -> None:
        retry_s = UNSUPPORTED_RETRY_S
        selector = self.selector
        changes = follow(
            self.client, COLLECTION, RawObject, retry_s=retry_s, field_selector=selector
        )
        async with aclosing(changes) as batches:
            async for batch in batches:
                for named, item in batch.changed:
                    if item is None:
                        self._observe_deleted(named)
                    else:
                        self._observe(item)
                if batch.restored:
                    self.write_anew()
                if batch.refusal is not None:
                    logger.debug("ResourceSlices are not watched: %s", batch.refusal)

    def _observe(self, changed: RawObject) -> None:
        if self._stored is None:
            return
        name = changed.metadata.name
        stored = self._stored[name].metadata if name in self._stored else ObjectMeta()
        if stored.uid != changed.metadata.uid or newer(
            changed.metadata.resource_version, stored.resource_version
        ):
            self._stored[name] = changed
            self.request()

    def _observe_deleted(self, deleted: Named) -> None:
        self._deleted.add(deleted.uid)
        stored = (self._stored or {}).get(deleted.name)
        if stored is not None and stored.metadata.uid == deleted.uid:
            self.write_anew()


def slice_path(name: str) -> str:
    return f"{COLLECTION}/{quote(name, safe='')}"


def _complete(stored: RawObject, wanted: Mapping[str, Any]) -> RawObject:
    dropped = find_dropped_fields(wanted["spec"], stored.spec)
    if not dropped:
        return stored
    raise UnsupportedError(
        f"the API server has dropped {', '.join(sorted(dropped))} of the devices: enable the "
        "feature gates DRAConsumableCapacity, DRADeviceBindingConditions and DRADeviceTaints (on "
        "by default from Kubernetes 1.36), or set dra to off"
    )


def _are_current(wanted: Mapping[str, Mapping[str, Any]], stored: Mapping[str, RawObject]) -> bool:
    return wanted.keys() == stored.keys() and all(
        is_current(slice_["spec"], stored[name].spec) for name, slice_ in wanted.items()
    )
