"""Budgets of objects and of a file: their statuses and Events, and what is in force."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from rich.console import Console, RenderableType

from services.api.projection.lease_views import budget_view
from services.cli.admin.budget import budget_table
from services.timekeeper.config.budget_sources import (
    PATH,
    BudgetFile,
    BudgetObjects,
    ConfiguredBudgets,
)
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.service import Timekeeper
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.types import ObjectMeta, RawObject
from shared.model.budgets.budget import BudgetState
from shared.model.errors import RequestError
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.timekeeper.accounts import MINUTE_MS, T0, TEAM, AccountLedger, lease, units
from tests.support.waiting import until

KIND = {"apiVersion": "leasehold.dev/v1beta1", "kind": "GPUBudget"}


def manifest(**spec: Any) -> dict[str, Any]:
    return {**KIND, "metadata": {"name": str(TEAM)}, "spec": spec}


def in_zone(zone: str) -> dict[str, Any]:
    return manifest(limitGPUMinutes=10, policy={"timeZone": zone})


@asynccontextmanager
async def keeping(
    opened: AccountLedger, kube: KubernetesClient
) -> AsyncIterator[tuple[Timekeeper, BudgetObjects]]:
    """A timekeeper that follows the objects."""
    objects = BudgetObjects(kube)
    configured = ConfiguredBudgets(objects=objects)
    keeper = opened.timekeeper(configuration=configured, statuses=StatusPublisher(objects))
    following = asyncio.create_task(configured.watch())
    try:
        await configured.wait_until_synced()
        yield keeper, objects
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.fixture
async def kube(lenient_api: ApiUnderTest) -> AsyncIterator[KubernetesClient]:
    async with KubernetesClient(load_credentials(lenient_api.kubeconfig)) as client:
        await client.create("/api/v1/namespaces", {"metadata": {"name": TEAM}})
        yield client


def shown(table: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


async def status_of(kube: KubernetesClient) -> Any:
    return json.loads(await kube.read(f"{PATH}/team-a"))["status"]


async def events_of(kube: KubernetesClient, *namespaces: str) -> list[Any]:
    paths = (f"/api/v1/namespaces/{namespace}/events" for namespace in namespaces)
    return [event for path in paths for event in json.loads(await kube.read(path))["items"]]


def reasons(events: list[Any]) -> list[tuple[str, str]]:
    return [(event["reason"], event["involvedObject"]["kind"]) for event in events]


async def test_a_budget_object_is_applied_and_gets_a_status_and_an_event(
    opened: AccountLedger, kube: KubernetesClient
) -> None:
    async with keeping(opened, kube) as (keeper, objects):
        await kube.create(PATH, manifest(limitGPUMinutes=10))
        await until(lambda: keeper.configuration.budget_of(TEAM).limit_units == units(10))
        await opened.journal("held", T0, lease("p"))
        await opened.count(T0 + MINUTE_MS, keeper=keeper)
        await opened.count(T0 + 24 * MINUTE_MS, keeper=keeper)
        status = await status_of(kube)
        events = await events_of(kube, "default", TEAM)
        await until(lambda: TEAM in objects.status_copies())

    assert (status["state"], status["usedUnits"]) == ("exhausted", str(units(12)))
    assert status["remainingGPUMinutes"] == "-2.000"
    assert objects.status_copies()[TEAM].window.used_units >= units(12)
    assert reasons(events) == [("BudgetExhausted", "GPUBudget"), ("BudgetExhausted", "Namespace")]
    assert {event["involvedObject"]["name"] for event in events} == {"team-a"}
    assert {event["message"].partition("; ")[2] for event in events} == {
        "its pods may be preempted, new pods are admitted"
    }


async def test_a_new_invalid_budget_lets_no_new_pod_in_and_says_so(
    opened: AccountLedger, kube: KubernetesClient
) -> None:
    async with keeping(opened, kube) as (keeper, objects):
        await kube.create(PATH, in_zone("CST"))
        await until(lambda: TEAM in objects.latest.problems)
        await opened.journal("held", T0, lease("p"))
        (event,) = await opened.count(T0 + MINUTE_MS, keeper=keeper)
        status = await status_of(kube)
        found = reasons(await events_of(kube, "default"))
        balance = keeper.balance_of(TEAM)

        assert (event.state, event.new_pods, event.lease_class) == (
            "invalid",
            "queue",
            "guaranteed",
        )
        assert status["state"] == "invalid"
        condition = status["conditions"][0]
        assert (condition["type"], condition["status"]) == ("Applied", "False")
        assert condition["observedGeneration"] == status["observedGeneration"] == 1
        assert "policy.timeZone: must be the IANA name of a time zone" in condition["message"]
        assert condition["message"].endswith("new pods of the namespace wait until it is valid")
        assert found == [("BudgetInvalid", "GPUBudget")]
        labels = {"namespace": str(TEAM)}
        assert REGISTRY.get_sample_value("leasehold_budget_invalid", labels) == 1
        assert balance.state is BudgetState.INVALID
        assert "team-a is invalid: " in shown(budget_table([budget_view(balance)], 0.0))

        await kube.patch_merge(f"{PATH}/team-a", {"spec": {"policy": {"timeZone": "UTC"}}})
        await until(lambda: TEAM not in objects.latest.problems)
        (event,) = await opened.count(T0 + 2 * MINUTE_MS, keeper=keeper)
        assert (event.state, event.new_pods) == ("ok", "admit")
        assert (await status_of(kube))["conditions"][0]["status"] == "True"


async def test_the_last_valid_budget_stays_in_force_also_after_a_restart(
    opened: AccountLedger, kube: KubernetesClient
) -> None:
    async with keeping(opened, kube) as (keeper, objects):
        await kube.create(PATH, in_zone("UTC"))
        await until(lambda: TEAM in objects.latest.valid)
        await opened.count(T0 + MINUTE_MS, keeper=keeper)
        await kube.patch_merge(f"{PATH}/team-a", {"spec": {"policy": {"timeZone": "UTC+8"}}})
        await until(lambda: TEAM in objects.latest.problems)
        await opened.count(T0 + MINUTE_MS + 1000, keeper=keeper)
        status = await status_of(kube)
        found = reasons(await events_of(kube, "default"))
    async with keeping(opened, kube) as (keeper, objects):
        again = keeper.configuration.budget_of(TEAM)

    assert (status["state"], status["conditions"][0]["status"]) == ("ok", "False")
    assert "the last valid version stays in force" in status["conditions"][0]["message"]
    assert status["specInForce"]["policy"]["timeZone"] == "UTC"
    assert found == [("BudgetInvalid", "GPUBudget")]
    assert (again.limit_units, again.unreadable) == (units(10), False)
    assert "timeZone" in again.problem


@pytest.mark.parametrize("fault", [{"y" * 1_000_000: 1}, {"policy": {"timeZone": "x" * 1_000_000}}])
def test_an_invalid_object_is_reported_in_few_words(fault: dict[str, Any]) -> None:
    objects = BudgetObjects(client=None)  # type: ignore[arg-type]
    objects.latest.apply(RawObject(metadata=ObjectMeta(name=str(TEAM)), spec=fault))

    budget = ConfiguredBudgets(objects=objects).budget_of(TEAM)

    assert budget.unreadable
    assert "GPUBudget team-a: spec" in budget.problem
    assert len(budget.problem) <= 512


def test_an_invalid_file_keeps_the_last_valid_one_in_force_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(json.dumps(in_zone("UTC")))
    file = BudgetFile(path)
    file.load()
    path.write_text(json.dumps(in_zone("CST")))
    with pytest.raises(RequestError, match="timeZone"):
        file.load()

    budget = ConfiguredBudgets(file=file).budget_of(TEAM)

    assert (budget.limit_units, budget.unreadable) == (units(10), False)
    assert "timeZone" in budget.problem
