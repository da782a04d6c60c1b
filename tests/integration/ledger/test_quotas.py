"""Quotas in the ledger: checked as a lease is made, counted exactly, offered when freed."""

import asyncio
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.budgets.budget import Budget
from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits, QuotaUsage, total_of
from shared.model.budgets.weights import weigh
from shared.model.leases.lease import ClaimAllocation, Lease, Share
from shared.model.leases.ledger import (
    NoCapacity,
    Reservation,
    ReservationOutcome,
    ReservedLease,
    WaitingPod,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, Term
from shared.placing.refusal import quota_refusals
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    queued,
    rebuild,
    refusal,
    report,
    reservation_among,
    reserve,
    share,
    uuid,
)
from tests.support.placer.quotas import Team
from tests.support.servers.valkey import ValkeyServer

TEAM = Namespace("team")


pytestmark = pytest.mark.nodes(a=4)


def reservation(
    pod: str, *shares: Share, namespace: Namespace = TEAM, node: str = "a"
) -> Reservation:
    given = shares or (share(node),)
    return structs.replace(reservation_among(pod, [(node, given)]), namespace=namespace)


async def outcome(leases: RedisLeases, wanted: Reservation) -> ReservationOutcome:
    [only] = await leases.reserve([wanted], now=NOW, ttl_s=30)
    return only


async def held(leases: RedisLeases, model: str = "") -> QuotaUsage:
    """Return what the team holds, after checking it against its leases, one by one."""
    found = await assert_sound(leases)
    accounts = await leases.quotas.totals()
    sizes = {
        known.uuid: known.memory_mib
        async for page in leases.totals.pages()
        for account in page
        for known, _ in account.node.devices
    }
    ours = {lease.pod: charge_of(lease.shares, sizes) for lease in found if lease.namespace == TEAM}
    assert {pod: rows[""] for pod, (_, rows) in accounts.charges.items()} == ours
    assert accounts.used.get(TEAM, {}).get("", QuotaUsage()) == total_of(ours.values())
    return accounts.used.get(TEAM, {}).get(model, QuotaUsage())


def of(limits: QuotaLimits, namespace: Namespace = TEAM, **more: Any) -> Quota:
    return Quota(namespace=namespace, limits=limits, **more)


OTHERS = Namespace("others")
EVERYBODY = of(QuotaLimits(memory_mib=4_000), namespace=Namespace("*"))
ONLY_P100 = of(QuotaLimits(), models=(("P100", QuotaLimits()),), only_models=True)


@pytest.mark.parametrize(
    ("quota", "held_before", "wanted", "excess"),
    [
        (
            of(QuotaLimits(milli_gpu=600)),
            [share("a", 0), share("a", 1)],
            reservation("p", share("a", 2)),
            QuotaExcess(measure="milliGPU", limit=600, used=500, requested=250),
        ),
        (of(QuotaLimits(memory_mib=8_000)), [], reservation("p", share("a", 0, 8_000)), None),
        (
            of(QuotaLimits(memory_mib=8_000)),
            [],
            reservation("p", share("a", 0, 8_001)),
            QuotaExcess(measure="memoryMiB", limit=8_000, requested=8_001),
        ),
        (of(QuotaLimits(cores_milli=300)), [], reservation("p", share("a", 0, 100, 30)), None),
        (
            of(QuotaLimits(cores_milli=300)),
            [],
            reservation("p", share("a", 0, 100, 31)),
            QuotaExcess(measure="cores", limit=300, requested=310),
        ),
        (
            of(QuotaLimits(cards=0)),
            [],
            reservation("p"),
            QuotaExcess(measure="cards", requested=1),
        ),
        (of(QuotaLimits(cards=0)), [], reservation("p", namespace=OTHERS), None),
        (EVERYBODY, [share("a")], reservation("p", namespace=OTHERS), None),
        (
            EVERYBODY,
            [share("a")],
            reservation("p"),
            QuotaExcess(measure="memoryMiB", limit=4_000, used=4_000, requested=4_000),
        ),
        (ONLY_P100, [], reservation("p"), QuotaExcess(measure="model", values=("P100",))),
    ],
)
async def test_what_a_quota_does_not_allow_is_refused_with_the_numbers(
    leases: RedisLeases,
    quota: Quota,
    held_before: list[Share],
    wanted: Reservation,
    excess: QuotaExcess | None,
) -> None:
    await leases.quotas.save([quota], read_at=NOW)
    before = [reservation(f"before-{n}", each) for n, each in enumerate(held_before)]
    await reserve(leases, *before)

    answer = await outcome(leases, wanted)

    assert isinstance(answer, ReservedLease if excess is None else NoCapacity)
    if isinstance(answer, NoCapacity):
        assert (answer.reason, answer.quotas) == ("a: quota", (excess,))
        assert (await held(leases)).memory_mib == 4_000 * len(before)
    charged = set((await leases.quotas.totals()).charges)
    assert ("p" in charged) is (excess is None and quota.namespace in {wanted.namespace, "*"})


