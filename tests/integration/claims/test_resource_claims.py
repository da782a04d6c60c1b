"""ResourceClaims are leased as allocated, answered once, and freed when nothing uses them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.claims.claim_leaser import FORGOTTEN_S, WAIT_S
from shared.model.devices.device import DeviceMode, MigLayout, MigProfile
from shared.model.errors import UnavailableError
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.events.pod_events import LeaseChanged
from shared.model.leases.lease import LeaseState
from shared.model.leases.lease_copy import copy_of, load_lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import LEASED, REFUSED, device_name
from shared.pods.pod_snapshot import generation_of
from tests.support.binder.claim_binder import GPU, ClaimBinder, deallocated
from tests.support.binder.world import allocated, on
from tests.support.placer.ledger import (
    assert_sound,
    device,
    report,
    reservation,
    reserve,
    share,
    uuid,
)
from tests.support.waiting import until


async def test_a_claim_is_leased_exactly_as_it_was_allocated(binder: ClaimBinder) -> None:
    parts = (
        on(GPU, 4_000, cores_percent=30, request="one", share_id="s1"),
        on(GPU, 2_000, request="two", share_id="s2"),
        on(uuid("a", 1), 1_000, request="two", share_id="s3"),
    )
    claim = binder.claims.put(replace(allocated("c", *parts), consumers=(PodUid("p"),)))

    await binder.lease(claim)

    lease = await binder.held(claim)
    assert lease.claim
    assert (lease.state, lease.claim.generation, lease.claim.consumers) == (
        LeaseState.BOUND,
        "g1",
        ("p",),
    )
    assert [
        (each.container, each.device, each.memory_mib, each.cores_percent, each.share_id)
        for each in lease.shares
    ] == [
        ("one", GPU, 4_000, 30, "s1"),
        ("two", GPU, 2_000, 0, "s2"),
        ("two", uuid("a", 1), 1_000, 0, "s3"),
    ]
    [answer] = binder.claims.answers["c"]
    assert answer.condition == LEASED
    assert binder.bus.published == [LeaseChanged(lease=lease)]
    await assert_sound(binder.ledger)


async def test_the_answer_carries_a_copy_from_which_the_lease_is_restored(
    binder: ClaimBinder,
) -> None:
    claim = await binder.leased()
    lease = await binder.held(claim)
    [answer] = binder.claims.answers["c"]
    assert answer.lease

    copy = json.dumps(answer.lease)

    assert load_lease(copy, namespace=lease.namespace, name=lease.name) == lease
    await binder.ledger.release([lease.pod], reason="its write was lost")
    await binder.lease(binder.claims.stored["c"])
    again = await binder.held(claim)
    assert again.shares == lease.shares
    assert binder.answered(claim) == [LEASED]


async def test_all_of_a_claim_is_refused_where_a_pod_has_the_share(binder: ClaimBinder) -> None:
    await reserve(binder.ledger, reservation("pod", share("a", 1, 14_000)))
    claim = binder.claims.put(allocated("c", on(GPU), on(uuid("a", 1), 4_001, request="two")))

    await binder.lease(claim)

    [answer] = binder.claims.answers["c"]
    assert answer.condition == REFUSED
    assert "pod default/name-of-pod (14000 MiB)" in answer.message
    assert "has 2000 MiB" in answer.message
    assert "needs 4001 MiB" in answer.message
    assert "%" not in answer.message, "kube-scheduler's Event takes it for a format"
    assert binder.agents.slices == ["a"]
    assert await binder.lease_of(claim) is None
    await binder.lease(binder.claims.stored["c"])
    assert binder.answered(claim) == [REFUSED]
    await assert_sound(binder.ledger)


async def test_words_34_of_two_claims_for_different_time_slices_the_second_waits_with_the_reason(
    binder: ClaimBinder,
) -> None:
    claims = [
        binder.claims.put(allocated(interval, on(GPU, 4_000, interval=interval)))
        for interval in ("Short", "Medium")
    ]
    with pytest.raises(UnavailableError, match="Medium has to wait for another one's lease"):
        await binder.lease(*claims)  # both at once: one is decided after the other's lease

    await binder.lease(*claims)

    first, second = (binder.claims.answers[claim.name][-1] for claim in claims)
    assert (first.condition, second.condition) == (LEASED, REFUSED)
    assert second.message == (
        f"GPU 0 ({GPU}) of a has Short time slices, and the claim asks for Medium: a GPU has one "
        "length of them at a time, asked for by claim default/Short (4000 MiB)"
    )
    assert (await binder.held(claims[0])).time_slices == {GPU: "Short"}

    binder.agents.answers[claims[0].claim] = True
    await binder.deallocate(claims[0])
    again = binder.claims.put(replace(claims[1], generation="g2"))
    await binder.lease(again)

    assert (await binder.held(again)).time_slices == {GPU: "Medium"}
    await assert_sound(binder.ledger)


@pytest.mark.parametrize("shares", [(16_000, 1), (1, 16_000)])
async def test_a_whole_device_is_exclusive(binder: ClaimBinder, shares: tuple[int, int]) -> None:
    first, second = (allocated(f"c{mib}", on(GPU, mib)) for mib in shares)
    for claim in (first, second):
        binder.claims.put(claim)
        await binder.lease(claim)

    assert (binder.answered(first), binder.answered(second)) == ([LEASED], [REFUSED])


async def test_a_share_without_cores_fits_beside_one_that_has_all(binder: ClaimBinder) -> None:
    claims = [
        allocated("all-cores", on(GPU, 4_000, cores_percent=100)),
        allocated("none", on(GPU, 5_000)),
    ]
    for claim in claims:
        binder.claims.put(claim)

    await binder.lease(*claims)

    assert [binder.answered(claim) for claim in claims] == [[LEASED], [LEASED]]


async def test_two_binders_lease_a_claim_once_and_answer_it_once(binder: ClaimBinder) -> None:
    other = ClaimBinder(binder.ledger, claims=binder.claims, agents=binder.agents)
    claims = [binder.claims.put(allocated(f"c{n}", on(GPU, 4_000))) for n in range(8)]

    for _ in range(2):
        await asyncio.gather(binder.lease(*claims), other.lease(*reversed(claims)))

    assert all(len(binder.answered(claim)) == 1 for claim in claims)
    answers = [binder.answered(claim)[0] for claim in claims]
    assert answers.count(LEASED) == 4
    for claim, answer in zip(claims, answers, strict=True):
        assert (await binder.lease_of(claim) is not None) is (answer == LEASED)
    await assert_sound(binder.ledger)


async def test_a_lease_ends_if_the_allocation_is_gone_when_it_is_answered(
    binder: ClaimBinder,
) -> None:
    claim = allocated("c", on(GPU))
    binder.agents.answers[claim.claim] = True

    [changed] = await binder.lease(claim)

    assert changed.lease.state is LeaseState.RELEASED
    assert await binder.lease_of(claim) is None


async def test_an_answer_that_could_not_be_written_is_written_later(binder: ClaimBinder) -> None:
    claim = binder.claims.put(allocated("c", on(GPU)))
    binder.claims.errors.append(UnavailableError("no answer"))

    with pytest.raises(UnavailableError, match="1 of 1 claims"):
        await binder.lease(claim)
    assert binder.answered(claim) == []
    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]
    assert len(await assert_sound(binder.ledger)) == 1


async def test_a_prepared_claim_keeps_its_lease_until_it_is_not_prepared(
    binder: ClaimBinder,
) -> None:
    claim = await binder.leased(memory_mib=16_000)
    await binder.ledger.activate([(claim.claim, claim.node)])
    binder.agents.answers[claim.claim] = False

    assert await binder.deallocate(claim) == []
    [vanished] = await binder.ledger.load_vanished()
    assert vanished.pod == claim.claim
    successor = binder.claims.put(allocated("d", on(GPU, 16_000)))
    with pytest.raises(UnavailableError, match="waits for a share that is ending"):
        await binder.lease(successor)
    assert binder.answered(successor) == []

    binder.agents.answers[claim.claim] = True
    assert len(await binder.deallocate(claim)) == 1
    await binder.lease(successor)
    assert binder.answered(successor) == [LEASED]


async def test_a_claim_is_refused_if_the_share_does_not_end_in_time(binder: ClaimBinder) -> None:
    claim = await binder.leased(memory_mib=16_000)
    await binder.deallocate(claim)
    successor = binder.claims.put(allocated("d", on(GPU, 16_000)))
    with pytest.raises(UnavailableError):
        await binder.lease(successor)

    binder.clock.advance(WAIT_S)
    await binder.lease(successor)

    assert binder.answered(successor) == [REFUSED]


async def test_a_claim_that_left_while_it_waited_is_forgotten(binder: ClaimBinder) -> None:
    claim = await binder.leased(memory_mib=16_000)
    await binder.deallocate(claim)
    successor = binder.claims.put(allocated("d", on(GPU, 16_000)))
    with pytest.raises(UnavailableError):
        await binder.lease(successor)

    binder.clock.advance(FORGOTTEN_S)
    with pytest.raises(UnavailableError, match="waits for a share that is ending"):
        await binder.lease(successor)


async def test_a_node_that_does_not_reply_delays_the_claims_of_no_other(
    binder: ClaimBinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("silent", "other", "still", "moved")
    silent, other, still, moved = [await binder.leased(name, 1_000) for name in names]
    replies = asyncio.Event()

    async def list_terminated(_: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        if pods[0] in (silent.claim, still.claim):
            await replies.wait()
        return set(pods)

    monkeypatch.setattr(binder.agents, "list_terminated", list_terminated)
    binder.claims.stored.clear()
    again = binder.claims.put(allocated("still", on(GPU, 1_000), generation="g2", version=7))
    new = binder.claims.put(allocated("moved", on(GPU, 1_000), generation="g2", version=7))
    gone = [deallocated(claim) for claim in (silent, other)]
    ending = asyncio.create_task(binder.ender.end_claims(gone))
    leasing = asyncio.create_task(binder.lease(again, new))

    async def ended() -> bool:
        return not (await binder.lease_of(other) or await binder.lease_of(moved))

    await until(ended)
    assert await binder.lease_of(silent)
    assert await binder.lease_of(still)
    replies.set()
    await asyncio.gather(ending, leasing)
    assert generation_of(await binder.held(again)) == "g2"


async def test_a_new_allocation_of_a_claim_needs_the_end_of_the_earlier_one(
    binder: ClaimBinder,
) -> None:
    first = await binder.leased()
    binder.agents.answers[first.claim] = False
    second = binder.claims.put(allocated("c", on(GPU, 5_000), generation="g2", version=7))

    with pytest.raises(UnavailableError, match="earlier lease of ResourceClaim default/c"):
        await binder.lease(second)
    assert await binder.ender.end_claims([deallocated(second)]) == []
    binder.agents.answers[first.claim] = True
    await binder.lease(second)

    lease = await binder.held(second)
    assert (generation_of(lease), lease.shares[0].memory_mib) == ("g2", 5_000)


async def test_a_late_event_of_an_earlier_allocation_does_not_end_the_lease_of_the_present_one(
    binder: ClaimBinder,
) -> None:
    first = allocated("c", on(GPU))
    second = binder.claims.put(allocated("c", on(GPU, 5_000), generation="g2", version=7))
    await binder.lease(second)

    await binder.lease(first)

    lease = await binder.held(second)
    assert (generation_of(lease), lease.state) == ("g2", LeaseState.BOUND)


async def test_the_agent_learns_of_further_consumers(binder: ClaimBinder) -> None:
    claim = binder.claims.put(replace(allocated("c", on(GPU)), consumers=(PodUid("p1"),)))
    await binder.lease(claim)
    binder.bus.published.clear()
    answered = binder.claims.stored["c"]

    await binder.lease(answered)
    assert binder.bus.published == []
    await binder.lease(replace(answered, consumers=(PodUid("p1"), PodUid("p2"))))

    [event] = binder.bus.published
    assert isinstance(event, LeaseChanged)
    assert event.lease.claim
    assert event.lease.claim.consumers == ("p1", "p2")
    assert binder.answered(claim) == [LEASED]


async def test_the_last_consumers_leave_while_the_claim_is_deallocated(binder: ClaimBinder) -> None:
    claim = binder.claims.put(replace(allocated("c", on(GPU)), consumers=(PodUid("p1"),)))
    await binder.lease(claim)
    binder.agents.answers[claim.claim] = True
    lease = await binder.held(claim)
    await binder.ledger.claims.set_consumers(lease, [])

    [ended] = await binder.ender.end(lease)

    assert ended.state is LeaseState.RELEASED
    late = replace(claim, answer=LEASED, lease=json.dumps(copy_of(lease)))
    binder.claims.stored.clear()
    await binder.lease(late)
    assert await binder.lease_of(claim) is None, "an event that comes late restores nothing"


# MIG instances

SMALL = MigProfile(name="1g", memory_mib=1_000, count=4)
LARGE = MigProfile(name="3g", memory_mib=4_000, count=2)
LAYOUTS = (
    MigLayout(name="small", profiles=(SMALL,)),
    MigLayout(name="large", profiles=(LARGE,)),
    MigLayout(name="mixed", profiles=(replace(LARGE, count=1), replace(SMALL, count=2))),
)


async def add_instances(binder: ClaimBinder, gpus: int = 1) -> None:
    devices = [device("a", n, mode=DeviceMode.MIG, layouts=LAYOUTS) for n in range(gpus)]
    await binder.ledger.save_devices([report("a", devices, at=1.0)])


def of_profile(name: str, *profiles: str) -> AllocatedClaim:
    """Return a claim that was allocated an instance of each profile of the first GPU."""
    parts = [
        AllocatedDevice(
            request=f"r{number}", device=device_name(GPU, profile), share_id=f"{name}-{number}"
        )
        for number, profile in enumerate(profiles)
    ]
    return allocated(name, *parts)


async def places(binder: ClaimBinder, *claims: AllocatedClaim) -> list[tuple[str, int]]:
    """Return layout and position of all instances that claims have leased, in order."""
    leases = [await binder.lease_of(claim) for claim in claims]
    shares = [share for lease in leases if lease for share in lease.shares]
    return [(share.mig.layout, share.mig.position) for share in shares if share.mig]


async def test_claims_of_a_profile_are_leased_in_free_places_until_there_is_none(
    binder: ClaimBinder,
) -> None:
    await add_instances(binder)
    claims = [binder.claims.put(of_profile(f"c{n}", "3g")) for n in range(3)]

    await binder.lease(*claims)

    assert await places(binder, *claims) == [("large", 0), ("large", 1)]
    lease = await binder.held(claims[1])
    assert [(share.slot, share.memory_mib) for share in lease.shares] == [(1, 4_000)]
    assert [binder.answered(claim) for claim in claims] == [[LEASED], [LEASED], [REFUSED]]
    await assert_sound(binder.ledger)


async def test_a_refusal_names_the_free_places_of_the_node(binder: ClaimBinder) -> None:
    await add_instances(binder, gpus=2)
    first = binder.claims.put(of_profile("first", "1g"))
    await binder.lease(first)
    refused = binder.claims.put(of_profile("refused", "3g"))

    await binder.lease(refused)

    [answer] = binder.claims.answers["refused"]
    assert answer.condition == REFUSED
    assert answer.message == (
        f"GPU 0 ({GPU}) of a has no place for 3g; free are: 3 of 1g on GPU 0; 4 of 1g or 2 of 3g "
        "on GPU 1; GPU 0 is leased to claim default/first (1000 MiB)"
    )
    assert binder.agents.slices == ["a"]
    await assert_sound(binder.ledger)


async def test_instances_of_one_claim_are_of_one_layout(binder: ClaimBinder) -> None:
    await add_instances(binder)
    claim = binder.claims.put(of_profile("c", "1g", "3g", "1g"))
    impossible = binder.claims.put(of_profile("d", "3g", "3g", "1g"))

    await binder.lease(claim)
    await binder.lease(impossible)

    assert await places(binder, claim) == [("mixed", 1), ("mixed", 0), ("mixed", 2)]
    [answer] = binder.claims.answers["d"]
    assert answer.condition == REFUSED
    assert answer.message == (
        f"GPU 0 ({GPU}) of a has no layout with 2 x 3g and 1g; its layouts: 4 x 1g; 2 x 3g; "
        "3g and 2 x 1g"
    )


async def test_claims_of_a_batch_are_reserved_in_different_places_at_once(
    binder: ClaimBinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.claims.claim_leaser.MOST_CHOICES", 1)
    await add_instances(binder)
    claims = [binder.claims.put(of_profile(f"c{n}", "1g")) for n in range(4)]

    await binder.lease(*claims)

    assert [binder.answered(claim) for claim in claims] == [[LEASED]] * 4


async def test_binders_that_choose_the_same_place_lease_all_that_fit(binder: ClaimBinder) -> None:
    """As many as a GPU has places, by binders that do not know of each other's choices."""
    await add_instances(binder)
    others = [
        ClaimBinder(binder.ledger, claims=binder.claims, agents=binder.agents) for _ in range(3)
    ]
    claims = [binder.claims.put(of_profile(f"c{n}", "1g")) for n in range(4)]

    await asyncio.gather(
        *(other.lease(claim) for other, claim in zip([binder, *others], claims, strict=True))
    )

    assert [binder.answered(claim) for claim in claims] == [[LEASED]] * 4
    assert sorted(await places(binder, *claims)) == [("small", n) for n in range(4)]
    await assert_sound(binder.ledger)


