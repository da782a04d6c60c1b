"""The commands that the pages for administrators print, run by kubectl on a simulated cluster.

Its containers run no image, so commands that need a running service are left out: `exec`, and
those that wait for the auth service.
"""

import asyncio
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes.short_lived import NO_GARBAGE
from tests.support.packaging import HELM
from tests.support.page_commands import commands
from tests.support.simcluster.process import cluster_process
from tests.support.stack import NEEDS_KUBECTL
from tools.generate.pages import ROOT

pytestmark = NEEDS_KUBECTL
with_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")
WAITS_AT_MOST_S = 120
NODE = "gpu-node-1"


class Shell:
    """Runs commands as a person does who has followed the pages so far, from a checkout."""

    def __init__(self, kubeconfig: Path, scratch: Path) -> None:
        self._environment = {**os.environ, **NO_GARBAGE, "KUBECONFIG": str(kubeconfig)}
        self._scratch = scratch
        for name in ("k8s", "services"):
            (scratch / name).symlink_to(ROOT / name)

    async def run(self, command: str) -> str:
        """Return standard output; a command that fails fails the test."""
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            cwd=self._scratch,
            env=self._environment,
            timeout=WAITS_AT_MOST_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    async def follow(self, page: str, section: str = "") -> None:
        """Run the commands of a page or section, of which there is at least one."""
        found = list(commands(page, section))
        assert found, (page, section)
        for command in found:
            await self.run(command)

    async def objects(self, kinds: str, *options: str) -> list[dict[str, Any]]:
        """Return the objects of these kinds in all namespaces."""
        shown = await self.run(f"kubectl get {kinds} -A -o json {' '.join(options)}")
        items: list[dict[str, Any]] = json.loads(shown)["items"]
        return items

    async def names(self, kinds: str, *options: str) -> set[str]:
        """Return the names of the objects of these kinds in all namespaces."""
        return {each["metadata"]["name"] for each in await self.objects(kinds, *options)}


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lh-") as directory:
        yield Path(directory)


async def test_pages_can_be_followed_from_the_installation_to_the_end(
    short_path: Path, tmp_path: Path
) -> None:
    shell = Shell(short_path / "kubeconfig", tmp_path)
    async with cluster_process(short_path, "--nodes", "2", "--node-prefix", "gpu-node-"):
        # Install
        for step in ("1.", "5.", "6.", "7.", "8."):
            await shell.follow("install.md", step)
        installed = await shell.names("deployments,statefulsets,daemonsets")
        assert {"auth", "binder", "placer", "nats", "redis", "node-agent"} <= installed
        pods = await shell.objects("pods", "-l app.kubernetes.io/part-of=leasehold")
        assert [
            one["spec"]["nodeName"] for one in pods if "agents" in one["metadata"]["namespace"]
        ] == [NODE]
        await shell.follow("budgets.md", "GPU-time budgets")
        await shell.follow("budgets.md", "Quotas")
        budget, quota = await shell.objects("gpubudgets,gpuquotas")

        # Change a setting, upgrade, rotate
        await shell.follow("upgrade.md")
        key = '{"data": {"redis.binder": "eA=="}}'
        await shell.run(f"kubectl -n leasehold-system patch secret auth -p '{key}'")
        await shell.follow("secrets.md", "Rotate a key")
        (secret,) = await shell.objects("secrets", "--field-selector metadata.name=auth")
        assert not secret.get("data")

        # Back up, lose, restore
        await shell.follow("backup.md", "What to back up")
        await shell.run("kubectl delete gpubudgets,gpuquotas -n team-a --all")
        await shell.follow("backup.md", "Restore budgets and quotas")
        restored = await shell.objects("gpubudgets,gpuquotas")
        assert [one["spec"] for one in restored] == [budget["spec"], quota["spec"]]
        await shell.run("kubectl -n leasehold-system delete secret auth")
        await shell.follow("backup.md", "After the Secret")
        assert "auth" in await shell.names("secrets")

        await shell.follow("cordon.md", "A node")

        # Uninstall
        await shell.follow("uninstall.md")
        left = await shell.names("all,configmaps,secrets,roles,clusterroles,crds")
        assert not {each for each in left if "leasehold" in each}
        assert not await shell.names("all", "-l app.kubernetes.io/part-of=leasehold")


HELM_INSTALLS = [
    command
    for page in ("install.md", "k8s/chart/README.md")
    for command in commands(page, program="helm")
    if command.startswith("helm install leasehold ")
]


@with_helm
@pytest.mark.parametrize("command", HELM_INSTALLS)
async def test_helm_lints_the_values_of_the_pages(command: str, tmp_path: Path) -> None:
    _, chart, options = re.split(r" leasehold (?=k8s)| --namespace .*?--create-namespace ", command)

    await Shell(tmp_path / "none", tmp_path).run(f"helm lint --strict {chart} {options}")


@with_helm
async def test_helm_installs_a_release_on_nodes_with_taints_only_and_uninstalls_it(
    short_path: Path, tmp_path: Path
) -> None:
    shell = Shell(short_path / "kubeconfig", tmp_path)
    tolerations = "--set tolerations[0].key=nvidia.com/gpu --set tolerations[0].operator=Exists"
    without_image = "--set hamiCore=false"  # its init container copies a file of its image
    async with cluster_process(short_path, "--nodes", "2", "--node-prefix", "gpu-node-"):
        await shell.run("kubectl taint nodes --all nvidia.com/gpu=:NoSchedule")
        await shell.run(f"{HELM_INSTALLS[0]} {tolerations} {without_image}")
        await shell.run(f"kubectl label node {NODE} leasehold.dev/gpu=true")
        await shell.run("kubectl -n leasehold-system rollout status deployment/binder")
        await shell.run("kubectl -n leasehold-agents rollout status daemonset/node-agent")
        await shell.run("kubectl -n leasehold-system wait --for=condition=Ready pod --all")

        await shell.run("helm upgrade leasehold k8s/chart -n leasehold-system --reuse-values")
        for command in commands("uninstall.md", program="helm"):
            await shell.run(command)

        assert not await shell.names("all", "-l app.kubernetes.io/part-of=leasehold")
        assert "gpubudgets.leasehold.dev" in await shell.names("crds")