@pytest.mark.parametrize(
    ("term", "given"),
    [
        (Term(), "has none"),
        (Term(expected_run_s=60), "has none"),
        (Term(max_run_s=7201), "has 2h1s"),
        (Term(max_run_s=7200), None),
        (Term(runs_on=True), None),
    ],
)
async def test_a_pod_has_a_maximum_run_time_where_its_quota_requires_one(
    leases: RedisLeases, term: Term, given: str | None
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, max_run_s=7200)], read_at=NOW)

    wanted = structs.replace(reservation("p"), term=term)
    if given is None:
        await reserve(leases, wanted)
        return

    answer = await refusal(leases, wanted)

    told = quota_refusals.over_quota(TEAM, answer.quotas, None)
    assert f"a maximum run time of 2h at most, and the pod {given}" in told.reason
    assert '{"spec":{"activeDeadlineSeconds":7200}}' in told.hint
    await refusal(leases, reservation("q", share("a", 0), share("a", 1)))


async def test_a_claim_needs_no_run_time(leases: RedisLeases) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, max_run_s=7200)], read_at=NOW)
    claim = ClaimAllocation(generation="g", consumers=(PodUid("p"),))

    await reserve(leases, structs.replace(reservation("c"), claim=claim))


@dataclass(frozen=True, slots=True)
class Size:
    """Equal shares of so many cards."""

    cards: int
    mib: int
    cores: int

    def reserved(self, name: str, first: int = 2) -> Reservation:
        shares = (
            share("a", first + n, self.mib, self.cores, container=f"c{n}")
            for n in range(self.cards)
        )
        return reservation(name, *shares)

    def within(self, most: dict[str, float]) -> "Size":
        """Request what the hint says, and nothing else less than before."""
        cards = min(self.cards, int(most.get("GPU cards", self.cards)))
        gpus, cores = (most.get(unit, 9) / cards for unit in ("GPUs", "GPUs' cores"))
        percent = int(100 * min(gpus, cores) + 1e-9)
        if not self.cores:  # then memory counts as cores, too
            gpus = min(gpus, cores)
        mib = min(most.get("MiB of GPU memory", 99_999) // cards, 16_000 * gpus + 1e-9)
        return Size(cards, min(self.mib, int(mib)), min(self.cores, percent))


def any_case(source: random.Random) -> tuple[QuotaLimits, list[Size], Size]:
    """A quota, what other pods of the namespace hold, and what a pod requests."""

    def size(cards: int) -> Size:
        whole = source.choice([0, 0, 30, 60, 99])
        return Size(cards, source.choice([1, 2_000, 8_000, 15_999]), whole)

    def limit(*values: int) -> int | None:
        return source.choice([None, None, *values])

    limits = QuotaLimits(
        cores_milli=limit(0, 300, 1_000, 2_000),
        milli_gpu=limit(0, 300, 1_000, 2_000),
        memory_mib=limit(0, 1_000, 9_000, 20_000),
        cards=limit(0, 1, 2, 3),
    )
    others = [size(1) for _ in range(source.choice([0, 0, 1, 2]))]
    return limits, others, size(source.choice([1, 1, 2]))


@pytest.mark.parametrize("seed", range(100))
async def test_whoever_does_what_the_hint_says_is_within_the_quota(
    leases: RedisLeases, seed: int
) -> None:
    limits, others, wanted = any_case(random.Random(seed))  # noqa: S311
    await reserve(leases, *(each.reserved(f"o{n}", n) for n, each in enumerate(others)))
    await leases.quotas.save([Quota(namespace=TEAM, limits=limits)], read_at=NOW)
    used = (await leases.quotas.totals()).used.get(TEAM, {})
    refused = await outcome(leases, wanted.reserved("wanted"))
    [candidate] = wanted.reserved("wanted").candidates
    counted = Team(Quota(namespace=TEAM, limits=limits), used).excesses(
        candidate.shares, facts("a")
    )
    assert counted == (refused.quotas if isinstance(refused, NoCapacity) else ())
    if not isinstance(refused, NoCapacity):
        return

    hint = quota_refusals.over_quota(TEAM, refused.quotas, None).hint

    async def fits(size: Size) -> bool:
        got = await outcome(leases, size.reserved("wanted"))
        await leases.release([PodUid("wanted")], reason="test")
        return isinstance(got, ReservedLease)

    units = r"(MiB of GPU memory|GPUs' cores|GPUs|GPU cards)"
    found = re.findall(rf"at most ([\d.]+) {units} in the whole pod", hint)
    less = wanted.within({unit: float(number) for number, unit in found}) if found else wanted
    now = bool(found) and not hint.startswith("waiting alone")
    if now and less.mib:
        assert await fits(less), hint
    await leases.release([PodUid(f"o{n}") for n, _ in enumerate(others)], reason="test")
    if found and not now and less.mib:
        assert await fits(less), hint
    needs = re.search(r"if the pod needs at most (\d) GPU cards", hint)
    if hint.startswith("waiting"):
        assert not await fits(wanted), hint
    elif needs is None or wanted.cards <= int(needs[1]):
        assert await fits(wanted), hint
    if hint.startswith("waiting does not help: ask"):
        assert not await fits(Size(1, 1, min(wanted.cores, 1))), hint


async def test_two_leases_on_one_device_use_one_device(leases: RedisLeases) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=1))], read_at=NOW)
    await reserve(leases, reservation("first", share("a", 0)), reservation("second", share("a", 0)))

    other_card = await refusal(leases, reservation("third", share("a", 1)))

    assert other_card.quotas[0].values == (uuid("a", 0),)
    await leases.release([PodUid("first")], reason="test")
    await refusal(leases, reservation("third", share("a", 1)))
    await leases.release([PodUid("second")], reason="test")
    await reserve(leases, reservation("third", share("a", 1)))


