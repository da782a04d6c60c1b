"""Resizes a running lease: ledger, pod, node if it grows; node, ledger, pod if it shrinks.

Any binder finishes what the ledger records as left to do, and a node raises a smaller limit again
that the ledger does not confirm: a request without a reply may be repeated.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

from services.binder.clients import NodeAgentClient, PodClient
from services.binder.metrics import RESIZES
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import event_of
from services.binder.resize.rules import (
    SizeChange,
    decide,
    is_smaller,
    no_capacity,
    refused,
    size_of,
)
from shared.dialects import DIALECTS
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock
from shared.model.errors import ConflictError, LeaseholdError, UnavailableError
from shared.model.events.pod_events import LeaseChanged, LeaseResized
from shared.model.events.request_reply import (
    LimitsReply,
    LimitsRequest,
    ResizeReply,
    ResizeRequest,
)
from shared.model.leases.lease import RESIZE_WAITING, Lease, StaleLeaseError, WaitingSize
from shared.model.leases.lease_copy import ANNOTATION, dump_lease
from shared.model.leases.ledger import LedgerNode, NoCapacity
from shared.model.names import PodUid
from shared.runtime.service import Publish, answers, loops

logger = logging.getLogger(__name__)

LOCK_S = 8.0
"""A smaller size is in the ledger within this time, or not at all; its node enforces it for
longer."""
MAX_DECISIONS = 3
MAX_ANNOTATE_TRIES = 8
"""The pod's resource version may change at any moment."""
FINISH_S = 1.0
"""Interval of looks for unfinished resizes, and the first pause before one is tried again."""
ABANDONED_S = 3.0
"""A resize that is not finished within this time was left by a binder that cannot finish it."""
MAX_RETRY_S = 30.0
"""The longest such pause; it doubles up to this."""
MAX_WAITING_RETRY_S = 15.0
"""The longest pause while a smaller size waits for less memory in use."""
BATCH = 16
ANY_VERSION = 1 << 53


