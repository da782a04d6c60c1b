"""A small kubelet: it admits pods one after the other, runs their containers and ends them."""

import asyncio
import contextlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.node_agent.kubelet.pods import (
    Holding,
    KubeletContainer,
    KubeletPod,
    PodResources,
    RunningPods,
)
from shared.dialects.hami_core import MEMORY_LIMIT
from shared.model.claim import DRIVER, LEASED, device_name
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import LeaseHolder
from shared.model.lease_copy import lease_outline
from shared.model.names import DeviceUuid, PodUid
from tests.model.api_server import NAMESPACE, Pod
from tests.model.claims import REQUEST, Claim
from tests.model.mig import parse_instance
from tests.support.build import TRIGGER

if TYPE_CHECKING:
    from tests.model.node import Node

CONTAINER = "main"


@dataclass(slots=True)
class KubeletRecord:
    """A pod that the kubelet has admitted, or is admitting."""

    pod: Pod | Claim
    """Or a claim, which counts once for all containers that use it."""
    device_ids: tuple[str, ...] = ()
    given: Mapping[str, str] | None = None
    """The environment of its container, which runs, with its limits now, or None."""
    stopped: bool = False
    """Its container ran, and starts again."""
    has_restarted: bool = False
    generation: str = ""
    """Of the claim's allocation."""
    device: str = ""
    """The UUID of the device that its container was given a part of."""
    used_mib: int = 0
    started_s: float = 0.0
    """When the kubelet had its devices, on the monotonic clock."""

    @property
    def visible(self) -> str:
        """The UUID of the device or MIG instance that its running container sees."""
        return (self.given or {}).get("NVIDIA_VISIBLE_DEVICES", "")


def limit_mib(record: KubeletRecord) -> int:
    """Return what a running container may use at most."""
    instance = parse_instance(record.visible)
    if instance is not None:
        return instance.memory_mib
    return int((record.given or {})[f"{MEMORY_LIMIT}_0"].removesuffix("m"))


