"""GPUSharing's guide: malformed requests, exhausted budgets and quotas, all through kubectl.

Its sidecar, self-reported usage and budgets in code are gone: budgets are objects, leases are what
is counted.
"""

import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest_asyncio
import yaml

from tests.support.dialects import guides
from tests.support.dialects.checklist import node_allocatable, until_quota
from tests.support.stack import NEEDS_KUBECTL, Stack, stack, succeeded
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL

BASE = Path(__file__).parents[2] / "k8s" / "base"
QUICKLY = {
    "LEASEHOLD_PREEMPTION_NOTICE_S": "1",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "1",
    "LEASEHOLD_TICK_S": "0.5",
    "LEASEHOLD_MODEL_FACTORS": "A10=20",
}
RUNS = 3
"""How often a test may run: the first one has its budgets in a file."""
FILED = itertools.count()
NUMBERS = itertools.count()
"""Numbers of the namespaces with a budget in the file, and of the others."""
CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"


def budget(namespace: str, minutes: int, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "leasehold.dev/v1beta1",
        "kind": "GPUBudget",
        "metadata": {"name": namespace},
        "spec": {"limitGPUMinutes": minutes, "hysteresisGPUMinutes": 1, **spec},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    """One node with two cards, of which one may be used for three seconds for each GPU-minute."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "budgets.yaml"
        budgets = [
            (budget(f"filed-spent-{n}", 1, onExhausted="queue"), budget(f"filed-rich-{n}", 200_000))
            for n in range(RUNS)
        ]
        file.write_text(yaml.safe_dump_all(itertools.chain.from_iterable(budgets)))
        options = ("--nodes", "1", "--gpus", "2xA10", "--budgets", str(file))
        async with stack(*options, webhook=True, env=QUICKLY) as started:
            await node_allocatable(started, "node-0", {CORE: 200})
            yield started


async def namespace(up: Stack, prefix: str) -> str:
    """Create a namespace of its own for each run of a test, and return its name."""
    name = f"{prefix}-{next(NUMBERS)}"
    await up.kubectl_out("create", "namespace", name)
    return name


def manifest(name: str, limits: Mapping[str, int]) -> str:
    container = {"name": "nvidia", "image": "mnist", "resources": {"limits": dict(limits)}}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    )


def cards(count: int) -> dict[str, int]:
    return {CORE: 100 * count}


async def create(up: Stack, where: str, name: str, limits: Mapping[str, int]) -> None:
    await up.kubectl_out("-n", where, "create", "-f", "-", stdin=manifest(name, limits))


async def pod(up: Stack, where: str, name: str) -> dict[str, Any]:
    """Return the pod; empty if there is none."""
    described = await up.kubectl_out(
        "-n", where, "get", "pod", name, "--ignore-not-found", "-ojson"
    )
    shown: dict[str, Any] = json.loads(described) if described else {}
    return shown


async def until_runs(up: Stack, where: str, name: str, *, limit_s: float = 60.0) -> None:
    async def status() -> dict[str, Any]:
        return dict((await pod(up, where, name)).get("status", {}))

    await until(status, lambda status_now: status_now.get("phase") == "Running", limit_s=limit_s)


async def until_waits(up: Stack, where: str, name: str, why: str) -> None:
    async def messages() -> str:
        conditions = (await pod(up, where, name)).get("status", {}).get("conditions", [])
        return "; ".join(condition.get("message", "") for condition in conditions)

    await until(messages, lambda text: why in text)


async def remove(up: Stack, where: str, *names: str) -> None:
    how = ("--ignore-not-found", "--wait=true", "--timeout=60s")
    await up.kubectl_out("-n", where, "delete", "pod", *names, *how)


async def budget_of(up: Stack, name: str) -> dict[str, Any]:
    done = await up.leasehold("budget", name, "--json")
    assert done.code == 0, done.err
    [budget_now] = json.loads(done.out)["budgets"]
    return dict(budget_now)


async def until_deleted(up: Stack, where: str, name: str) -> None:
    await until(lambda: pod(up, where, name), lambda pod_now: not pod_now)


async def until_state(up: Stack, name: str, state: str) -> None:
    await until(lambda: budget_of(up, name), lambda budget: budget["state"] == state)


async def test_gpusharing_the_guide_runs_from_malformed_requests_to_exhausted_budgets(
    up: Stack,
) -> None:
    number = next(FILED)
    spent = f"filed-spent-{number}"
    rich = f"filed-rich-{number}"
    for name in (spent, rich):
        await up.kubectl_out("create", "namespace", name)

    malformed = guides.GPUSHARING_POD.replace("vcuda-core: 50 ", "vcuda-core: 150")
    denied = await up.kubectl("-n", spent, "create", "-f", "-", stdin=malformed)
    assert denied.code != 0
    assert "150 must be 1..99 or a multiple of 100" in denied.err

    await up.kubectl_out("-n", rich, "create", "-f", "-", stdin=guides.GPUSHARING_POD)
    await until_runs(up, rich, "mnist-case")
    await remove(up, rich, "mnist-case")

    await create(up, spent, "training", cards(2))
    await until_runs(up, spent, "training")
    await until_state(up, spent, "exhausted")
    assert "exhausted" in (await up.leasehold("budget")).out
    assert (await pod(up, spent, "training"))["status"]["phase"] == "Running"

    await create(up, rich, "waiting", cards(1))
    await until_runs(up, rich, "waiting")
    await until_deleted(up, spent, "training")
    events = await up.kubectl_out("-n", spent, "get", "events", "-ojson")
    assert any("preempt" in event["reason"].lower() for event in json.loads(events)["items"])

    await create(up, spent, "again", cards(1))
    await until(
        lambda: pod(up, spent, "again"), lambda pod_now: pod_now["spec"].get("schedulingGates")
    )
    explained = (await up.leasehold("explain", "again", "-n", spent)).out
    granted = await up.leasehold("budget", "grant", spent, "600", "--reason", "deadline")
    assert granted.code == 0, granted.err
    await until_state(up, spent, "ok")
    await until_runs(up, spent, "again")
    assert f"waits until namespace {spent} has GPU time again" in explained
    await up.audit()


async def test_gpusharing_10_gpu_admissions_quota_allows_and_denies_per_model_and_pool(
    up: Stack,
) -> None:
    where = await namespace(up, "imported")
    labels = ("gaia.tencent.com/gpu-model=M40", "gaia.tencent.com/gpu-pool=public")
    await up.kubectl_out("label", "node", "node-0", *labels)

    async def quota(message: object) -> None:
        text = json.dumps({where: message})
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "gpuquota", "namespace": "kube-system"},
            "data": {"gpu_quota": text},
        }
        await up.apply(yaml.safe_dump(config))

    await quota({"quota": {"M40": 1}, "pool": ["wx"]})
    await until_quota(up, where)
    await create(up, where, "first", {CORE: 60, MEMORY: 4})
    await until_waits(up, where, "first", "label gaia.tencent.com/gpu-pool of wx")

    await quota({"quota": {"P100": 2}, "pool": ["public"]})
    await until_waits(up, where, "first", "it allows only GPUs of model P100")

    await quota({"quota": {"M40": 1}, "pool": ["public"]})
    await until_runs(up, where, "first")
    await create(up, where, "second", {CORE: 60, MEMORY: 4})
    await until_waits(up, where, "second", "of model M40, 0.6 are used and 0.6 requested")

    await remove(up, where, "first")
    await until_runs(up, where, "second")
    await up.audit()


async def test_gpusharing_a_gpuquota_sums_over_all_dialects(up: Stack) -> None:
    where = await namespace(up, "quota")
    quota = {
        "apiVersion": "leasehold.dev/v1beta1",
        "kind": "GPUQuota",
        "metadata": {"name": where},
        "spec": {"maxMilliGPU": 1000},
    }
    await until(lambda: up.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(quota)), succeeded)
    await until_quota(up, where)

    await create(up, where, "vcuda", {CORE: 60, MEMORY: 4})
    await until_runs(up, where, "vcuda")
    await create(up, where, "hami", {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50})
    await until_waits(up, where, "hami", "it allows 1 GPUs, 0.6 are used")

    quota["spec"] = {"maxMilliGPU": 2000}
    await up.apply(yaml.safe_dump(quota))
    await until_runs(up, where, "hami")
    await up.audit()