async def test_the_next_candidate_is_taken_when_a_quota_refuses_the_first(
    leases: RedisLeases,
) -> None:
    await leases.save_nodes([replace(facts("b"), labels={"pool": "public"})])
    await leases.save_devices([report("b", [device("b", 0)])])
    quota = Quota(namespace=TEAM, pools=("public",), pool_label="pool")
    await leases.quotas.save([quota], read_at=NOW)
    both = structs.replace(
        reservation_among("pod", [("a", [share("a")]), ("b", [share("b")])]), namespace=TEAM
    )

    [lease] = await reserve(leases, both)

    assert lease.node == "b"


@pytest.mark.parametrize("label", ["", "gpu-model"])
async def test_models_are_counted_separately(leases: RedisLeases, label: str) -> None:
    await leases.save_nodes([replace(facts("b"), labels={"gpu-model": "P100"})])
    await leases.save_devices([report("b", [device("b", 0, model="Tesla P100-PCIE-16GB")])])
    await leases.save_nodes([replace(facts("a"), labels={"gpu-model": "T4"})])
    models = (
        ("T4", QuotaLimits(cores_milli=1000)),
        ("P100", QuotaLimits(cores_milli=200)),
        ("K80", QuotaLimits(cards=0)),
    )
    quota = Quota(namespace=TEAM, models=models, only_models=True, model_label=label)
    await leases.quotas.save([quota], read_at=NOW)

    await reserve(leases, reservation("small", share("b", 0, 100, 20), node="b"))
    more = await refusal(leases, reservation("more", share("b", 0, 100, 1), node="b"))
    await reserve(leases, reservation("whole", share("a", 0, 16_000, whole=True)))
    await refusal(leases, reservation("last", share("a", 1, 100, 1)))

    assert (more.quotas[0].model, more.quotas[0].label) == ("P100", label)
    assert more.quotas[0].values == ("P100", "K80")
    assert (await held(leases, "T4")).cores_milli == 1000


