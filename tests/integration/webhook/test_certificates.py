"""Certificates of the webhook: replaced, shared by replicas and trusted in time."""

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.webhook.registration import NAME, configuration, webhook_paths
from services.webhook.wiring import CONFIGURATIONS, RegistrationWriter
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import (
    LIFE_DAYS,
    CertificateBundle,
    DirectoryStore,
    SecretStore,
    make,
)
from shared.model.errors import UnavailableError
from tests.support.webhook.replica import (
    NAMES,
    NOW,
    VGPU,
    Time,
    cluster,
    create_namespace,
    created,
    pod,
    replica,
)


async def test_gpusharing_36_no_admission_fails_while_the_certificate_is_replaced(
    tmp_path: Path,
) -> None:
    time = Time(datetime.now(UTC) - timedelta(days=60))
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path, time) as one:
        before = one.certificate.bundle
        stop = asyncio.Event()
        statuses: list[int] = []

        async def create_continuously() -> None:
            while not stop.is_set() or len(statuses) < 20:
                status, _ = await created(client, pod(f"p{len(statuses)}", VGPU))
                statuses.append(status)

        creating = asyncio.create_task(create_continuously())
        time.now += timedelta(days=LIFE_DAYS / 2 + 1)
        await one.certificate.refresh()
        trusted_bundles = one.certificate.bundle, await trusted_by(client)
        await one.certificate.refresh()
        stop.set()
        await creating

    assert one.certificate.bundle is not None
    assert trusted_bundles == (before, one.certificate.bundle.trusted), (
        "clients trust it before it is served"
    )
    assert before is not None
    assert one.certificate.bundle.certificate != before.certificate
    assert set(statuses) == {201}


async def test_a_second_replica_takes_over_the_certificate_and_both_are_trusted(
    tmp_path: Path,
) -> None:
    async with cluster() as (_, kube, client):
        await create_namespace(client, "lh")
        time = Time()
        registration = RegistrationWriter(kube, url="https://127.0.0.1:1/mutate")
        first, second = (
            ServingCertificate(SecretStore(kube, "lh", "webhook"), registration.trust, NAMES, time)
            for _ in range(2)
        )
        await first.refresh()
        await second.refresh()
        shared = first.bundle
        time.now += timedelta(days=LIFE_DAYS / 2 + 1)
        await second.refresh()
        await second.refresh()
        trusted = await trusted_by(client)

        assert shared == first.bundle != second.bundle
        assert first.bundle is not None
        assert second.bundle is not None
        assert first.bundle.authority in trusted
        assert second.bundle.authority in trusted

        await first.refresh()
        await first.refresh()
        assert first.bundle == second.bundle


async def test_webhooks_of_an_earlier_version_are_replaced() -> None:
    async with cluster() as (_, kube, _):
        authority = make(NAMES, NOW).authority
        await RegistrationWriter(kube, url="https://127.0.0.1:1").trust(authority)
        path = f"{CONFIGURATIONS}/leasehold"
        made = await kube.read(path, dict[str, Any])
        earlier = {"op": "remove", "path": "/webhooks/0/matchConditions"}
        await kube.patch_json(path, [earlier])

        await RegistrationWriter(kube, url="https://127.0.0.1:1").trust(authority)

        assert (await kube.read(path, dict[str, Any]))["webhooks"] == made["webhooks"]


async def test_a_deleted_certificate_is_trusted_until_another_is_served(
    tmp_path: Path,
) -> None:
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        before = one.certificate.bundle
        for path in tmp_path.iterdir():
            path.unlink()
        await one.certificate.refresh()
        between = await created(client, pod("between", VGPU))
        await one.certificate.refresh()
        after = await created(client, pod("after", VGPU))

    assert [status for status, _ in (between, after)] == [201, 201], (between, after)
    assert before is not None
    assert one.certificate.bundle is not None
    assert one.certificate.bundle.previous == before.authority != one.certificate.bundle.authority


async def trusted_by(client: aiohttp.ClientSession) -> bytes:
    async with client.get(f"{CONFIGURATIONS}/{NAME}") as response:
        webhooks = (await response.json())["webhooks"]
    [bundle] = {webhook["clientConfig"]["caBundle"] for webhook in webhooks}
    return base64.b64decode(bundle)


async def test_two_replicas_that_start_at_once_agree_on_one_certificate() -> None:
    async with cluster() as (_, kube, client):
        await create_namespace(client, "lh")
        stores = [SecretStore(kube, "lh", "webhook") for _ in range(2)]
        assert [await store.load() for store in stores] == [None, None]
        bundles = [make(NAMES, NOW) for _ in stores]

        written = [
            await store.save(bundle, after=None)
            for store, bundle in zip(stores, bundles, strict=True)
        ]

        assert written == [True, False]
        assert [await store.load() for store in stores] == [bundles[0], bundles[0]]


async def test_a_url_replaces_the_service_of_an_installed_configuration(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client):
        async with client.post(CONFIGURATIONS, json=configuration()) as made:
            assert made.status == 201, await made.text()
        async with replica(api, kube, tmp_path) as one:
            async with client.get(f"{CONFIGURATIONS}/{NAME}") as response:
                found = (await response.json())["webhooks"]
            status, _ = await created(client, pod(limits=VGPU))

    for webhook in found:
        assert webhook["clientConfig"].keys() == {"url", "caBundle"}
        path = webhook_paths()[webhook["name"]]
        assert webhook["clientConfig"]["url"] == one.registration.url + path
    assert status == 201


async def test_without_its_registration_the_error_names_what_to_apply(tmp_path: Path) -> None:
    async with cluster() as (_, kube, _):
        certificate = ServingCertificate(
            DirectoryStore(tmp_path), RegistrationWriter(kube).trust, NAMES, Time()
        )

        with pytest.raises(UnavailableError, match="apply k8s/base/webhook"):
            await certificate.refresh()

        assert certificate.unready_reason() == "no certificate yet"


async def test_an_expired_certificate_is_not_ready(tmp_path: Path) -> None:
    time = Time(NOW)
    async with cluster() as (api, kube, _), replica(api, kube, tmp_path, time) as one:
        assert one.certificate.unready_reason() is None
        time.now += timedelta(days=LIFE_DAYS + 1)
        assert one.certificate.unready_reason() == "the certificate has expired"


def test_a_bundle_is_kept_in_files_that_only_its_owner_reads(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "tls")
    bundle = make(NAMES, NOW)

    async def stored() -> CertificateBundle | None:
        await store.save(bundle, after=None)
        return await store.load()

    assert asyncio.run(stored()) == bundle
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tls").write_text("a file is in the way")
    bundle = make(NAMES, NOW)

    with pytest.raises(UnavailableError, match=r"tls cannot be written \(.+\): let this user"):
        await DirectoryStore(tmp_path / "tls").save(bundle, after=None)
