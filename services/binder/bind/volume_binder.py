"""Has the claims of placed pods bound, and keeps the pods' reservations meanwhile.

It reserves a volume for a claim, or selects the node for which one is provisioned;
kube-controller-manager binds both. Nothing is stored: a placement that is published again begins
anew, in any binder.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.binder.bind.claim_progress import ClaimStage, progress_of
from services.binder.bind.volume_client import VolumeClient
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.ledger_updates import LedgerUpdater, binding_failed
from services.binder.report.event_writer import ConditionWriter, EventRecorder
from services.binder.report.explanations import explain_deferred, explain_unbound
from shared.kubernetes.errors import KubernetesConflictError
from shared.kubernetes.known_objects import is_older
from shared.kubernetes.storage_objects import ApiVolume, ApiVolumeClaim
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, ExpiringMap, wait_for_event
from shared.model.devices.node import NodeFacts
from shared.model.errors import ConflictError, LeaseholdError, UnavailableError
from shared.model.events.pod_events import (
    PlacementChosen,
    lease_changes,
)
from shared.model.leases.lease import LIVE, Lease
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import PodClaim
from shared.placing.node_filters import reaches
from shared.pods.node_selectors import selected_nodes
from shared.runtime.service import Publish, loops

logger = logging.getLogger(__name__)

BIND_TIMEOUT_S = 600.0
"""How long claims may take to be bound: kube-scheduler's `bindTimeoutSeconds`."""
KEPT_S = 30.0
"""A reservation lasts for this long after the binder that waits for its claims was last there."""
KEEP_S = 5.0
"""Interval at which reservations are extended."""
EXPLAIN_S = 2.0
"""A pod's condition explains the wait for its claims after this time."""
EXPLAIN_AGAIN_S = 30.0
"""Interval at which the explanation gets the newest warning about the claim, and the reservation of
a pod that is gone ends."""
ATTEMPTS = 5
MAX_REQUESTS = 16
BOUND_FOR_S = 60.0
"""Claims of a lease that were all bound are not read again for this time."""
MOST_BOUND = 8192
NOT_BOUND = "its claims could not be bound"

ClaimKey = tuple[str, str]
"""Namespace and name."""
Versions = frozenset[tuple[PodUid, int]]


@dataclass(slots=True, eq=False)
class OpenClaim:
    claim: PodClaim
    leases: list[Lease] = field(default_factory=list)
    selected_version: str = ""
    """Its resource version when its node was selected."""

    @property
    def nodes(self) -> list[NodeName]:
        return [lease.node for lease in self.leases]


@dataclass(slots=True, eq=False)
class ClaimWait:
    leases: tuple[Lease, ...]
    open_claims: dict[ClaimKey, OpenClaim] = field(default_factory=dict)
    begun: "asyncio.Future[bool]" = field(default_factory=asyncio.Future)
    is_beginning: bool = True
    has_changed: bool = False
    explain_at: float = 0.0

    @property
    def versions(self) -> Versions:
        return _versions(self.leases)

    @property
    def began_at(self) -> float:
        return max(lease.created_at for lease in self.leases)


