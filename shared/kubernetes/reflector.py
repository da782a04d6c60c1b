"""A reflector: lists and watches one kind of object, and lists again if it cannot resume.

The sequence of changes is complete from the first list on: a deletion is reported once, a change
once or merged with later ones, and nothing is repeated.

An API server whose etcd was restored continues with lower resource versions, and sends nothing to a
watch that starts from a higher one. So the version of the store is read before a watch is resumed.
A lower one leads to a new list, and so does an API server that could not be reached, since its
versions may have caught up.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import (
    ExpiredError,
    KubernetesError,
    NotFoundError,
    error_of,
    is_throttled,
)
from shared.kubernetes.known_objects import Change, KnownObjects, is_older
from shared.kubernetes.watch_events import (
    Bookmark,
    EventReader,
    KubernetesObject,
    LineSplitter,
    UndecodableObject,
    UnreadableLineError,
    WatchEvent,
)
from shared.model.clock import wait_for_event
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError

R = TypeVar("R", bound=KubernetesObject)
Uniform = Callable[[float, float], float]

BATCH = 256
PAGE = 500
FIRST_PAUSE_S = 0.2
"""The first pause after a failed list or watch; it doubles."""
LONGEST_PAUSE_S = 10.0
"""The longest such pause; a watch that lasted for longer ends the doubling."""
MAX_RETRY_AFTER_S = 60.0
"""The longest pause that an API server's Retry-After causes."""
UNKNOWN_KIND_RETRY_S = 5.0
"""The interval at which a custom kind is requested that the API server does not know, or does not
let a service read: budgets and quotas apply this long after their kind is installed."""
SHORT_WATCH_S = 1.0
"""A watch without events that ends sooner counts as failed."""
WATCH_S = (300, 600)
"""The range of the random time after which a watch ends, so that not all end together."""

_UNIFORM = random.SystemRandom().uniform

logger = logging.getLogger(__name__)


class RestoredError(ConflictError):
    def __init__(self, *, earlier: str, listed: str) -> None:
        super().__init__(
            f"the API server is at resource version {listed}, after it was at {earlier}: its etcd "
            "was restored from a backup"
        )


