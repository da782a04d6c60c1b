"""The commands that the vendors' user guides print, typed into a terminal.

Words in braces or angle brackets are filled in, and `--` is put before a container's command, since
kubectl requires it from 1.31 on. Left out: what installs the vendor's own program or a host's
driver (`kubectl create -f deployment/` and `-f volcano-vgpu-device-plugin.yml`, `apt-get`,
`nvidia-smi -mig 1`), which Leasehold replaces.
"""

import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.support.dialects import guides
from tests.support.servers.nats import free_port
from tests.support.stack import NEEDS_KUBECTL, Done, Stack, run, running, stack
from tests.support.waiting import until

pytestmark = [
    *NEEDS_KUBECTL,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH"),
    pytest.mark.asyncio(loop_scope="module"),
]

TERMINAL = (sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)")
DISABLED = guides.VOLCANO_GPU_SHARING_CONF.replace("Enable: true", "Enable: false")
EDITOR = "sed -i 's/GPUSharingEnable: false/GPUSharingEnable: true/'"


@dataclass(frozen=True)
class Terminal:
    """A terminal of somebody who follows a guide."""

    up: Stack
    filled: Mapping[str, str]

    async def type(self, command: str) -> Done:
        for word, text in self.filled.items():
            command = command.replace(word, text)
        env = {"KUBECONFIG": self.up.kubeconfig, "KUBE_EDITOR": EDITOR}
        return await run(*TERMINAL, "bash", "-c", command, env=env)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def terminal() -> AsyncIterator[Terminal]:
    """One node with the guide's eight cards, and the ports of both sets of metrics."""
    scheduler, usage = f"127.0.0.1:{free_port()}", free_port()
    ports = ("--scheduler-metrics", scheduler, "--usage-port", str(usage))
    async with stack(
        "--nodes", "1", "--gpus", "8xGTX1080Ti", *ports, webhook=True, dashboard=True
    ) as up:
        yield Terminal(
            up,
            {
                **dict.fromkeys(("{node name}", "{node-name}"), "node-0"),
                "{volcano scheduler cluster ip}:8080": scheduler,
                "<volcano-scheduler-ip>:8080": scheduler,
                "{volcano device plugin pod ip}:9394": f"127.0.0.1:{usage}",
                "<plugin-pod-ip>:9394": f"127.0.0.1:{usage}",
                "gpu-pod1 env": "gpu-pod1 -- env",
                "pod-example bash": "pod-example -- bash",
            },
        )


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(terminal: Terminal) -> AsyncIterator[None]:
    yield
    await terminal.up.clear()


async def test_the_commands_of_the_gpu_sharing_guide(terminal: Terminal) -> None:
    await terminal.type("kubectl create namespace volcano-system")
    await terminal.up.kubectl("apply", "-f", "-", stdin=DISABLED)

    edited = await terminal.type("kubectl edit cm -n volcano-system volcano-scheduler-configmap")
    node = await terminal.type("kubectl get node {node name} -oyaml")
    for manifest in (guides.VOLCANO_GPU_POD_1, guides.VOLCANO_GPU_POD_2):
        applied = await terminal.type(f"cat <<EOF | kubectl apply -f -{manifest}EOF")
        assert "created" in applied.out, applied
    await terminal.up.until("gpu-pod1", running)
    environment = await terminal.type("kubectl exec -ti  gpu-pod1 env")

    assert "configmap/volcano-scheduler-configmap edited" in edited.out, edited
    assert 'volcano.sh/gpu-memory: "89424"' in node.out
    assert 'volcano.sh/gpu-number: "8"' in node.out
    assert "VOLCANO_GPU_ALLOCATED=1024" in environment.out, environment


def names_the_pod(done: Done) -> bool:
    return "gpu-pod1" in done.out


async def test_the_commands_of_the_vgpu_guides(terminal: Terminal) -> None:
    applied = await terminal.type(f"cat <<EOF | kubectl apply -f -{guides.VOLCANO_VGPU_POD}EOF")
    assert "created" in applied.out, applied
    await terminal.up.until("gpu-pod1", running)
    node = await terminal.type("kubectl get node {node-name} -o yaml")
    scheduler = await until(
        lambda: terminal.type("curl http://<volcano-scheduler-ip>:8080/metrics"), names_the_pod
    )
    plugin = await until(
        lambda: terminal.type("curl {volcano device plugin pod ip}:9394/metrics"), names_the_pod
    )

    assert 'volcano.sh/vgpu-memory: "89424"' in node.out
    assert "volcano_vgpu_device_allocated_memory" in scheduler.out
    assert "vGPU_device_memory_limit_in_bytes" in plugin.out


async def test_the_commands_of_the_koordinator_guide(terminal: Terminal) -> None:
    await terminal.up.kubectl("apply", "-f", "-", stdin=guides.KOORDINATOR_POD)
    await terminal.up.until("pod-example", running)

    shown = await terminal.type("kubectl get pod -n default pod-example -o yaml")
    shell = await terminal.type("kubectl exec -it -n default pod-example bash")

    assert "scheduling.koordinator.sh/device-allocated" in shown.out
    assert "simulated containers have no interactive shell" in shell.out, shell


async def test_what_simulated_containers_cannot_do_is_refused_with_the_reason(
    terminal: Terminal,
) -> None:
    await terminal.type(f"cat <<EOF | kubectl apply -f -{guides.VOLCANO_GPU_POD_1}EOF")
    await terminal.up.until("gpu-pod1", running)

    forwarded = await terminal.type("kubectl port-forward gpu-pod1 :8080")
    to = await terminal.type(f"kubectl cp {__file__} gpu-pod1:/tmp/file")
    back = await terminal.type("kubectl cp gpu-pod1:/tmp/file /dev/null")

    assert forwarded.code == 1
    assert "port-forward is not supported: simulated containers have no network" in forwarded.out
    for copied in (to, back):
        assert copied.code != 0
        assert "kubectl cp is not supported: simulated containers have no files" in copied.out
