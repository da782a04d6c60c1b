"""Reviews of pods as large as an API server accepts, alone and many at once."""

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.webhook.registration import ALL_PODS_PATH, PATH
from shared.dialects.reserved import NOTHING_VISIBLE, VISIBLE
from tests.support.webhook.replica import VGPU, cluster, created, pod, replica
from tests.support.webhook.worst_pods import KINDS, Obj, review_of, worst_pod

ENOUGH = 2.5
"""How much longer than reading and writing its JSON a review may take: 1.2 is usual at most."""
FLOOD_S = 30
"""The longest timeout of an API server: both ends of the flood run in this process."""
TRIES = 3
"""Of which one must be fast: another program may have had the processor's cache."""


@pytest.mark.parametrize("gpu", [False, True])
async def test_no_pod_takes_long_to_review(tmp_path: Path, *, gpu: bool) -> None:
    async with cluster() as (api, kube, _), replica(api, kube, tmp_path) as one:
        slow = {}
        for kind in KINDS:
            worst = worst_pod(kind, gpu=gpu)
            for old in (None, worst):
                body = review_of(worst, old=old)
                for _ in range(TRIES):
                    took = await cost(one.webhook, body)
                    if took <= ENOUGH:
                        break
                else:
                    slow[kind, bool(old)] = took

    assert slow == {}


async def cost(webhook: Any, body: bytes) -> float:
    """Return the processor time of a review, divided by that of reading and writing its JSON.

    Both work on the same data, so that both are slower where a processor's cache is shared.
    """
    began = time.process_time()
    await webhook.review(body, claims=True)
    reviewed = time.process_time()
    json.dumps(json.loads(body))
    return (reviewed - began) / (time.process_time() - reviewed)


async def test_no_number_of_sources_or_variables_lets_a_container_see_devices(
    tmp_path: Path,
) -> None:
    seeing = {"name": VISIBLE, "value": "all"}
    fields: dict[str, Obj] = {
        "sources": {
            "env": [seeing],
            "envFrom": [
                {"configMapRef": {"name": f"absent-{n}", "optional": True}} for n in range(5_000)
            ],
        },
        "variables": {"env": [*({"name": f"A{n}"} for n in range(9_000)), seeing]},
    }
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        shown = {}
        for name, more in fields.items():
            obj = pod(name)
            obj["spec"]["containers"][0] |= more
            status, made = await created(client, obj)
            shown[name] = (status, made["spec"]["containers"][0]["env"][-1])
        added = pod("many")
        added["spec"]["containers"] = [{"name": f"c{n}", "image": "app"} for n in range(200)]
        many, _ = await created(client, added)

    hidden = {"name": VISIBLE, "value": NOTHING_VISIBLE}
    assert shown == {"sources": (201, hidden), "variables": (201, hidden)}
    assert many == 201


async def test_many_large_pods_delay_no_other_namespace_and_are_never_let_in_unseen(
    tmp_path: Path,
) -> None:
    flood = [review_of(worst_pod(kind, gpu=False)) for kind in (*KINDS, *KINDS)]
    main = {"name": "main", "image": "app", "resources": {"limits": VGPU}}
    asking = review_of({"metadata": {"name": "p"}, "spec": {"containers": [main]}}, namespace="b")
    async with (
        cluster() as (api, kube, _),
        replica(api, kube, tmp_path, knows_callers=False) as one,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=False)) as session,
    ):

        async def reviewed(body: bytes, timeout_s: int) -> tuple[float, Obj]:
            began = time.monotonic()
            url = f"{one.registration.url}{PATH}?timeout={timeout_s}s"
            async with session.post(url, data=io.BytesIO(body)) as response:
                assert response.status == 200
                answer = (await response.json())["response"]
                return time.monotonic() - began, answer

        async with asyncio.TaskGroup() as group:
            floods = [group.create_task(reviewed(body, FLOOD_S)) for body in flood]
            others = [group.create_task(reviewed(asking, FLOOD_S)) for _ in range(5)]

    waits_s = [task.result()[0] for task in others]
    before = [task for task in floods if task.result()[0] < max(waits_s)]
    assert len(before) < len(floods) / 2, "in the order of arrival, all would be before the others"
    assert all(task.result()[1]["allowed"] for task in others)
    for took_s, answer in (task.result() for task in floods):
        assert took_s < FLOOD_S, "the API server would let the pod in"
        assert not answer["allowed"] or hides(answer)


def hides(answer: Obj) -> bool:
    patch = json.loads(base64.b64decode(answer.get("patch", "")) or "[]")
    return any(VISIBLE in str(each.get("value")) for each in patch)


async def test_a_review_whose_body_does_not_arrive_in_time_is_denied(tmp_path: Path) -> None:
    body = review_of(pod())
    answered = asyncio.Event()

    async def beginning() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await answered.wait()

    async with (
        cluster() as (api, kube, _),
        replica(api, kube, tmp_path, knows_callers=False) as one,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
    ):

        async def response_at(path: str) -> Obj:
            url = f"{one.registration.url}{path}?timeout=1s"
            async with session.post(url, data=beginning()) as response:
                response_of_review: Obj = (await response.json())["response"]
                return response_of_review

        async with asyncio.timeout(30):
            denied = await response_at(PATH)
            unplaced = await response_at(ALL_PODS_PATH)
        answered.set()

    assert denied["uid"] == json.loads(body)["request"]["uid"]
    assert (denied["allowed"], denied["status"]["code"]) == (False, 429)
    assert "create it again later" in denied["status"]["message"]
    assert unplaced["allowed"], "it only chooses a scheduler"
