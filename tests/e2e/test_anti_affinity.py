"""Required anti-affinity of running pods, whoever placed them, keeps pods with GPUs away."""

import redis.asyncio

from tests.support.stack import gpu_pod, running, stack, succeeded, vgpu
from tests.support.waiting import until

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"
RULE = "didn't satisfy existing pods anti-affinity rules"


def quiet_pod(node: str) -> dict[str, object]:
    """A pod without GPUs, placed by the cluster's scheduler, that wants no noisy ones beside it."""
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"app": "noisy"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "quiet"},
        "spec": {
            "nodeSelector": {HOST: node},
            "affinity": {"podAntiAffinity": {REQUIRED: [term]}},
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "busybox", "command": ["sleep", "1000"]}],
        },
    }


async def test_a_pod_waits_beside_one_that_repels_it_and_runs_once_that_has_gone() -> None:
    async with stack("--nodes", "1", "--gpus", "1xT4") as cluster:
        nodes = await cluster.kubectl("get", "nodes", "-o", "name")
        node = nodes.out.strip().removeprefix("node/")
        await cluster.create(quiet_pod(node))
        await cluster.until("quiet", running)
        async with redis.asyncio.Redis.from_url(
            cluster.state()["redis_url"], **cluster.login(), decode_responses=True
        ) as ledger:
            facts = [key async for key in ledger.scan_iter(f"*facts:{node}")]
            await until(lambda: ledger.hget(facts[0], "facts"), lambda text: "noisy" in text)
        noisy, other = gpu_pod("noisy", vgpu(memory=1000)), gpu_pod("other", vgpu(memory=1000))
        noisy["metadata"]["labels"] = {"app": "noisy"}

        await cluster.create(noisy)
        await cluster.create(other)

        await cluster.until("other", running)
        explained = await until(
            lambda: cluster.leasehold("explain", "noisy"), lambda done: RULE in done.out
        )
        assert succeeded(explained)
        assert not running(await cluster.pod("noisy"))
        await cluster.kube.delete("/api/v1/namespaces/default/pods/quiet")
        await cluster.until("noisy", running, limit_s=20)
        await cluster.audit()
