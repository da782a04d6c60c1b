"""A container that combines requests with limits is refused when its claim is leased."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.binder.claim_client import RequestUse
from shared.model.claim import LEASED, REFUSED
from shared.model.errors import UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import PodUid
from tests.support.binder.claim_binder import GPU, ClaimBinder
from tests.support.binder.claims import allocated, on
from tests.support.placer.ledger import uuid
from tests.support.servers.valkey import ValkeyServer, valkey_server


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


def used(*uses: tuple[str, str], container: str = "main") -> list[RequestUse]:
    return [RequestUse(container=container, claim=claim, request=name) for claim, name in uses]


def by_pod(claim: AllocatedClaim) -> AllocatedClaim:
    return replace(claim, consumers=(PodUid("uid-pod"),), consumer_names=("pod",))


TWO = (on(GPU, 4_000, request="one"), on(GPU, 5_000, request="two"))
ADMIN = on(GPU, None, request="admin")


@pytest.mark.parametrize(
    ("uses", "named"),
    [
        ([("c", "")], "request one of ResourceClaim c and request two of ResourceClaim c"),
        ([("c", "one"), ("c", "two")], "request one of ResourceClaim c and request two"),
        ([("c", "one"), ("other", "")], "request gpu of ResourceClaim other"),
        ([("c", "one"), ("admin", "")], "request admin of ResourceClaim admin"),
        ([("c", "two"), ("", "nvidia.com/gpu")], "nvidia.com/gpu and request two"),
    ],
)
async def test_a_claim_is_refused_if_a_container_combines_limits(
    binder: ClaimBinder, uses: list[tuple[str, str]], named: str
) -> None:
    binder.claims.put(by_pod(allocated("other", on(GPU, 1_000))))
    binder.claims.put(by_pod(replace(allocated("admin"), admin_devices=(ADMIN,))))
    claim = binder.claims.put(by_pod(allocated("c", *TWO)))
    binder.claims.uses["pod"] = used(*uses)

    await binder.lease(claim)

    [answer] = binder.claims.answers["c"]
    assert answer.condition == REFUSED
    assert named in answer.message
    assert "in container main of pod default/pod: use one request of gpu" in answer.message
    assert await binder.lease_of(claim) is None


async def test_each_container_may_use_a_request_of_its_own(binder: ClaimBinder) -> None:
    claim = binder.claims.put(by_pod(allocated("c", *TWO)))
    binder.claims.uses["pod"] = used(("c", "one")) + used(("c", "two"), container="second")

    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]


async def test_a_container_may_use_several_whole_devices(binder: ClaimBinder) -> None:
    devices = (on(GPU, None, request="a/best"), on(uuid("a", 1), None, request="b"))
    claim = binder.claims.put(by_pod(allocated("c", *devices)))
    binder.claims.uses["pod"] = used(("c", ""), ("c", "a"))

    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]


async def test_a_pod_that_cannot_be_read_is_read_again(binder: ClaimBinder) -> None:
    claim = binder.claims.put(by_pod(allocated("c", *TWO)))
    binder.claims.unreadable.append(UnavailableError("no API server"))

    with pytest.raises(UnavailableError, match="the pods of ResourceClaim default/c: no API"):
        await binder.lease(claim)
    assert binder.answered(claim) == []
    await binder.lease(claim)

    assert binder.answered(claim) == [LEASED]
