"""The span of a denial, and the times of a review on the admitted pod; over TLS."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.model.events.event import ADMISSION
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import Tracing, open_tracing
from tests.integration.webhook.test_annotation_policy import install
from tests.support.webhook.replica import PODS, VGPU, cluster, created, pod, replica

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
