"""A pod on each GPU leaves no room for a whole one; `defrag` moves one of them."""

import json

from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, succeeded, vgpu
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL
CARDS = 4
ANY_TIME = ("--min-runtime-s", "0")


def deployment(name: str, pod: dict[str, object]) -> str:
    """Return a Deployment of one such pod."""
    labels = {"app": name}
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
            },
        }
    )


async def test_what_if_and_defrag_make_room_for_a_waiting_pod(up: Stack) -> None:
    for number in range(CARDS):
        await up.create(gpu_pod(f"first-{number}", vgpu(memory=9_000)))
        await up.until(f"first-{number}", running)
        beside = deployment(f"beside-{number}", gpu_pod("p", vgpu(memory=6_000)))
        await up.apply(beside)
        await up.until_all(2 * (number + 1))
    assert succeeded(
        await up.kubectl("delete", "pod", *(f"first-{n}" for n in range(CARDS)), "--wait")
    )
    whole = gpu_pod("whole", vgpu(memory=14_000))
    manifest = up.root / "whole.json"
    manifest.write_text(json.dumps(whole))

    tried = await until(
        lambda: up.leasehold("what-if", str(manifest)),
        lambda done: "set volcano.sh/vgpu-memory: 9360," in done.out,
    )

    assert tried.code == 1
    assert "Pod whole: 0 of 1 would run" in tried.out
    assert "one more would run on node-0 without default/beside-" in tried.out
    assert "1 more node like node-0 (4x Tesla T4 of 15360 MiB) would run all" in tried.out
    await up.create(whole)
    row = await until(lambda: up.kubectl("get", "waitingpods", "whole", "-owide"), succeeded)
    shared = ("get", "gpus", "--field-selector=status.usedShares=1", "-oname")
    assert "InsufficientGpuMemory" in row.out
    await until(lambda: up.kubectl_out(*shared), lambda text: len(text.split()) == CARDS)
    assert (
        len((await up.kubectl_out("get", "leasehold", "-A", "--no-headers")).splitlines()) > CARDS
    )
    assert "numa\t<integer>" in await up.kubectl_out("explain", "gpudevices.status")
    waiting = await up.kubectl("get", "pod", "whole", "-o", "yaml")
    manifest.write_text(waiting.out)
    again = await up.leasehold("what-if", str(manifest))
    assert "Pod whole: 0 of 1 would run" in again.out
    early = await until(
        lambda: up.leasehold("defrag", "whole", "--dry-run"), lambda done: "stays" in done.out
    )
    assert early.code == 1
    assert "it has not run for 600 s" in early.out
    planned = await up.leasehold("defrag", "whole", "--dry-run", "--json", *ANY_TIME)
    [move] = json.loads(planned.out)["plan"]["moves"]
    assert (move["from"], move["to"]) == ("node-0", "node-0")

    done = await up.leasehold("defrag", "whole", "--evict", *ANY_TIME)

    assert succeeded(done), done.err
    assert f"{move['pod']}: evicted" in done.err
    await up.until("whole", running)
    await up.until_all(CARDS + 1)
    await up.audit()
    assert succeeded(
        await up.kubectl("delete", "deployment", *(f"beside-{n}" for n in range(CARDS)))
    )
