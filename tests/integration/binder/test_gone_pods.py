"""Pods that are gone leave no record in the ledger, and no gang begins short; a real server."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.ledger_sync.reconciliation import Correction
from services.binder.observations import PodSnapshot
from shared.kubernetes.errors import ErrorResponse, ForbiddenError
from shared.ledger.waiting_pods import GatedPods
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    ListedPods,
    PodGated,
    PodsListed,
    PodTerminated,
)
from shared.model.lease import Lease, LeaseState
from shared.model.ledger import Reserved
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.request import Gang
from tests.support.binder.world import World, chosen
from tests.support.placer.ledger import (
    GANG,
    NOW,
    assert_sound,
    in_gang,
    ledger,
    queued,
    reservation,
    reserve,
    share,
    verdict,
)
from tests.support.servers.valkey import ValkeyServer

FORBIDDEN = ErrorResponse(
    method="GET",
    path="/api/v1/namespaces/default/pods/name-of-p",
    code=403,
    reason="Forbidden",
    message="it is forbidden",
)


class Binder(World):
    """A binder that compares listings with the ledger."""

    def start_another(self) -> "Binder":
        """Return another binder of the same ledger."""
        return Binder(self.ledger)

    async def wait(self, *pods: str, gang: Gang | None = None) -> None:
        """Let pods wait that fit nowhere."""
        capacity = await self.ledger.capacity()
        events = [in_gang(pod, 99_000, gang) if gang else queued(pod, units=99_000) for pod in pods]
        await self.ledger.waiting_pods.enqueue([verdict(each, capacity) for each in events])

    async def list(self, *unbound: str) -> list[Correction]:
        """Compare the ledger with a complete listing."""
        listed = ListedPods(unbound=tuple(map(PodUid, unbound)))
        listing = PodsListed(listing_id="l", chunk=0, chunks=1, pods=listed)
        return await self.binder.reconciler.reconcile_listing([listing])

    async def list_pods(self, *unbound: str) -> Sequence[PodTerminated]:
        """Compare as `list`, and return the pods that are gone."""
        return [event for event in await self.list(*unbound) if isinstance(event, PodTerminated)]

    async def reserve_gang(self, *pods: str) -> Sequence[Lease]:
        wanted = [replace(reservation(pod, share("a", 0, 4_000)), gang=GANG.name) for pod in pods]
        outcomes = await self.ledger.reserve_gang(GANG, wanted, now=NOW, ttl_s=30)
        return [outcome.lease for outcome in outcomes if isinstance(outcome, Reserved)]

    async def waiting(self) -> set[str]:
        return {each.queued.pod for each in await self.ledger.waiting_pods.load()}


@pytest.fixture
async def binder(server: ValkeyServer) -> AsyncIterator[Binder]:
    await server.ready()
    async with ledger(server.url) as leases:
        yield Binder(leases)


def deleted(pod: str) -> PodTerminated:
    space = Namespace("default")
    return PodTerminated(pod=PodUid(pod), namespace=space, name=pod, node=None, phase="")


async def test_records_of_pods_that_vanished_unseen_are_removed(binder: Binder) -> None:
    await binder.wait("stays", "gone", "recreated", "finalized", "new")
    binder.pods.seen = {
        "gone": None,
        "recreated": PodSnapshot(PodUid("another"), None),
        "finalized": PodSnapshot(PodUid("finalized"), None, deleting=True),
        "new": PodSnapshot(PodUid("new"), None),  # created while the pods were listed
    }

    ended = await binder.list_pods("stays")
    await binder.updater.end_terminated(ended)

    assert {event.pod for event in ended} == {"gone", "recreated", "finalized"}
    assert await binder.waiting() == {"stays", "new"}
    assert await binder.list_pods("stays", "new") == []


async def test_reservations_of_pods_that_vanished_unseen_end(binder: Binder) -> None:
    """A ledger that was rolled back has reservations again, which could last for as long as before
    the clock of its server was set back."""
    pods = ("stays", "gone", "recreated", "succeeded", "new")
    wanted = [reservation(pod, share("a", n % 2, mib=1_000)) for n, pod in enumerate(pods)]
    await reserve(binder.ledger, *wanted)
    binder.pods.seen = {
        "name-of-gone": None,
        "name-of-recreated": PodSnapshot(PodUid("another"), None),
        "name-of-succeeded": PodSnapshot(PodUid("succeeded"), NodeName("a"), terminal=True),
        "name-of-new": PodSnapshot(PodUid("new"), None),  # created while the pods were listed
    }

    await binder.updater.end_terminated(await binder.list_pods("stays"))

    assert {lease.pod for lease in await assert_sound(binder.ledger)} == {"stays", "new"}


async def test_a_gang_is_counted_without_the_pods_that_vanished_unseen(binder: Binder) -> None:
    await binder.wait("ghost", "p", "q", gang=GANG)
    binder.pods.seen = {"ghost": None}

    await binder.updater.end_terminated(await binder.list_pods("p", "q"))

    counted = await binder.ledger.waiting_pods.enroll(GANG, [])
    assert (counted.live_count, counted.waiting_count) == (0, 2)


async def test_a_pod_that_was_bound_by_something_else_waits_no_longer(binder: Binder) -> None:
    await binder.wait("p")
    binder.pods.seen = {"p": PodSnapshot(PodUid("p"), NodeName("a"))}

    assert await binder.list_pods() == []
    assert await binder.waiting() == set()


async def test_the_lost_lease_of_a_bound_pod_that_waits_can_be_restored(binder: Binder) -> None:
    [lease] = await reserve(binder.ledger, reservation("p", share("a", 0, 4_000)))
    await binder.ledger.release([PodUid("p")], reason="lost")
    await binder.wait("p")
    binder.pods.seen = {"p": PodSnapshot(PodUid("p"), NodeName("a"))}

    await binder.list_pods()

    lost = structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0)
    assert await binder.ledger.restore([lost], now=NOW) == []


async def test_a_lease_of_a_pod_that_is_bound_to_another_node_ends_and_the_pod_is_not_gone(
    binder: Binder,
) -> None:
    [lease] = await reserve(binder.ledger, reservation("p", share("a", 0, 4_000)))
    await binder.ledger.bind([lease])
    binder.pods.seen = {lease.name: PodSnapshot(PodUid("p"), NodeName("b"))}

    [event] = await binder.list()

    assert isinstance(event, LeaseChanged)
    assert await binder.ledger.load([PodUid("p")]) == [None]
    assert await binder.ledger.waiting_pods.list_gone([PodUid("p")]) == set()


async def test_a_gated_pod_that_vanished_unseen_is_reported(binder: Binder) -> None:
    space = Namespace("default")
    await binder.ledger.part(GatedPods).save(
        [
            PodGated(pod=PodUid(pod), namespace=space, name=pod, resource_version="1")
            for pod in ("gone", "stays")
        ]
    )
    binder.pods.seen = {"gone": None}

    assert [event.pod for event in await binder.list_pods("stays")] == ["gone"]


async def test_the_rest_of_a_gang_is_placed_again_if_a_pod_is_deleted_before_it_is_bound(
    binder: Binder,
) -> None:
    reserved = await binder.reserve_gang("p", "q", "r")

    events = await binder.updater.end_terminated([deleted("q")])

    assert {each.lease.pod for each in events if isinstance(each, LeaseChanged)} == {"p", "q", "r"}
    assert {each.pod for each in events if isinstance(each, BindingFailed)} == {"p", "r"}
    assert not any(isinstance(each, Lease) for each in await binder.ledger.bind(reserved))
    assert await assert_sound(binder.ledger) == []


async def test_no_pod_of_a_gang_is_bound_if_one_was_deleted_since_they_were_counted(
    binder: Binder,
) -> None:
    """The event of the deletion is still on its way: the API server is read before a Binding."""
    pods = ("p", "ghost", "q")
    placements = chosen(*await binder.reserve_gang(*pods))
    binder.pods.seen = {
        f"name-of-{pod}": PodSnapshot(PodUid(pod), None) for pod in pods if pod != "ghost"
    }

    events = await binder.binder.pods.bind_pods(placements)

    assert {each.pod for each in events if isinstance(each, BindingFailed)} >= {"p", "q"}
    assert not binder.pods.bindings
    assert await assert_sound(binder.ledger) == []
    counted = await binder.ledger.waiting_pods.enroll(GANG, [])
    assert counted.live_count == 0


async def test_another_binder_ends_the_lease_of_a_pod_that_vanished_before_it_started(
    binder: Binder,
) -> None:
    await binder.ledger.bind(await reserve(binder.ledger, reservation("p", share("a"))))
    await binder.updater.end_terminated([deleted("p")])
    successor = binder.start_another()
    successor.agents.answers = {PodUid("p"): True}

    [ended] = await successor.binder.vanished.end_vanished()

    assert isinstance(ended, LeaseChanged)
    assert ended.lease.pod == "p"
    assert await binder.ledger.load_vanished() == []
    assert await assert_sound(binder.ledger) == []


async def test_a_listing_finds_a_lease_that_was_reserved_a_moment_before_it(
    binder: Binder,
) -> None:
    await binder.ledger.bind(await reserve(binder.ledger, reservation("p", share("a"))))

    assert [event.pod for event in await binder.list_pods()] == ["p"]


async def test_a_pod_that_cannot_be_read_does_not_hold_up_the_others(binder: Binder) -> None:
    wanted = (reservation("p", share("a")), reservation("q", share("a")))
    await binder.ledger.bind(await reserve(binder.ledger, *wanted))
    binder.pods.unreadable = {"name-of-p": ForbiddenError(FORBIDDEN)}

    with pytest.raises(UnavailableError, match="name-of-p"):
        await binder.list()

    assert [getattr(event, "pod", None) for event in binder.bus.published] == ["q"]
    binder.pods.unreadable = {}
    assert {event.pod for event in await binder.list_pods()} == {"p", "q"}
