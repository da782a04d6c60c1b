"""Gangs as their users make them: PodGroups through kubectl, all pods or none."""

import asyncio
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest_asyncio

from shared.model.leases.lease import LeaseState
from tests.support.dialects.checklist import condition_text, leases
from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL

CRDS = Path(__file__).parents[2] / "support" / "crds"
VOLCANO = "scheduling.volcano.sh/v1beta1"
COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
WHOLE = vgpu(number=1, cores=100)


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def pod_groups(whole: Stack) -> None:
    """Install both kinds of PodGroup."""
    for kind in ("volcano", "coscheduling"):
        await whole.apply(CRDS / f"{kind}_podgroup.yaml")


def group(name: str, size: int, version: str = VOLCANO) -> str:
    return f"""
apiVersion: {version}
kind: PodGroup
metadata:
  name: {name}
spec:
  minMember: {size}
"""


def member(name: str, of: str) -> dict[str, Any]:
    return gpu_pod(name, WHOLE, annotations={"scheduling.k8s.io/group-name": of})


async def all_run(up: Stack, *names: str) -> None:
    await asyncio.gather(*(up.until(name, running) for name in names))


async def test_two_gangs_that_do_not_fit_together_run_one_after_the_other(up: Stack) -> None:
    await up.apply("---".join((group("red", 3), group("blue", 3))))

    for number in range(3):
        for colour in ("red", "blue"):
            await up.create(member(f"{colour}-{number}", colour))
    pods = await until(up.pods, lambda pods: sum(map(running, pods)) >= 3)

    first_gang = [pod for pod in pods if running(pod)]
    first = first_gang[0]["metadata"]["name"].partition("-")[0]
    second = "blue" if first == "red" else "red"
    assert {pod["metadata"]["name"] for pod in first_gang} == {f"{first}-{n}" for n in range(3)}
    waiting = await up.until(f"{second}-0", lambda pod: "1 of 3 fit" in condition_text(pod))
    assert not waiting["spec"].get("nodeName")
    explained = await up.leasehold("explain", f"{second}-0")
    assert f"gang        default/{second}, at least 3 run together or none" in explained.out
    await up.audit()

    await asyncio.gather(*(up.kubectl("delete", "pod", f"{first}-{n}", "--now") for n in range(3)))

    await all_run(up, *(f"{second}-{n}" for n in range(3)))


async def test_coschedulings_label_and_koordinators_annotation_define_gangs(up: Stack) -> None:
    await up.apply(group("labelled", 2, COSCHEDULING))
    for name in ("l-0", "l-1"):
        pod = gpu_pod(name, WHOLE)
        pod["metadata"]["labels"] = {"scheduling.x-k8s.io/pod-group": "labelled"}
        await up.create(pod)
    await all_run(up, "l-0", "l-1")
    own = {
        "gang.scheduling.koordinator.sh/name": "own",
        "gang.scheduling.koordinator.sh/min-available": "3",
    }

    for number in range(3):
        await up.create(gpu_pod(f"k-{number}", WHOLE, annotations=own))

    await up.until("k-0", lambda pod: "2 of 3 fit" in condition_text(pod))
    await up.kubectl("delete", "pod", "l-0", "--now")
    await all_run(up, "k-0", "k-1", "k-2")


async def test_a_gang_is_promised_a_start_until_which_only_what_ends_before_gets_its_gpus(
    up: Stack, tmp_path: Path
) -> None:
    await up.apply(group("planned", 2))
    for number in range(2):
        await up.create(gpu_pod(f"endless-{number}", WHOLE))
    await up.create(gpu_pod("limited", WHOLE, activeDeadlineSeconds=120))
    await all_run(up, "endless-0", "endless-1", "limited")
    await until(lambda: leases(up), lambda held: held["limited"].state is LeaseState.ACTIVE)

    await asyncio.gather(*(up.create(member(f"planned-{n}", "planned")) for n in range(2)))

    explained = await until(
        lambda: up.leasehold("explain", "planned-0"), lambda done: "starts by " in done.out
    )
    promise = re.search(
        r"starts by (\S+) at the latest: default/limited ends by then", explained.out
    )
    assert promise, explained.out
    await until_event(up, "planned-1", "GPUStartPlanned", promise[0])
    await up.until("planned-1", lambda pod: f"Planned start: {promise[0]}" in condition_text(pod))
    start = f"by {promise[1]}"
    await until(
        lambda: up.kubectl_out("get", "waitingpods", "planned-0"), lambda listed: start in listed
    )
    await until(lambda: up.leasehold("ps", "-o", "wide"), lambda done: start in done.out)
    manifest = tmp_path / "late.json"
    manifest.write_text(json.dumps(gpu_pod("late", WHOLE)))
    assert "  no end in sight" in (await up.leasehold("what-if", str(manifest), "--when")).out
    await up.create(gpu_pod("late", WHOLE))
    await up.create(gpu_pod("short", WHOLE, activeDeadlineSeconds=1))
    await up.until("short", lambda pod: pod["spec"].get("nodeName"))
    await up.until("late", lambda pod: "reserved for another pod" in condition_text(pod))

    await up.kubectl("delete", "pod", "limited", "--now")
    await all_run(up, "planned-0", "planned-1")

    assert datetime.now(UTC) < datetime.fromisoformat(promise[1])
    assert (await up.pod("short"))["status"]["reason"] == "DeadlineExceeded"
    assert not (await up.pod("late"))["spec"].get("nodeName")
    await up.audit()


async def until_event(up: Stack, pod: str, reason: str, text: str) -> None:
    """Wait for an Event about a pod with a text."""
    about = f"involvedObject.name={pod},reason={reason}"
    shown = ("get", "events", "--field-selector", about, "-o", "jsonpath={.items[*].message}")
    await until(lambda: up.kubectl_out(*shown), lambda messages: text in messages)