@dataclass(eq=False)
class Resizer:
    ledger: RedisLeases
    agents: NodeAgentClient
    pods: PodClient
    publish: Publish
    events: EventRecorder
    clock: Clock

    def __post_init__(self) -> None:
        self._retries: dict[PodUid, tuple[float, float]] = {}
        """When to try again, and the pause after that."""

    @answers
    async def resize(self, request: ResizeRequest) -> ResizeReply:
        """A repeated request gets the same size once."""
        reply = await self._resize(request)
        RESIZES.labels(reply.outcome).inc()
        return reply

    async def _resize(self, request: ResizeRequest) -> ResizeReply:
        reply: ResizeReply | None = None
        try:
            for _ in range(MAX_DECISIONS):
                reply = await self._try(request)
                if reply is not None:
                    break
        except (UnavailableError, ConflictError) as error:
            reply = _unavailable(f"it is not known whether it was done: {error}")
        return reply or _unavailable("its share changes too often")

    async def _try(self, request: ResizeRequest) -> ResizeReply | None:
        """Return None if the lease has moved on meanwhile."""
        (lease,) = await self.ledger.load([request.pod])
        node = await self._node(lease)
        match decide(lease, request, node):
            case ResizeReply() as refusal:
                return refusal
            case SizeChange(is_none=True) as same:
                return _reply("unchanged", same, await self._synchronize(same.lease))
            case SizeChange() as change if node is not None:
                return await self._change(change, node)
        return None

    async def _node(self, lease: Lease | None) -> LedgerNode | None:
        nodes = await self.ledger.totals.of_nodes([lease.node]) if lease else []
        return nodes[0].node if nodes else None

    async def _change(self, change: SizeChange, node: LedgerNode) -> ResizeReply | None:
        token = ""
        if change.shrinks:
            limited = await self._limit(change)
            if not isinstance(limited, str):
                return limited
            token = limited
        try:
            outcome = await self.ledger.resizes.apply(change.lease, token=token)
        except ConflictError:
            await self._cancel(change, token)
            return _unavailable(f"its node took longer than {LOCK_S:g} s to reply")
        match outcome:
            case Lease() as lease:
                await self._report(change, lease)
                pending = await self._synchronize(lease)
                return _reply("resized", change, pending)
            case NoCapacity() as full:
                await self._cancel(change, token)
                return no_capacity(full, change, node)
        await self._cancel(change, token)
        return None

    async def _limit(self, change: SizeChange) -> str | ResizeReply | None:
        """Return the lock's token, or why the limits stay.

        None if the lease has moved on meanwhile.
        """
        lease = change.lease
        token = await self.ledger.resizes.lock(lease.pod, ttl_s=LOCK_S)
        if token is None:
            return _unavailable("another resize of it is in progress")
        try:
            reply = await self.agents.set_limits(
                LimitsRequest(node=lease.node, lease=lease, resize_id=token)
            )
        except UnavailableError as error:
            await self._cancel(change, token)
            return _unavailable(
                f"the agent of node {lease.node} does not respond, and only the agent knows how "
                f"much is in use: {error}"
            )
        if not reply.applied:
            await self.ledger.resizes.unlock(lease.pod, token)
            by_driver = all(share.memory == "driver" for share in change.after)
            if by_driver and (reply.in_use_mib or reply.may_follow):
                return await self._wait(change, reply)
            return _more_in_use(reply)
        return token

    async def _wait(self, change: SizeChange, limits: LimitsReply) -> ResizeReply | None:
        """Record the smaller size, which the container gets once less is in use.

        Return None if the lease has moved on meanwhile.
        """
        waiting = change.waiting(self.clock.now())
        if isinstance(waiting, ResizeReply):
            return waiting
        if waiting is not change.stored:
            outcome = await self.ledger.resizes.apply(waiting)
            if isinstance(outcome, StaleLeaseError):
                return None
            if not isinstance(outcome, Lease):
                return _more_in_use(limits)
            missing_mib = limits.in_use_mib - change.after[0].memory_mib
            what = f"{missing_mib} MiB less are in use" if missing_mib > 0 else "the driver sets it"
            text = f"{_text(change)} waits until {what}: {limits.reason}"
            self.events.record(event_of(outcome, RESIZE_WAITING, text, warning=False))
            with contextlib.suppress(UnavailableError):
                await self.publish([LeaseChanged(lease=outcome)])
            await self._synchronize(outcome)
        reply = _reply("waiting", change, ())
        return replace(reply, after=reply.before, reason=limits.reason)

    async def _cancel(self, change: SizeChange, token: str) -> None:
        """Restore the container's limits from its lease, as its node also does after a while."""
        if not token:
            return
        lease = change.lease
        await self.ledger.resizes.unlock(lease.pod, token)
        with contextlib.suppress(UnavailableError):
            await self.agents.set_limits(
                LimitsRequest(node=lease.node, lease=lease, resize_id=token, finished=True)
            )

    async def _report(self, change: SizeChange, lease: Lease) -> None:
        if change.after == change.before:
            with contextlib.suppress(UnavailableError):
                await self.publish([LeaseChanged(lease=lease)])
            return
        self.events.record(event_of(lease, "LeaseResized", _text(change), warning=False))
        self.ledger.freed.set()
        resized = LeaseResized(
            lease=lease,
            container=change.container,
            before=size_of(change.before[0]),
            after=size_of(change.after[0]),
            actor=change.actor,
        )
        with contextlib.suppress(UnavailableError):  # the node gets a request as well
            await self.publish([LeaseChanged(lease=lease), resized])

    # Unfinished work of a resize

    async def _synchronize(self, lease: Lease, *, undo: bool = False) -> tuple[str, ...]:
        """Return what is left to do.

        No limit is ever above the size in the copy of the lease, which counts where the ledger is
        lost: the pod comes before the node. With `undo`, a lease that its device cannot hold gets
        its container's size.
        """
        try:
            lease = await self._annotate(lease)
        except LeaseholdError as error:
            return (f"the pod's annotations, and then the container's limits: {error}",)
        try:
            reply = await self.agents.set_limits(LimitsRequest(node=lease.node, lease=lease))
        except UnavailableError:
            return (f"the container's limits, as soon as the agent of node {lease.node} responds",)
        if not reply.applied:
            back = reply.resize_back(lease.pod)
            if undo and back is not None and is_smaller(back, lease):
                await self._undo(lease, back, reply.reason)
            return (f"the container's limits: {reply.reason}",)
        if lease.waiting_size is None:  # else it is tried again as long as it is not synced
            await self.ledger.resizes.set_synced(lease.pod, lease.version)
        return ()

    async def _undo(self, lease: Lease, request: ResizeRequest, reason: str) -> None:
        """The ledger restores the lost lease of another pod on the device after this."""
        logger.warning(
            "pod %s/%s gets its size before the resize again: %s",
            *(lease.namespace, lease.name, reason),
        )
        await self.resize(request)

    async def _annotate(self, lease: Lease) -> Lease:
        """Return the lease that is written.

        Of two writers the one with the older lease gets a conflict, and reads again.
        """
        for _ in range(MAX_ANNOTATE_TRIES):
            read = await self.pods.get(lease.namespace, lease.name)
            (current,) = await self.ledger.load([lease.pod])
            if read is None or read.pod != lease.pod or current is None:
                return lease
            wanted = resized_annotations(current)
            if all(read.annotations.get(key) == text for key, text in wanted.items()):
                return current
            with contextlib.suppress(ConflictError):
                await self.pods.annotate(
                    lease.namespace,
                    lease.name,
                    lease.pod,
                    wanted,
                    resource_version=read.resource_version,
                )
                return current
        raise ConflictError(f"pod {lease.namespace}/{lease.name} changes too often")

    @loops(every_s=FINISH_S)
    async def finish_resizes(self) -> None:
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None or not status.unsynced:
            return
        now = self.clock.now()
        pods = await self.ledger.resizes.unsynced(older_than_s=ABANDONED_S)
        self._retries = {pod: self._retries.get(pod, (0.0, FINISH_S)) for pod in pods}
        due = [pod for pod in pods if self._retries[pod][0] <= now][:BATCH]
        leases = await self.ledger.load(due) if due else []
        pairs = list(zip(due, leases, strict=True))
        await asyncio.gather(*(self._finish(pod, lease) for pod, lease in pairs))

    async def _finish(self, pod: PodUid, lease: Lease | None) -> None:
        if lease is None:
            await self.ledger.resizes.set_synced(pod, ANY_VERSION)
            return
        pending = await self._synchronize(lease, undo=True)
        longest_s = MAX_RETRY_S
        if not pending and lease.waiting_size is not None:
            pending = await self._shrink(lease.pod, lease.waiting_size)
            longest_s = MAX_WAITING_RETRY_S
        if pending:
            _, pause_s = self._retries.get(pod, (0.0, FINISH_S))
            self._retries[pod] = (self.clock.now() + pause_s, min(2 * pause_s, longest_s))
            logger.info(
                "pod %s/%s was resized; unfinished: %s", lease.namespace, lease.name, pending[0]
            )

    async def _shrink(self, pod: PodUid, size: WaitingSize) -> tuple[str, ...]:
        """Return why the smaller size still waits."""
        reply = await self._resize(ResizeRequest.of_waiting(pod, size))
        if reply.outcome in ("resized", "unchanged"):
            return reply.pending
        return (f"{size.memory_mib} MiB for container {size.container}: {reply.reason}",)


