"""GPUBudgets that the timekeeper could not read are refused where they are written."""

from typing import Any

import pytest

from services.timekeeper.config.budget_sources import PATH
from tests.support.simcluster.apiserver import ApiUnderTest


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    kind = {"apiVersion": "leasehold.dev/v1alpha1", "kind": "GPUBudget"}
    return {**kind, "metadata": {"name": "team-a"}, "spec": spec}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"limitGPUMinutes": -1}, "limitGPUMinutes"),
        ({"policy": {"type": "lunar"}}, "policy"),
        ({"warnAt": [101]}, "warnAt"),
        ({"share": 0}, "share"),
        ({"policy": {"type": "bucket", "refillGPUMinutesPerHour": 1}}, "requires limitGPUMinutes"),
        ({"limitGPUMinutes": 1, "policy": {"type": "bucket"}}, "require each other"),
        ({"policy": {"refillGPUMinutesPerHour": 1}}, "require each other"),
        ({"policy": {"type": "sliding", "lengthHours": 20, "bucketMinutes": 1}}, "1 to 1000 times"),
        ({"policy": {"type": "sliding", "lengthHours": 2**40}}, "less than or equal to 175680"),
    ],
)
async def test_an_unreadable_gpubudget_is_refused_by_the_api_server(
    api: ApiUnderTest, spec: dict[str, Any], message: str
) -> None:
    async with api.client() as client, client.post(PATH, json=manifest(spec)) as answer:
        body = await answer.json()

    assert answer.status == 422
    assert message in body["message"]


async def test_a_complete_bucket_is_accepted(api: ApiUnderTest) -> None:
    whole = {"limitGPUMinutes": 60, "policy": {"type": "bucket", "refillGPUMinutesPerHour": 1}}
    async with api.client() as client, client.post(PATH, json=manifest(whole)) as answer:
        assert answer.status == 201, await answer.text()
