"""Preemption continues exactly where a binder was killed, and never twice."""

import asyncio

import pytest

from services.binder.clients import PodClient
from services.binder.observations import PodSnapshot
from shared.kubernetes.client import KubernetesClient
from shared.model.preemption import EvictionOutcome, Victim
from tests.support.binder.preemption import Scene
from tests.support.placer.ledger import rebuild


class KilledError(Exception):
    """The binder ended here."""


class Mortal(PodClient):
    """Kills its binder before or after the nth call that changes something."""

    def __init__(self, kube: KubernetesClient, *, at: int, after: bool) -> None:
        super().__init__(kube)
        self.left = at
        self.after = after

    def _die(self, *, after: bool) -> None:
        if after is self.after:
            self.left -= 1
            if self.left == 0:
                raise KilledError

    async def announce(self, victim: Victim, at: float) -> bool:
        self._die(after=False)
        done = await super().announce(victim, at)
        self._die(after=True)
        return done

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        self._die(after=False)
        done = await super().evict(victim, dry_run=dry_run)
        self._die(after=True)
        return done


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(1, 7))
async def test_another_binder_continues_wherever_one_is_killed(
    at: Scene, call: int, after: bool
) -> None:
    one = await at.running("one", mib=8_000)
    two = await at.running("two", mib=8_000)
    await at.save_budget("a")
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder(pods=Mortal(at.kube, at=call, after=after))
    with pytest.raises(KilledError):
        await at.evict(binder)
    successor = at.binder()
    assert await successor.step() == []  # the dead one's turn is not over
    await _turn_over(at)

    await at.evict(successor)
    await at.terminate(one)
    await at.terminate(two)
    [chosen] = await successor.step()

    assert chosen.lease.pod == pod
    for name in ("one", "two"):
        writes = at.writes(name)
        assert writes.get("delete/eviction") == 1, writes
    past = (await at.preemptions.state(now=at.clock.now())).evictions
    assert sorted(line.name for line in past) == ["one", "two"]


async def test_a_lease_whose_event_was_lost_is_published_again(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder()
    await at.evict(binder)
    await at.terminate(old)
    [placement] = await binder.step()  # and killed before it is published
    await _turn_over(at)

    assert await at.binder().step() == [placement]


async def test_two_binders_do_not_both_evict(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binders = [at.binder() for _ in range(3)]

    for _ in range(3):
        await asyncio.gather(*(binder.step() for binder in binders))
        at.clock.advance(30)

    assert at.writes("old")["delete/eviction"] == 1
    assert len((await at.preemptions.state(now=at.clock.now())).evictions) == 1


async def test_a_rebuilt_ledger_cancels(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder()
    await binder.step()

    await rebuild(at.ledger, kept=[old], now=at.clock.now(), force=True)
    await binder.step()

    assert await at.announced_for("old") is None
    assert not (await at.preemptions.state(now=at.clock.now())).open


async def _turn_over(at: Scene) -> None:
    """Wait until the leader's turn is over: the server's clock is real."""
    prefix = at.ledger._connection.prefix.removesuffix(":")
    await at.preemptions._connection._redis.delete(f"{prefix}-preemption:leader")
