"""Placers and quotas on a real ledger: which pods wait and why, and where else pods go."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from services.placer.rounds.rounds import PlacementEvent
from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.events.pod_events import PlacementChosen, PlacementRefused, PodQueued
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang
from tests.support.build import gpu, pod_queued, request
from tests.support.placer.ledger import NOW, assert_sound, device, facts, ledger, report
from tests.support.placer.running import placers
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

TEAM = Namespace("team")
SHARE = request(gpu(memory=4_000), resources={"cpu": 100, "pods": 1})


@pytest.fixture
async def leases(server: ValkeyServer) -> AsyncIterator[RedisLeases]:
    await server.ready()
    async with ledger(server.url, {"a": 2}) as opened:
        yield opened


@pytest.fixture
async def placer(leases: RedisLeases) -> AsyncIterator[Placer]:
    async with placers(leases, 1) as [placer]:
        yield placer


def pod(name: str, namespace: Namespace = TEAM, gang: Gang | None = None) -> PodQueued:
    wanted = structs.replace(SHARE, gang=gang)
    return replace(pod_queued(name, wanted), namespace=namespace)


async def add_node(leases: RedisLeases, name: str, model: str, **labels: str) -> None:
    await leases.save_nodes([replace(facts(name), labels=labels)])
    await leases.save_devices([report(name, [device(name, 0, model=model)])])


def outcome_by_pod(answers: Sequence[PlacementEvent]) -> dict[str, str]:
    """Return by pod where it goes, or why it waits."""
    return {
        one.lease.pod if isinstance(one, PlacementChosen) else one.pod: (
            one.lease.node if isinstance(one, PlacementChosen) else one.refusal.reason
        )
        for one in answers
    }


async def test_a_pod_over_its_quota_waits_with_the_numbers_and_gets_what_its_namespace_frees(
    leases: RedisLeases, placer: Placer
) -> None:
    await leases.quotas.save(
        [Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=500))], read_at=NOW
    )

    answers = await placer.place_pods([pod("one"), pod("two"), pod("three")])

    [refused] = [one for one in answers if isinstance(one, PlacementRefused)]
    assert refused.refusal.reason == (
        "the GPU quota of namespace team blocks the pod: it allows 0.5 GPUs, 0.5 are used and 0.25 "
        "requested"
    )
    assert refused.refusal.counts == (("ExceedsGPUQuota", 1),)
    assert "raise its GPUQuota" in refused.refusal.hint

    holding = sorted({"one", "two", "three"} - {refused.pod})
    await leases.release([PodUid(holding[0])], reason="test")
    offered = (await leases.waiting_pods.choose_offers(now=NOW)).pods
    assert [each.pod for each in offered] == [refused.pod]
    assert outcome_by_pod(await placer.place_pods(offered)) == {refused.pod: "a"}
    await assert_sound(leases)


async def test_a_pod_with_what_its_hint_says_is_within_the_quota(
    leases: RedisLeases, placer: Placer
) -> None:
    await leases.quotas.save(
        [Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=200))], read_at=NOW
    )

    [refused] = await placer.place_pods([pod("four")])
    smaller = structs.replace(SHARE, containers=(gpu(memory=3_200),))
    [placed] = await placer.place_pods([replace(pod("less"), request=smaller)])

    assert isinstance(refused, PlacementRefused)
    assert refused.refusal.hint == (
        "waiting does not help: request at most 0.2 GPUs in the whole pod: in container main set "
        "volcano.sh/vgpu-memory: 3200; or ask an administrator to raise its GPUQuota (kubectl get "
        "gpuquota team)"
    )
    assert isinstance(placed, PlacementChosen)


async def test_what_others_free_is_not_offered_to_a_pod_over_its_quota(
    leases: RedisLeases, placer: Placer
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=0))], read_at=NOW)
    await placer.place_pods([pod("other", Namespace("others")), pod("ours")])

    await leases.release([PodUid("other")], reason="test")

    assert not (await leases.waiting_pods.choose_offers(now=NOW)).pods


@pytest.mark.parametrize("label", ["", "gpu-model"])
async def test_a_pod_goes_to_the_model_of_which_its_namespace_has_quota_left(
    leases: RedisLeases, placer: Placer, label: str
) -> None:
    await leases.save_nodes([replace(facts("a"), labels={"gpu-model": "T4"})])
    await add_node(leases, "b", "Tesla P100-PCIE-16GB", **{"gpu-model": "P100"})
    models = (("T4", QuotaLimits(cards=1)), ("P100", QuotaLimits(milli_gpu=250)))
    quota = Quota(namespace=TEAM, models=models, only_models=True, model_label=label)
    await leases.quotas.save([quota], read_at=NOW)
    await until_seen(placer, "b")

    where = [outcome_by_pod(await placer.place_pods([pod(str(n))]))[str(n)] for n in range(6)]

    assert sorted(where[:5]) == ["a", "a", "a", "a", "b"]
    assert "it allows 0.25 GPUs of model P100, 0.25 are used" in where[5]


async def test_a_namespace_limited_to_one_card_shares_that_card(
    leases: RedisLeases, placer: Placer
) -> None:
    await leases.quotas.save([Quota(namespace=TEAM, limits=QuotaLimits(cards=1))], read_at=NOW)

    answers = outcome_by_pod(await placer.place_pods([pod(str(n)) for n in range(5)]))

    assert sorted(answers.values())[:4] == ["a"] * 4
    assert "it allows 1 GPU cards, 1 are used and 1 requested" in max(answers.values())
    devices = {share.device for lease in await assert_sound(leases) for share in lease.shares}
    assert len(devices) == 1


async def test_quotas_of_pools_restrict_a_namespace_to_their_nodes(
    leases: RedisLeases, placer: Placer
) -> None:
    await add_node(leases, "b", "Tesla T4", pool="public")
    await leases.quotas.save(
        [Quota(namespace=TEAM, pools=("public",), pool_label="pool")], read_at=NOW
    )
    await until_seen(placer, "b")

    answers = outcome_by_pod(await placer.place_pods([pod(str(n)) for n in range(5)]))

    assert sorted(answers.values())[:4] == ["b"] * 4
    assert "it allows only nodes with label pool of public" in max(answers.values())


async def test_a_gang_over_its_quota_waits_as_a_whole_and_runs_when_that_is_raised(
    leases: RedisLeases, placer: Placer
) -> None:
    await leases.quotas.save(
        [Quota(namespace=TEAM, limits=QuotaLimits(milli_gpu=500))], read_at=NOW
    )
    gang = Gang(name="team/ring", min_member=3)
    ranks = [pod(f"rank-{n}", gang=gang) for n in range(3)]

    answers = outcome_by_pod(await placer.place_pods(ranks))

    assert all("the GPU quota of namespace team blocks the pod" in why for why in answers.values())
    assert not await assert_sound(leases)

    await leases.quotas.save([], read_at=NOW + 1)
    offered = (await leases.waiting_pods.choose_offers(now=NOW)).pods
    assert len(offered) == 1
    assert set(outcome_by_pod(await placer.place_pods(offered)).values()) == {"a"}
    assert len(await assert_sound(leases)) == 3


async def test_a_pod_that_fits_another_model_is_offered_both(
    leases: RedisLeases, placer: Placer
) -> None:
    await add_node(leases, "b", "Tesla P100-PCIE-16GB")
    models = (("T4", QuotaLimits(cards=0)), ("P100", QuotaLimits()))
    await leases.quotas.save([Quota(namespace=TEAM, models=models)], read_at=NOW)
    await until_seen(placer, "b")
    others = [pod(f"other-{n}", Namespace("others")) for n in range(12)]
    await placer.place_pods(others)
    await leases.release([(await held_on(leases, "a"))[0]], reason="test")
    await until(
        lambda: sum(each.use().shares for each in placer.mirror.nodes[NodeName("a")].devices) <= 7,
        limit_s=30,
    )

    [(name, why)] = outcome_by_pod(await placer.place_pods([pod("ours")])).items()

    assert "0 GPU cards of model T4, 0 are used and 1 requested; elsewhere 0/2 nodes" in why
    await leases.release([(await held_on(leases, "b"))[0]], reason="test")
    assert [each.pod for each in (await leases.waiting_pods.choose_offers(now=NOW)).pods] == [name]


async def held_on(leases: RedisLeases, node: str) -> list[PodUid]:
    return [lease.pod for lease in await assert_sound(leases) if lease.node == node]


async def until_seen(placer: Placer, node: str) -> None:
    await until(
        lambda: any(each == node and state.devices for each, state in placer.mirror.nodes.items()),
        limit_s=30,
    )