async def test_a_claim_waits_for_a_place_that_is_ending(binder: ClaimBinder) -> None:
    await add_instances(binder)
    first = binder.claims.put(of_profile("first", "3g"))
    await binder.lease(first)
    await binder.ledger.activate([(first.claim, first.node)])
    binder.agents.answers[first.claim] = False
    assert await binder.deallocate(first) == []
    second = binder.claims.put(of_profile("second", "1g"))

    with pytest.raises(UnavailableError, match="waits for a share that is ending"):
        await binder.lease(second)
    binder.agents.answers[first.claim] = True
    await binder.deallocate(first)
    await binder.lease(second)

    assert await places(binder, second) == [("small", 0)]


async def test_a_claim_of_a_device_that_the_node_does_not_have_is_refused(
    binder: ClaimBinder,
) -> None:
    await add_instances(binder)
    claims = [binder.claims.put(of_profile("p", "7g")), binder.claims.put(allocated("d", on(GPU)))]

    await binder.lease(*claims)

    texts = [binder.claims.answers[claim.name][0].message for claim in claims]
    assert texts == ["node a has no device gpu-a-0-7g", "node a has no device gpu-a-0"]


@pytest.mark.parametrize(
    ("namespace", "holder"),
    [
        ("default", "claim default/c (9000 MiB)"),
        ("secret", "a pod or claim of another namespace"),
    ],
)
async def test_a_refusal_names_the_claim_of_the_same_batch_if_it_is_of_its_namespace(
    binder: ClaimBinder, namespace: str, holder: str
) -> None:
    first, second = allocated("c", on(GPU, 9_000)), allocated("d", on(GPU, 9_000))
    first = replace(first, namespace=Namespace(namespace))

    await binder.lease(binder.claims.put(first), binder.claims.put(second))

    [refusal] = binder.claims.answers["d"]
    assert refusal.condition == REFUSED
    assert "has 7000 MiB" in refusal.message
    assert refusal.message.endswith(f"it is leased to {holder}")


async def test_administrative_access_is_permitted_without_a_lease(binder: ClaimBinder) -> None:
    admin = on(GPU, None, request="admin")
    alone = binder.claims.put(replace(allocated("alone"), admin_devices=(admin,)))
    beside = binder.claims.put(replace(allocated("beside", on(GPU)), admin_devices=(admin,)))

    await binder.lease(alone, beside)
    await binder.lease(binder.claims.stored["alone"])

    [answer] = binder.claims.answers["alone"]
    assert (answer.condition, answer.lease) == (LEASED, None)
    assert binder.answered(beside) == [LEASED]
    assert await binder.lease_of(alone) is None
    lease = await binder.held(beside)
    assert [share.container for share in lease.shares] == ["gpu"]
    assert await binder.deallocate(alone) == []
