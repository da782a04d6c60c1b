"""Pods are bound after their claims, or give their shares back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.binder.bind.volume_binder import EXPLAIN_S, KEPT_S
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import LeaseChanged, PodTerminated
from shared.model.leases.lease import LeaseState
from simcluster.apimachinery.objects import at_path
from tests.support.binder.volumes import VolumeScene, local_claim, to_provision, volume_scene
from tests.support.waiting import until


@pytest.fixture
async def scene(url: str) -> AsyncIterator[VolumeScene]:
    async with volume_scene(url) as made:
        yield made


async def test_a_pod_is_bound_after_the_volume_of_its_claim_is_provisioned_for_its_node(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"delay": "0.3"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        await scene.deliver(placed)
        assert scene.selected() == "n1"
        assert not scene.pods.sent
        await until(lambda: scene.node_of("p1") == "n1")
        await until(lambda: scene.bound() == ["p1"])

    assert scene.pods.early == []
    assert scene.pods.sent == ["p1"]
    assert await scene.world.states() == {"p1": LeaseState.BOUND}


async def test_a_claim_that_is_bound_by_then_delays_nothing(scene: VolumeScene) -> None:
    scene.storage_class("Immediate")
    scene.claim()
    await until(lambda: at_path(scene.stored_claim(), "status.phase") == "Bound")
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        await scene.deliver(placed)

    assert scene.bound() == ["p1"]


async def test_claims_get_the_smallest_free_volumes_that_their_nodes_reach(
    scene: VolumeScene,
) -> None:
    scene.storage_class(provisioner="kubernetes.io/no-provisioner")
    for name, node, size in (("far", "n2", "1Gi"), ("small", "n1", "2Gi"), ("large", "n1", "3Gi")):
        scene.volume(name, node, size)
    scene.claim("first")
    scene.claim("second")
    await until(
        lambda: (
            {at_path(volume, "status.phase") for volume in scene.store.list("persistentvolumes")}
            == {"Available"}
        )
    )
    volumes = (("far", "n2"), ("small", "n1"), ("large", "n1"))
    leases = [
        await scene.reserved(f"p-{name}", local_claim(*volumes, name=name))
        for name in ("first", "second")
    ]

    async with scene.running():
        await scene.deliver(*leases)
        await until(lambda: set(scene.bound()) == {"p-first", "p-second"})

    names = {at_path(scene.stored_claim(name), "spec.volumeName") for name in ("first", "second")}
    assert names == {"small", "large"}
    assert scene.pods.early == []
    assert not scene.selected("first")


async def test_a_pod_without_a_volume_left_on_its_node_gives_its_share_back(
    scene: VolumeScene,
) -> None:
    scene.storage_class(provisioner="kubernetes.io/no-provisioner")
    scene.volume("far", "n2")
    scene.claim()
    placed = await scene.reserved("p1", local_claim(("far", "n2")))

    async with scene.running():
        await scene.deliver(placed)

    assert "no volume that node n1 reaches is left for claim data" in scene.failures()["p1"]
    assert await scene.world.states() == {}


async def test_a_provisioner_that_fails_gives_the_share_back_with_its_words(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"fails-on": "n1", "delay": "0.2"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        await scene.deliver(placed)
        await until(scene.failures)
        await until(lambda: "no space left for node n1" in scene.condition("p1"))

    assert "no space left for node n1" in scene.failures()["p1"]
    assert scene.selected() is None
    assert await scene.world.states() == {}
    assert scene.node_of("p1") is None


async def test_a_reservation_lasts_until_the_time_limit_of_its_claims(scene: VolumeScene) -> None:
    scene.storage_class(parameters={"delay": "1000"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())
    volumes = scene.world.binder.volumes

    async with scene.running():
        await scene.deliver(placed)
        for _ in range(3):
            scene.clock.advance(KEPT_S - 1)
            await volumes.keep_reservations()
            assert await scene.ledger.expire(scene.clock.now()) == []
        await until(lambda: "it must wait: claim data is not bound yet" in scene.condition("p1"))
        scene.clock.advance(600)
        await volumes.keep_reservations()
        await volumes.keep_reservations()

    assert "claim data was not bound within 600 s" in scene.failures()["p1"]
    assert await scene.world.states() == {}
    assert scene.selected() is None


async def test_another_binder_takes_up_the_claims_of_one_that_was_killed(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"delay": "1"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())
    async with scene.running():
        await scene.deliver(placed)
    survivor = scene.binder()

    async with scene.running(survivor):
        await scene.deliver(placed, world=survivor)
        await until(lambda: scene.bound(survivor) == ["p1"])

    assert scene.pods.sent == ["p1"]
    assert scene.pods.early == []


async def test_two_binders_with_one_placement_bind_its_pod_once(scene: VolumeScene) -> None:
    scene.storage_class(parameters={"delay": "0.5"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())
    other = scene.binder()

    async with scene.running(), scene.running(other):
        await scene.deliver(placed)
        await scene.deliver(placed, world=other)
        await until(lambda: scene.bound() and scene.bound(other))

    assert scene.pods.early == []
    assert scene.failures() == scene.failures(other) == {}
    assert await scene.world.states() == {"p1": LeaseState.BOUND}


async def test_a_deleted_pod_leaves_no_node_selected_for_its_claim(scene: VolumeScene) -> None:
    scene.storage_class(parameters={"delay": "1000"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        await scene.deliver(placed)
        assert scene.selected() == "n1"
        scene.store.delete("pods", "default", "p1")
        gone = PodTerminated(
            pod=placed.pod, namespace=placed.namespace, name="p1", node=None, phase=""
        )
        await scene.world.binder.end_leases([gone])
        await scene.world.binder.volumes.keep_reservations()

    assert scene.selected() is None
    assert await scene.world.states() == {}
    assert scene.stored_claim()["status"]["phase"] == "Pending"


async def test_a_pod_that_was_deleted_before_it_was_reserved_keeps_no_lease(
    scene: VolumeScene,
) -> None:
    """The event of its end has come before, and ended nothing."""
    scene.storage_class(parameters={"delay": "1000"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        scene.store.delete("pods", "default", "p1")
        await scene.deliver(placed)
        assert await scene.world.states() == {"p1": LeaseState.RESERVED}
        scene.clock.advance(EXPLAIN_S)
        for _ in range(2):  # the second undoes what was written to the claim
            await scene.world.binder.volumes.keep_reservations()

    assert any(isinstance(event, LeaseChanged) for event in scene.published())
    assert await scene.world.states() == {}
    assert scene.selected() is None


async def test_a_binder_that_is_killed_as_it_gives_a_share_back_leaves_no_selected_node(
    scene: VolumeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.storage_class(parameters={"delay": "1000"})
    scene.claim()
    placed = await scene.reserved("p1", to_provision())
    volumes = scene.world.binder.volumes

    async def killed(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    async with scene.running():
        await scene.deliver(placed)
        await volumes.keep_reservations()
        before = scene.selected()
        monkeypatch.setattr(volumes.updater, "release_unmoved", killed)
        scene.clock.advance(600)
        with pytest.raises(asyncio.CancelledError):
            await volumes.keep_reservations()

    assert before == "n1"
    assert scene.selected() is None
    assert await scene.world.states() == {"p1": LeaseState.RESERVED}, "it expires, or is taken up"


async def test_claims_of_ended_pods_that_cannot_be_read_hold_up_no_reservation(
    scene: VolumeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read may take as long as a third of a reservation."""
    volumes = scene.world.binder.volumes
    ended = [await scene.reserved(name, to_provision()) for name in ("p1", "p2", "p3")]
    await scene.ledger.release([lease.pod for lease in ended], reason="test")
    together = asyncio.Barrier(len(ended))

    async def unread(*_: object) -> None:
        await together.wait()
        raise UnavailableError("no response")

    monkeypatch.setattr(volumes.volumes, "get_claim", unread)
    volumes.forsake(ended)

    async with asyncio.timeout(5):
        await volumes.keep_reservations()
        await volumes.keep_reservations()