class Kubelet:
    """Admits bound pods one after the other, runs their containers and ends them."""

    unreadable_reason = ""
    is_passing = False

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.records: dict[PodUid, KubeletRecord] = {}
        self.claims: dict[PodUid, KubeletRecord] = {}
        """Prepared claims."""
        self.ended: set[PodUid] = set()
        self.stuck: set[PodUid] = set()
        """Pods with a process that cannot be killed."""
        self.left: dict[PodUid, KubeletRecord] = {}
        """Those of them that have ended: the process still uses the device."""
        self.admission: asyncio.Task[None] | None = None
        self._claims_changing = asyncio.Lock()

    def sync(self) -> None:
        """End what the API server has no more, and begin to admit what it has bound."""
        self.end_deleted()
        self.end_late()
        self.node.spawn(self._sync_claims())
        if self.admission is not None and self.admission.done() and not self.admission.cancelled():
            self.admission.result()  # a bug of the product ends the run
        if self.admission is None or self.admission.done():
            self.admission = self.node.clock.loop.create_task(self._admit())

    def end_deleted(self) -> None:
        for uid in list(self.records):
            if self.node.api.find(uid) is None:
                self.end(uid)
        for pod in list(self.node.api.pods.values()):
            if pod.node == self.node.name and pod.deleting:
                if pod.uid in self.records:
                    self.end(pod.uid)
                self.node.api.finish_deleted(pod)

    def end_late(self) -> None:
        """End pods that have run for as long as they may."""
        for uid, record in list(self.records.items()):
            longest = record.pod.request.term.max_run_s if isinstance(record.pod, Pod) else None
            ran_s = self.node.clock.ticks() - record.started_s
            if record.device_ids and longest is not None and ran_s >= longest:
                self.end(uid, "Failed")

    def end(self, uid: PodUid, phase: str = "") -> None:
        """End the pod's container; with a `phase`, report it."""
        record = self.records.pop(uid)
        self.ended.add(uid)
        if uid in self.stuck and record.given is not None:
            self.left[uid] = record
        if phase and isinstance(record.pod, Pod):
            self.node.api.finish(record.pod, phase)

    def abort_admission(self) -> None:
        """Fail the pod that is being admitted: its Allocate got no reply."""
        if self.admission is not None:
            self.admission.cancel()
        for uid, record in list(self.records.items()):
            if record.given is None and not record.stopped:
                self.end(uid, "Failed")

    def fail_users(self, device: DeviceUuid) -> None:
        """Fail the containers of a device that is gone."""
        self.abort_admission()
        self.end_processes(device)
        for uid, record in list(self.records.items()):
            if record.device == device:
                self.end(uid, "Failed")
        self.node.claims.fail_users(device)
        for record in self.claims.values():
            if record.device == device:
                record.given = None

    def stop(self, uid: PodUid) -> None:
        """Stop the pod's container, which starts again by the pod's restart policy."""
        record = self.records[uid]
        record.stopped, record.given, record.used_mib = True, None, 0

    def stop_users(self, device: DeviceUuid) -> None:
        """Stop the containers of a device that is reset."""
        self.abort_admission()
        self.end_processes(device)
        for uid, record in self.records.items():
            if record.device == device:
                self.stop(uid)

    async def _sync_claims(self) -> None:
        """Unprepare claims without pods, and prepare what the binder has leased."""
        async with self._claims_changing:
            for record in list(self.claims.values()):
                claim = record.pod
                assert isinstance(claim, Claim)
                if not claim.consumers or claim.ending or claim.generation != record.generation:
                    await self._unprepare(record, claim)
            for claim in list(self.node.claims.stored.values()):
                ready = claim.node == self.node.name and claim.answer == LEASED
                if ready and claim.consumers and claim.uid not in self.claims:
                    await self._prepare(claim)

    async def _unprepare(self, record: KubeletRecord, claim: Claim) -> None:
        record.given = None
        with contextlib.suppress(LeaseholdError):
            await self.node.agent.preparation.unprepare(_reference(claim))
            del self.claims[claim.uid]
            if claim.ending:
                claim.ending = False
                self.node.claims.remove_consumer(claim)

    async def _prepare(self, claim: Claim) -> None:
        generation = claim.generation
        try:
            devices = await self.node.agent.preparation.prepare(_reference(claim))
        except LeaseholdError as error:
            self.node.note(f"kubelet {self.node.name} cannot prepare {claim.uid}: {error}")
            return
        record = self.claims[claim.uid] = KubeletRecord(claim, generation=generation)
        entry = self.node.agent.checkpoint.find(claim.uid, REQUEST, DRIVER)
        if entry is None or claim.generation != generation or not claim.consumers:
            return
        named = {device_name(device.uuid): device.uuid for device in self.node.devices}
        record.device = named[devices[0].device_name]
        record.given = {**entry.limits.environment, "NVIDIA_VISIBLE_DEVICES": record.device}
        self.node.on_given(self.node.name, record)

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        container = KubeletContainer(name=CONTAINER, limits={TRIGGER: 1})
        return tuple(
            KubeletPod(
                uid=uid,
                namespace=NAMESPACE,
                name=record.pod.name,
                phase="Running" if record.given or record.stopped else "Pending",
                containers=(container,),
                leased_at=lease_outline(record.pod.lease).created_at,
            )
            for uid, record in self.records.items()
            if isinstance(record.pod, Pod)
        )

    async def find_running(self) -> RunningPods:
        given = {uid for uid, record in self.records.items() if record.given is not None}
        return RunningPods(processes={uid: {CONTAINER} for uid in given | self.left.keys()})

    async def list_running(self) -> Set[PodUid]:
        return (await self.find_running()).uids

    async def list_processes(self) -> Mapping[int, PodUid]:
        return dict(enumerate(sorted((await self.find_running()).uids)))

    def end_processes(self, device: DeviceUuid | None = None) -> None:
        """End what is left of ended pods: all, or what uses a device."""
        self.stuck.clear()
        for uid, record in list(self.left.items()):
            if device in {None, record.device}:
                del self.left[uid]

    async def list_holdings(self) -> PodResources:
        return PodResources(
            holdings=tuple(
                Holding(NAMESPACE, r.pod.name, CONTAINER, TRIGGER, frozenset(r.device_ids))
                for r in self.records.values()
                if r.device_ids
            ),
            pods=frozenset((NAMESPACE, r.pod.name) for r in self.records.values()),
        )

    async def _admit(self) -> None:
        await self._start_again()
        for pod in list(self.node.api.pods.values()):
            waits = pod.node == self.node.name and not (pod.is_terminal or pod.deleting)
            if waits and pod.uid not in self.records and pod.uid not in self.ended:
                record = self.records[pod.uid] = KubeletRecord(pod)
                try:
                    await self._allocate(record)
                except LeaseholdError as error:
                    self.node.note(f"kubelet {self.node.name} fails pod {pod.uid}: {error}")
                    self.node.on_refused(self.node.name, pod, str(error))
                    if pod.uid in self.records:
                        self.end(pod.uid, "Failed")

    async def _start_again(self) -> None:
        for uid, record in list(self.records.items()):
            if not record.stopped:
                continue
            try:
                await self.node.agent.handler.pre_start_container(TRIGGER, record.device_ids)
            except LeaseholdError as error:
                self.node.note(f"kubelet {self.node.name} does not start {uid} again: {error}")
                continue
            entry = self.node.agent.checkpoint.find(uid, CONTAINER, TRIGGER)
            if self.records.get(uid) is record and entry is not None:
                record.given = dict(entry.limits.environment)
                record.stopped, record.has_restarted = False, True
                self.node.on_given(self.node.name, record)

    async def _allocate(self, record: KubeletRecord) -> None:
        handler = self.node.agent.handler
        used = {each for other in self.records.values() for each in other.device_ids}
        free = [each for each in self.node.snapshot().served[TRIGGER] if each not in used]
        preferred = await handler.get_preferred_allocation(TRIGGER, free, [], 1)
        ids = tuple(preferred or free[:1])
        setup = await handler.allocate(TRIGGER, ids)
        record.device_ids, record.started_s = ids, self.node.clock.ticks()
        if record.pod.uid in self.records:
            record.given = dict(setup.environment)
            instance = parse_instance(record.visible)
            record.device = instance.device if instance else record.visible
            self.node.on_given(self.node.name, record)


def _reference(claim: Claim) -> LeaseHolder:
    return LeaseHolder(pod=claim.uid, namespace=NAMESPACE, name=claim.name, claim=True)
