"""Resizing a running lease: larger in the ledger first, smaller on its node first.

Every step may be the last that this binder makes. What a resize leaves undone is noted with it in
the ledger, and any binder sees it through; a smaller limit that no ledger confirms is raised again
by its node. So a wish that was not answered may be put again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.binder.ports.ledger import LeaseResizeStore, NodeTotalsReader
from services.binder.report.explanations import KubernetesEvent, lease_event
from services.binder.resize.rules import ResizeRefusal, SizeChange, SizeUnchanged, decide, full_text
from shared.dialects import DIALECTS
from shared.model.clock import Clock
from shared.model.errors import ConflictError, LeaseholdError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import LeaseChanged, LeaseResized
from shared.model.events.request_reply import LimitsReply, LimitsRequest, ResizeReply, ResizeRequest
from shared.model.lease import Lease, Share, ShareSize
from shared.model.lease_copy import ANNOTATION, dump_lease
from shared.model.ledger import LedgerNode, NoCapacity
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

TURN_S = 8.0
"""A smaller size is in the ledger within this, or never; its node keeps to it for longer."""
TRIES = 3
ANNOTATE_TRIES = 8
"""The pod's status may change at any moment, and with it the version that was read."""
LOOK_S = 1.0
LATE_S = 3.0
"""What is not seen through within this was left by somebody who cannot any more."""
AGAIN_MOST_S = 30.0
AT_ONCE = 16
EVER = 1 << 53


