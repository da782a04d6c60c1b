"""The commands of the pages for administrators, on a node of the stack."""

import json
import shlex
from typing import Any

from tests.support.page_commands import commands
from tests.support.stack import Done, Stack, gpu_pod, running, succeeded, vgpu

NODE = "node-0"


async def follow(up: Stack, page: str) -> list[Done]:
    """Run the page's commands of leasehold, which are for the node `gpu-node-1`."""
    done = []
    for command in commands(page, program="leasehold"):
        _, *words = shlex.split(command.replace("gpu-node-1", NODE), comments=True)
        done.append(await up.leasehold(*words))
        assert succeeded(done[-1]), (command, done[-1].err)
    return done


async def test_a_gpu_is_cordoned_and_opened_again(up: Stack) -> None:
    _, shown, _ = await follow(up, "cordon.md")
    after = await up.leasehold("gpus")

    assert "ECC errors" in shown.out
    assert "ECC errors" not in after.out


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

    assert {(one["memory_mib"], one["cores_percent"]) for one in shares} == {
        (6_144, 0),
        (4_096, 40),
    }
    assert "6144 of 15360 MiB" in explained.out
