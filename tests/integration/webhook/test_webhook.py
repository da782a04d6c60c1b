"""The webhook beside an API server that calls it over TLS, as it registered itself."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.webhook.admission import AdmissionPolicy
from services.webhook.cluster_lookups import ApiServerLookups
from services.webhook.metrics import WebhookMetrics
from services.webhook.registration import EXEMPT_LABEL, NAME
from services.webhook.registration_writer import CONFIGURATIONS, RegistrationWriter
from services.webhook.server import serving_reviews
from services.webhook.service import Webhook
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.credentials.serving_certificate import LIFE_DAYS, CertificateBundle, make
from shared.dialects.reserved import EXEMPT, VISIBLE
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BudgetChanged, LargestDeviceReported
from shared.model.names import BUDGET_GATE, Namespace
from shared.runtime.telemetry import Tracing
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.waiting import until

NAMES = ("127.0.0.1", "localhost")
PODS = "/api/v1/namespaces/default/pods"
NOW = datetime(2026, 11, 21, tzinfo=UTC)


@dataclass
class Time:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now


@dataclass
class Replica:
    webhook: Webhook
    certificate: ServingCertificate
    registration: RegistrationWriter


@asynccontextmanager
async def replica(
    api: ApiUnderTest,
    kube: KubernetesClient,
    directory: Path,
    time: Time | None = None,
    tracing: Tracing | None = None,
    **policy: Any,
) -> AsyncIterator[Replica]:
    """Run a webhook with its own certificate, and register it."""
    registration = RegistrationWriter(kube)
    certificate = ServingCertificate(
        DirectoryStore(directory), registration.trust, NAMES, time or Time()
    )
    webhook = Webhook(
        AdmissionPolicy(**policy),
        ApiServerLookups(kube),
        rotate_certificate=certificate.run,
        metrics=WebhookMetrics(),
        clock=SystemClock(),
        tracing=tracing or Tracing("webhook", None),
    )
    async with serving_reviews(webhook.review, "127.0.0.1:0", certificate.context) as (_, port):
        registration.url = f"https://127.0.0.1:{port}"
        await certificate.refresh()
        yield Replica(webhook, certificate, registration)


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[ApiUnderTest, KubernetesClient, aiohttp.ClientSession]]:
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig, environ={})) as kube,
        api.client() as client,
    ):
        yield api, kube, client


def pod(name: str = "pod", limits: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    main: dict[str, Any] = {"name": "main", "image": "app"}
    if limits:
        main["resources"] = {"limits": limits}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [main], **spec},
    }


VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}


async def created(client: aiohttp.ClientSession, obj: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(PODS, json=obj) as response:
        return response.status, await response.json()


async def test_a_pod_is_completed_on_its_way_into_the_cluster(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        status, made = await created(client, pod(limits=VGPU))

    assert status == 201
    assert made["spec"]["schedulerName"] == "leasehold"


async def test_gpusharing_2_the_api_server_returns_the_denial_of_a_malformed_pod(
    tmp_path: Path,
) -> None:
    limits = {"tencent.com/vcuda-core": "150", "tencent.com/vcuda-memory": "4"}
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        status, denial = await created(client, pod(limits=limits))

    assert status == 400
    prefix = 'admission webhook "pods.leasehold.dev" denied the request: '
    assert denial["message"].startswith(prefix)
    assert "150 must be 1..99 or a multiple of 100" in denial["message"]


async def test_the_default_priority_class_counts_as_none(tmp_path: Path) -> None:
    classes = [("everybody", 1, True), ("mine", 2, False), ("in-budget", 3, False)]
    async with cluster() as (api, kube, client):
        for name, value, usual in classes:
            body = {"metadata": {"name": name}, "value": value, "globalDefault": usual}
            async with client.post("/apis/scheduling.k8s.io/v1/priorityclasses", json=body) as made:
                assert made.status == 201
        async with replica(api, kube, tmp_path, in_budget_class="in-budget") as one:
            knowing = asyncio.create_task(one.webhook.read_default_class())
            await until(lambda: one.webhook.default_class, limit_s=10)
            _, unnamed = await created(client, pod("unnamed", VGPU))
            _, named = await created(client, pod("named", VGPU, priorityClassName="mine"))
            knowing.cancel()

    assert one.webhook.default_class == "everybody"
    assert [
        (obj["spec"]["priorityClassName"], obj["spec"]["priority"]) for obj in (unnamed, named)
    ] == [("in-budget", 3), ("mine", 2)]


async def test_pods_without_a_gpu_never_reach_the_webhook(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client):
        async with replica(api, kube, tmp_path):
            pass

        status, _ = await created(client, pod("plain", {"cpu": "1"}))
        refused, denial = await created(client, pod("gpu", VGPU))

    assert status == 201, "the webhook is away, and the pod is none of its business"
    assert refused == 500, "a GPU pod is not let in unseen"
    assert 'failed calling webhook "pods.leasehold.dev"' in denial["message"]


async def test_variables_from_a_config_map_are_read(tmp_path: Path) -> None:
    maps = "/api/v1/namespaces/default/configmaps"
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        for name, key in (("bad", "LD_PRELOAD"), ("good", "MODE")):
            body = {"metadata": {"name": name}, "data": {key: "x"}}
            async with client.post(maps, json=body) as response:
                assert response.status == 201
        answers = {}
        for name in ("bad", "good", "missing"):
            obj = pod(name, VGPU)
            obj["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": name}}]
            answers[name] = await created(client, obj)

    assert {name: status for name, (status, _) in answers.items()} == {
        "bad": 403,
        "good": 201,
        "missing": 403,
    }
    assert "config map bad sets LD_PRELOAD" in answers["bad"][1]["message"]


def report(new_pods: str, state: str = "exhausted") -> BudgetChanged:
    return BudgetChanged(
        namespace=Namespace("default"),
        state=state,
        previous_state=state,
        lease_class="reclaimable",
        new_pods=new_pods,
        reported_at=NOW.timestamp(),  # by the ledger's clock, which need not agree with ours
    )


async def test_an_exhausted_budget_that_queues_gives_new_gpu_pods_a_scheduling_gate(
    tmp_path: Path,
) -> None:
    own = [{"name": "example.com/own"}]
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        await one.webhook.note_budgets([report("queue")])
        made = {
            name: (await created(client, each))[1]["spec"].get("schedulingGates")
            for name, each in {
                "alone": pod("alone", VGPU),
                "beside": pod("beside", VGPU, schedulingGates=own),
                "already": pod("already", VGPU, schedulingGates=[{"name": BUDGET_GATE}]),
                "plain": pod("plain"),
                "foreign": pod("foreign", VGPU, schedulerName="another"),
            }.items()
        }
        await one.webhook.note_budgets([report("admit")])
        made["later"] = (await created(client, pod("later", VGPU)))[1]["spec"].get(
            "schedulingGates"
        )

    ours = {"name": BUDGET_GATE}
    assert made == {
        "alone": [ours],
        "beside": [*own, ours],
        "already": [ours],
        "plain": None,
        "foreign": None,
        "later": None,
    }


async def test_an_exhausted_budget_denies_new_gpu_pods_where_so_configured(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        await one.webhook.note_budgets([report("deny")])
        denied, denial = await created(client, pod("one", VGPU))
        plain, _ = await created(client, pod("plain"))
        await one.webhook.note_budgets([report("admit")])
        admitted, _ = await created(client, pod("two", VGPU))

    assert (denied, plain, admitted) == (403, 201, 201)
    assert "has used up its GPU time" in denial["message"]


async def test_gpusharing_2_a_request_larger_than_every_device_is_denied(tmp_path: Path) -> None:
    largest = LargestDeviceReported(memory_mib=2000, memory_units=2000)
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        early, _ = await created(client, pod("early", VGPU))
        await one.webhook.note_largest([largest])
        denied, denial = await created(client, pod("late", VGPU))
        fitting, _ = await created(client, pod("small", {**VGPU, "volcano.sh/vgpu-memory": "2000"}))

    assert (early, denied, fitting) == (201, 400, 201)
    assert 'container "main": volcano.sh/vgpu-memory=3000' in denial["message"]


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
        async with client.post("/api/v1/namespaces", json={"metadata": {"name": "lh"}}) as made:
            assert made.status == 201
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
        async with client.post("/api/v1/namespaces", json={"metadata": {"name": "lh"}}) as made:
            assert made.status == 201
        stores = [SecretStore(kube, "lh", "webhook") for _ in range(2)]
        assert [await store.load() for store in stores] == [None, None]
        bundles = [make(NAMES, NOW) for _ in stores]

        written = [
            await store.save(bundle, after=None)
            for store, bundle in zip(stores, bundles, strict=True)
        ]

        assert written == [True, False]
        assert [await store.load() for store in stores] == [bundles[0], bundles[0]]


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
    store, bundle = DirectoryStore(tmp_path / "tls"), make(NAMES, NOW)

    async def stored() -> CertificateBundle | None:
        await store.save(bundle, after=None)
        return await store.load()

    assert asyncio.run(stored()) == bundle
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}


async def test_pods_without_a_request_are_admitted_and_see_no_device(
    tmp_path: Path,
) -> None:
    cuda = {"name": "main", "image": "nvidia/cuda:12.4.1-base"}
    everywhere = {"name": "main", "image": "app", "env": [{"name": VISIBLE, "value": "all"}]}
    naming_mount = {"name": "v", "mountPath": "/var/run/nvidia-container-devices/all"}
    driver = {"metadata": {"name": "drivers", "labels": {EXEMPT_LABEL: "true"}}}

    def named(name: str, container: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"containers": [container]}}

    async with cluster() as (api, kube, client):
        await client.post("/api/v1/namespaces", json=driver)
        async with replica(api, kube, tmp_path):
            made = {
                "image": await created(client, named("image", cuda)),
                "variable": await created(client, named("variable", everywhere)),
                "plain": await created(client, pod("plain")),
            }
            spec: dict[str, Any] = {"volumes": [{"name": "v", "hostPath": {"path": "/dev/null"}}]}
            spec["containers"] = [{"name": "c", "image": "app", "volumeMounts": [naming_mount]}]
            naming = await created(client, {"metadata": {"name": "naming"}, "spec": spec})
            path = "/api/v1/namespaces/{}/pods"
            for where in ("drivers", "kube-system"):
                async with client.post(path.format(where), json=named("open", cuda)) as answer:
                    made[where] = answer.status, await answer.json()
        away = await created(client, named("away", cuda))
        denied = await created(client, pod("gpu", VGPU))

    seen = {
        name: [each.get("value") for each in obj["spec"]["containers"][0].get("env", ())]
        for name, (_, obj) in made.items()
    }
    assert {status for status, _ in made.values()} == {201}
    assert seen == {
        "image": ["void"],
        "variable": ["all", "void"],
        "plain": [],
        "drivers": [],
        "kube-system": [],
    }
    assert naming[0] == 403, "a device selected by a mount cannot be hidden"
    assert away[0] == 201, "only GPU pods need the webhook"
    assert denied[0] == 500


async def test_images_and_ephemeral_containers_are_reviewed_after_admission(tmp_path: Path) -> None:
    cuda = "nvidia/cuda:12.4.1-base"
    merge = {"Content-Type": "application/merge-patch+json"}
    image = {"spec": {"containers": [{"name": "main", "image": cuda}]}}
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": cuda}]}}
    traces = {"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}
    tracing = {"spec": {"ephemeralContainers": [{"name": "trace", "image": "app", **traces}]}}

    async def patched(name: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with client.patch(f"{PODS}/{name}", json=body, headers=merge) as response:
            return response.status, await response.json()

    async with cluster() as (api, kube, client):
        async with replica(api, kube, tmp_path):
            await created(client, pod("plain"))
            await created(client, pod("gpu", VGPU))
            refused = await patched("plain", image)
            other = await patched(
                "plain", {"spec": {"containers": [{"name": "main", "image": "b"}]}}
            )
            added = [
                await patched(f"{name}/ephemeralcontainers", debug) for name in ("plain", "gpu")
            ]
            traced = await patched("gpu/ephemeralcontainers", tracing)
        annotated, _ = await patched("gpu", {"metadata": {"annotations": {"mine": "x"}}})

    assert (refused[0], other[0], traced[0]) == (403, 200, 403)
    assert f"container main: image {cuda}" in refused[1]["message"]
    assert "container trace: capability SYS_PTRACE" in traced[1]["message"]
    for status, shown in added:
        assert status == 200, shown
        assert shown["spec"]["ephemeralContainers"][0]["env"] == [
            {"name": VISIBLE, "value": "void"}
        ]
    assert annotated == 200, "other changes do not wait for the webhook"


async def test_administrators_exempt_a_namespace_by_its_label(tmp_path: Path) -> None:
    profiling = {"metadata": {"name": "profiling", "labels": {EXEMPT_LABEL: "true"}}}
    traced = pod("traced", VGPU, hostPID=True)
    async with cluster() as (api, kube, client):
        await client.post("/api/v1/namespaces", json=profiling)
        async with replica(api, kube, tmp_path):
            denied, _ = await created(client, traced)
            path = "/api/v1/namespaces/profiling/pods"
            async with client.post(path, json=traced) as response:
                status, shown = response.status, await response.json()

    assert (denied, status) == (403, 201)
    assert shown["spec"]["schedulerName"] == "leasehold"
    assert shown["metadata"]["annotations"][EXEMPT] == "true"
