"""A small kubelet: it admits pods one after the other, runs their containers and ends them.

It may lose the API server, and what it answers its agent is old or an error then, and for a while
longer.
"""

import asyncio
import contextlib
import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.node_agent.allocate.cdi import qualified_limits
from services.node_agent.kubelet.pods import (
    Holding,
    KubeletContainer,
    KubeletPod,
    PodResources,
)
from services.node_agent.memory_limits.hook_server import ContainerState, HookCall
from shared.dialects.reserved import VISIBLE
from shared.kubernetes.errors import parse_error
from shared.model.devices.replicas import Replicas
from shared.model.errors import LeaseholdError, RequestError
from shared.model.events.node_events import LeaseHolder
from shared.model.leases.lease_copy import lease_outline
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.claim import DRIVER, LEASED, device_name
from tests.model.api_server import NAMESPACE, Pod
from tests.model.claims import REQUEST, Claim
from tests.model.mig import parse_instance
from tests.support.build import TRIGGER

if TYPE_CHECKING:
    from tests.model.node import Node

CONTAINER = "main"
TURN_S = 2.0
"""After a pause of this length, calls of the agent belong to another turn of the main loop."""
DENIED_S = 30.0
RELISTED_S = 45.0
ANSWERS_S = {"": 0.0, "403": DENIED_S, "500": DENIED_S, "old": RELISTED_S, "late": RELISTED_S}
"""How long the kubelet answers like this once it has found the API server again.

`old`: its list of pods is that of before; `late`: it contains new pods, and those that have ended
meanwhile as they were before.
"""


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
    replicas: Replicas | None = None
    """As which that device was offered, or None for amounts."""
    used_mib: int = 0
    uncounted: bool = False
    """The library does not count what it uses; the driver does."""
    started_s: float = 0.0
    """When the kubelet had its devices, on the monotonic clock."""
    hooked: bool = False
    """Its setup names the hook for the driver's limits."""
    container_id: str = ""
    """Of its container, whose cgroup exists, or empty."""
    runs: int = 0

    @property
    def visible(self) -> str:
        """The UUID of the device or MIG instance that its running container sees."""
        return (self.given or {}).get("NVIDIA_VISIBLE_DEVICES", "")

    @property
    def counted_mib(self) -> int:
        """What its library counts of its use."""
        return 0 if self.uncounted else self.used_mib

    @property
    def user(self) -> PodUid:
        """The pod whose container it is."""
        consumers = self.pod.consumers if isinstance(self.pod, Claim) else ()
        return PodUid(consumers[0]) if consumers else self.pod.uid


