"""The commands of the pages for administrators, on a node of the stack."""

import json
import shlex
from typing import Any

import pytest

from tests.support.page_commands import commands
from tests.support.stack import Done, Stack, gpu_pod, running, succeeded, vgpu

NODE = "node-0"


async def follow(up: Stack, page: str, section: str = "") -> list[Done]:
    """Apply the manifests of a page or section, and run its commands of leasehold.

    They are for the node `gpu-node-1`; what they write into a file is returned, too.
    """
    done = []
    for command in commands(page, section, program="leasehold"):
        if command.startswith("kubectl apply"):
            manifest = command.partition("\n")[2].removesuffix("EOF")
            await up.apply(manifest)
            if "kind: GPUBudget" in manifest:
                applied = ("--for=condition=Applied", "--timeout=30s", "-f", "-")
                await up.kubectl_out("wait", *applied, stdin=manifest)
            continue
        if command.startswith("leasehold doctor"):
            continue  # it misses the webhook here: e2e/admission runs it
        words, _, _ = command.replace("gpu-node-1", NODE).partition(" > ")
        done.append(await up.leasehold(*shlex.split(words, comments=True)[1:]))
        assert succeeded(done[-1]), (command, done[-1].err)
    return done


async def test_a_gpu_is_cordoned_and_opened_again(up: Stack) -> None:
    _, shown, _ = await follow(up, "cordon.md")
    after = await up.leasehold("gpus")

    assert "ECC errors" in shown.out
    assert "ECC errors" not in after.out


async def test_budgets_are_granted_reported_and_priced(up: Stack) -> None:
    await up.kubectl("create", "namespace", "team-a")

    shown, granted, *_ = await follow(up, "budgets.md", "GPU-time budgets")
    *_, costs = await follow(up, "budgets.md", "Costs")
    await follow(up, "budgets.md", "Quotas")
    quotas = await up.kubectl_out("get", "gpuquotas", "-o", "name")
    await up.kubectl("delete", "gpubudget,gpuquota", "team-a")
    await up.kubectl("delete", "namespace", "team-a")

    assert "team-a" in shown.out
    assert "granted 120.000 GPU-minutes to team-a" in granted.out
    assert "BilledCost" in costs.out
    assert quotas.strip() == "gpuquota.leasehold.dev/team-a"


async def test_preemptions_are_listed_and_tried_for_a_pod_that_none_helps(up: Stack) -> None:
    await up.create(gpu_pod("my-pod", vgpu(memory=15_360, number=9)))
    await up.until("my-pod", lambda pod: bool(pod["status"].get("conditions")))

    listed, tried = [
        await up.leasehold(*shlex.split(command, comments=True)[1:])
        for command in commands("budgets.md", "Preemption", program="leasehold")
    ]

    assert succeeded(listed), listed.err
    assert tried.code == 1
    assert "default/my-pod" in tried.out
    assert "none: no freed device could help" in tried.out


@pytest.mark.parametrize(
    ("page", "section"), [("install.md", "9."), ("upgrade.md", "Upgrade"), ("backup.md", "After a")]
)
async def test_the_checks_of_the_pages_succeed(up: Stack, page: str, section: str) -> None:
    *_, audited = await follow(up, page, section)

    assert audited.out.startswith("clean: ")


async def test_running_pods_are_resized(up: Stack) -> None:
    await up.kubectl("create", "namespace", "team-a")
    in_team = gpu_pod("train", vgpu(memory=3_000, cores=20))
    in_team["metadata"]["namespace"] = "team-a"
    in_team["spec"]["containers"][0]["name"] = "trainer"
    await up.apply(json.dumps(in_team))
    await up.create(gpu_pod("train", vgpu(memory=3_000)))
    await up.until("train", running)
    await up.kubectl_out(
        "wait", "pod/train", "-n", "team-a", "--for=condition=Ready", "--timeout=60s"
    )

    *_, explained = await follow(up, "resize.md")
    shares: list[dict[str, Any]] = [
        share
        for lease in json.loads((await up.leasehold("ps", "-A", "--json")).out)["leases"]
        for share in lease["shares"]
    ]
    await up.kubectl("delete", "namespace", "team-a")

    assert {(share["memory_mib"], share["cores_percent"]) for share in shares} == {
        (6_144, 0),
        (4_096, 40),
    }
    assert "6144 of 15360 MiB" in explained.out
