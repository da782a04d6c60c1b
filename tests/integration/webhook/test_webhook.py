"""What the webhook answers to an API server that calls it over TLS, as it registered itself."""

import asyncio
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.webhook.wiring import QuotaReader
from shared.dialects.reserved import EXEMPT, VISIBLE
from shared.kubernetes.kinds.custom_kinds import API_VERSION
from shared.kubernetes.kinds.gpu_quotas import OBJECTS
from shared.model.budgets.quota import ALL_NAMESPACES, Quota
from shared.model.events.event import ADMISSION
from shared.model.events.pod_events import BudgetChanged
from shared.model.names import BUDGET_GATE, Namespace
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import Tracing, open_tracing
from tests.integration.webhook.test_annotation_policy import install
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.service_process import service_process
from tests.support.simcluster.custom_kinds import older_definition
from tests.support.waiting import until
from tests.support.webhook.replica import (
    NAMES,
    NOW,
    PODS,
    VGPU,
    cluster,
    create_namespace,
    created,
    pod,
    replica,
)


async def test_the_default_priority_class_counts_as_none(tmp_path: Path) -> None:
    classes = [("everybody", 1, True), ("mine", 2, False), ("in-budget", 3, False)]
    async with cluster() as (api, kube, client):
        for name, value, usual in classes:
            body = {"metadata": {"name": name}, "value": value, "globalDefault": usual}
            async with client.post("/apis/scheduling.k8s.io/v1/priorityclasses", json=body) as made:
                assert made.status == 201
        async with replica(api, kube, tmp_path, in_budget_class="in-budget") as one:
            await one.webhook.read_default_class()
            _, unnamed = await created(client, pod("unnamed", VGPU))
            _, named = await created(client, pod("named", VGPU, priorityClassName="mine"))

    assert one.webhook.default_class == "everybody"
    assert [
        (obj["spec"]["priorityClassName"], obj["spec"]["priority"]) for obj in (unnamed, named)
    ] == [("in-budget", 3), ("mine", 2)]


async def test_a_pod_that_is_replaced_by_what_kubectl_shows_of_it_is_created_again(
    tmp_path: Path,
) -> None:
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        await install(client)
        _, first = await created(client, pod("base", VGPU))
        binding = {"leasehold.dev/lease": "{}", "volcano.sh/vgpu-node": "node-0"}
        exported = deepcopy(first)
        exported["metadata"].pop("resourceVersion")
        exported["metadata"]["annotations"] = binding | {"mine": "stays"}
        exported["spec"]["nodeName"] = "node-0"
        exported["status"] = {"phase": "Running"}
        async with client.delete("/api/v1/namespaces/default/pods/base") as deleted:
            assert deleted.status == 200
        status, again = await created(client, exported)

    assert status == 201, again
    assert again["spec"] == first["spec"]
    assert again["metadata"]["annotations"].keys() & binding.keys() == set()


async def test_pods_without_a_gpu_never_reach_the_webhook(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client):
        async with replica(api, kube, tmp_path):
            pass

        status, _ = await created(client, pod("plain", {"cpu": "1"}))
        zero, _ = await created(client, pod("zero", {"nvidia.com/gpu": "0k"}))
        refused, denial = await created(client, pod("gpu", VGPU))

    assert (status, zero) == (201, 201), "the webhook is away, and they are not its business"
    assert refused == 500, "a GPU pod is not let in unseen"
    assert 'failed calling webhook "pods.leasehold.dev"' in denial["message"]


def report(new_pods: str, state: str = "exhausted") -> BudgetChanged:
    return BudgetChanged(
        namespace=Namespace("default"),
        state=state,
        previous_state=state,
        lease_class="reclaimable",
        new_pods=new_pods,
        reported_at=NOW.timestamp(),  # by the ledger's clock, which need not agree with ours
    )


