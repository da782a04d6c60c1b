"""Volcano's user guides: their commands, typed into a terminal, on their own kind of node.

Words in braces or angle brackets are filled in, and `--` is put before a container's command, since
kubectl requires it from 1.31 on. Left out: what installs the vendor's own program or a host's
driver (`kubectl create -f deployment/` and `-f volcano-vgpu-device-plugin.yml`, `apt-get`,
`nvidia-smi -mig 1`), which Leasehold replaces.
"""

import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.support.dialects import guides
from tests.support.dialects.checklist import condition_text
from tests.support.servers.nats import free_port
from tests.support.stack import NEEDS_KUBECTL, Done, Stack, run, running, stack
from tests.support.waiting import until

pytestmark = [
    *NEEDS_KUBECTL,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH"),
]

TERMINAL = (sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)")
DISABLED = guides.VOLCANO_GPU_SHARING_CONF.replace("Enable: true", "Enable: false")
EDITOR = "sed -i 's/GPUSharingEnable: false/GPUSharingEnable: true/'"
LARGER = {"LEASEHOLD_ALLOW_LARGER_REQUESTS": "true"}
"""Requests may wait for a larger card."""


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

    async def apply(self, manifest: str) -> None:
        applied = await self.type(f"cat <<EOF | kubectl apply -f -\n{manifest}EOF")
        assert "created" in applied.out, applied


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def terminal() -> AsyncIterator[Terminal]:
    """One node with the guide's eight cards of 11178 MiB, and the ports of both sets of metrics."""
    scheduler = f"127.0.0.1:{free_port()}"
    usage = free_port()
    ports = ("--scheduler-metrics", scheduler, "--usage-port", str(usage))
    async with stack(
        *("--nodes", "1", "--gpus", "8xGTX1080Ti", *ports), webhook=True, env=LARGER
    ) as started:
        yield Terminal(
            started,
            {
                **dict.fromkeys(("{node name}", "{node-name}"), "node-0"),
                "{volcano scheduler cluster ip}:8080": scheduler,
                "<volcano-scheduler-ip>:8080": scheduler,
                "{volcano device plugin pod ip}:9394": f"127.0.0.1:{usage}",
                "<plugin-pod-ip>:9394": f"127.0.0.1:{usage}",
                "gpu-pod1 env": "gpu-pod1 -- env",
            },
        )


@pytest_asyncio.fixture(loop_scope="session")
async def up(terminal: Terminal) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield terminal.up
    await terminal.up.clear()


def gpushare(name: str, memory: int) -> str:
    """The guide's pod under another name, with other memory."""
    return guides.VOLCANO_GPU_POD_1.replace("gpu-pod1", name).replace("1024 #", f"{memory} #")


def annotated(key: str, text: str) -> Any:
    return lambda pod: pod["metadata"].get("annotations", {}).get(key) == text


def shows_the_amounts(done: Done) -> bool:
    """Whether the node has what the guides print, allocatable and as its capacity."""
    amounts = {
        "gpu-memory": 89424,
        "gpu-number": 8,
        "vgpu-memory": 89424,
        "vgpu-number": 80,
        "vgpu-cores": 800,
    }
    return all(
        f'volcano.sh/{name}: "{amount}"' in done.out.partition(f"{block}:")[2]
        for block in ("allocatable", "capacity")
        for name, amount in amounts.items()
    )


async def test_item_1_the_commands_of_the_gpu_sharing_guide(terminal: Terminal, up: Stack) -> None:
    await terminal.type("kubectl create namespace volcano-system")
    await up.kubectl("apply", "-f", "-", stdin=DISABLED)

    edited = await terminal.type("kubectl edit cm -n volcano-system volcano-scheduler-configmap")
    await until(lambda: terminal.type("kubectl get node {node name} -oyaml"), shows_the_amounts)
    for manifest in (guides.VOLCANO_GPU_POD_1, guides.VOLCANO_GPU_POD_2):
        await terminal.apply(manifest)
    assigned = annotated("volcano.sh/gpu-assigned", "true")
    pods = [await up.until(name, assigned) for name in ("gpu-pod1", "gpu-pod2")]
    await up.until("gpu-pod1", running)
    environment = await terminal.type("kubectl exec -ti  gpu-pod1 env")

    assert "configmap/volcano-scheduler-configmap edited" in edited.out, edited
    for pod in pods:
        notes = pod["metadata"]["annotations"]
        assert notes["volcano.sh/gpu-index"] == "0"
        assert re.fullmatch(r"\d{19}", notes["volcano.sh/predicate-time"])
    for variable in ("MEMORY_TOTAL=11178", "ALLOCATED=1024"):
        assert f"VOLCANO_GPU_{variable}" in environment.out, environment
    assert "NVIDIA_VISIBLE_DEVICES=0" in environment.out