async def test_existing_leases_count_when_a_quota_is_added(leases: RedisLeases) -> None:
    await reserve(leases, reservation("early", share("a", 0, 8_000)))

    await leases.quotas.save(
        [Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=500))], read_at=NOW
    )

    assert (await held(leases)).milli_gpu == 500
    await refusal(leases, reservation("late", share("a", 1, 16)))
    await leases.quotas.save([], read_at=NOW + 1)
    await reserve(leases, reservation("late", share("a", 1, 16)))


async def test_quotas_that_were_read_earlier_are_ignored(leases: RedisLeases) -> None:
    await leases.quotas.save([], read_at=2.0)

    changed = await leases.quotas.save(
        [Quota(namespace=TEAM, limits=QuotaLimits(cards=0))], read_at=1.0
    )

    assert not changed
    assert (await leases.quotas.totals()).quotas == {}


async def test_a_rebuild_keeps_quotas_and_counts_again(leases: RedisLeases) -> None:
    quota = Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=300))
    await leases.quotas.save([quota], read_at=NOW)
    [lease] = await reserve(leases, reservation("pod", share("a", 0, 4_000)))
    [bound] = await leases.bind([lease])

    await rebuild(leases, {"a": 4}, kept=[bound], force=True)  # type: ignore[list-item]

    assert (await held(leases)).milli_gpu == 250
    await refusal(leases, reservation("more", share("a", 1, 4_000)))


async def test_expired_reservations_free_their_quota(leases: RedisLeases) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=1))], read_at=NOW)
    await reserve(leases, reservation("pod"))

    await leases.expire(NOW + 31)

    assert await held(leases) == QuotaUsage()


async def test_a_gang_that_exceeds_a_quota_as_a_whole_reserves_and_counts_nothing(
    leases: RedisLeases,
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=2))], read_at=NOW)
    gang = Gang(name="team/ring", min_member=3)
    wanted = [
        structs.replace(reservation(f"rank-{n}", share("a", n, 16_000, whole=True)), gang=gang.name)
        for n in range(3)
    ]

    outcomes = await leases.reserve_gang(gang, wanted, now=NOW, ttl_s=30)

    [refused] = [each for each in outcomes if isinstance(each, NoCapacity)]
    [excess] = refused.quotas
    assert (excess.limit, excess.used, excess.by_gang, excess.requested) == (2, 2, 2, 1)
    assert quota_refusals.over_quota(TEAM, refused.quotas, None).text == (
        "the GPU quota of namespace team blocks the pod: it allows 2 GPU cards, 0 are used and 3 "
        "requested by pods of the gang. Waiting does not help: request at most 2 GPU cards in all "
        "pods of the gang; or ask an administrator to raise its GPUQuota (kubectl "
        "get gpuquota team)."
    )
    assert await held(leases) == QuotaUsage()
    assert len(await reserve(leases, reservation("single", share("a", 0, 16_000, whole=True)))) == 1


def over_quota(pod: str, capacity: int) -> WaitingPod:
    event = replace(queued(pod), namespace=TEAM)
    return WaitingPod(
        queued=event,
        refusal=Refusal(reason="over quota", permanent=True, quota=TEAM),
        capacity=capacity,
    )


async def test_a_pod_that_waits_for_quota_is_offered_what_its_namespace_frees(
    leases: RedisLeases,
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=1))], read_at=NOW)
    await reserve(
        leases, reservation("mine"), reservation("foreign", namespace=Namespace("others"))
    )
    waited = await leases.waiting_pods.enqueue([over_quota("waiting", await leases.capacity())])
    assert not waited.stale

    await leases.release([PodUid("foreign")], reason="test")
    assert not (await leases.waiting_pods.choose_offers(now=NOW)).pods

    await leases.release([PodUid("mine")], reason="test")
    offers = await leases.waiting_pods.choose_offers(now=NOW)
    assert [pod.pod for pod in offers.pods] == ["waiting"]
    assert not offers.complete


