"""How the watcher tells listings: in pieces that fit a message, and until one succeeds."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from services.watcher.service import Watcher
from services.watcher.sources import LEASE_BYTES, PIECE_BYTES, FreshListing
from shared.kubernetes.client import KubernetesClient, Page
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PodsListed
from shared.model.lease_copy import ANNOTATION
from shared.nats.wire import encode


class OnePage:
    """An API server with these pods, each with this text for a lease."""

    def __init__(self, texts: list[str]) -> None:
        self.items = tuple(
            msgspec.Raw(msgspec.json.encode(_pod(n, t))) for n, t in enumerate(texts)
        )

    async def list_page(self, path: str, **_: object) -> Page:
        return Page(items=self.items)


def _pod(number: int, text: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"p{number}", "uid": f"u{number}", "annotations": {ANNOTATION: text}},
        "spec": {"schedulerName": "volcano", "nodeName": "n"},
        "status": {},
    }


async def pieces_of(texts: list[str]) -> list[PodsListed]:
    kube = cast("KubernetesClient", OnePage(texts))
    return [piece async for piece in FreshListing(kube, frozenset({"volcano"})).pieces()]


async def test_a_listing_is_cut_into_pieces_that_fit_a_message() -> None:
    texts = ["x" * (LEASE_BYTES - 1)] * 30

    pieces = await pieces_of(texts)

    assert [piece.chunk for piece in pieces] == list(range(pieces[0].chunks))
    assert [pod.lease for piece in pieces for pod in piece.pods] == texts
    assert all(len(encode([piece])) < 2 * PIECE_BYTES for piece in pieces)


async def test_a_text_that_cannot_be_a_lease_of_ours_is_left_out() -> None:
    (piece,) = await pieces_of(["x" * (LEASE_BYTES + 1), "lease"])

    assert [pod.lease for pod in piece.pods] == ["", "lease"]


async def test_an_empty_listing_is_one_piece() -> None:
    (piece,) = await pieces_of([])

    assert (piece.chunks, piece.pods) == (1, ())


class Clock:
    def now(self) -> float:
        return 1_000.0

    def ticks(self) -> float:
        return 1_000.0

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)


@dataclass
class Flaky:
    """A listing that fails a few times."""

    failures: int
    asked: int = field(default=0)

    async def pieces(self) -> AsyncIterator[PodsListed]:
        self.asked += 1
        if self.asked <= self.failures:
            raise UnavailableError("the API server is away")
        yield PodsListed(listing_id="l", chunk=0, chunks=1, pods=())


async def test_a_listing_that_failed_is_asked_for_until_it_succeeds() -> None:
    listing = Flaky(failures=3)
    nothing = cast("Any", None)
    watcher = Watcher(nothing, nothing, nothing, listing, Clock(), quotas=nothing)

    told = watcher.list_pods()
    async with asyncio.timeout(30):
        first, second = [await anext(told) for _ in range(2)]

    assert list(first) == []
    assert [type(event) for event in second] == [PodsListed]
    assert listing.asked == 4