async def test_an_exhausted_budget_gates_or_denies_new_gpu_pods(
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
        await one.webhook.note_budgets([report("deny")])
        denied, denial = await created(client, pod("denied", VGPU))
        allowed, _ = await created(client, pod("without"))
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
    assert (denied, allowed) == (403, 201)
    assert "the GPU budget of namespace" in denial["message"]


async def test_new_gpu_pods_run_no_longer_than_their_namespaces_quota_allows(
    tmp_path: Path,
) -> None:
    quota = {
        "apiVersion": API_VERSION,
        "kind": "GPUQuota",
        "metadata": {"name": "default"},
        "spec": {"defaultRunTime": "90m", "maxRunTime": "2h"},
    }
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        api.store.create("customresourcedefinitions", older_definition("gpuquotas"))
        await kube.create(OBJECTS, quota)
        await one.webhook.follow_quotas()
        made = {
            name: (await created(client, each))[1]["spec"].get("activeDeadlineSeconds")
            for name, each in {
                "default": pod("default", VGPU),
                "own": pod("own", VGPU, activeDeadlineSeconds=60),
                "plain": pod("plain"),
            }.items()
        }
        code, denial = await created(client, pod("long", VGPU, activeDeadlineSeconds=7201))
        names = (Namespace("default"), ALL_NAMESPACES)
        of_file = {name: Quota(namespace=name, max_run_s=30) for name in names}
        both = await QuotaReader(kube, of_file).read()
        one.webhook.quotas = {ALL_NAMESPACES: both[ALL_NAMESPACES]}
        made["other"] = (await created(client, pod("other", VGPU)))[1]["spec"].get(
            "activeDeadlineSeconds"
        )

    assert {name: each.max_run_s for name, each in both.items()} == {"default": 7200, "*": 30}
    assert made == {"default": 5400, "own": 60, "plain": None, "other": 30}
    assert code == 422
    assert "the GPUQuota of namespace default allows 2h at most" in denial["message"]


async def test_an_invalid_quota_does_not_give_its_namespace_the_run_times_of_all_others() -> None:
    mine = Namespace("default")
    others = {ALL_NAMESPACES: Quota(namespace=ALL_NAMESPACES, max_run_s=30)}
    quota = {
        "apiVersion": API_VERSION,
        "kind": "GPUQuota",
        "metadata": {"name": mine},
        "spec": {"maxRunTime": "1d"},
    }
    async with cluster() as (api, kube, _):
        api.store.create("customresourcedefinitions", older_definition("gpuquotas"))
        await kube.create(OBJECTS, quota)
        reader = QuotaReader(kube, others)
        run_times = [(await reader.read())[mine].max_run_s]
        for text in ("2h", "1d"):
            await kube.patch_merge(f"{OBJECTS}/{mine}", {"spec": {"maxRunTime": text}})
            run_times.append((await reader.read())[mine].max_run_s)
        await kube.delete(f"{OBJECTS}/{mine}")
        after = await reader.read()

    assert run_times == [Quota(namespace=mine).max_run_s, 7200, 7200]
    assert after == others


async def test_pods_without_a_request_are_admitted_and_see_no_device(
    tmp_path: Path,
) -> None:
    cuda = {"name": "main", "image": "nvidia/cuda:12.4.1-base"}
    everywhere = {"name": "main", "image": "app", "env": [{"name": VISIBLE, "value": "all"}]}
    naming_mount = {"name": "v", "mountPath": "/var/run/nvidia-container-devices/all"}

    def named(name: str, container: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"containers": [container]}}

    async with cluster() as (api, kube, client):
        await create_namespace(client, "drivers", sees_devices="true")
        async with replica(api, kube, tmp_path):
            made = {
                "image": await created(client, named("image", cuda)),
                "variable": await created(client, named("variable", everywhere)),
                "plain": await created(client, pod("plain")),
            }
            spec: dict[str, Any] = {"volumes": [{"name": "v", "hostPath": {"path": "/dev/null"}}]}
            spec["containers"] = [{"name": "c", "image": "app", "volumeMounts": [naming_mount]}]
            naming = await created(client, {"metadata": {"name": "naming"}, "spec": spec})
            for where in ("drivers", "kube-system"):
                made[where] = await created(client, named("open", cuda), where)
        away = await created(client, named("away", cuda))
        denied = await created(client, pod("gpu", VGPU))

    seen = {
        name: [each.get("value") for each in obj["spec"]["containers"][0].get("env", ())]
        for name, (_, obj) in made.items()
    }
    assert {status for status, _ in made.values()} == {201}
    assert seen == {
        "image": ["void"],
        "variable": ["void"],
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
    assert f"container main would see every GPU with image {cuda}" in refused[1]["message"]
    assert "container trace: capability SYS_PTRACE" in traced[1]["message"]
    for status, shown in added:
        assert status == 200, shown
        assert shown["spec"]["ephemeralContainers"][0]["env"] == [
            {"name": VISIBLE, "value": "void"}
        ]
    assert annotated == 200, "other changes do not wait for the webhook"


async def test_administrators_exempt_a_namespace_by_its_label(tmp_path: Path) -> None:
    traced = pod("traced", VGPU, hostPID=True)
    async with cluster() as (api, kube, client):
        await create_namespace(client, "profiling", sees_devices="true")
        async with replica(api, kube, tmp_path):
            denied, _ = await created(client, traced)
            status, shown = await created(client, traced, "profiling")

    assert (denied, status) == (403, 201)
    assert shown["spec"]["schedulerName"] == "leasehold"
    assert shown["metadata"]["annotations"][EXEMPT] == "true"


async def test_pods_without_gpus_are_placed_too_where_the_namespace_says_so(
    tmp_path: Path,
) -> None:
    port = {"name": "c", "image": "app", "ports": [{"containerPort": 80, "hostPort": 80}]}
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    disk = {
        "name": "data",
        "iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.x:y", "lun": 0},
    }
    bodies = {
        "plain": pod("plain"),
        "gpu": pod("gpu", VGPU),
        "host-port": {"metadata": {"name": "host-port"}, "spec": {"containers": [port]}},
        "spread": pod("spread", topologySpreadConstraints=[spread]),
        "disk": pod("disk", volumes=[disk]),
        "own-scheduler": pod("own-scheduler", schedulerName="mine"),
    }

    async with cluster() as (api, kube, client):
        await create_namespace(client, "batch", all_pods="true")
        async with replica(api, kube, tmp_path):
            _, elsewhere = await created(client, pod("elsewhere"))
            found = {
                name: (await created(client, body, "batch"))[1]["spec"]["schedulerName"]
                for name, body in bodies.items()
            }
        unreviewed, _ = await created(client, pod("later"), "batch")

    assert elsewhere["spec"]["schedulerName"] == "default-scheduler"
    assert found == {
        "plain": "leasehold",
        "gpu": "leasehold",
        "host-port": "leasehold",
        "spread": "leasehold",
        "disk": "default-scheduler",
        "own-scheduler": "mine",
    }
    assert unreviewed == 201, "the webhook fails open for these pods"


