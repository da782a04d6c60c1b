"""The examples in the stack as a user starts it."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from shared.model.leases.lease_copy import ANNOTATION, load_lease
from shared.model.names import Namespace
from tests.support.page_commands import SHELL_BLOCK
from tests.support.stack import NEEDS_KUBECTL, Stack, stack, succeeded
from tests.support.waiting import until
from tools.generate.pages import DOCS, ROOT

pytestmark = NEEDS_KUBECTL
EXAMPLES = Path(__file__).parents[2] / "examples"
OTHER_PROJECTS = re.compile(
    r"(jobset.x-k8s|karpenter|keda|kubeflow|kueue.x-k8s|ray|scheduling.volcano|serving.kserve)\."
    r"(io|sh|org)/"
)
"""Groups of kinds that neither Kubernetes nor Leasehold has."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def up() -> AsyncIterator[Stack]:
    async with stack("--nodes", "2", "--gpus", "4xA100-40GB", webhook=True) as started:
        yield started


async def shares(up: Stack, selector: str) -> list[list[tuple[int, int]]]:
    """Return memory in MiB and cores of the shares of each pod that a selector selects."""
    shown = await up.kubectl("get", "pods", "-l", selector, "-o", "json")
    copies = [
        (pod["metadata"]["name"], pod["metadata"]["annotations"].get(ANNOTATION, ""))
        for pod in json.loads(shown.out)["items"]
    ]
    leases = [load_lease(text, namespace=Namespace("default"), name=name) for name, text in copies]
    return [[(share.memory_mib, share.cores_percent) for share in lease.shares] for lease in leases]


@pytest.mark.parametrize(
    ("file", "target", "selector", "expected"),
    [
        ("notebook.yaml", "deployment/notebook", "app=notebook", [[(10240, 0)]]),
        ("inference.yaml", "deployment/vllm", "app=vllm", [[(12000, 50)], [(12000, 50)]]),
        ("notebook-home.yaml", "deployment/notebook-home", "app=notebook-home", [[(10240, 0)]]),
        ("statefulset-claims.yaml", "statefulset/embeddings", "app=embeddings", [[(6000, 0)]] * 3),
    ],
)
async def test_a_deployment_of_the_examples_is_rolled_out(
    up: Stack, file: str, target: str, selector: str, expected: list[list[tuple[int, int]]]
) -> None:
    await up.apply(EXAMPLES / file)

    done = await up.kubectl("rollout", "status", target, "--timeout=60s")

    assert succeeded(done), done.err
    assert await shares(up, selector) == expected
    await up.kubectl("delete", "-f", str(EXAMPLES / file))


async def test_a_deployment_on_all_gpus_is_replaced_on_a_full_cluster(up: Stack) -> None:
    await until(lambda: up.kubectl_out("get", "pods", "-o", "name"), lambda names: not names)
    target = "deployment/whole-cluster"
    await up.apply(EXAMPLES / "rollout-full-cluster.yaml")
    first = await up.kubectl("rollout", "status", target, "--timeout=60s")
    await up.kubectl("set", "env", target, "VERSION=2")

    second = await up.kubectl("rollout", "status", target, "--timeout=60s")

    assert (succeeded(first), succeeded(second)) == (True, True), first.err + second.err
    held = await shares(up, "app=whole-cluster")
    assert [len(of_pod) for of_pod in held] == [1] * 8, "all GPUs of both nodes"
    await up.kubectl("delete", "-f", str(EXAMPLES / "rollout-full-cluster.yaml"))


async def test_each_replica_of_the_stateful_set_keeps_its_claim(up: Stack) -> None:
    await up.apply(EXAMPLES / "statefulset-claims.yaml")
    rollout = ("rollout", "status", "statefulset/embeddings", "--timeout=180s")
    await up.kubectl_out(*rollout)
    before = await claims_of_replicas(up)
    await up.kubectl("delete", "pod", "embeddings-1")

    await up.kubectl_out(*rollout)

    after = await claims_of_replicas(up)
    assert before == after
    assert before.keys() == {f"models-embeddings-{number}" for number in range(3)}
    assert len(set(before.values())) == 3
    await up.kubectl("delete", "-f", str(EXAMPLES / "statefulset-claims.yaml"))


async def claims_of_replicas(up: Stack) -> dict[str, str]:
    """Return the volume of each claim of the StatefulSet."""
    shown = json.loads(await up.kubectl_out("get", "pvc", "-o", "json"))
    return {
        claim["metadata"]["name"]: claim["spec"].get("volumeName", "")
        for claim in shown["items"]
        if claim["metadata"]["name"].startswith("models-")
    }


@pytest.mark.parametrize(
    ("file", "name", "pods"),
    [
        ("job.yaml", "sweep", 4),
        ("gang.yaml", "distributed", 3),
        ("gang-data.yaml", "training", 8),
    ],
)
async def test_a_job_of_the_examples_completes(up: Stack, file: str, name: str, pods: int) -> None:
    await up.apply(EXAMPLES / file)

    done = await up.kubectl("wait", "--for=condition=complete", f"job/{name}", "--timeout=80s")

    assert succeeded(done), done.err
    of_pods = await shares(up, f"job-name={name}")
    assert [len(of_pod) for of_pod in of_pods] == [1] * pods
    await until(lambda: up.kubectl("delete", "job", name), succeeded)


