"""The inventory of the ledger, its snapshots, and the feed of every change after one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence

import msgspec

from shared.ledger.connection import LedgerConnection, LedgerPart, in_batches
from shared.ledger.ledger_totals import PAGE_SIZE, NodePage, read_nodes
from shared.ledger.rows.node_rows import (
    decode_change,
    decode_node_rows,
    device_report_record,
    is_known,
    node_facts_record,
)
from shared.ledger.rows.unreadable import UNREADABLE
from shared.ledger.server_errors import RebuildPendingError
from shared.model.devices.device import Device
from shared.model.devices.node import UNKNOWN_REVISION, NodeFacts, NodeRevision
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.leases.ledger import (
    FeedTruncatedError,
    LedgerChange,
    LedgerSnapshot,
    LedgerStatus,
)
from shared.model.names import DeviceUuid, NodeName

logger = logging.getLogger(__name__)

NODES_AT_ONCE = 32
"""Saved per call: Redis runs nothing else meanwhile."""
FEED_BATCH = 200
FEED_WAIT_S = 2.0
"""How long a reader of the feed waits before it checks that the ledger is still the same."""
MAX_AGE_S = 0.45
"""The loops of a binder share a reading of the ledger's status for this long."""


class LedgerInventory(LedgerPart):
    def __init__(self, connection: LedgerConnection) -> None:
        super().__init__(connection)
        self._reading = asyncio.Lock()
        self._status: LedgerStatus | None = None
        self._read_at = float("inf")

    async def capacity(self) -> int:
        """Return the number that rises whenever something is freed or added."""
        return (await self._read_status()).capacity

    async def generation(self) -> str | None:
        try:
            return (await self._read_status()).generation
        except RebuildPendingError:
            return None

    async def status(self, *, now: float, max_age_s: float = MAX_AGE_S) -> LedgerStatus | None:
        """Return what may have to be done, or None while the ledger is not ready.

        `now` is the caller's monotonic time. Callers share one reading for `max_age_s`.
        """
        async with self._reading:
            if not self._read_at <= now < self._read_at + max_age_s:
                try:
                    self._status = await self._read_status()
                except RebuildPendingError:
                    self._status = None
                self._read_at = now
            return self._status

    async def _read_status(self) -> LedgerStatus:
        status_values = await self._connection.run("status")
        generation, capacity, version, vanished, expires_at, *counts = status_values
        waiting, unsynced, preemptions, budgets, changed_gangs = counts
        self._connection.observe_version(version)
        return LedgerStatus(
            generation=str(generation),
            capacity=int(capacity),
            vanished=vanished,
            expires_at=expires_at,
            waiting=waiting,
            unsynced=unsynced,
            preemptions=preemptions,
            budgets=budgets,
            changed_gangs=changed_gangs,
        )

    async def snapshot(self) -> LedgerSnapshot:
        start = await read_nodes(self._connection, [])
        return await self._snapshot(start, start.names)

    async def snapshot_around(self, names: Collection[NodeName]) -> LedgerSnapshot:
        """Return these nodes, and those whose pods may keep a pod off them by anti-affinity."""
        start = await read_nodes(self._connection, list(names)[:1])
        wide = await self._connection.run("query", "wide_terms")
        return await self._snapshot(start, {*names, *wide})

    async def _snapshot(self, start: NodePage, names: Iterable[str]) -> LedgerSnapshot:
        nodes = []
        for batch in in_batches(sorted(names), PAGE_SIZE):
            page = await read_nodes(self._connection, batch)
            if page.generation != start.generation:
                raise UnavailableError("the ledger was rebuilt while it was read; read it again")
            known_rows = filter(is_known, page.rows)
            nodes += [totals.node for totals in decode_node_rows(known_rows, page.leases)]
        return LedgerSnapshot(
            position=f"{start.generation}:{start.feed_entry}",
            capacity=start.capacity,
            version=start.version,
            nodes=tuple(nodes),
        )

    async def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        """Yield every change after `position` as soon as it happens, without end.

        Raises FeedTruncatedError if the feed no longer goes back that far, or the ledger was
        rebuilt, or has lost changes.
        """
        generation, at = position.split(":")
        missed = ""
        while True:
            entries = await self._connection.read_feed(at, count=FEED_BATCH, block_s=FEED_WAIT_S)
            if not entries:
                page = await read_nodes(self._connection, [])
                if page.generation != generation:
                    raise FeedTruncatedError(position, "the ledger was rebuilt")
                if _order(page.feed_entry) < _order(at):
                    raise FeedTruncatedError(position, f"it ends at {page.feed_entry}")
                if page.feed_entry not in {at, missed}:
                    missed = page.feed_entry
                elif page.feed_entry != at:
                    raise FeedTruncatedError(position, f"it has no entry up to {missed}")
                continue
            changes = []
            for entry, fields in entries:
                if fields.get(b"e", b"").decode("latin1") != generation:
                    raise FeedTruncatedError(position, "the ledger was rebuilt")
                check_follows(position, at, fields.get(b"p", b"").decode("latin1"))
                at = entry
                changes.append(_decoded(f"{generation}:{at}", fields))
            self._connection.observe_version(max(change.version for change in changes))
            yield changes

    async def save_nodes(
        self, nodes: Sequence[NodeFacts], revisions: Sequence[NodeRevision] = ()
    ) -> bool:
        """Save nodes' facts, also during a rebuild; return whether any changed.

        Facts of a lower revision than a recent one are ignored. Without `revisions` they are not
        compared.
        """
        known_revisions = revisions or [UNKNOWN_REVISION] * len(nodes)
        rows = [
            msgspec.to_builtins(node_facts_record(facts, revision))
            for facts, revision in zip(nodes, known_revisions, strict=True)
        ]
        has_changed = False
        for batch in in_batches(rows, NODES_AT_ONCE):
            changed, too_large = await self._connection.run("save_nodes", *batch, state="open")
            has_changed = has_changed or changed
            for name in too_large:
                logger.error("node %s is not saved: it has too many resources", name)
        return has_changed

    async def save_devices(
        self, reports: Sequence[DeviceReported]
    ) -> dict[DeviceUuid, tuple[NodeName, NodeName]] | None:
        """Save what nodes' agents report; also possible during a rebuild.

        A report up to two minutes older than one saved in the last 20 s is ignored. Leases stay: a
        device that is missing, unhealthy or smaller than its use takes nothing new.

        A device that another node also reports stays there. Returns None if nothing changed, or
        else such devices, with the node that reports them and the one that has them.
        """
        shared: dict[DeviceUuid, tuple[NodeName, NodeName]] | None = None
        for batch in in_batches(
            [msgspec.to_builtins(device_report_record(report)) for report in reports],
            NODES_AT_ONCE,
        ):
            outcomes = await self._connection.run("save_devices", *batch, state="open")
            if outcomes is not False:
                pairs = zip(outcomes[1::3], outcomes[2::3], strict=True)
                shared = (shared or {}) | dict(zip(outcomes[::3], pairs, strict=True))
        return shared

    async def devices_of(self, names: Sequence[NodeName]) -> dict[NodeName, tuple[Device, ...]]:
        devices: dict[NodeName, tuple[Device, ...]] = {}
        for batch in in_batches(names, PAGE_SIZE):
            page = await read_nodes(self._connection, batch, state="open")
            for totals in decode_node_rows(page.rows, page.leases):
                of_node = (device for device, _ in totals.node.devices)
                devices[totals.node.facts.name] = tuple(of_node)
        return devices

    async def reported_by_agent(self, node: NodeName) -> bool:
        return bool(await self._connection.run("query", "by_agent", node))

    async def remove_node(
        self, name: NodeName, *, revision: NodeRevision = UNKNOWN_REVISION
    ) -> bool:
        row = (name, revision.node, revision.pods)
        return bool(await self._connection.run("remove_node", *row, state="open"))

    async def node_names(self) -> frozenset[NodeName]:
        return frozenset(map(NodeName, (await read_nodes(self._connection, [])).names))

    async def set_cordoned(self, reasons: Mapping[NodeName, str]) -> dict[NodeName, str]:
        """Cordon nodes, so that no pod is bound to them, or uncordon those with an empty reason.

        Returns the reasons of all that are cordoned; mirrors see these without served resources.
        """
        outcome: Sequence[str] = ()
        for batch in in_batches([*reasons.items()], NODES_AT_ONCE) or [()]:
            parts = [part for item in batch for part in item]
            outcome = await self._connection.run("cordon", parts)
        return {NodeName(name): why for name, why in zip(outcome[::2], outcome[1::2], strict=True)}


def _decoded(position: str, fields: Mapping[bytes, bytes]) -> LedgerChange:
    try:
        return decode_change(position, fields)
    except UNREADABLE as error:
        raise FeedTruncatedError(position, f"its entry cannot be read: {error}") from error


def check_follows(position: str, at: str, before: str) -> None:
    """Raise FeedTruncatedError unless the next entry follows the one that was read."""
    if before != at:
        raise FeedTruncatedError(position, f"its next entry follows {before or 'none'}")


def _order(entry: str) -> tuple[int, ...]:
    """Return the sort key of an ID such as `1764364623456-0`."""
    return tuple(map(int, entry.split("-")))