class Kubelet:
    """Admits bound pods one after the other, runs their containers and ends them."""

    silent_reason = ""
    """PodResources always respond."""

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
        self.is_cut_off = False
        """It cannot reach the API server."""
        self.is_blank = False
        """The machine has restarted since then: it knows the pods only from the API server."""
        self.unreported: list[tuple[Pod, str]] = []
        """Pods that have ended since then, with their phases."""
        self.answer = ""
        """A key of `ANSWERS_S`."""
        self.answers_until = 0.0
        self.listed_before: dict[PodUid, KubeletPod] = {}
        """Its list of pods when it lost the API server."""
        self.called_s = -math.inf
        self.turn_began_s = self.called_s
        """When it began to call the agent in this turn of its main loop, and when it last did."""

    def lose_api(self, answer: str) -> None:
        """Let it see nothing of the API server, and answer the agent like this meanwhile."""
        if not self.is_cut_off:
            self.listed_before = self._listed()
        self.is_cut_off = True
        self.answer = answer
        self.answers_until = math.inf

    def find_api(self, answer: str) -> None:
        """End that; it answers like this for a while longer."""
        self.is_cut_off = False
        self.is_blank = False
        self.answer = answer
        self.answers_until = self.node.clock.ticks() + ANSWERS_S[answer]
        for pod, phase in self.unreported:
            self.node.api.finish(pod, phase)
        self.unreported.clear()

    def sync(self) -> None:
        """End what the API server has no more, and begin to admit what it has bound."""
        if not self.is_cut_off:
            self.end_deleted()
            self.node.spawn(self._sync_claims())
        if not self.is_blank:
            self.end_late()
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
        is_stuck = uid in self.stuck or DeviceUuid(record.device) in self.node.driver.hanging
        if is_stuck and record.given is not None:
            self.left[uid] = record
        if phase and isinstance(record.pod, Pod):
            self._report(record.pod, phase)

    def _report(self, pod: Pod, phase: str) -> None:
        if self.is_cut_off:
            self.unreported.append((pod, phase))
        else:
            self.node.api.finish(pod, phase)

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
        if DeviceUuid(record.device) in self.node.driver.hanging:
            return  # its process cannot be killed
        record.stopped = True
        record.given = None
        record.container_id = ""
        record.used_mib = 0

    def stop_all(self) -> None:
        """Stop all containers, which start again; claims are prepared again before that."""
        self.abort_admission()
        for uid, record in self.records.items():
            if record.given is not None:
                self.stop(uid)
        for record in self.claims.values():
            record.given = None
            record.container_id = ""

    def restart_machine(self) -> None:
        """Stop all containers; they start again once it knows from the API server which stay."""
        self.end_processes()
        self.stop_all()
        self.listed_before = {}
        self.is_blank = self.is_cut_off

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
                elif record.given is None:
                    await self._prepare(claim)
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
        self.node.on_allocated(self.node.name, claim.uid)
        entry = self.node.agent.checkpoint.find(claim.uid, REQUEST, DRIVER)
        if entry is None or claim.generation != generation or not claim.consumers:
            return
        named = {device_name(device.uuid): device.uuid for device in self.node.devices}
        record.device = named[devices[0].device_name]
        record.replicas = self._offered(record.device)
        record.hooked = qualified_limits(claim.uid, REQUEST) in devices[0].cdi_device_ids
        if await self._create(record, REQUEST) and self.claims.get(claim.uid) is record:
            record.given = {**entry.limits.environment, "NVIDIA_VISIBLE_DEVICES": record.device}
            self.node.on_given(self.node.name, record)

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        answer = self._answer("/pods")
        before = self._still_listed() if answer else {}
        now = self._listed() if answer != "old" else {}
        return tuple((before | now).values())

    def _still_listed(self) -> dict[PodUid, KubeletPod]:
        """Return its list of before, without pods of which it has one that was made again.

        It knows pods of the API server by their names: it removes the earlier one first.
        """
        names = {r.pod.name: uid for uid, r in self.records.items() if isinstance(r.pod, Pod)}
        return {
            uid: pod for uid, pod in self.listed_before.items() if names.get(pod.name, uid) == uid
        }

    async def list_running(self) -> Set[PodUid]:
        self._answer("/runningpods/")
        return self.processes()

    def processes(self) -> Set[PodUid]:
        """Return the pods with processes."""
        given = {uid for uid, record in self.records.items() if record.given is not None}
        return given | self.left.keys()

    def _answer(self, path: str) -> str:
        if self.node.clock.ticks() >= self.answers_until:
            self.answer = ""
        if self.answer.isdecimal():
            raise parse_error("GET", path, int(self.answer), b"")
        return self.answer

    def _listed(self) -> dict[PodUid, KubeletPod]:
        container = KubeletContainer(name=CONTAINER, limits={TRIGGER: 1})
        return {
            uid: KubeletPod(
                uid=uid,
                namespace=NAMESPACE,
                name=record.pod.name,
                phase="Running" if record.given or record.stopped else "Pending",
                containers=(container,),
                leased_at=lease_outline(record.pod.lease).created_at,
                container_ids={record.container_id: CONTAINER} if record.given else {},
            )
            for uid, record in self._seen()
            if isinstance(record.pod, Pod)
        }

    def _seen(self) -> Collection[tuple[PodUid, KubeletRecord]]:
        return () if self.is_blank else self.records.items()

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
                for _, r in self._seen()
                if r.device_ids
            ),
            pods=frozenset((NAMESPACE, r.pod.name) for _, r in self._seen()),
        )

    async def _admit(self) -> None:
        await self._start_again()
        for pod in list(self.node.api.pods.values()):
            waits = pod.node == self.node.name and not (pod.is_terminal or pod.deleting)
            if (
                waits
                and not self.is_cut_off
                and pod.uid not in self.records
                and pod.uid not in self.ended
            ):
                # A kubelet removes an earlier pod of the same name first.
                self.end_deleted()
                record = self.records[pod.uid] = KubeletRecord(pod)
                try:
                    await self._allocate(record)
                except LeaseholdError as error:
                    self.node.note(f"kubelet {self.node.name} fails pod {pod.uid}: {error}")
                    waited_s = self.node.clock.ticks() - self.turn_began_s
                    self.node.on_refused(self.node.name, pod, str(error), waited_s)
                    if pod.uid in self.records:
                        self.end(pod.uid, "Failed")

    async def _start_again(self) -> None:
        for _, record in list(self._seen()):
            if record.stopped:
                record.has_restarted = True
                await self._start(record)

    async def _start(self, record: KubeletRecord) -> None:
        """Start the container of a pod that has its devices; without success, it is tried again."""
        uid = record.pod.uid
        record.stopped = True
        try:
            await self.node.agent.handler.pre_start_container(TRIGGER, record.device_ids)
        except LeaseholdError as error:
            self.node.note(f"kubelet {self.node.name} does not start {uid}: {error}")
            return
        entry = self.node.agent.checkpoint.find(uid, CONTAINER, TRIGGER)
        if self.records.get(uid) is not record or entry is None:
            return
        if await self._create(record, CONTAINER) and self.records.get(uid) is record:
            entry = self.node.agent.checkpoint.find(uid, CONTAINER, TRIGGER) or entry
            record.given = dict(entry.limits.environment)
            record.stopped = False
            self.node.on_given(self.node.name, record)

    async def _create(self, record: KubeletRecord, container: str) -> bool:
        """Create the container as a runtime does, with its hook; return whether it may run."""
        record.runs += 1
        record.container_id = f"{record.pod.uid}-run-{record.runs}"
        self.node.on_created(self.node.name, record)
        if not record.hooked:
            return True
        fence = self.node.hook_program.fences.get((record.pod.uid, container), -1)
        state = ContainerState(record.container_id, 1, record.user)
        call = HookCall(record.pod.uid, container, fence, state)
        try:
            await self.node.agent.driver_limits.start_container(call)
        except LeaseholdError as error:
            self.node.note(f"runtime {self.node.name} does not start {record.pod.uid}: {error}")
            record.container_id = ""
            return False
        return True

    def containers_of(self, pod: PodUid) -> Set[str] | None:
        """Return the IDs of a pod's containers, or None if the pod has no cgroup."""
        record = self.records.get(pod) or self.left.get(pod)
        if record is not None:
            return {record.container_id} if record.device_ids else None
        for claim in self.node.claims.stored.values():
            if claim.node == self.node.name and pod in claim.consumers:
                used = self.claims.get(claim.uid)
                return {used.container_id if used is not None else ""}
        return None

    def consumers(self) -> Set[PodUid]:
        """Return the pods that use claims here."""
        claims = (claim for claim in self.node.claims.stored.values() if claim.node)
        return {PodUid(uid) for claim in claims for uid in claim.consumers}

    def _offered(self, device: str) -> Replicas | None:
        return self.node.agent.known.require_snapshot().devices[DeviceUuid(device)].replicas

    def used_mib(self, device: DeviceUuid, pod: str) -> int:
        record = self.records.get(PodUid(pod)) or self.left.get(PodUid(pod))
        return record.used_mib if record is not None and record.device == device else 0

    async def _allocate(self, record: KubeletRecord) -> None:
        handler = self.node.agent.handler
        used = {device_id for other in self.records.values() for device_id in other.device_ids}
        served = self.node.agent.known.require_snapshot().served[TRIGGER].values()
        free = [device.id for device in served if device.healthy and device.id not in used]
        if not free:
            raise RequestError("no healthy devices present; cannot allocate unhealthy devices")
        if self.node.clock.ticks() > self.called_s + TURN_S:
            self.turn_began_s = self.node.clock.ticks()
        try:
            preferred = await handler.get_preferred_allocation(TRIGGER, free, [], 1)
            ids = tuple(preferred or free[:1])
            setup = await handler.allocate(TRIGGER, ids)
        finally:
            self.called_s = self.node.clock.ticks()
        self.node.on_allocated(self.node.name, record.pod.uid)
        record.device_ids = ids
        record.started_s = self.node.clock.ticks()
        if record.pod.uid in self.records:
            visible = setup.environment[VISIBLE]
            instance = parse_instance(visible)
            record.device = instance.device if instance else visible
            record.replicas = self._offered(record.device)
            record.hooked = qualified_limits(record.pod.uid, CONTAINER) in setup.cdi_devices
            await self._start(record)


def _reference(claim: Claim) -> LeaseHolder:
    return LeaseHolder(pod=claim.uid, namespace=NAMESPACE, name=claim.name, claim=True)
