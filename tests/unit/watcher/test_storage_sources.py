"""Claims and volumes that cannot be parsed: their pods' reason, and logged once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from services.watcher import storage_sources
from services.watcher.claimed_storage import StorageChanges, StorageKind
from services.watcher.storage_sources import StorageReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.known_objects import Change
from shared.kubernetes.reflector import Batch
from shared.kubernetes.storage_objects import ApiVolume, ApiVolumeClaim
from shared.kubernetes.types import ObjectMeta
from shared.pods.storage import Claim, Volume
from tests.support.storage import Manifest, claim, volume
from tests.support.waiting import until

NOT_A_QUANTITY = "1 GiB"


def changed(kind: Any, manifest: Manifest) -> Change[Any]:
    stored = msgspec.convert(manifest, kind)
    return stored.metadata, stored


async def changes_of(
    monkeypatch: pytest.MonkeyPatch, kind: StorageKind, *batches: Batch[Any]
) -> list[StorageChanges]:
    """Return what the watcher reads of one kind, of which the API server reports these batches."""
    paths = {StorageKind.CLAIM: "persistentvolumeclaims", StorageKind.VOLUME: "persistentvolumes"}

    async def follow(
        _client: object, path: str, _type: object, **_: float
    ) -> AsyncIterator[Batch[Any]]:
        if path.endswith(f"/{paths[kind]}"):
            for batch in batches:
                yield batch

    monkeypatch.setattr(storage_sources, "follow", follow)
    reflectors = StorageReflectors(cast(KubernetesClient, None), retry_s=1.0)
    read: list[StorageChanges] = []

    async def read_all() -> None:
        async for changes in reflectors.batches():
            read.append(changes)  # noqa: PERF401 - each as it comes

    reading = asyncio.create_task(read_all())
    await until(lambda: len(read) == len(batches))
    reading.cancel()
    return read


async def test_an_object_that_cannot_be_parsed_is_kept_with_the_reason_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Batch(changed=[changed(ApiVolumeClaim, claim("data", size=NOT_A_QUANTITY))], listed=True)
    good = Batch(changed=[changed(ApiVolumeClaim, claim("data"))])
    gone: Batch[Any] = Batch(changed=[(ObjectMeta(name="data", namespace="team"), None)])

    first, again, parsed, broken, deleted = await changes_of(
        monkeypatch, StorageKind.CLAIM, bad, bad, good, bad, gone
    )

    [(key, stored)] = first.changed
    assert key == ("team", "data")
    assert isinstance(stored, Claim)
    assert NOT_A_QUANTITY in stored.error
    assert again == first
    assert isinstance(parsed.changed[0][1], Claim)
    assert parsed.changed[0][1].error == ""
    assert broken.changed == first.changed
    assert deleted.changed == ((("team", "data"), None),)
    logged = [text for text in caplog.messages if "team/data cannot be read" in text]
    assert len(logged) == 2, "once, and once more after it could be read"


async def test_a_volume_that_cannot_be_parsed_is_no_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = Batch(changed=[changed(ApiVolume, volume("pv", size=NOT_A_QUANTITY))])

    [changes] = await changes_of(monkeypatch, StorageKind.VOLUME, bad)

    [(_, stored)] = changes.changed
    assert isinstance(stored, Volume)
    assert NOT_A_QUANTITY in stored.error
