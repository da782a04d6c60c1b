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
    r"(jobset.x-k8s|karpenter|keda|kubeflow|kueue.x-k8s|ray|scheduling.volcano)\.(io|sh|org)/"
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
    ],
)
async def test_a_deployment_of_the_examples_is_rolled_out(
    up: Stack, file: str, target: str, selector: str, expected: list[list[tuple[int, int]]]
) -> None:
    await up.apply(EXAMPLES / file)

    done = await up.kubectl("rollout", "status", target, "--timeout=60s")

    assert succeeded(done), done.err
    assert await shares(up, selector) == expected


@pytest.mark.parametrize(
    ("file", "name", "pods"), [("job.yaml", "sweep", 4), ("gang.yaml", "distributed", 3)]
)
async def test_a_job_of_the_examples_completes(up: Stack, file: str, name: str, pods: int) -> None:
    await up.apply(EXAMPLES / file)

    done = await up.kubectl("wait", "--for=condition=complete", f"job/{name}", "--timeout=80s")

    assert succeeded(done), done.err
    of_pods = await shares(up, f"job-name={name}")
    assert [len(of_pod) for of_pod in of_pods] == [1] * pods
    await until(lambda: up.kubectl("delete", "job", name), succeeded)


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