async def test_a_deleted_claim_or_one_for_another_node_gives_the_share_back(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"delay": "1000"})
    scene.claim("deleted")
    scene.claim("elsewhere")
    scene.annotate({"volume.kubernetes.io/selected-node": "n2"}, "elsewhere")
    deleted = await scene.reserved("p-deleted", to_provision("deleted"))
    elsewhere = await scene.reserved("p-elsewhere", to_provision("elsewhere"))

    async with scene.running():
        await scene.deliver(deleted, elsewhere)
        scene.store.delete("persistentvolumeclaims", "default", "deleted")
        await until(lambda: len(scene.failures()) == 2)

    assert "gets its volume for node n2" in scene.failures()["p-elsewhere"]
    assert scene.selected("elsewhere") == "n2"
    assert await scene.world.states() == {}


async def test_a_bound_volume_that_the_node_does_not_reach_gives_the_share_back(
    scene: VolumeScene,
) -> None:
    scene.storage_class("Immediate", provisioner="kubernetes.io/no-provisioner")
    scene.volume("far", "n2")
    scene.claim()
    await until(lambda: at_path(scene.stored_claim(), "status.phase") == "Bound")
    placed = await scene.reserved("p1", to_provision())

    async with scene.running():
        await scene.deliver(placed)

    assert scene.failures()["p1"] == "node n1 does not reach volume far of claim data"
    assert await scene.world.states() == {}