def names_the_pod(done: Done) -> bool:
    return "gpu-pod1" in done.out


async def test_the_commands_of_the_vgpu_guides(terminal: Terminal, up: Stack) -> None:
    await terminal.apply(guides.VOLCANO_VGPU_POD)
    await up.until("gpu-pod1", running)
    pod = await up.until("gpu-pod1", annotated("volcano.sh/bind-phase", "success"))
    values = await up.environment("gpu-pod1")
    described = await until(
        lambda: terminal.type("kubectl describe pod gpu-pod1"),
        lambda done: "Successfully assigned" in done.out,
    )
    scheduler = await until(
        lambda: terminal.type("curl http://<volcano-scheduler-ip>:8080/metrics"), names_the_pod
    )
    plugin = await until(
        lambda: terminal.type("curl {volcano device plugin pod ip}:9394/metrics"), names_the_pod
    )

    notes = pod["metadata"]["annotations"]
    card = r"(GPU-[^,]+),NVIDIA,3000,50:"
    devices = re.fullmatch(card + card, notes["volcano.sh/vgpu-ids-new"])
    assert devices is not None
    assert notes["volcano.sh/vgpu-node"] == "node-0"
    assert notes["volcano.sh/devices-to-allocate"] == ""
    assert notes["volcano.sh/vgpu-time"] == "18446744073709551615"
    assert sorted(values["NVIDIA_VISIBLE_DEVICES"].split(",")) == sorted(devices.groups())
    assert values["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert values["CUDA_DEVICE_MEMORY_LIMIT_1"] == "3000m"
    assert values["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert re.search(r"Scheduled.*Successfully assigned default/gpu-pod1 to node-0", described.out)
    assert "volcano_vgpu_device_allocated_memory" in scheduler.out
    assert "vGPU_device_memory_limit_in_bytes" in plugin.out


async def test_item_4_a_whole_card_gets_an_idle_card_and_a_too_large_request_waits_with_the_reason(
    terminal: Terminal, up: Stack
) -> None:
    await terminal.apply(gpushare(name="small", memory=1024))
    await up.until("small", running)
    await terminal.apply(gpushare(name="large", memory=11178))
    large = await up.until("large", running)
    await terminal.apply(gpushare(name="huge", memory=20000))
    await up.until("huge", condition_text)

    described = await until(
        lambda: up.kubectl("describe", "pod", "huge"), lambda done: "FailedScheduling" in done.out
    )

    assert large["metadata"]["annotations"]["volcano.sh/gpu-index"] == "1"
    assert "FailedScheduling" in described.out
    assert "set volcano.sh/gpu-memory: 11178" in described.out
    assert "0/1 nodes are available" in described.out


async def test_gpus_ps_explain_and_trace_show_running_and_waiting_pods(
    terminal: Terminal, up: Stack
) -> None:
    await terminal.apply(guides.VOLCANO_VGPU_POD)
    await up.until("gpu-pod1", running)
    await terminal.apply(gpushare(name="huge", memory=20000))
    await up.until("huge", condition_text)

    gpus = await up.leasehold("gpus", "--json")
    leases = await up.leasehold("ps", "--json")
    runs = await up.leasehold("explain", "gpu-pod1")
    waits = await up.leasehold("explain", "huge")
    steps = ("watcher", "placer", "binder", "node-agent")
    await until(
        lambda: up.leasehold("trace", "gpu-pod1"),
        lambda done: all(step in done.out for step in steps),
    )

    assert gpus.code == 0, gpus.err
    assert gpus.out.count('"GPU-') >= 8
    assert "gpu-pod1" in json.dumps(json.loads(leases.out))
    assert "node-0" in runs.out
    assert "20000" in waits.out
    assert "11178" in waits.out
