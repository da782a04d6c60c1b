"""The cluster of the model: two of each service, two nodes, and the bag of messages."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.binder.clients import NoReply
from services.binder.report.explanations import KubernetesEvent
from services.node_agent.gpus.memory_limits import Accounting
from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Device
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    LedgerRebuilt,
    PodQueued,
    ResyncRequested,
)
from shared.model.events.request_reply import (
    BindReply,
    ClaimLeaseReply,
    ClaimLeaseRequest,
    ClaimRestoreRequest,
    LeasesReply,
    LeasesRequest,
    LimitsReply,
    LimitsRequest,
    ResizeRequest,
)
from shared.model.leases.lease import Lease
from shared.model.names import NodeName, PodUid
from tests.model.api_server import ApiServer, Pod
from tests.model.claims import Claims, KubeScheduler
from tests.model.kubelet import KubeletRecord
from tests.model.mig import instance_mode
from tests.model.node import Node
from tests.model.redis_links import Link, LinkedConnection, RedisServer
from tests.model.services import BinderReplica, PlacerReplica, PlannerReplica, Replica, Service
from tests.model.virtual_time import EPOCH_S, ActorClock, VirtualLoop
from tests.model.volumes import WITH_CLAIM
from tests.support.build import device

NODES = (NodeName("a"), NodeName("b"))
DEVICE_MIB = 100
SLOTS = 4
MIG_INDEX = 7
"""Of each node's device that is in MIG mode at first."""
ACCOUNTING = {"a": Accounting.DMEM, "b": Accounting.MISC}
"""How each node's driver limits memory; that of node b is too old for it at first."""
MIG_LAYOUTS = {"a": ("mixed", "whole"), "b": ("quarters", "halves", "whole")}
WEBHOOK_S = 3.0
"""The API server waits so long for the webhook."""
FLOW_LIMIT = 150
"""Messages that one flow delivers: two services may answer each other for ever."""


@dataclass(eq=False, slots=True)
class Message:
    """An event on its way to one kind of service, or to one node's agent."""

    event: Event
    to: str
    """`binder`, `placer`, `planner`, `watcher`, or `agent NODE`."""

    def __str__(self) -> str:
        event: Any = self.event
        about = getattr(event, "pod", None) or getattr(event, "node", None) or ""
        lease = getattr(event, "lease", None)
        if lease is not None:
            about = f"{lease.pod} on {lease.node}, {lease.state} v{lease.version}"
        about = about if isinstance(about, str) else about.name
        return f"{type(event).__name__}({about})"


class Watches:
    """What a judge does when something happens; by default nothing."""

    def check_created(self, node: NodeName, record: KubeletRecord) -> None: ...
    def check_given(self, node: NodeName, record: KubeletRecord) -> None: ...
    def check_destroyed(self, node: NodeName, uuid: str) -> None: ...
    def note_admitted(self, node: NodeName, lease: Lease) -> None: ...
    def note_declined(self, pod: PodUid, reason: str) -> None: ...
    def check_binding(self, pod: PodUid) -> None: ...
    def check_refused(self, node: NodeName, pod: Pod, reason: str, waited_s: float) -> None: ...
    def check_gangs(self) -> None: ...
    def note_handled(self, event: Event) -> None: ...
    def note_starts_advanced(self, began_at: float) -> None: ...
    def note_reported(self, event: KubernetesEvent) -> None: ...
    def check_evicted(self, pod: Pod, announced_s: float) -> None: ...


