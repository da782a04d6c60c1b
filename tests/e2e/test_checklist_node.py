"""Volcano's acceptance checklist, end to end: what nodes show and what containers are given.

The items that placing decides are in `test_checklist.py`. One stack serves all tests: its first
node is as `up` starts it, the others' agents are started by the tests, with flags of their own.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.dialects.checklist import (
    CARD_MIB,
    GPUS,
    IDS,
    INDEX,
    MEMORY,
    NEVER,
    NODE,
    NUMBER,
    OTHER,
    SPARE,
    agent,
    agent_flags,
    allocated_setup,
    annotate,
    annotation_of,
    annotations_of,
    asking,
    bound,
    condition_text,
    container,
    delete_all_pods,
    leases,
    node_allocatable,
    refused,
    restart_kubelet,
    runs,
    state_of,
    uuid,
)
from tests.support.simcluster.kubelet import ScriptedPlugin, healthy
from tests.support.stack import Stack, run, running, stack, vgpu
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

VGPU = "volcano.sh/vgpu-number"
UNSERVED = re.compile(
    "1 node.s. did not serve volcano.sh/vgpu-number"
    "|1 node.s. had a node agent that was not ready"  # it was placed before the node was seen
)
UNITS_OF_10 = 8 * (CARD_MIB // 10)
LEFT, PHASE, TIME = (
    "volcano.sh/devices-to-allocate",
    "volcano.sh/bind-phase",
    "volcano.sh/vgpu-time",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Stack]:
    own = (f"agent-{SPARE}", f"agent-{OTHER}")
    async with stack("--nodes", "3", "--gpus", GPUS, without=own) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield whole
    await delete_all_pods(whole)


async def test_item_40_restarts_of_agent_and_kubelet_stop_no_pod_and_pending_pods_start(
    up: Stack,
) -> None:
    async with agent(up) as process:
        await node_allocatable(up, SPARE, {VGPU: 80})
        kept = await runs(up, asking("kept", vgpu(memory=1000), node=SPARE))
        before, answer = state_of(up, kept), await allocated_setup(up, kept)
        process.kill()
        await process.wait()
    await node_allocatable(up, SPARE, {VGPU: 0})

    await up.create(asking("late", vgpu(memory=2000), node=SPARE))
    await up.until("late", lambda pod: UNSERVED.search(condition_text(pod)))
    await restart_kubelet(up, SPARE)
    async with agent(up):
        late = await up.until("late", running)
        await restart_kubelet(up, SPARE)
        await node_allocatable(up, SPARE, {VGPU: 80})
        after = await runs(up, asking("after", vgpu(memory=3000), node=SPARE))

        assert (await up.pod("kept"))["status"]["phase"] == "Running"
        assert state_of(up, kept) == before
        assert await allocated_setup(up, kept) == answer
        assert (await allocated_setup(up, late)).envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"
        assert (await allocated_setup(up, after)).envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        await up.audit()
        await delete_all_pods(up)


async def test_item_8_a_gpushare_container_gets_exactly_three_variables(up: Stack) -> None:
    pod = await runs(up, asking("one", {MEMORY: 1024}))

    answer = await allocated_setup(up, pod)
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "1024",
        "VOLCANO_GPU_MEMORY_TOTAL": "11178",
    }
    assert not answer.mounts
    assert not answer.devices


async def test_item_9_an_allocated_pod_is_marked_assigned(up: Stack) -> None:
    await up.create(asking("one", {MEMORY: 1024}))

    await up.until("one", lambda pod: annotations_of(pod).get("volcano.sh/gpu-assigned") == "true")


async def test_item_35_a_one_gpu_container_gets_exactly_the_published_variables_and_mounts(
    up: Stack,
) -> None:
    pod = await runs(up, asking("one", vgpu(memory=3000, cores=50)))

    answer = await allocated_setup(up, pod)
    given = state_of(up, pod)
    cache = answer.envs["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    home = up.root / "agents" / NODE
    own = home / f"containers/{pod['metadata']['uid']}_cuda"
    assert re.fullmatch(r"/tmp/vgpu/[0-9a-f-]{36}\.cache", cache)
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": uuid(7),
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache,
        "GPU_CORE_UTILIZATION_POLICY": "force",  # ours, see docs/decisions/0012
        "LIBCUDA_LOG_LEVEL": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    assert {m.container_path: (m.host_path, m.read_only) for m in answer.mounts} == {
        "/usr/local/vgpu/libvgpu.so": (str(home / "library/simulated/libvgpu.so"), True),
        "/tmp/vgpu": (str(own), False),
        "/tmp/cudevshr.cache": (str(own / Path(cache).name), False),  # ours, likewise
        "/tmp/vgpulock": (f"{own}.lock", False),
        "/overrideEnv": (f"{own}.env", True),
        "/etc/ld.so.preload": (str(home / "ld.so.preload"), True),
    }
    assert dict(answer.envs).items() <= given["env"].items()
    assert {m["container_path"] for m in given["mounts"]} == {
        m.container_path for m in answer.mounts
    }


async def test_item_30_each_of_four_containers_gets_what_it_requested(up: Stack) -> None:
    four = [
        container("side"),
        container("a", vgpu(memory=3000, cores=10)),
        container("x"),
        container("b", vgpu(memory=5000, cores=20)),
    ]

    pod = await runs(up, asking("four", {}, containers=four))

    card, uid = uuid(7), pod["metadata"]["uid"]
    assert annotation_of(pod, IDS) == f"{card},NVIDIA,3000,10:;{card},NVIDIA,5000,20:"
    for name, limit in (("a", "3000m"), ("b", "5000m")):
        answer = await allocated_setup(up, pod, name)
        assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == limit
        assert any(mount.host_path.endswith(f"/{uid}_{name}") for mount in answer.mounts)
    for name in ("side", "x"):
        given = state_of(up, pod, name)
        assert not given["mounts"]
        assert not [key for key in given["env"] if key.startswith(("CUDA_", "NVIDIA_"))]


@pytest.mark.parametrize("variable", ["CUDA_DISABLE_CONTROL", "CUDA_DEVICE_MEMORY_LIMIT_0"])
async def test_item_36_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name(
    up: Stack, variable: str
) -> None:
    own = container("cuda", vgpu(memory=1000), env=[{"name": variable, "value": "true"}])
    await up.create(asking("cheat", {}, containers=[own]))

    failed = await up.until("cheat", lambda pod: pod["status"].get("phase") == "Failed")

    assert f"container cuda of pod default/cheat sets {variable}" in failed["status"]["message"]


async def test_item_38_a_refused_pod_is_marked_failed_and_its_lease_returned(up: Stack) -> None:
    own = container("cuda", vgpu(memory=1000), env=[{"name": "LD_PRELOAD", "value": "/x.so"}])
    await up.create(asking("cheat", {}, containers=[own]))

    failed = await up.until("cheat", lambda pod: annotations_of(pod).get(PHASE) == "failed")

    assert annotation_of(failed, TIME) == NEVER
    await until(lambda: leases(up), lambda held: not held)
    assert (await up.pod("cheat"))["status"]["reason"] == "UnexpectedAdmissionError"


async def test_item_37_elements_are_emptied_one_by_one_and_the_last_ends_the_phase(
    up: Stack,
) -> None:
    gate, opened = "example.com/gate", asyncio.Event()

    async def wait(_devices: list[str]) -> dict[str, str]:
        await opened.wait()
        return {}

    async with ScriptedPlugin(up.root / "nodes" / NODE / "device-plugins", gate) as plugin:
        plugin.on_allocate = wait
        plugin.report(healthy("g"))
        await plugin.register()
        await node_allocatable(up, NODE, {gate: 1})
        three = [
            container("a", vgpu(memory=1000)),
            container("gate", {gate: 1}),
            container("b", vgpu(memory=2000)),
        ]
        await up.create(asking("two", {}, containers=three))

        halfway = await up.until(
            "two", lambda pod: annotations_of(pod).get(LEFT, "").startswith(";")
        )
        opened.set()
        done = await up.until("two", lambda pod: annotations_of(pod).get(PHASE) == "success")

    assert annotation_of(halfway, LEFT) == f";{uuid(7)},NVIDIA,2000,0:"
    assert annotation_of(halfway, PHASE) == "allocating"
    assert annotation_of(halfway, TIME) != NEVER
    assert (annotation_of(done, LEFT), annotation_of(done, TIME)) == (";", NEVER)
    assert annotation_of(done, IDS) == f"{uuid(7)},NVIDIA,1000,0:;{uuid(7)},NVIDIA,2000,0:"


async def test_item_2_in_number_mode_the_node_still_shows_memory_of_0(up: Stack) -> None:
    async with agent(up, "--gpu-strategy", "number", node=OTHER):
        node = await node_allocatable(up, OTHER, {NUMBER: 8, MEMORY: 0, VGPU: 80})

    assert node["status"]["capacity"][MEMORY] == "0"


async def test_item_7_whole_cards_are_idle_distinct_and_written_in_ascending_order(
    up: Stack,
) -> None:
    async with agent(up, "--gpu-strategy", "number", node=OTHER):
        await node_allocatable(up, OTHER, {NUMBER: 8, VGPU: 80})
        shared = await runs(up, asking("shared", vgpu(memory=10), node=OTHER))
        whole = [await runs(up, asking(f"whole-{n}", {NUMBER: 2}, node=OTHER)) for n in range(3)]
        text = await refused(up, asking("too-many", {NUMBER: 2}, node=OTHER))
        answer = await allocated_setup(up, whole[1])
        await delete_all_pods(up)

    assert annotation_of(shared, IDS).startswith(uuid(7, OTHER))
    assert [annotation_of(pod, INDEX) for pod in whole] == ["0,1", "2,3", "4,5"]
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "2,3"
    assert text.startswith("0/3 nodes are available:")


async def test_item_8_with_a_factor_of_10_a_limit_of_1024_is_10240_mib(up: Stack) -> None:
    async with agent(up, "--memory-factor", "10"):
        await node_allocatable(up, SPARE, {MEMORY: UNITS_OF_10})
        pod = await runs(up, asking("share", {MEMORY: 1024}, node=SPARE))
        answer = await allocated_setup(up, pod)
        await delete_all_pods(up)

    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "10240",
        "VOLCANO_GPU_MEMORY_TOTAL": "11178",
    }


async def test_item_13_allocatable_counts_slots_cores_and_whole_units(up: Stack) -> None:
    async with agent(up, "--memory-factor", "10", "--device-split-count", "4"):
        amounts = {VGPU: 32, "volcano.sh/vgpu-cores": 800, "volcano.sh/vgpu-memory": UNITS_OF_10}
        await node_allocatable(up, SPARE, amounts)
        pod = await runs(up, asking("core", vgpu(memory=300), node=SPARE))
        answer = await allocated_setup(up, pod)
        await delete_all_pods(up)

    assert annotation_of(pod, IDS) == f"{uuid(7, SPARE)},NVIDIA,300,0:"
    assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"


async def test_item_6_the_agent_adds_unhealthy_cards_and_keeps_those_of_the_operator(
    up: Stack, tmp_path: Path
) -> None:
    closed, faults = "volcano.sh/gpu-unhealthy-ids", tmp_path / "faults.json"
    faults.write_text('{"3": "unhealthy"}')
    await annotate(up, SPARE, {closed: "0,1"})
    async with agent(up, "--fault-file", str(faults)):
        await shows_note(up, SPARE, closed, "0,1,3")
        await node_allocatable(up, SPARE, {VGPU: 70})
        pod = await bound(up, asking("one", {MEMORY: CARD_MIB}, node=SPARE))
        faults.write_text("{}")
        await shows_note(up, SPARE, closed, "0,1")
        await delete_all_pods(up)

    await annotate(up, SPARE, {closed: None})
    assert annotation_of(pod, INDEX) == "2"


async def shows_note(up: Stack, node: str, key: str, text: str) -> None:
    """Wait until a node's annotation has this value."""

    async def annotation() -> str | None:
        return annotations_of(json.loads(await up.kube.read(f"/api/v1/nodes/{node}"))).get(key)

    await until(annotation, lambda found: found == text)