async def test_pods_with_claims_are_reviewed_where_claims_are_served(tmp_path: Path) -> None:
    def using(name: str, **own: Any) -> dict[str, Any]:
        main = {"name": "main", "image": "app", "resources": {"claims": [{"name": "gpu"}]}, **own}
        claims = [{"name": "gpu", "resourceClaimName": "gpu"}]
        return {
            "metadata": {"name": name},
            "spec": {"containers": [main], "resourceClaims": claims},
        }

    preload = {"env": [{"name": "LD_PRELOAD", "value": ""}]}
    async with cluster() as (api, kube, client):
        async with replica(api, kube, tmp_path):
            denied, denial = await created(client, using("free", **preload))
            admitted, shown = await created(client, using("held"))
            both = using("both", **preload)
            both["spec"]["containers"].append(
                pod(limits={"nvidia.com/gpu": "1"})["spec"]["containers"][0] | {"name": "gpu"}
            )
            denied_too, _ = await created(client, both)
        away, _ = await created(client, using("away"))
        plain, _ = await created(client, pod("plain"))

    assert (denied, denied_too, admitted, away, plain) == (403, 403, 201, 500, 201)
    assert "variable LD_PRELOAD may be set by Leasehold only" in denial["message"]
    assert shown["spec"]["containers"][0]["env"] == [{"name": VISIBLE, "value": "void"}]