def pause_s(failures: int, *, jitter: float, retry_after_s: float | None = None) -> float:
    """`jitter` is from 0.5 to 1."""
    doubled = FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16)
    return max(min(LONGEST_PAUSE_S, doubled) * jitter, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


@dataclass(slots=True)
class Batch(Generic[R]):
    changed: list[Change[R]] = field(default_factory=list)
    listed: bool = False
    """Every object that existed when a list was complete was reported."""
    restored: bool = False
    """Versions of objects may be lower than before the list."""
    refusal: RequestError | None = None
    path: str = ""


class Reflector(Generic[R]):
    """Follows one resource path, optionally with a selector, decoded into `kind`.

    For example::

        async with contextlib.aclosing(reflector.batches()) as batches:
            async for batch in batches:
                for named, pod in batch.changed:
                    ...
    """

    def __init__(
        self,
        kube: KubernetesClient,
        path: str,
        kind: type[R],
        *,
        field_selector: str = "",
        silence_s: float = 150.0,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Uniform = _UNIFORM,
    ) -> None:
        self._kube = kube
        self._path = path
        self._selectors = {"fieldSelector": field_selector} if field_selector else {}
        self._silence_s = silence_s
        self._pause = pause
        self._uniform = uniform
        self._reader = EventReader(kind)
        self._known: KnownObjects[R] = KnownObjects()
        self._unreported: list[Change[R]] = []
        self._listed: tuple[bool, bool] = (False, False)
        self._failures = 0
        self._must_list = True
        self._was_away = False
        self._watching_since_s = float("inf")

    @property
    def resource_version(self) -> str:
        return self._known.resource_version

    @property
    def has_failed(self) -> bool:
        """Nothing was received since the latest list or watch failed."""
        return self._failures > 0

    async def batches(self) -> AsyncGenerator[Batch[R], None]:
        """Yield batches of changes for ever, at most 256 at once.

        Raises RequestError only before the first list is complete; later errors are logged and
        retried. Consume it inside `contextlib.aclosing`, so that the connection is freed at once; a
        later call continues.
        """
        for batch in self._take_batches():
            yield batch
        while True:
            try:
                async with aclosing(self._follow()) as batches:
                    async for batch in batches:
                        yield batch
            except LeaseholdError as error:
                if isinstance(error, RequestError) and not self._known.resource_version:
                    raise
                await self._recover(error)

    async def _recover(self, error: LeaseholdError) -> None:
        """Wait according to the error; after a first expiry list at once."""
        expired = isinstance(error, ExpiredError | RestoredError)
        self._must_list |= expired or isinstance(error, UnreadableLineError | RequestError)
        self._failures = 1 if self._watched_s() > LONGEST_PAUSE_S else self._failures + 1
        self._watching_since_s = float("inf")
        if expired and self._failures == 1:
            logger.info("%s: listing again: %s", self._path, error)
            return
        after_s = error.response.retry_after_s if isinstance(error, KubernetesError) else None
        wait_s = pause_s(self._failures, jitter=self._uniform(0.5, 1.0), retry_after_s=after_s)
        logger.warning("%s: trying again in %.1f s: %s", self._path, wait_s, error)
        await self._pause(wait_s)

    async def _follow(self) -> AsyncGenerator[Batch[R], None]:
        if not self._must_list:
            await self._check_store()
        if self._must_list:
            async with aclosing(self._list()) as listed:
                async for batch in listed:
                    yield batch
        start = self._known.resource_version
        async with aclosing(self._watch()) as watched:
            async for batch in watched:
                yield batch
        if self._known.resource_version == start and self._watched_s() < SHORT_WATCH_S:
            # Back off after a short watch without events: the server may close each at once.
            self._failures += 1
            await self._pause(pause_s(self._failures, jitter=self._uniform(0.5, 1.0)))

    async def _check_store(self) -> None:
        try:
            page = await self._kube.list_page(self._path, query=self._selectors, limit=1)
        except UnavailableError as error:
            if not is_throttled(error):
                self._must_list = True
                self._was_away = True
            raise
        self._refuse_older(page.metadata.resource_version)

    def _refuse_older(self, version: str) -> None:
        if is_older(version, self._known.resource_version):
            raise RestoredError(earlier=self._known.resource_version, listed=version)

    def _watched_s(self) -> float:
        return asyncio.get_running_loop().time() - self._watching_since_s

    async def _list(self) -> AsyncGenerator[Batch[R], None]:
        self._watching_since_s = float("inf")
        self._known.begin_list()
        token = ""
        restored = self._was_away
        while True:
            page = await self._kube.list_page(
                self._path, query=self._selectors, limit=PAGE, continue_token=token
            )
            for item in page.items or ():
                self._unreported.extend(self._take_item(item))
            token = page.metadata.continue_
            if not token:
                version = page.metadata.resource_version
                restored |= is_older(version, self._known.resource_version)
                self._unreported.extend(self._known.end_list(version))
                self._listed = True, restored
                self._must_list = False
                self._was_away = False
            for batch in self._take_batches():
                yield batch
            if not token:
                return

    async def _watch(self) -> AsyncGenerator[Batch[R], None]:
        """An incomplete line at the end of a watch is dropped."""
        self._watching_since_s = asyncio.get_running_loop().time()
        lines = LineSplitter()
        async with self._kube.watch(
            self._path, query=self._watch_query(), silence_s=self._silence_s
        ) as chunks:
            async for chunk in chunks:
                before = self._known.resource_version
                failure: LeaseholdError | None = None
                try:
                    for line in lines.feed(chunk):
                        self._unreported.extend(self._take_line(line))
                except LeaseholdError as error:
                    failure = error
                if self._known.resource_version != before:
                    self._failures = 0
                for batch in self._take_batches():
                    yield batch
                if failure is not None:
                    raise failure

    def _take_batches(self) -> Iterator[Batch[R]]:
        while self._unreported or any(self._listed):
            batch = Batch(self._unreported[:BATCH], path=self._path)
            del self._unreported[:BATCH]
            if not self._unreported:
                (batch.listed, batch.restored), self._listed = self._listed, (False, False)
            yield batch

    def _watch_query(self) -> Mapping[str, str]:
        return {
            **self._selectors,
            "resourceVersion": self._known.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(self._uniform(*WATCH_S))),
        }

    def _take_line(self, line: bytes) -> tuple[Change[R], ...]:
        event = self._reader.read_event(line)
        if isinstance(event, Bookmark):
            self._refuse_older(event.resource_version)
            self._known.advance(event.resource_version)
            return ()
        if isinstance(event, WatchEvent):
            self._refuse_older(event.item.metadata.resource_version)
            if event.kind == "DELETED":
                return self._known.remove(event.item.metadata)
            return self._known.upsert(event.item)
        if isinstance(event, UndecodableObject):
            self._refuse_older(event.item.resource_version)
            self._report(event)
            if event.kind == "DELETED":
                return self._known.remove(event.item)
            return self._known.skip(event.item)
        raise error_of("GET", self._path, event)

    def _take_item(self, encoded: msgspec.Raw) -> tuple[Change[R], ...]:
        item = self._reader.read_item(encoded)
        if isinstance(item, UndecodableObject):
            self._report(item)
            self._known.list_undecodable(item.item)
            return ()
        return self._known.list_item(item)

    def _report(self, undecodable: UndecodableObject) -> None:
        logger.error(
            "%s: ignored %s/%s at version %s, which cannot be decoded: %s",
            self._path,
            undecodable.item.namespace,
            undecodable.item.name,
            undecodable.item.resource_version,
            undecodable.why,
        )


async def follow(
    client: KubernetesClient,
    paths: str | Sequence[str],
    kind: type[R],
    *,
    retry_s: float,
    field_selector: str = "",
    appeared: asyncio.Event | None = None,
) -> AsyncGenerator[Batch[R]]:
    """Follow a kind that the API server may not have, or not let us read.

    It is requested again every `retry_s`, or as soon as it has `appeared`. The first of several
    versions that is served is followed.
    """
    again, paths, at = appeared or asyncio.Event(), [paths] if isinstance(paths, str) else paths, 0
    while True:
        again.clear()
        reflector = Reflector(client, paths[at], kind, field_selector=field_selector)
        try:
            async with aclosing(reflector.batches()) as batches:
                async for batch in batches:
                    yield batch
        except RequestError as error:
            if isinstance(error, NotFoundError):
                at = (at + 1) % len(paths)
                if at:
                    continue
            yield Batch(refusal=error)
        await wait_for_event(again, retry_s)