@dataclass(slots=True)
class SettledPlacements:
    ready: list[PlacementChosen] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class VolumeBinder:
    ledger: RedisLeases
    volumes: VolumeClient
    holders: LeaseHolders
    updater: LedgerUpdater
    conditions: ConditionWriter
    events: EventRecorder
    publish: Publish
    clock: Clock
    timeout_s: float = BIND_TIMEOUT_S

    def __post_init__(self) -> None:
        self._waits: dict[str, ClaimWait] = {}
        """By gang, or by UID of a pod without one."""
        self._ended: list[Lease] = []
        """Before their claims were bound."""
        self._requests = asyncio.Semaphore(MAX_REQUESTS)
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._bound: ExpiringMap[tuple[PodUid, int], bool] = ExpiringMap(
            self.clock.ticks, expires_s=BOUND_FOR_S, most=MOST_BOUND
        )

    # Placements

    async def settle(self, placements: Sequence[PlacementChosen]) -> SettledPlacements:
        """Return the placements whose claims are bound: of a gang, all or none."""
        settled = SettledPlacements()
        units: dict[str, list[PlacementChosen]] = {}
        for placement in placements:
            lease = placement.lease
            if lease.claims:
                units.setdefault(lease.gang or lease.pod, []).append(placement)
            else:
                settled.ready.append(placement)
        outcomes = await asyncio.gather(
            *(self._settle_unit(unit) for unit in units.values()), return_exceptions=True
        )
        for unit, outcome in zip(units.values(), outcomes, strict=True):
            if isinstance(outcome, LeaseholdError):
                settled.unresolved += [str(outcome)] * len(unit)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome:
                settled.ready += unit
        return settled

    async def _settle_unit(self, unit: Sequence[PlacementChosen]) -> bool:
        leases = [placement.lease for placement in unit]
        if not leases[0].gang:
            return await self.are_bound(leases)
        # Without any: one of its pods is bound, which they are after all claims.
        members = await self.ledger.load_reserved_gang(leases[0].gang)
        return not members or await self.are_bound(members)

    async def are_bound(self, leases: Sequence[Lease]) -> bool:
        """Have the claims of a pod, or of a gang, bound; return whether they are.

        Raises a LeaseholdError if a claim or a volume cannot be read or written now.
        """
        with_claims = [lease for lease in leases if lease.claims]
        if all(self._bound.get((lease.pod, lease.version)) for lease in with_claims):
            return True
        key = leases[0].gang or leases[0].pod
        wait = self._waits.get(key)
        if wait is None or wait.versions != _versions(leases):
            wait = self._waits[key] = ClaimWait(tuple(leases))
            wait.begun = asyncio.create_task(self._begin(key, wait))
            wait.begun.add_done_callback(_retrieve)
        # Batches with other pods of the gang get the same result.
        return await asyncio.shield(wait.begun)

    async def _begin(self, key: str, wait: ClaimWait) -> bool:
        try:
            until = self.clock.now() + KEPT_S
            if not all(await self.ledger.extend(wait.leases, until=until)):
                self._forget(key, wait)
                return True  # a lease has moved on: it is committed already, or has ended
            for lease in wait.leases:
                for claim in lease.claims:
                    claim_key = (lease.namespace, claim.name)
                    shared = wait.open_claims.setdefault(claim_key, OpenClaim(claim))
                    shared.leases.append(lease)
            self._begun.set()
            self._changed.set()
            reason = await self._begin_claims(wait)
        except BaseException:
            self._forget(key, wait)
            raise
        if reason:
            await self._fail(key, wait, reason)
            return False
        wait.is_beginning = False
        if not wait.open_claims:
            self._forget(key, wait)
            for lease in wait.leases:
                self._bound.set((lease.pod, lease.version), True)
            return True
        if wait.has_changed:
            await self._read_claims(key, wait)
        return False

    async def _begin_claims(self, wait: ClaimWait) -> str:
        """Return why a volume, or a node, cannot be chosen for a claim."""
        names = sorted({lease.node for lease in wait.leases if lease.claims})
        read_nodes = await asyncio.gather(*map(self._get_node, names))
        nodes = dict(zip(names, read_nodes, strict=True))
        gone = [name for name, node in nodes.items() if node is None]
        if gone:
            return f"node {gone[0]} does not exist any more"
        present = {name: node for name, node in nodes.items() if node is not None}
        begun = [
            self._begin_claim(wait, key, [present[name] for name in open_claim.nodes])
            for key, open_claim in list(wait.open_claims.items())
        ]
        return next(filter(None, await asyncio.gather(*begun)), "")

    async def _get_node(self, name: NodeName) -> NodeFacts | None:
        async with self._requests:
            return await self.volumes.get_node(name)

    async def _begin_claim(self, wait: ClaimWait, key: ClaimKey, nodes: Sequence[NodeFacts]) -> str:
        async with self._requests:
            for _ in range(ATTEMPTS):
                try:
                    return await self._try_claim(wait, key, nodes)
                except KubernetesConflictError:
                    continue
        raise UnavailableError(f"claim {'/'.join(key)} is changed by others all the time")

    async def _try_claim(self, wait: ClaimWait, key: ClaimKey, nodes: Sequence[NodeFacts]) -> str:
        open_claim = wait.open_claims[key]
        claim = open_claim.claim
        stored = await self.volumes.get_claim(*key)
        progress = progress_of(claim, stored, open_claim.nodes)
        if progress.stage is ClaimStage.FAILED or stored is None:
            return progress.reason
        if progress.stage is ClaimStage.BOUND:
            reason = await self._unreachable(stored, nodes)
            if not reason:
                del wait.open_claims[key]
            return reason
        if progress.stage is ClaimStage.SELECTED:
            open_claim.selected_version = stored.metadata.resource_version
        elif not await self._reserve_volume(claim, stored, nodes):
            if not claim.provisions:
                return f"no volume that node {nodes[0].name} reaches is left for claim {claim.name}"
            selected = await self.volumes.select_node(stored, nodes[0].name)
            open_claim.selected_version = selected.metadata.resource_version
        return ""

    async def _unreachable(self, claim: ApiVolumeClaim, nodes: Iterable[NodeFacts]) -> str:
        name = claim.spec.volume_name
        volume = await self.volumes.get_volume(name)
        if volume is None:
            return f"volume {name} of claim {claim.metadata.name} does not exist any more"
        affinity = volume.spec.node_affinity
        required = affinity.required if affinity else None
        terms = selected_nodes(required) if required else ()
        far = [node.name for node in nodes if not reaches(node, terms)]
        if not far:
            return ""
        return f"node {far[0]} does not reach volume {name} of claim {claim.metadata.name}"

    async def _reserve_volume(
        self, claim: PodClaim, stored: ApiVolumeClaim, nodes: Sequence[NodeFacts]
    ) -> bool:
        for candidate in claim.volumes:
            if not all(reaches(node, candidate.terms) for node in nodes):
                continue
            volume = await self.volumes.get_volume(candidate.name)
            if volume is None or volume.metadata.deletion_timestamp is not None:
                continue
            if _is_reserved_for(volume, stored):
                return True
            if volume.spec.claim_ref is None and volume.status.phase == "Available":
                try:
                    await self.volumes.reserve_volume(volume, stored)
                except KubernetesConflictError:
                    continue  # it is another claim's now
                return True
        return False

    # Waits

    @loops
    async def follow_claims(self) -> None:
        while True:
            await self._begun.wait()
            version = await self.volumes.version()
            for key, wait in list(self._waits.items()):
                await self._read_claims(key, wait)
            async with aclosing(self.volumes.changes(version)) as changes:
                async for event in changes:
                    meta = event.item.metadata
                    stored = None if event.kind == "DELETED" else event.item
                    for key, wait in list(self._waits.items()):
                        await self._apply(key, wait, (meta.namespace, meta.name), stored)
                    if not self._waits:
                        self._begun.clear()
                        break

    async def _read_claims(self, key: str, wait: ClaimWait) -> None:
        for claim_key in list(wait.open_claims):
            stored = await self.volumes.get_claim(*claim_key)
            await self._apply(key, wait, claim_key, stored)

    async def _apply(
        self, key: str, wait: ClaimWait, claim_key: ClaimKey, stored: ApiVolumeClaim | None
    ) -> None:
        open_claim = wait.open_claims.get(claim_key)
        if open_claim is None or self._waits.get(key) is not wait:
            return
        if wait.is_beginning:
            wait.has_changed = True
            return
        progress = progress_of(open_claim.claim, stored, open_claim.nodes)
        if progress.stage is ClaimStage.FAILED:
            await self._fail(key, wait, progress.reason)
        elif progress.stage is ClaimStage.BOUND:
            del wait.open_claims[claim_key]
            if not wait.open_claims:
                await self._publish_again(key, wait, {claim_key: open_claim})
        elif progress.stage is ClaimStage.OPEN and stored and _was_reset(open_claim, stored):
            warning = await self._warning(claim_key)
            reason = (
                f"no volume was provisioned for claim {open_claim.claim.name} "
                f"on node {open_claim.nodes[0]}"
            )
            await self._fail(key, wait, f"{reason}: {warning}" if warning else reason)

    async def _publish_again(
        self, key: str, wait: ClaimWait, last: Mapping[ClaimKey, OpenClaim]
    ) -> None:
        """Publish the placements again; their handler checks that the nodes reach the volumes.

        `last` are read again if that fails.
        """
        self._forget(key, wait)
        try:
            await self.publish(
                [PlacementChosen(lease=lease, trace=lease.trace) for lease in wait.leases]
            )
        except UnavailableError:
            wait.open_claims.update(last)
            self._waits.setdefault(key, wait)
            raise

    @loops(wait=lambda binder: binder.wait())
    async def keep_reservations(self) -> None:
        self._changed.clear()
        now = self.clock.now()
        for key, wait in list(self._waits.items()):
            if not all(await self.ledger.extend(wait.leases, until=now + KEPT_S)):
                self._forget(key, wait)
                self.forsake(wait.leases)
            elif now - wait.began_at >= self.timeout_s:
                await self._fail(key, wait, await self._explanation(wait, over=True))
            elif now >= (wait.explain_at or wait.began_at + EXPLAIN_S):
                wait.explain_at = now + EXPLAIN_AGAIN_S
                if not await self._end_gone(wait):
                    await self._explain(wait)
        await self._undo_ended()

    async def wait(self) -> None:
        await wait_for_event(self._changed, KEEP_S if self._waits or self._ended else None)

    async def _end_gone(self, wait: ClaimWait) -> bool:
        """A pod may be deleted before it has a lease that its end could end."""
        try:
            gone = await self.holders.read_gone(wait.leases)
        except UnavailableError:
            return False  # they are read again with the next explanation
        if gone:
            await self.publish(await self.updater.end_terminated(gone))
        return bool(gone)

    async def _explain(self, wait: ClaimWait) -> None:
        text = await self._explanation(wait)
        for lease in wait.leases:
            self.conditions.repeat(explain_deferred(lease, text), self.events)

    async def _explanation(self, wait: ClaimWait, *, over: bool = False) -> str:
        if not wait.open_claims:
            return "its claims are bound, which is being published"
        first, *others = wait.open_claims
        more = f" and {len(others)} more" if others else ""
        text = f"claim {first[1]}{more} is not bound yet"
        if over:
            text = f"claim {first[1]}{more} was not bound within {self.timeout_s:g} s"
        warning = await self._warning(first)
        return f"{text}: {warning}" if warning else text

    async def _warning(self, claim_key: ClaimKey) -> str:
        try:
            return await self.volumes.last_warning(*claim_key)
        except LeaseholdError as error:
            return f"its Events cannot be read: {error}"

    # Ends

    async def _fail(self, key: str, wait: ClaimWait, reason: str) -> None:
        """Give back all reservations of a wait.

        Their claims are undone first: if a binder is killed in between, another one has them bound
        anew.
        """
        self._forget(key, wait)
        for lease in wait.leases:
            try:
                await self._undo(lease, is_held=True)
            except LeaseholdError as error:  # `forsake` tries again
                logger.info("claims of pod %s/%s: %s", lease.namespace, lease.name, error)
        try:
            released = await self.updater.release_unmoved(wait.leases, reason=NOT_BOUND)
        except ConflictError:
            released = []  # committed or ended meanwhile
        self.forsake(wait.leases)
        for lease in released:
            self.conditions.explain(explain_unbound(lease, reason), self.events)
        await self.publish(
            [
                *lease_changes(released),
                *(binding_failed(lease, reason, lease.trace) for lease in released),
            ]
        )

    def forsake(self, leases: Iterable[Lease]) -> None:
        """Undo, soon, what was written to claims of ended leases."""
        ended = [lease for lease in leases if lease.claims]
        if ended:
            self._ended += ended
            self._changed.set()

    async def _undo_ended(self) -> None:
        """Undo some side by side: claims that cannot be changed hold up no reservation."""
        ended, self._ended = self._ended[:MAX_REQUESTS], self._ended[MAX_REQUESTS:]
        are_done = await asyncio.gather(*map(self._try_to_undo, ended))
        self._ended += [
            lease for lease, is_done in zip(ended, are_done, strict=True) if not is_done
        ]
        if self._ended and any(are_done):
            self._changed.set()

    async def _try_to_undo(self, lease: Lease) -> bool:
        """Return False if it may succeed later."""
        try:
            await self._undo(lease)
        except (UnavailableError, ConflictError) as error:
            logger.info("claims of pod %s/%s: %s", lease.namespace, lease.name, error)
            return False
        except LeaseholdError as error:
            logger.warning("claims of pod %s/%s: %s", lease.namespace, lease.name, error)
        return True

    async def _undo(self, lease: Lease, *, is_held: bool = False) -> None:
        """Select no node for claims that are not bound; a reserved volume stays theirs.

        Claims of a pod with a lease on the node are left, unless the caller holds it.
        """
        [now] = await self.ledger.load([lease.pod])
        is_there = now is not None and now.state in LIVE and now.node == lease.node
        is_same = now is not None and now.version == lease.version
        if is_there and not (is_held and is_same):
            return
        for claim in lease.claims:
            key = (lease.namespace, claim.name)
            if any(key in wait.open_claims for wait in self._waits.values()):
                continue
            stored = await self.volumes.get_claim(*key)
            progress = progress_of(claim, stored, [lease.node])
            is_selected = progress.stage is ClaimStage.SELECTED
            if stored is not None and is_selected and not stored.spec.volume_name:
                await self.volumes.select_node(stored, None)

    def _forget(self, key: str, wait: ClaimWait) -> None:
        if self._waits.get(key) is wait:
            del self._waits[key]


def _retrieve(begun: "asyncio.Future[bool]") -> None:
    """Retrieve an error that nothing may wait for any more."""
    if not begun.cancelled():
        begun.exception()


def _versions(leases: Iterable[Lease]) -> Versions:
    return frozenset((lease.pod, lease.version) for lease in leases)


def _was_reset(open_claim: OpenClaim, stored: ApiVolumeClaim) -> bool:
    """Return whether the provisioner has given up the selected node."""
    version = open_claim.selected_version
    return bool(version) and not is_older(stored.metadata.resource_version, version)


def _is_reserved_for(volume: ApiVolume, claim: ApiVolumeClaim) -> bool:
    reference = volume.spec.claim_ref
    meta = claim.metadata
    return reference is not None and (reference.namespace, reference.name, reference.uid) == (
        meta.namespace,
        meta.name,
        meta.uid,
    )
