"""Pods that fit nowhere yet, in the ledger: enrolled, counted by gang, offered what was freed."""

from collections.abc import Sequence
from dataclasses import replace

from shared.ledger.connection import LedgerStore, in_groups, unpacked
from shared.ledger.rows.lease_rows import lease_of
from shared.ledger.rows.waiting_rows import enrolled_row, waiting_of, waiting_row
from shared.model.ledger import GangEnrollment, OfferedPods, WaitingPod, WaitResult
from shared.model.names import PodUid
from shared.model.request import Gang


class WaitingPods(LedgerStore):
    """The part of the ledger (`RedisLeases`) that remembers who waits, and why."""

    async def wait(self, verdicts: Sequence[WaitingPod]) -> WaitResult:
        """Remember pods that fit nowhere; return those that do not wait.

        To be decided again are those for which something was freed after the state they were
        decided on, on a node that may now have room for them. A pod that holds a lease (reserved by
        a call whose answer was lost, say) keeps it.
        """
        stale: list[PodUid] = []
        held: list[PodUid] = []
        for group in in_groups(verdicts):
            rows = [waiting_row(waiting) for waiting in group]
            again, leased = await self._connection.run("wait", "wait", rows)
            stale += [PodUid(pod) for pod in again]
            held += [PodUid(pod) for pod in leased]
        leases = await self._connection.run_raw("load_leases", held, []) if held else []
        return WaitResult(
            stale=tuple(stale), already_leased=tuple(lease_of(value) for value in leases if value)
        )

    async def waiting(self, pods: Sequence[PodUid] | None = None) -> list[WaitingPod]:
        """Return the pods that wait: all, or those among `pods`."""
        if pods is not None:
            _, rows = await self._connection.run("list_waiting", "pods", pods)
            return [waiting_of(*row) for row in rows]
        found: dict[PodUid, WaitingPod] = {}
        cursor = "0"
        while True:
            cursor, rows = await self._connection.run("list_waiting", "scan", cursor, 500)
            found.update(
                (waiting.queued.pod, waiting) for waiting in (waiting_of(*r) for r in rows)
            )
            if cursor == "0":
                return list(found.values())

    async def forget_waiting(self, pods: Sequence[PodUid]) -> None:
        """Let pods wait no longer, because they are gone."""
        for group in in_groups(pods):
            await self._connection.run("wait", "forget", group)

    async def offers(
        self, *, now: float, limit: int = 128, spare: int = 32, retry_s: float = 60.0
    ) -> OfferedPods:
        """Choose waiting pods that freed capacity may suffice for, to be decided again.

        Those whose smallest need fits a node on which something was freed since their verdict, as
        many as it could hold; if the capacity is still there once they have answered, those after
        them, twice as many each time. Of those that only a changed cluster can help, up to `spare`
        when it has changed. Highest priority first, then oldest. A pod is offered once per capacity
        number, and again if there was no answer for `retry_s`.
        """
        capacity, records, settled = await self._connection.run(
            "choose_offers", now, limit, spare, retry_s
        )
        pods = (replace(waiting_of(0, 0.0, record).queued, offer=capacity) for record in records)
        return OfferedPods(pods=tuple(pods), complete=settled)

    async def muster(self, gang: Gang, enrolled: Sequence[WaitingPod]) -> GangEnrollment:
        """Let pods of a gang wait, nothing being offered to them, and count the gang.

        What was written of one that waits already stays.
        """
        rows = [enrolled_row(waiting) for waiting in enrolled]
        packed, *values = await self._connection.run_raw("enroll", gang.name, gang.min_member, rows)
        live, here, told = unpacked(packed)
        return GangEnrollment(
            live_count=live,
            waiting_count=here,
            waiting=tuple(waiting_of(*row) for row in told),
            leases=tuple(map(lease_of, values)),
        )
