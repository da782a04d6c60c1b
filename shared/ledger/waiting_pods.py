"""Waiting pods in the ledger: for capacity, with their gang, or at their budget's gate."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shared.ledger.connection import LedgerPart, in_batches, unpack
from shared.ledger.rows.joined_texts import escaped
from shared.ledger.rows.lease_rows import decode_lease, text
from shared.ledger.rows.unreadable import readable
from shared.ledger.rows.waiting_rows import (
    as_waiting_pod,
    decode_queued,
    waiting_row,
)
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged, PodGated
from shared.model.leases.ledger import GangEnrollment, OfferedPods, WaitingPod, WaitResult
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang

logger = logging.getLogger(__name__)

SCAN_COUNT = 500
MOST_OFFERS = 128

_decode_gated = msgspec.json.Decoder(PodGated).decode
_decode_budget = msgspec.json.Decoder(BudgetChanged).decode


class WaitingPods(LedgerPart):
    async def enqueue(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        """Add waiting pods; return those that need not wait, and those whose reason has changed.

        A pod is stale, to be decided again, if something was freed after its verdict, on a node
        that may now have room for it.
        """
        stale: list[PodUid] = []
        leased: list[PodUid] = []
        gone: list[PodUid] = []
        changed: list[PodUid] = []
        for batch in in_batches(verdicts):
            rows = _encoded(batch)
            outcome = await self._connection.run("wait", "wait", rows)
            for pods, names in zip((stale, leased, gone, changed), outcome, strict=True):
                pods.extend(map(PodUid, names))
        values = await self._connection.run_raw("load_leases", leased, [], []) if leased else []
        return WaitResult(
            stale=tuple(stale),
            already_leased=tuple(readable(decode_lease, filter(None, values))),
            gone=tuple(gone),
            changed=tuple(changed),
        )

    async def hand_over(self, waiting: Sequence[WaitingPod]) -> None:
        """Add pods, which receive no offers; leave out those that have a lease, or are gone."""
        for batch in in_batches(waiting):
            await self._connection.run("wait", "handed_over", _encoded(batch))

    async def load(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        if pods is not None:
            _, rows = await self._connection.run("list_waiting", "pods", pods)
            return list(readable(as_waiting_pod, rows))
        pods_by_uid: dict[PodUid, WaitingPod] = {}
        cursor = "0"
        while True:
            cursor, rows = await self._connection.run("list_waiting", "scan", cursor, SCAN_COUNT)
            page = readable(as_waiting_pod, rows)
            pods_by_uid.update((waiting.queued.pod, waiting) for waiting in page)
            if cursor == "0":
                return list(pods_by_uid.values())

    async def uids(self) -> list[PodUid]:
        return [PodUid(pod) for pod in await self._connection.run("list_waiting", "uids")]

    async def remove(self, pods: Sequence[PodUid]) -> None:
        """Remove waiting pods that are gone.

        For ten minutes nothing more is stored for them. No gang counts them, although they may hold
        leases until their containers have ended.
        """
        for batch in in_batches(pods):
            await self._connection.run("wait", "gone", batch)

    async def remove_bound(self, pods: Sequence[PodUid]) -> None:
        """Remove pods; their leases, if lost, can still be restored."""
        for batch in in_batches(pods):
            await self._connection.run("wait", "bound", batch)

    async def list_gone(self, pods: Sequence[PodUid]) -> set[PodUid]:
        uids: set[PodUid] = set()
        for batch in in_batches(pods):
            uids.update(await self._connection.run("query", "gone", batch))
        return uids

    async def choose_offers(
        self, *, now: float, spare: int = 32, with_gangs: bool = True
    ) -> OfferedPods:
        """Choose waiting pods that freed capacity may suffice for, to be decided again.

        As many as a node could hold on which something was freed since their verdict; if the
        capacity is still there once they have answered, those after them, twice as many each time.
        Of those that only a changed cluster can help, up to `spare`, and as many whose verdict
        names the change. A pod is offered once per capacity number, and again if there was no
        answer for 2 s.
        """
        capacity, records, is_complete = await self._connection.run(
            "choose_offers", now, MOST_OFFERS, spare, MOST_OFFERS if with_gangs else 0
        )
        pods = readable(
            lambda record: replace(decode_queued(record), requeue_number=capacity), records
        )
        return OfferedPods(pods=tuple(pods), complete=is_complete)

    async def enroll(self, gang: Gang, enrolled: Sequence[WaitingPod]) -> GangEnrollment:
        """Add waiting pods of a gang, which receive no offers, and count the gang.

        If one was queued again, all waiting pods of the gang are returned, to be decided again with
        it.
        """
        rows = _encoded(enrolled)
        requeued = any(waiting.queued.requeue_number for waiting in enrolled)
        with_nodes = gang.has_topology
        packed, *values = await self._connection.run_raw(
            "enroll", escaped(gang.name), gang.min_member, rows, requeued, with_nodes
        )
        live_count, waiting_count, waiting_rows, gone, nodes = unpack(packed)
        return GangEnrollment(
            live_count=live_count,
            waiting_count=waiting_count,
            waiting=tuple(readable(as_waiting_pod, waiting_rows)),
            leases=tuple(readable(decode_lease, values)),
            gone=tuple(map(PodUid, gone)),
            nodes=tuple(map(NodeName, nodes)),
        )


def _encoded(waiting: Iterable[WaitingPod]) -> list[list[Any]]:
    rows = []
    for waiting_pod in waiting:
        try:
            rows.append(msgspec.to_builtins(waiting_row(waiting_pod)))
        except (RequestError, OverflowError, UnicodeEncodeError) as error:
            queued = waiting_pod.queued
            logger.warning("%s/%s does not wait: %s", queued.namespace, queued.name, error)
    return rows


class GatedPods(LedgerPart):
    """Usable whether or not the ledger is ready."""

    async def save(self, pods: Sequence[PodGated]) -> None:
        rows = [(pod.namespace, pod.pod, text(pod)) for pod in pods]
        await self._run("save", rows)

    async def remove(self, namespace: Namespace, pods: Sequence[PodUid]) -> None:
        await self._run("remove", namespace, pods)

    async def namespaces(self) -> dict[Namespace, BudgetChanged | None]:
        return {
            Namespace(name): next(readable(_decode_budget, [stored]), None) if stored else None
            for name, stored in await self._read("namespaces")
        }

    async def load(self, namespace: Namespace) -> list[PodGated]:
        return list(readable(_decode_gated, await self._read("list", namespace)))

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("gated_pods", *args, state="any")

    async def _read(self, *args: object) -> Any:
        return await self._connection.run("read_gated_pods", *args, state="any")