async def test_a_gang_gives_all_shares_back_if_a_node_does_not_reach_a_shared_volume(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"delay": "0.3"})
    scene.claim("own")
    scene.claim("shared")
    leases = [
        await scene.reserved("a", to_provision("own"), to_provision("shared"), gang="default/g"),
        await scene.reserved("b", to_provision("shared"), node="n2", gang="default/g"),
        await scene.reserved("c", gang="default/g"),
    ]

    async with scene.running():
        await scene.deliver(leases[2])
        await scene.deliver(leases[0])
        assert scene.pods.sent == []
        await until(lambda: set(scene.failures()) == {"a", "b", "c"})

    # The volume that a and b share was provisioned for the node of one of them.
    assert "does not reach volume" in scene.failures()["c"]
    assert scene.pods.sent == []
    assert await scene.world.states() == {}


async def test_a_gang_with_claims_of_its_own_is_bound_as_a_whole(scene: VolumeScene) -> None:
    scene.storage_class(parameters={"delay": "0.3"})
    names = ["a", "b"]
    for name in names:
        scene.claim(name)
    leases = [
        await scene.reserved("a", to_provision("a"), gang="default/g"),
        await scene.reserved("b", to_provision("b"), node="n2", gang="default/g"),
        await scene.reserved("launcher", gang="default/g"),
    ]

    async with scene.running():
        await scene.deliver(leases[2])
        assert scene.pods.sent == []
        await scene.deliver(leases[0])
        await until(lambda: set(scene.bound()) == {"a", "b", "launcher"})

    assert scene.pods.early == []
    assert scene.selected("a") == "n1"
    assert scene.selected("b") == "n2"


async def test_a_gang_gives_all_shares_back_if_a_claim_of_one_pod_fails(
    scene: VolumeScene,
) -> None:
    scene.storage_class(parameters={"fails-on": "n2", "delay": "0.2"})
    scene.claim("a")
    scene.claim("b")
    leases = [
        await scene.reserved("a", to_provision("a"), gang="default/g"),
        await scene.reserved("b", to_provision("b"), node="n2", gang="default/g"),
    ]

    async with scene.running():
        await scene.deliver(*leases)
        await until(lambda: set(scene.failures()) == {"a", "b"})
        await scene.world.binder.volumes.keep_reservations()

    assert await scene.world.states() == {}
    assert scene.pods.sent == []
    assert scene.selected("b") is None