class World:
    """All actors; nothing in it moves by itself."""

    def __init__(self, server: RedisServer, folder: Path, note: Callable[[str], None]) -> None:
        self.server = server
        self.loop = VirtualLoop()
        server.clock = ActorClock(self.loop)
        self.note = note
        self.failures: list[str] = []
        self.bag: list[Message] = []
        self.handled: list[Message] = []
        """Those that services handle now."""
        self.lost_redis = False
        self.moved: set[str] = set()
        """Devices that were built into another machine."""
        self.given: set[tuple[str, NodeName]] = set()
        """Pods to which a node's agent gave devices."""
        self.lost_unseen = False
        """Redis was rolled back, and nothing was left that knew a newer version."""
        self.watcher_clock = ActorClock(self.loop)
        self.claims = Claims(self.publish)
        self.api = ApiServer(self.publish, self.watcher_clock, self.claims)
        self.binders = [BinderReplica(f"binder {n}", server, self.loop, self) for n in range(2)]
        self.placers = [
            PlacerReplica(f"placer {n}", server, self.loop, self, seed=n) for n in range(2)
        ]
        self.planners = [PlannerReplica(f"planner {n}", server, self.loop, self) for n in range(2)]
        self.nodes = {
            name: Node(
                name=name,
                api=self.api,
                claims=self.claims,
                clock=ActorClock(self.loop),
                requester=_Requester(self, name),
                folder=folder,
                devices=[
                    instance_mode(_device(name, MIG_INDEX), *MIG_LAYOUTS[name]),
                    *(_device(name, number) for number in range(2 - index)),
                ],
                note=self.note,
                publish=self.publish,
                accounting=ACCOUNTING[name],
                has_old_driver=index > 0,
                on_allocated=self.on_allocated,
                on_created=self.on_created,
                on_given=self.on_given,
                on_destroy=self.on_destroy,
                on_refused=self.on_refused,
            )
            for index, name in enumerate(NODES)
        }
        self.scheduler = KubeScheduler(self.claims, self.api, self.nodes, self.lease_claim)
        self.watches: Watches = Watches()
        self.api.on_binding = self.on_binding
        self.api.on_bound = self.on_bound
        self.api.on_evicted = self.on_evicted
        self.rounds = 0
        self.locks: dict[tuple[Service, type], asyncio.Lock] = {}
        self._begin()

    @property
    def services(self) -> list[Service]:
        return [*self.binders, *self.placers, *self.planners]

    def _begin(self) -> None:
        self.server.reset()
        for node in self.nodes.values():
            (node.folder / f"{node.name}.json").unlink(missing_ok=True)
            self.loop.run_until_complete(node.start_agent())
            self.api.add_node(node.name)
            node.report()
        leases = RedisLeases(LinkedConnection(Link(self.server)))
        token = self.loop.run_until_complete(leases.begin_rebuild(now=EPOCH_S))
        self.loop.run_until_complete(leases.finish_rebuild(token or ""))
        self.flow()
        self.loop.advance(1.2)
        self.flow()

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop_agent()
        for service in self.services:
            service.stop()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()
        self.loop.close()

    # The bag

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            for to in self._recipients(event):
                self.bag.append(Message(event, to))

    def _recipients(self, event: Event) -> list[str]:
        messages = []
        if any(type(event) in binder.handlers for binder in self.binders[:1]):
            messages.append("binder")
        if any(type(event) in placer.handlers for placer in self.placers[:1]):
            messages.append("placer")
        if any(type(event) in planner.handlers for planner in self.planners[:1]):
            messages.append("planner")
        if isinstance(event, BindingFailed | ResyncRequested | LedgerRebuilt):
            messages.append("watcher")
        if isinstance(event, LeaseChanged):
            messages.append(f"agent {event.lease.node}")
        if isinstance(event, ResyncRequested):
            messages += [f"agent {name}" for name in NODES]
        return messages

    def deliver(self, message: Message, replica: int = 0, *, stale: bool = False) -> None:
        """Deliver a message that is in the bag; a consumer that cannot take it puts it back.

        A `stale` placer has not read the ledger's feed since.
        """
        self.bag.remove(message)
        if message.to == "binder":
            for binder in self.binders:
                binder.observe(message.event)
            self._hand_over(self.binders[replica], message)
        elif message.to == "placer":
            placer = self.placers[replica]
            if not stale:
                placer.link.feed_wanted.set()
                self.loop.settle()
            self._hand_over(placer, message)
        elif message.to == "planner":
            self._hand_over(self.planners[replica], message)
        elif message.to == "watcher":
            self._tell_watcher(message.event)
        else:
            self._tell_agent(self.nodes[NodeName(message.to.removeprefix("agent "))], message)
        self.loop.settle()

    def _tell_watcher(self, event: Event) -> None:
        if isinstance(event, BindingFailed):
            self.api.requeue(event)
        else:
            self.api.resync(event.request_id if isinstance(event, ResyncRequested) else "")

    def _tell_agent(self, node: Node, message: Message) -> None:
        event = message.event
        if isinstance(event, LeaseChanged):
            node.agent.observe(event)
        elif isinstance(event, ResyncRequested):
            node.report()
            self.sync_agent(node)

    def _hand_over(self, service: Replica, message: Message) -> None:
        service.spawn(self._handle(service, message))

    async def _handle(self, service: Replica, message: Message) -> None:
        kind = type(message.event)
        lock = self.locks.setdefault((service, kind), asyncio.Lock())
        self.handled.append(message)
        try:
            async with lock:
                events = await service.handlers[kind]([message.event])
        except RequestError as error:
            self.note(f"{service.name} gives {message} up: {error}")
        except (UnavailableError, ConflictError, asyncio.CancelledError):
            self.bag.append(message)
        except Exception as error:  # noqa: BLE001 - a bug of the product, which the model reports
            self.fail(f"{service.name} raises {error!r} on {message}")
        else:
            self.watches.note_handled(message.event)
            if isinstance(message.event, PodQueued):
                self.watches.check_gangs()
            self.publish(events or ())
        finally:
            self.handled.remove(message)

    def flow(self) -> None:
        """Deliver all messages in order, and let API server and kubelets work, until it is calm."""
        self.loop.advance(0.05)
        tried: set[Message] = set()
        for _ in range(FLOW_LIMIT):
            ready = [message for message in self.bag if message not in tried]
            if not ready:
                before = len(self.bag)
                self.sync_kubelets()
                self.loop.advance(0.02)
                if len(self.bag) == before:
                    return
                continue
            tried.add(ready[0])
            self.deliver(ready[0], replica=len(tried) % 2)

    def resize(self, pod: PodUid, mib: int, binder: BinderReplica) -> None:
        """Request a size of a binder, and forget the request."""
        binder.spawn(self._resize(ResizeRequest(pod=pod, memory_mib=mib), binder))
        self.loop.settle()

    async def _resize(self, request: ResizeRequest, binder: BinderReplica) -> None:
        reply = await binder.attempt(binder.binder.resizer.resize(request))
        if reply is not None:
            pod = request.pod
            mib = request.memory_mib
            self.note(f"{binder.name} on {pod} with {mib} MiB: {reply.outcome} {reply.reason}")

    # Actors

    def sync_kubelets(self) -> None:
        for node in self.nodes.values():
            node.kubelet.sync()
        self.loop.settle()

    def sync_agent(self, node: Node) -> None:
        service = self.binders[0]
        node.tasks.append(service.loop.create_task(service.attempt(node.agent.sync())))

    def clean_up_agent(self, node: Node) -> None:
        service = self.binders[0]
        for work in (
            node.agent.reconciler.remove_ended(),
            node.agent.limits.restore_altered(),
        ):
            node.tasks.append(service.loop.create_task(service.attempt(work)))

    def restart(self, service: Replica) -> None:
        service.stop()
        service.start()
        if isinstance(service, BinderReplica):
            self.publish([ResyncRequested(reason="a binder has started")])
        self.loop.settle()

    def work(self) -> None:
        """Let 3 s pass in which every loop runs, and deliver what is on its way."""
        self.rounds += 1
        for node in self.nodes.values():
            node.report()
            if self.rounds % 5 == 1 or node.agent.checkpoint.lost:
                self.sync_agent(node)
            self.clean_up_agent(node)
        if self.rounds % 5 == 2:
            self.api.list_nodes()
            self.api.list_pods()
            self.api.queue_again()
        self.claims.resync_unanswered()
        for planner in self.planners:
            planner.link.feed_wanted.set()
            self.loop.settle()
            planner.run_loops()
        for binder in self.binders:
            binder.run_loops()
        self.scheduler.schedule()
        self.loop.advance(1.0)
        self.flow()
        self.loop.advance(2.0)

    def fail(self, what: str) -> None:
        self.note(what)
        self.failures.append(what)

    def on_allocated(self, node: NodeName, pod: PodUid) -> None:
        self.given.add((pod, node))

    def on_created(self, node: NodeName, record: KubeletRecord) -> None:
        self.watches.check_created(node, record)

    def on_given(self, node: NodeName, record: KubeletRecord) -> None:
        what = f"{self.nodes[node].limit_mib(record)} MiB of {record.visible}"
        self.note(f"agent {node} gives {record.pod.uid} {what}")
        self.watches.check_given(node, record)

    def on_binding(self, pod: PodUid) -> None:
        self.watches.check_binding(pod)

    def on_bound(self, pod: Pod) -> None:
        has_claim = pod.request.claims == WITH_CLAIM
        if has_claim and pod.node and self.api.volumes.is_missing_on(pod.node, pod.name):
            self.fail(f"V1: {pod.uid} is bound to {pod.node}, without its volume")

    def on_evicted(self, pod: Pod, announced_s: float) -> None:
        self.note(f"{pod.uid} is evicted")
        self.watches.check_evicted(pod, announced_s)

    def on_refused(self, node: NodeName, pod: Pod, reason: str, waited_s: float) -> None:
        self.watches.check_refused(node, pod, reason, waited_s)

    def on_destroy(self, node: NodeName, uuid: str) -> None:
        self.note(f"partitioner {node} destroys {uuid}")
        self.watches.check_destroyed(node, uuid)

    # What is requested of binders

    async def lease_claim(self, request: ClaimLeaseRequest, replica: int) -> ClaimLeaseReply:
        """Return the answer to an allocation; the webhook allows it without one in time."""
        binder = self.binders[replica]
        work = binder.spawn(binder.attempt(binder.claims_service.leaser.lease_claim(request)))
        await asyncio.wait([work], timeout=WEBHOOK_S)
        reply = work.result() if work.done() and not work.cancelled() else None
        return reply if isinstance(reply, ClaimLeaseReply) else ClaimLeaseReply()

    # What binders request of agents

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        machine = self.nodes[node]
        if machine.silent:
            return NoReply(reason="no reply", has_responder=True)
        reply = await machine.agent.admit_binds(leases)
        for pod, reason in reply.refusals.items():
            self.watches.note_declined(pod, reason)
        waiting = {*reply.deferred_pods, *reply.unserved_pods, *reply.refusals}
        for lease in leases:
            if lease.pod not in waiting:
                self.watches.note_admitted(node, lease)
        return reply

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        machine = self.nodes[request.node]
        if machine.silent:
            raise UnavailableError("no reply")
        work = asyncio.create_task(machine.agent.limits.apply_request(request))
        machine.tasks.append(work)
        await asyncio.wait([work])
        if work.cancelled() or machine.loses_reply:
            machine.loses_reply = False
            raise UnavailableError("no reply")
        return work.result()

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        machine = self.nodes[node]
        if machine.silent:
            raise UnavailableError("no reply")
        asked = frozenset(pods) - machine.agent.checkpoint.claims
        terminated = set(await machine.agent.reconciler.terminated(asked))
        machine.agent.leftovers.note_vanished(asked - terminated)
        return terminated

    async def write_slices(self, node: NodeName) -> str:
        machine = self.nodes[node]
        if machine.silent:
            return "no reply"
        try:
            await machine.agent.lease_sync.sync()
        except UnavailableError as error:
            return str(error)
        return ""


class _Requester:
    """Requests of an agent to any binder."""

    def __init__(self, world: World, node: NodeName) -> None:
        self.world = world
        self.node = node

    async def request(
        self,
        question: LeasesRequest | ClaimRestoreRequest,
        answer: type[LeasesReply],
        *,
        timeout_s: float,
    ) -> LeasesReply:
        if self.world.nodes[self.node].silent:
            raise UnavailableError("no reply")
        usable = [binder for binder in self.world.binders if not binder.link.delayed]
        for binder in usable or self.world.binders:
            try:
                async with asyncio.timeout(timeout_s):
                    if isinstance(question, ClaimRestoreRequest):
                        return await binder.claims_service.leaser.restore_lease(question)
                    return await binder.binder.list_leases(question)
            except TimeoutError as error:
                raise UnavailableError("no reply in time") from error
        raise UnavailableError("no binder runs")


def _device(node: NodeName, number: int) -> Device:
    return device(f"GPU-{node}-{number}", number, memory_mib=DEVICE_MIB, slots=SLOTS)