OLD = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
CORE = {"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "4"}


def traced(directory: Path, ratio: float = 1.0) -> Tracing:
    return open_tracing("webhook", ServiceSettings(trace_dir=directory, trace_ratio=ratio))


def recorded_spans(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in directory.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]


def admission_span(made: dict[str, Any]) -> str:
    return str(made["metadata"].get("annotations", {}).get(ADMISSION, ""))


@pytest.mark.parametrize("limits", [VGPU, CORE])
@pytest.mark.parametrize("given", [{}, {ADMISSION: OLD}, {ADMISSION: "no context", "mine": "x"}])
async def test_o1_an_admitted_pod_has_the_times_of_its_review_and_no_earlier_ones(
    tmp_path: Path, limits: dict[str, str], given: dict[str, str]
) -> None:
    tracing = traced(tmp_path / "spans")
    wanted = pod(limits=limits)
    wanted["metadata"]["annotations"] = given
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path, tracing=tracing):
        await install(client)
        status, made = await created(client, wanted)
    tracing.close()

    assert status == 201, made
    assert recorded_spans(tmp_path / "spans") == []
    began, ended = map(int, admission_span(made).split("-"))
    assert 0 <= ended - began < 10_000_000_000
    others = made["metadata"]["annotations"]
    assert others.get("mine") == given.get("mine")
    assert ("tencent.com/vcuda-core-limit" in others) == (limits is CORE)


async def test_a_denied_pod_leaves_a_failed_span_and_others_leave_none(tmp_path: Path) -> None:
    tracing = traced(tmp_path / "spans")
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path, tracing=tracing):
        denied, _ = await created(client, pod("bad", {"tencent.com/vcuda-core": "150"}))
        async with client.post(f"{PODS}?dryRun=All", json=pod("dry", VGPU)) as response:
            dry = await response.json()
        _, plain = await created(client, pod("plain"))
    tracing.close()

    (span,) = recorded_spans(tmp_path / "spans")
    assert (denied, span["ok"]) == (400, False)
    assert "multiple of 100" in span["text"]
    assert admission_span(dry) == admission_span(plain) == ""


@pytest.mark.parametrize("ratio", [None, 0.0])
async def test_a_pod_has_no_times_of_its_review_while_tracing_is_off(
    tmp_path: Path, ratio: float | None
) -> None:
    tracing = None if ratio is None else traced(tmp_path / "spans", ratio)
    wanted = pod(limits=VGPU)
    wanted["metadata"]["annotations"] = {ADMISSION: OLD, "mine": "stays"}
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path, tracing=tracing):
        status, made = await created(client, wanted)
    if tracing is not None:
        tracing.close()

    assert status == 201
    assert admission_span(made) == ""
    assert made["metadata"]["annotations"]["mine"] == "stays"


DRAIN_S = 2.0


@pytest.mark.parametrize("with_nats", [True, False])
async def test_a_webhook_answers_while_it_drains(tmp_path: Path, *, with_nats: bool) -> None:
    nats = NatsServer()
    listen = f"127.0.0.1:{free_port()}"
    flags = ["--nats-url", nats.url, "--listen", listen, "--drain-s", str(DRAIN_S)]
    flags += ["--tls-dir", str(tmp_path), "--names", ",".join(NAMES), "--url", "https://127.0.0.1"]
    try:
        if with_nats:
            await nats.start()
        async with cluster() as (api, _, client), aiohttp.ClientSession() as direct:
            with service_process("webhook", "--kubeconfig", str(api.kubeconfig), *flags) as webhook:
                await webhook.until_ready()
                async with asyncio.timeout(30):
                    early, _ = await created(client, pod("early", VGPU, schedulerName="volcano"))
                    exiting = asyncio.create_task(webhook.terminated())
                    await until(lambda: is_closing(direct, listen))
                    late, made = await created(client, pod("late", VGPU, schedulerName="volcano"))
                    status = await exiting
    finally:
        nats.close()

    assert (early, late, status) == (201, 201, 0), made


async def is_closing(session: aiohttp.ClientSession, listen: str) -> bool:
    """Whether it answers, and closes the connection."""
    async with session.post(f"https://{listen}/mutate", json={}, ssl=False) as response:
        return response.headers.get("Connection") == "close"
