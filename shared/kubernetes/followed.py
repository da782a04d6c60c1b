"""Follows a kind that the API server may not have, or not let us read, and tries again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.known_objects import Change, ListSynced, ObjectDeleted
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ObjectMeta
from shared.kubernetes.watch_events import KubernetesObject, ObjectIdentity
from shared.model.clock import wait_for_event
from shared.model.errors import RequestError

R = TypeVar("R", bound=KubernetesObject)


@dataclass(slots=True)
class Batch(Generic[R]):
    """Changes of a kind, or why it cannot be read now."""

    changed: list[tuple[ObjectMeta | ObjectIdentity, R | None]] = field(default_factory=list)
    """What each object is named, and the object unless it was deleted."""
    listed: bool = False
    """With these changes, a list is complete."""
    refusal: RequestError | None = None


async def follow(
    client: KubernetesClient,
    path: str,
    kind: type[R],
    *,
    retry_s: float,
    field_selector: str = "",
    appeared: asyncio.Event | None = None,
) -> AsyncGenerator[Batch[R]]:
    """Yield every change for ever; after a refusal request the kind again every `retry_s`.

    Or as soon as it has `appeared`.
    """
    again = appeared or asyncio.Event()
    while True:
        again.clear()
        reflector = Reflector(client, path, kind, field_selector=field_selector)
        try:
            async with aclosing(reflector.batches()) as batches:
                async for batch in batches:
                    yield _batch_of(batch)
        except RequestError as error:
            yield Batch(refusal=error)
        await wait_for_event(again, retry_s)


def _batch_of(changes: Sequence[Change[R]]) -> Batch[R]:
    batch = Batch[R]()
    for change in changes:
        if isinstance(change, ListSynced):
            batch.listed = True
        elif isinstance(change, ObjectDeleted):
            batch.changed.append((change.item, None))
        else:
            batch.changed.append((change.item.metadata, change.item))
    return batch