def resized_annotations(lease: Lease) -> dict[str, str]:
    dialect = DIALECTS.get(lease.dialect)
    return {
        **(dialect.resized_annotations(lease) if dialect else {}),
        ANNOTATION: dump_lease(lease),
    }


def _more_in_use(limits: LimitsReply) -> ResizeReply:
    hint = f"the least is --memory {limits.in_use_mib}Mi now" if limits.in_use_mib else ""
    return refused(limits.reason, hint)


def _unavailable(reason: str) -> ResizeReply:
    return ResizeReply(
        outcome="unavailable",
        reason=reason,
        hint="try again in some seconds: the same request is never applied twice",
    )


def _reply(outcome: str, change: SizeChange, pending: tuple[str, ...]) -> ResizeReply:
    was = size_of(change.before[0])
    now = size_of(change.after[0])
    notes = []
    withdrawn = change.stored.waiting_size
    if withdrawn is not None and change.lease.waiting_size is None and was == now:
        notes.append(f"it does not wait for {withdrawn.memory_mib} MiB any more")
    if was.cores_percent != now.cores_percent:
        cap = f"their cap of {was.cores_percent} %" if was.cores_percent else "no cap"
        notes.append(
            f"cores: running processes keep {cap} until they restart; processes that start now get "
            f"{now.cores_percent} %"
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
    was = size_of(change.before[0])
    now = size_of(change.after[0])
    devices = ", ".join(str(share.index) for share in change.after)
    limits = [
        f"{size.cores_percent} %" if size.cores_percent else "no limit" for size in (was, now)
    ]
    cores = f", {' to '.join(limits)} of its cores"
    return (
        f"container {change.container}: {was.memory_mib} to {now.memory_mib} MiB"
        f"{cores if was.cores_percent != now.cores_percent else ''} of GPU {devices} of node "
        f"{change.lease.node}{f', by {change.actor}' if change.actor else ''}"
    )
