"""Whatever is done to the ledger, in whatever order, it agrees with a small model of it."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Device
from shared.model.leases.lease import Lease, LeaseState, Share, StaleLeaseError
from shared.model.leases.ledger import (
    AlreadyLeased,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
)
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import Gang
from tests.support.placer.ledger import assert_sound, facts, ledger, report, reservation_among, uuid
from tests.support.placer.ledger_model import GPUS, NODES, TTL_S, Model, candidates, described, pods
from tests.support.servers.valkey import ValkeyServer
from tests.support.stateful import run_machine


class LedgerMachine(RuleBasedStateMachine):
    """Every rule is done to the ledger and to the model, and the answers are compared."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.model = Model()
        self.old: list[Lease] = []
        self.at = 0.0
        opened = ledger(self.url, dict.fromkeys(NODES, 0))
        self.leases: RedisLeases = self.run(self.stack.enter_async_context(opened))
        for node in NODES:
            here = [described(node, gpu) for gpu in range(GPUS + 1)]
            self.run(self.leases.save_devices([report(node, here)]))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()

    @rule(
        wanted=st.lists(
            st.tuples(
                pods,
                st.lists(candidates(), min_size=1, max_size=3),
                st.sampled_from(("", "", "red")),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def reserve(self, wanted: list[tuple[str, list[tuple[str, list[Share]]], str]]) -> None:
        group = [reservation_among(pod, among, tag=tag) for pod, among, tag in wanted]

        outcomes = self.run(self.leases.reserve(group, now=self.model.now, ttl_s=TTL_S))

        for reservation, outcome in zip(group, outcomes, strict=True):
            self.compare(reservation, outcome)

    @rule(
        wanted=st.dictionaries(
            pods, st.lists(candidates(), min_size=1, max_size=2), min_size=1, max_size=4
        ),
        gang=st.sampled_from(("ns/g", "ns/h")),
        least=st.integers(1, 4),
    )
    def reserve_gang(
        self, wanted: dict[str, list[tuple[str, list[Share]]]], gang: str, least: int
    ) -> None:
        group = [
            structs.replace(reservation_among(pod, among), gang=gang)
            for pod, among in wanted.items()
        ]
        before = dict(self.model.leases)
        fences = dict(self.model.fences)

        outcomes = self.run(
            self.leases.reserve_gang(
                Gang(name=gang, min_member=least), group, now=self.model.now, ttl_s=TTL_S
            )
        )

        if any(isinstance(outcome, ReservedLease) for outcome in outcomes):
            for reservation, outcome in zip(group, outcomes, strict=True):
                self.compare(reservation, outcome)
            assert sum(lease.gang == gang for lease in self.model.leases.values()) >= least
            return
        live = sum(lease.gang == gang for lease in before.values())
        fitting = all(
            self.would_reserve(reservation)
            for reservation in group
            if reservation.pod not in before
        )
        self.model.leases = before
        self.model.fences = fences
        new = sum(reservation.pod not in before for reservation in group)
        assert new == 0 or not fitting or live + new < least

    def would_reserve(self, reservation: Reservation) -> bool:
        """Count the first candidate that fits in the model, as the ledger would."""
        fits = [c for c in reservation.candidates if self.model.fits(reservation, c.node, c.shares)]
        if fits:
            self.model.leases[reservation.pod] = Lease(
                pod=reservation.pod,
                namespace=reservation.namespace,
                name=reservation.name,
                node=fits[0].node,
                shares=fits[0].shares,
                anti_affinity_groups=reservation.anti_affinity_groups,
            )
        return bool(fits)

    def compare(self, reservation: Reservation, outcome: ReservationOutcome) -> None:
        if reservation.pod in self.model.leases:
            assert outcome == AlreadyLeased(lease=self.model.leases[reservation.pod])
            return
        fitting = [
            c for c in reservation.candidates if self.model.fits(reservation, c.node, c.shares)
        ]
        if not fitting:
            assert isinstance(outcome, NoCapacity), (reservation, outcome)
            return
        assert isinstance(outcome, ReservedLease), (fitting, outcome)
        assert outcome.lease.node == fitting[0].node
        bare = tuple(structs.replace(s, slot=None, fence=0) for s in outcome.lease.shares)
        assert bare == fitting[0].shares
        self.model.check_new(outcome.lease)

    @rule(pod=pods)
    def bind(self, pod: str) -> None:
        known = self.model.leases.get(pod)
        old = [lease for lease in self.old if lease.pod == pod][-1:]
        for lease in [*old, *([known] if known else [])]:
            [answer] = self.run(self.leases.bind([lease]))
            if lease is not known:
                assert isinstance(answer, StaleLeaseError)
            elif lease.state is LeaseState.RESERVED:
                assert answer == structs.replace(
                    lease, state=LeaseState.BOUND, expires_at=0.0, version=answer.version
                )
                assert answer.version > lease.version
                self.model.leases[pod] = answer
                self.expect_committed(answer.gang)
            else:
                assert answer == lease

    def expect_committed(self, gang: str) -> None:
        """With the first of a gang that is bound, all its reservations are."""
        peers = [
            lease
            for lease in self.model.leases.values()
            if gang and lease.gang == gang and lease.state is LeaseState.RESERVED
        ]
        for peer, now in zip(
            peers, self.run(self.leases.load([p.pod for p in peers])), strict=True
        ):
            assert now == structs.replace(
                peer, state=LeaseState.BOUND, expires_at=0.0, version=now.version
            )
            self.model.leases[peer.pod] = now

    @rule(pod=pods)
    def activate(self, pod: str) -> None:
        known = self.model.leases.get(pod)

        [answer] = self.run(
            self.leases.activate([(PodUid(pod), known.node if known else NodeName("a"))])
        )

        if known is None or known.state is LeaseState.RESERVED:
            assert answer is None
        else:
            assert answer.state is LeaseState.ACTIVE
            assert answer.activated_at >= known.activated_at
            assert answer == structs.replace(
                known,
                state=LeaseState.ACTIVE,
                version=answer.version,
                activated_at=answer.activated_at,
            )
            self.model.leases[pod] = answer

    @rule(chosen=st.sets(pods, max_size=3))
    def release(self, chosen: set[str]) -> None:
        requested = [PodUid(pod) for pod in sorted(chosen)]
        live = {pod for pod in requested if pod in self.model.leases}
        expected = live | self.unbound_gangs_of(live)

        ended = self.run(self.leases.release(requested, reason="test"))

        assert {lease.pod for lease in ended} == expected
        assert len(ended) == len(expected)
        self.forget(ended)

    def unbound_gangs_of(self, pods: set[PodUid]) -> set[PodUid]:
        """Return the pods of gangs that lose a reservation before any of their pods is bound."""
        states: dict[str, set[LeaseState]] = {}
        for lease in self.model.leases.values():
            states.setdefault(lease.gang, set()).add(lease.state)
        unbound = {
            gang for gang, found in states.items() if gang and found == {LeaseState.RESERVED}
        }
        lost = unbound & {self.model.leases[pod].gang for pod in pods}
        return {lease.pod for lease in self.model.leases.values() if lease.gang in lost}

    @rule(passed_s=st.sampled_from((1, 29, 31)))
    def expire(self, passed_s: int) -> None:
        self.model.now += passed_s
        due = {
            lease.pod
            for lease in self.model.leases.values()
            if lease.state is LeaseState.RESERVED and lease.expires_at <= self.model.now
        }

        ended = self.run(self.leases.expire(self.model.now))

        assert {lease.pod for lease in ended} == due
        self.forget(ended)

    def forget(self, ended: list[Lease]) -> None:
        for lease in ended:
            self.old.append(self.model.leases.pop(lease.pod))

    @rule(
        node=st.sampled_from(NODES),
        changes=st.lists(
            st.tuples(
                st.booleans(),
                st.booleans(),
                st.sampled_from((1_000, 16_000, 20_000)),
                st.sampled_from((False, False, True)),
            ),
            min_size=GPUS + 1,
            max_size=GPUS + 1,
        ),
    )
    def report(self, node: str, changes: list[tuple[bool, bool, int, bool]]) -> None:
        found: list[Device] = []
        for gpu, (there, healthy, memory_mib, flipped) in enumerate(changes):
            self.model.devices.pop(uuid(node, gpu), None)
            if there:
                changed = {"healthy": healthy, "memory_mib": memory_mib}
                found.append(described(node, gpu, flipped=flipped, **changed))
                self.model.devices[uuid(node, gpu)] = found[-1]

        self.run(self.leases.save_devices([report(node, found)]))

    @rule(node=st.sampled_from(NODES), allowed=st.sampled_from((1, 3, 110)))
    def change_node(self, node: str, allowed: int) -> None:
        self.model.pods_allowed[node] = allowed

        self.run(self.leases.save_nodes([facts(node, pods=allowed)]))

    @precondition(lambda self: self.model.leases)
    @rule()
    def rebuild(self) -> None:
        self.model.now += 1
        self.run(self.do_rebuild())

    async def do_rebuild(self) -> None:
        now = self.model.now
        kept = list(self.model.leases.values())
        token = await self.leases.begin_rebuild(now=now, force=True)
        assert token is not None
        assert await self.leases.restore(kept, now=now, token=token) == []
        for node in NODES:
            await self.leases.save_nodes([facts(node, pods=self.model.pods_allowed[node])])
            here = [self.model.devices.get(uuid(node, gpu)) for gpu in range(GPUS + 1)]
            await self.leases.save_devices([report(node, [d for d in here if d])])
        assert await self.leases.restore(kept, now=now, token=token) == []
        assert await self.leases.finish_rebuild(token)

    @invariant()
    def agrees(self) -> None:
        found = self.run(assert_sound(self.leases))
        assert {lease.pod: lease for lease in found} == self.model.leases


def test_the_ledger_agrees_with_its_model(server: ValkeyServer) -> None:
    asyncio.run(server.ready())
    LedgerMachine.url = server.url
    run_machine(LedgerMachine, examples=30, steps=40)