class Ledger(Protocol):
    """What resizing needs of the ledger."""

    async def generation(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    @property
    def resizes(self) -> LeaseResizeStore:
        """Leases that change their size."""
        ...


class Agents(Protocol):
    """The node agents."""

    async def set_limits(self, question: LimitsRequest) -> LimitsReply:
        """Put the question. Raises UnavailableError without an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnnotations:
    """A pod's annotations, with the version that they were read at."""

    uid: PodUid
    resource_version: str
    annotations: Mapping[str, str]


class Annotations(Protocol):
    """Pods' annotations at the API server."""

    async def get_annotations(self, namespace: str, name: str) -> PodAnnotations | None:
        """Return a pod's annotations, or None if there is no such pod."""
        ...

    async def annotate(
        self, namespace: str, name: str, read: PodAnnotations, annotations: Mapping[str, str]
    ) -> None:
        """Add to them, in one write. Raises ConflictError if the pod has changed since."""
        ...


class Publishing(Protocol):
    """The bus."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events."""
        ...


class Notes(Protocol):
    """The writer of Kubernetes Events."""

    def note(self, note: KubernetesEvent) -> None:
        """Have it written."""
        ...


class Resizer:
    """Any number of binders may resize at once; of one pod's lease, one at a time."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        agents: Agents,
        pods: Annotations,
        bus: Publishing,
        events: Notes,
        clock: Clock,
        counted: Callable[[str], None],
        freed: Callable[[], None],
    ) -> None:
        self.ledger = ledger
        self.agents = agents
        self.pods = pods
        self.bus = bus
        self.events = events
        self.clock = clock
        self.counted = counted
        self.freed = freed
        self._again: dict[PodUid, tuple[float, float]] = {}

    async def resize(self, asked: ResizeRequest) -> ResizeReply:
        """Do as is asked, or say why not; whoever asks twice gets the same size once."""
        told: ResizeReply | None = None
        try:
            for _ in range(TRIES):
                told = await self._try(asked)
                if told is not None:
                    break
        except (UnavailableError, ConflictError) as error:
            told = _unavailable(f"not known whether it was done: {error}")
        told = told or _unavailable("its lease changes all the time")
        self.counted(told.outcome)
        return told

    async def _try(self, asked: ResizeRequest) -> ResizeReply | None:
        """Decide on the lease as it is now, and act on that; None: it has moved on meanwhile."""
        (lease,) = await self.ledger.load([asked.pod])
        node = await self._node(lease)
        match decide(lease, asked, node):
            case ResizeRefusal() as refused:
                return _refused(refused)
            case SizeUnchanged(container=container, shares=shares) if lease is not None:
                pending = await self._see_through(lease)
                same = SizeChange(container=container, lease=lease, before=shares)
                return _lease_changes("unchanged", same, pending)
            case SizeChange() as change if node is not None:
                return await self._change(change, node)
        return None

    async def _node(self, lease: Lease | None) -> LedgerNode | None:
        accounts = await self.ledger.totals.of_nodes([lease.node]) if lease else []
        return accounts[0].node if accounts else None

    async def _change(self, change: SizeChange, node: LedgerNode) -> ResizeReply | None:
        turn = ""
        if change.shrinks:
            held = await self._hold(change)
            if isinstance(held, ResizeReply):
                return held
            turn = held
        try:
            outcome = await self.ledger.resizes.apply(change.lease, token=turn)
        except ConflictError:
            await self._call_off(change, turn)
            return _unavailable(f"its node took longer than {TURN_S:g} s to answer")
        match outcome:
            case Lease() as lease:
                await self._tell(change, lease)
                pending = await self._see_through(lease)
                return _lease_changes("resized", change, pending)
            case NoCapacity() as full:
                await self._call_off(change, turn)
                return _refused(full_text(full, change, node))
        await self._call_off(change, turn)
        return None

    async def _hold(self, change: SizeChange) -> str | ResizeReply:
        """Have the node hold the container to less already; return in which turn, or why not."""
        lease = change.lease
        turn = await self.ledger.resizes.lock(lease.pod, ttl_s=TURN_S)
        if turn is None:
            return _unavailable("another resize of it is under way")
        try:
            told = await self.agents.set_limits(
                LimitsRequest(node=lease.node, lease=lease, resize_id=turn)
            )
        except UnavailableError as error:
            await self._call_off(change, turn)
            return _unavailable(
                f"the agent of node {lease.node} does not answer, and only it knows what is in "
                f"use: {error}"
            )
        if not told.applied:
            await self.ledger.resizes.unlock(lease.pod, turn)
            hint = f"the least is --memory {told.in_use_mib}Mi now" if told.in_use_mib else ""
            return _refused(ResizeRefusal(reason=told.reason, hint=hint))
        return turn

    async def _call_off(self, change: SizeChange, turn: str) -> None:
        """Let the container have again what its lease says; its node does so by itself in time."""
        if not turn:
            return
        lease = change.lease
        await self.ledger.resizes.unlock(lease.pod, turn)
        with contextlib.suppress(UnavailableError):
            await self.agents.set_limits(
                LimitsRequest(node=lease.node, lease=lease, resize_id=turn, finished=True)
            )

    async def _tell(self, change: SizeChange, lease: Lease) -> None:
        self.events.note(lease_event(lease, "LeaseResized", _text(change), warning=False))
        self.freed()
        resized = LeaseResized(
            lease=lease,
            container=change.container,
            before=_size(change.before),
            after=_size(change.after),
        )
        with contextlib.suppress(UnavailableError):  # the node is asked besides
            await self.bus.publish([LeaseChanged(lease=lease), resized])

    # What a resize leaves to be done

    async def _see_through(self, lease: Lease) -> tuple[str, ...]:
        """Have the node, then the pod's annotations follow the lease; return what is left."""
        try:
            told = await self.agents.set_limits(LimitsRequest(node=lease.node, lease=lease))
            if not told.applied:
                return (f"the container's limits: {told.reason}",)
        except UnavailableError:
            return (f"the container's limits, as soon as the agent of node {lease.node} answers",)
        try:
            await self._annotate(lease)
        except LeaseholdError as error:
            return (f"the pod's annotations: {error}",)
        await self.ledger.resizes.set_synced(lease.pod, lease.version)
        return ()

    async def _annotate(self, lease: Lease) -> None:
        """Write what the lease says by then, once it is known what the pod says.

        Of two who do so at once the one with the older lease meets a conflict, and reads it again.
        """
        for _ in range(ANNOTATE_TRIES):
            seen = await self.pods.get_annotations(lease.namespace, lease.name)
            (now,) = await self.ledger.load([lease.pod])
            if seen is None or seen.uid != lease.pod or now is None:
                return
            wanted = resized_annotations(now)
            if all(seen.annotations.get(key) == text for key, text in wanted.items()):
                return
            with contextlib.suppress(ConflictError):
                await self.pods.annotate(lease.namespace, lease.name, seen, wanted)
                return
        raise ConflictError(f"pod {lease.namespace}/{lease.name} changes all the time")

    async def run(self) -> None:
        """See through what others began."""
        while True:
            with contextlib.suppress(UnavailableError):
                await self.finish()
            await self.clock.sleep(LOOK_S)

    async def finish(self) -> None:
        """See through every resize that nobody is at any more, each again after a pause."""
        if await self.ledger.generation() is None:
            return
        now = self.clock.now()
        pods = await self.ledger.resizes.unsynced(older_than_s=LATE_S)
        self._again = {pod: self._again.get(pod, (0.0, LOOK_S)) for pod in pods}
        due = [pod for pod in pods if self._again[pod][0] <= now][:AT_ONCE]
        leases = await self.ledger.load(due) if due else []
        pairs = list(zip(due, leases, strict=True))
        await asyncio.gather(*(self._finish(pod, lease) for pod, lease in pairs))

    async def _finish(self, pod: PodUid, lease: Lease | None) -> None:
        if lease is None:
            await self.ledger.resizes.set_synced(pod, EVER)
            return
        pending = await self._see_through(lease)
        if pending:
            _, pause_s = self._again.get(pod, (0.0, LOOK_S))
            again = (self.clock.now() + pause_s, min(2 * pause_s, AGAIN_MOST_S))
            self._again[pod] = again
            logger.info("pod %s/%s was resized; left: %s", lease.namespace, lease.name, pending[0])


def resized_annotations(lease: Lease) -> dict[str, str]:
    """Return the annotations of a running pod that say how much it holds."""
    dialect = DIALECTS.get(lease.dialect)
    return {
        **(dialect.resized_annotations(lease) if dialect else {}),
        ANNOTATION: dump_lease(lease),
    }


def _size(shares: Sequence[Share]) -> ShareSize:
    return ShareSize(memory_mib=shares[0].memory_mib, cores_percent=shares[0].cores_percent)


def _refused(why: ResizeRefusal) -> ResizeReply:
    return ResizeReply(outcome="refused", reason=why.reason, hint=why.hint)


def _unavailable(reason: str) -> ResizeReply:
    return ResizeReply(
        outcome="unavailable",
        reason=reason,
        hint="try again in some seconds: the same wish is never granted twice",
    )


def _lease_changes(outcome: str, change: SizeChange, pending: tuple[str, ...]) -> ResizeReply:
    was, now = _size(change.before), _size(change.after)
    notes = []
    if was.cores_percent != now.cores_percent:
        cap = f"their cap of {was.cores_percent} %" if was.cores_percent else "no cap"
        notes.append(
            f"cores: processes that run keep {cap} until they start again; those that start from "
            f"now on get {now.cores_percent} %"
        )
    return ResizeReply(
        outcome=outcome,
        container=change.container,
        node=change.lease.node,
        devices=tuple(share.index for share in change.after),
        before=was,
        after=now,
        pending=pending,
        notes=tuple(notes),
    )


def _text(change: SizeChange) -> str:
    was, now = _size(change.before), _size(change.after)
    devices = ", ".join(str(share.index) for share in change.after)
    cores = f", {was.cores_percent} to {now.cores_percent} % of its cores"
    return (
        f"container {change.container}: {was.memory_mib} to {now.memory_mib} MiB"
        f"{cores if was.cores_percent != now.cores_percent else ''} of GPU {devices} of node "
        f"{change.lease.node}"
    )