async def take_a_gpu(up: Stack, node: str) -> None:
    container = {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"on-{node}"}, "spec": spec}
    await up.apply(json.dumps(pod))
    await up.kubectl_out("wait", "--for=condition=Ready", f"pod/on-{node}", "--timeout=60s")


async def test_the_pods_of_a_rack_of_the_examples_run_in_one_rack_or_wait(up: Stack) -> None:
    for number in range(2):
        await up.kubectl_out(
            "label", "node", f"node-{number}", f"topology.kubernetes.io/rack=r{number}"
        )
        await take_a_gpu(up, f"node-{number}")
    await up.apply(EXAMPLES / "rack.yaml")
    pods = ("get", "pods", "-l", "job-name=in-one-rack")
    reason = "{.items[*].status.conditions[?(@.type=='PodScheduled')].message}"

    waits = await until(
        lambda: up.kubectl_out(*pods, "-o", f"jsonpath={reason}"), lambda text: "has room" in text
    )
    await up.kubectl("delete", "pod", "on-node-1")
    done = await up.kubectl("wait", "--for=condition=complete", "job/in-one-rack", "--timeout=80s")

    assert "(r0 has room for 6 of 8, r1 for 6)" in waits
    assert succeeded(done), done.err
    nodes = await up.kubectl_out(*pods, "-o", "jsonpath={.items[*].spec.nodeName}")
    assert nodes.split() == ["node-1"] * 8
    await until(lambda: up.kubectl("delete", "job/in-one-rack", "pod/on-node-0"), succeeded)


async def test_the_replicas_of_the_example_are_on_different_nodes_and_apart_from_the_load_test(
    up: Stack,
) -> None:
    deployment = "deployment/replicas-apart"
    pods = ("get", "pods", "-l", "app=replicas-apart", "-o")
    await up.apply(EXAMPLES / "replicas-apart.yaml")
    rolled = await up.kubectl("rollout", "status", deployment, "--timeout=80s")
    nodes = await up.kubectl_out(*pods, "jsonpath={.items[*].spec.nodeName}")

    for number in range(2):
        name = f"load-{number}"
        main = {"name": "main", "image": "x", "command": ["sleep", "1000"]}
        pod = {"metadata": {"name": name, "labels": {"app": "load-test"}},
               "spec": {"nodeName": f"node-{number}", "containers": [main]}}  # fmt: skip
        await up.kube.create("/api/v1/namespaces/default/pods", pod)
    await up.kubectl_out("wait", "--for=condition=Ready", "pod", "-l", "app=load-test")
    await up.kubectl_out("scale", deployment, "--replicas=5")
    reason = "{.items[*].status.conditions[?(@.type=='PodScheduled')].message}"
    waits = await until(
        lambda: up.kubectl_out(*pods, f"jsonpath={reason}"), lambda text: "nodes are" in text
    )
    await up.kubectl_out("delete", "pod", "load-1", "--force")
    started = await up.kubectl("rollout", "status", deployment, "--timeout=80s")

    assert succeeded(rolled), rolled.err
    assert sorted(nodes.split()) == ["node-0", "node-0", "node-1", "node-1"]
    assert "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules" in waits
    assert succeeded(started), started.err
    await up.kubectl("delete", deployment, "pod/load-0", "--force")
    await until(lambda: up.kubectl_out(*pods, "name"), lambda names: not names)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
async def test_all_kinds_of_kubernetes_and_leasehold_are_accepted(up: Stack, file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    others = {
        document["kind"] for document in documents if OTHER_PROJECTS.match(document["apiVersion"])
    }

    done = await up.kubectl("apply", "-f", str(file))

    accepted = re.findall(r"(?:created|configured|unchanged)$", done.out, re.MULTILINE)
    assert len(accepted) == sum(document["kind"] not in others for document in documents), done.err
    assert set(re.findall(r'no matches for kind "(\w+)"', done.err)) == others
    assert "rror from server" not in done.err
    await up.kubectl("delete", "-f", str(file), "--wait=false")


async def test_the_nodes_have_the_label_of_nodes_with_an_agent(up: Stack) -> None:
    shown = await up.kubectl_out("get", "nodes", "-l", "leasehold.dev/gpu=true", "-o", "name")

    assert shown.split() == ["node/node-0", "node/node-1"]


async def test_the_page_on_ai_conformance_can_be_followed(up: Stack) -> None:
    port = json.loads((up.root / "state.json").read_text())["ports"]["usage-node-0"]
    page = (DOCS / "conformance.md").read_text().replace("localhost:9394", f"localhost:{port}")
    shell = os.environ | {
        "KUBECONFIG": str(up.root / "kubeconfig"),
        "LEASEHOLD_STATE": str(up.root),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    access, gangs, metrics = [
        await asyncio.to_thread(
            subprocess.run, ["bash", "-euo", "pipefail", "-c", block],
            capture_output=True, text=True, cwd=ROOT, env=shell, check=False,
        )
        for _, block in SHELL_BLOCK.findall(page)
    ]  # fmt: skip

    for done in (access, gangs, metrics):
        assert done.returncode == 0, done.stdout + done.stderr
    assert '"NVIDIA_VISIBLE_DEVICES","value":"void"' in access.stdout
    shares = re.findall(r"^default/share-[ab] +(\S+ +\d+) ", access.stdout, re.MULTILINE)
    assert len(shares) == 2
    assert len(set(shares)) == 1
    assert "clean: " in access.stdout
    assert "hw_gpu_utilization_ratio{" in metrics.stdout
    assert "share-a" in metrics.stdout