async def test_item_17_too_many_units_end_the_agent_with_the_factor_needed(
    up: Stack,
) -> None:
    done = await run(
        *(sys.executable, "-P", "-m", "simcluster.node_agent"),
        *(*up.bus_flags(f"node-agent.{SPARE}"), "--kubeconfig", up.kubeconfig),
        *(*agent_flags(up, gpus="8xA100-80GB"), "--gpu-strategy", "share"),
    )

    assert done.code == 2
    assert re.search(r"use --memory-factor \d+ or more, or --gpu-strategy auto", done.err)
    assert "Traceback" not in done.err


async def test_item_11_sharing_together_with_vgpu_is_refused_at_start(
    up: Stack, tmp_path: Path
) -> None:
    conf = tmp_path / "volcano-scheduler.conf"
    both = "{deviceshare.GPUSharingEnable: true, deviceshare.VGPUEnable: true}"
    plugin = f"{{name: deviceshare, arguments: {both}}}"
    conf.write_text(f"tiers: [{{plugins: [{plugin}]}}]")

    done = await run(
        *(sys.executable, "-P", "-m", "services.watcher", "--volcano-conf", str(conf)),
        *(*up.bus_flags("watcher"), "--kubeconfig", up.kubeconfig),
    )

    assert done.code == 2
    assert "deviceshare.GPUSharingEnable and deviceshare.VGPUEnable are both true" in done.err