async def test_the_work_of_a_change_of_quotas_does_not_grow_with_the_square_of_different_needs(
    leases: RedisLeases, url: str
) -> None:
    """Redis serves nothing else meanwhile, and one namespace's pods may all differ."""
    limits = QuotaLimits(cards=1)
    await leases.quotas.save([Quota(namespace=TEAM, limits=limits)], read_at=NOW)
    over = Refusal(reason="over quota", quota=TEAM)
    capacity = await leases.capacity()
    await leases.waiting_pods.enqueue(
        [
            WaitingPod(
                queued=replace(queued(f"waiting-{units}", units=units), namespace=TEAM),
                refusal=over,
                capacity=capacity,
            )
            for units in range(1, 301)
        ]
    )
    async with redis.asyncio.from_url(url) as db:
        await db.config_resetstat()
        assert await leases.quotas.save([], read_at=NOW + 1)
        commands = await db.info("commandstats")

    assert commands["cmdstat_hset"]["calls"] < 20
    assert (await leases.waiting_pods.choose_offers(now=NOW)).pods


async def test_a_verdict_older_than_what_the_namespace_freed_is_stale(leases: RedisLeases) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=1))], read_at=NOW)
    await reserve(leases, reservation("mine"))
    capacity = await leases.capacity()
    await leases.release([PodUid("mine")], reason="test")

    waited = await leases.waiting_pods.enqueue([over_quota("waiting", capacity)])

    assert waited.stale == ("waiting",)


async def test_every_node_is_reserved_for_a_pod_that_more_of_its_quota_is_offered_to(
    leases: RedisLeases,
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=0))], read_at=NOW)
    high = WaitingPod(
        queued=replace(queued("high", priority=5), namespace=TEAM),
        refusal=Refusal(reason="over quota", quota=TEAM),
        capacity=await leases.capacity(),
    )
    await leases.waiting_pods.enqueue([high])
    await leases.quotas.save([], read_at=NOW + 1)
    offers = await leases.waiting_pods.choose_offers(now=NOW)
    assert [pod.pod for pod in offers.pods] == ["high"]

    outcome = await refusal(leases, reservation("low", namespace=Namespace("others")))

    assert outcome.reserved_for_other


async def test_a_raised_quota_is_offered_to_all_pods_that_wait_for_it(leases: RedisLeases) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=0))], read_at=NOW)
    pods = [f"waiting-{n:02d}" for n in range(20)]
    await leases.waiting_pods.enqueue([over_quota(pod, await leases.capacity()) for pod in pods])

    await leases.quotas.save([], read_at=NOW + 1)

    offered: list[str] = []
    async with asyncio.timeout(30):
        while True:
            offers = await leases.waiting_pods.choose_offers(now=NOW)
            offered += [pod.pod for pod in offers.pods]
            await leases.waiting_pods.remove([pod.pod for pod in offers.pods])
            if offers.complete:
                break
    assert offered == pods


async def test_concurrent_callers_never_exceed_a_quota(server: ValkeyServer) -> None:
    chance = random.Random(7)  # noqa: S311
    async with ledger(server.url, {"a": 8, "b": 8}) as leases:
        await leases.quotas.save(
            [Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=1500))], read_at=1
        )

        async def caller(name: int) -> None:
            for turn in range(15):
                node = chance.choice("ab")
                wanted = reservation(
                    f"{name}-{turn}",
                    share(node, chance.randrange(8), chance.randrange(500, 6_000)),
                    node=node,
                )
                if (
                    isinstance(await outcome(leases, wanted), ReservedLease)
                    and chance.random() < 0.5
                ):
                    await leases.release([wanted.pod], reason="test")
                accounts = await leases.quotas.totals()
                assert accounts.used.get(TEAM, {}).get("", QuotaUsage()).milli_gpu <= 1500

        await asyncio.gather(*(caller(name) for name in range(8)))

        assert 0 < (await held(leases)).milli_gpu <= 1500


def test_a_share_counts_for_a_quota_as_it_does_for_a_budget() -> None:
    chance = random.Random(11)  # noqa: S311
    sizes = {uuid("a", gpu): 16_000 for gpu in range(4)}
    for _ in range(200):
        cores = chance.choice([0, 10, 50, 100])
        mib = chance.randrange(1, 16_000)
        given = tuple(share("a", gpu, mib, cores) for gpu in range(chance.choice([1, 1, 2])))
        lease = Lease(pod=PodUid("p"), namespace=TEAM, name="p", node=NodeName("a"), shares=given)
        weight = weigh(lease, Budget(namespace=TEAM), {}).milli_gpu
        assert 0 <= charge_of(lease.shares, sizes).milli_gpu - weight < len(given)
