"""Lists of bound pods: in chunks that fit a message, and retried until one succeeds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec

from services.watcher.service import Watcher
from services.watcher.sources import (
    CHUNK_BYTES,
    LEASE_BYTES,
    ClaimReflector,
    OurPodLister,
    PodGroupConditions,
)
from shared.kubernetes.client import KubernetesClient, Page
from shared.kubernetes.errors import ErrorResponse, ForbiddenError
from shared.kubernetes.resource_claims import CLAIMS_PATH
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import LEASE_PRESENT, ListedPods, PodsListed, ResyncRequested
from shared.model.lease_copy import ANNOTATION
from shared.nats.wire import encode


class OnePage:
    """An API server with these pods, each with this lease annotation."""

    def __init__(self, texts: list[str]) -> None:
        self.items = tuple(
            msgspec.Raw(msgspec.json.encode(_pod(n, t))) for n, t in enumerate(texts)
        )

    async def pages(self, path: str) -> AsyncIterator[Page]:
        yield Page(items=self.items)


def _pod(number: int, text: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"p{number}", "uid": f"u{number}", "annotations": {ANNOTATION: text}},
        "spec": {"schedulerName": "volcano", "nodeName": "n"},
        "status": {},
    }


async def chunks_of(texts: list[str], request_ids: tuple[str, ...] = ("r",)) -> list[PodsListed]:
    kube = cast("KubernetesClient", OnePage(texts))
    lister = OurPodLister(kube, frozenset({"volcano"}), ClaimReflector(kube))
    return [chunk async for chunk in lister.chunks(request_ids)]


async def test_a_list_is_cut_into_chunks_that_fit_a_message() -> None:
    texts = ["x" * (LEASE_BYTES - 1)] * 30

    chunks = await chunks_of(texts)

    assert [chunk.chunk for chunk in chunks] == list(range(chunks[0].chunks))
    assert [pod.lease for chunk in chunks for pod in chunk.pods.bound] == texts
    assert all(len(encode([chunk])) < 2 * CHUNK_BYTES for chunk in chunks)


async def test_an_annotation_that_is_too_long_for_a_lease_is_left_out() -> None:
    (chunk,) = await chunks_of(["x" * (LEASE_BYTES + 1), "lease"])

    assert [pod.lease for pod in chunk.pods.bound] == ["", "lease"]


async def test_a_list_that_answers_no_request_shows_only_which_pods_have_a_lease() -> None:
    (chunk,) = await chunks_of(["lease" * 1_000, ""], ())

    assert [pod.lease for pod in chunk.pods.bound] == [LEASE_PRESENT, ""]


async def test_an_empty_list_is_one_chunk() -> None:
    (chunk,) = await chunks_of([])

    assert (chunk.chunks, chunk.pods) == (1, ListedPods())


class Clock:
    def now(self) -> float:
        return 1_000.0

    def ticks(self) -> float:
        return 1_000.0

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)


class FlakyLister(OurPodLister):
    """A lister that fails a few times."""

    def __init__(self, failures: int) -> None:
        super().__init__(cast("Any", None), frozenset(), cast("Any", None))
        self.failures, self.attempts = failures, 0

    async def chunks(self, request_ids: tuple[str, ...] = ()) -> AsyncIterator[PodsListed]:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise UnavailableError("the API server is away")
        listed = ListedPods()
        yield PodsListed(listing_id="l", chunk=0, chunks=1, pods=listed, request_ids=request_ids)


async def test_a_list_that_failed_is_retried_until_it_succeeds() -> None:
    lister = FlakyLister(failures=3)
    sources = dict.fromkeys(
        ("pod", "node", "group", "namespace", "quota", "claim"), cast("Any", None)
    )
    watcher = Watcher(
        lister=lister,
        clock=Clock(),
        group_conditions=PodGroupConditions(cast("Any", None)),
        **{f"{name}_source": none for name, none in sources.items()},
    )

    await watcher.request_resync([ResyncRequested(reason="a test", request_id="t")])
    batches = watcher.resync()
    async with asyncio.timeout(30):
        first, second = [await anext(batches) for _ in range(2)]

    assert list(first) == []
    assert [event.request_ids for event in second if isinstance(event, PodsListed)] == [("t",)]
    assert lister.attempts == 4


FORBIDDEN = ErrorResponse(
    method="GET", path=CLAIMS_PATH, code=403, reason="Forbidden", message="not permitted"
)


class NoClaims(OnePage):
    """An API server that lets nobody list ResourceClaims."""

    refuses = True

    async def pages(self, path: str) -> AsyncIterator[Page]:
        if path == CLAIMS_PATH and self.refuses:
            raise ForbiddenError(FORBIDDEN)
        yield Page() if path == CLAIMS_PATH else Page(items=self.items)


async def test_pods_are_listed_although_claims_may_not_be_and_the_reason_is_reported() -> None:
    server = NoClaims(["lease"])
    kube = cast("KubernetesClient", server)
    claims = ClaimReflector(kube)
    lister = OurPodLister(kube, frozenset({"volcano"}), claims)

    (chunk,) = [chunk async for chunk in lister.chunks(("r",))]

    assert [pod.lease for pod in chunk.pods.bound] == ["lease"]
    assert claims.unreadable == f"ResourceClaims cannot be read: {ForbiddenError(FORBIDDEN)}"
    server.refuses = False
    assert len([chunk async for chunk in lister.chunks(("r",))]) == 1
    assert not claims.unreadable


async def test_a_list_needs_no_field_of_a_pod_but_its_names_and_its_node() -> None:
    api = OnePage([])
    pod = _pod(1, "x")
    pod["metadata"] |= {"labels": None, "creationTimestamp": "yesterday"}
    pod["spec"] |= {"containers": {"odd": True}, "priority": "high"}
    api.items = (msgspec.Raw(msgspec.json.encode(pod)),)

    kube = cast("KubernetesClient", api)
    lister = OurPodLister(kube, frozenset({"volcano"}), ClaimReflector(kube))

    [chunk] = [each async for each in lister.chunks()]

    assert [each.pod for each in chunk.pods.bound] == ["u1"]
