"""Pods of all dialects, placed by two placers over one real ledger, against a brute-force recount.

The placers follow the ledger's feed as they do in production, so their mirrors are behind at times;
whatever they decide on, the ledger must not grant more than there is.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from services.placer.service import Placer
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import PodRequest
from tests.support.build import dice, facts, pod_queued
from tests.support.dialects.mixes import ExpectedPod, mixed
from tests.support.dialects.recount import LABELS, NODES, SERVED, Recount, assert_environment
from tests.support.placer.ledger import assert_sound, ledger
from tests.support.servers.valkey import ValkeyServer
from tests.support.stateful import run_machine
from tests.support.waiting import until

PLACERS = 2
TTL_S = 600.0


class MixMachine(RuleBasedStateMachine):
    """Pods come and go; every lease is compared with its pod's request."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.recount = Recount(NODES)
        self.pods = 0
        self.spoken = Rules()
        opened = ledger(self.url, {})
        self.leases: RedisLeases = self.run(self.stack.enter_async_context(opened))
        self.placers = [
            Placer(self.leases, SystemClock(), dice(n), ttl_s=TTL_S) for n in range(PLACERS)
        ]
        self.following: list[asyncio.Task[None]] = []
        self.run(self.begin())

    async def begin(self) -> None:
        for name in NODES:
            await self.leases.save_nodes([facts(name, labels=LABELS)])
            await self.report(name)
        self.following = [asyncio.create_task(placer.follow_ledger()) for placer in self.placers]
        await until(lambda: not any(placer.unready_reason() for placer in self.placers))

    async def report(self, name: NodeName) -> None:
        devices = [replace(d, healthy=d.uuid not in self.recount.ill) for d in NODES[name]]
        await self.leases.save_devices(
            [DeviceReported(node=name, devices=tuple(devices), served=SERVED, reported_at=0.0)]
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.end())
        self.runner.close()

    async def end(self) -> None:
        for task in self.following:
            task.cancel()
        await asyncio.gather(*self.following, return_exceptions=True)
        await self.stack.aclose()

    @initialize(rules=st.sampled_from([Rules(), Rules(schedule_policy="spread", prefer_mig=True)]))
    def choose(self, rules: Rules) -> None:
        self.spoken = rules

    @rule(batch=st.lists(mixed, min_size=1, max_size=4))
    def place_twins(self, batch: list[ExpectedPod]) -> None:
        """Give all placers equal pods at the same time, so that they compete for devices."""
        self.place([batch] * PLACERS)

    @rule(batches=st.lists(st.lists(mixed, max_size=4), min_size=PLACERS, max_size=PLACERS))
    def place_others(self, batches: list[list[ExpectedPod]]) -> None:
        """Give each placer its own batch at the same time."""
        self.place(batches)

    def place(self, batches: list[list[ExpectedPod]]) -> None:
        expected_pods: dict[PodUid, ExpectedPod] = {}
        queued = [[self.queued(expected, expected_pods) for expected in batch] for batch in batches]

        replies = self.run(self.place_all(queued))

        for answer in replies:
            expected = expected_pods.pop(_pod_of(answer))
            if isinstance(answer, PlacementChosen):
                self.recount.add(answer.lease.pod, expected, answer.lease)
                assert_environment(expected, answer.lease, NODES[answer.lease.node])

    def queued(self, expected: ExpectedPod, expected_pods: dict[PodUid, ExpectedPod]) -> PodQueued:
        self.pods += 1
        request: PodRequest = structs.replace(
            parse_pod_request(expected.manifest, self.spoken), resources={"pods": 1}
        )
        event = pod_queued(f"uid-{self.pods}", request)
        expected_pods[event.pod] = expected
        return event

    async def place_all(
        self, queued: Sequence[Sequence[PodQueued]]
    ) -> list[PlacementChosen | PlacementRefused]:
        async with asyncio.timeout(60):
            both = await asyncio.gather(
                *(
                    placer.place_pods(events)
                    for placer, events in zip(self.placers, queued, strict=True)
                )
            )
        return [answer for answers in both for answer in answers]

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def release(self, picks: list[int]) -> None:
        live = sorted(self.recount.live)
        ending = sorted({live[pick % len(live)] for pick in picks}) if live else []

        ended = self.run(self.leases.release([PodUid(pod) for pod in ending], reason="test"))

        assert [lease.pod for lease in ended] == ending
        for pod in ending:
            self.recount.remove(pod)

    @rule(name=st.sampled_from(sorted(NODES)), pick=st.integers(0, 3))
    def fall_ill_or_recover(self, name: NodeName, pick: int) -> None:
        device = NODES[name][pick % len(NODES[name])]
        self.recount.ill ^= {device.uuid}

        self.run(self.report(name))

    @invariant()
    def nothing_is_over_committed(self) -> None:
        found = self.run(assert_sound(self.leases))
        assert {lease.pod: lease for lease in found} == {
            pod: lease for pod, (_, lease) in self.recount.live.items()
        }
        self.recount.assert_consistent()


def _pod_of(answer: PlacementChosen | PlacementRefused) -> PodUid:
    return answer.lease.pod if isinstance(answer, PlacementChosen) else answer.pod


def test_a_random_mix_of_all_dialects_never_over_commits_a_real_ledger(
    server: ValkeyServer,
) -> None:
    MixMachine.url = server.url
    run_machine(MixMachine, examples=20, steps=20)
