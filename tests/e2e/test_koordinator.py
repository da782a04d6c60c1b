"""Koordinator's acceptance checklist, end to end, with the guide's own manifest through kubectl.

One stack serves all tests: its first node is as `up` starts it, the second one's agent is started
by the tests that need it.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.support.dialects import guides
from tests.support.dialects.builders import koord
from tests.support.dialects.checklist import (
    NODE,
    SPARE,
    agent_flags,
    allocated_setup,
    annotation_of,
    annotations_of,
    bound,
    container,
    delete_all_pods,
    leases,
    node_allocatable,
    refused,
    runs,
    service,
    uuid,
)
from tests.support.stack import KUBECTL, Stack, gpu_pod, running, stack
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CRD = Path(__file__).parents[2] / "k8s/base/crds/koordinator-device.yaml"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEVICES = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
ALLOCATED = "scheduling.koordinator.sh/device-allocated"
ISOLATION = "koordinator.sh/gpu-isolation-provider"
T4_MIB = 15360
MIB = 1 << 20


def requesting(
    name: str, limits: Mapping[str, Any], *, node: str | None = NODE, **more: Any
) -> dict[str, Any]:
    """Return a pod for Koordinator's scheduler that may only go to `node`."""
    spec: dict[str, Any] = {
        "schedulerName": "koord-scheduler",
        "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
    }
    return gpu_pod(name, limits, **(spec | more))


def cards(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs of a pod's allocation."""
    found: list[dict[str, Any]] = json.loads(annotation_of(pod, ALLOCATED))["gpu"]
    return found


async def variables(up: Stack, pod: Mapping[str, Any], container: str = "cuda") -> dict[str, str]:
    return dict((await allocated_setup(up, pod, container)).envs)


@asynccontextmanager
async def spare_agent(up: Stack, *flags: str) -> AsyncIterator[None]:
    """Run the second node's agent, with the cards of the first."""
    known = agent_flags(up, SPARE, "2xT4")
    async with service(up, "node_agent", f"agent-{SPARE}", *known, *flags):
        yield
        await delete_all_pods(up)  # while it can still say that their containers have ended


async def labels(up: Stack, node: str) -> dict[str, str]:
    found = json.loads(await up.kube.read(f"/api/v1/nodes/{node}"))
    return dict(found["metadata"].get("labels", {}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Stack]:
    """Everything but the second node's agent, and Koordinator's kind `Device`."""
    async with stack("--nodes", "2", "--gpus", "2xT4", without=(f"agent-{SPARE}",)) as started:
        await started.kube.create(DEFINITIONS, yaml.safe_load(CRD.read_text()))
        await node_allocatable(started, NODE, {"koordinator.sh/gpu.shared": 200})
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield whole
    await delete_all_pods(whole)


@pytest.mark.kubectl
@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH: the guide's commands need one")
async def test_koordinator_10_the_guides_pod_runs_and_shows_its_allocation(up: Stack) -> None:
    applied = await up.kubectl("apply", "-f", "-", stdin=guides.KOORDINATOR_POD)
    assert applied.code == 0, applied.err
    pod = await up.until("pod-example", running)
    shown = await up.kubectl("get", "pod", "-n", "default", "pod-example", "-o", "yaml")
    environment = (await up.exec("pod-example", "env")).out.splitlines()

    card = cards(pod)[0]
    assert annotation_of(pod, ALLOCATED) == (
        f'{{"gpu":[{{"minor":{card["minor"]},"resources":{{"koordinator.sh/gpu-core":"50",'
        '"koordinator.sh/gpu-memory":"7680Mi","koordinator.sh/gpu-memory-ratio":"50"},'
        f'"id":"{uuid(card["minor"], pod["spec"]["nodeName"])}"}}]}}'
    )
    assert ALLOCATED in shown.out
    assert f"CUDA_DEVICE_MEMORY_LIMIT={7680 * MIB}" in environment
    assert "CUDA_DEVICE_SM_LIMIT=50" in environment
    assert f"NVIDIA_VISIBLE_DEVICES={card['id']}" in environment


async def test_koordinator_24_the_annotation_is_written_together_with_the_node_name(
    up: Stack,
) -> None:
    pods = [requesting(f"pod-{n}", koord(shared=1, ratio=10)) for n in range(8)]
    for pod in pods:
        await up.create(pod)
    for pod in pods:
        seen = await up.until(pod["metadata"]["name"], lambda p: p["spec"].get("nodeName"))
        assert len(cards(seen)) == 1


async def test_koordinator_26_half_a_card_gets_the_published_variables_and_mounts(
    up: Stack,
) -> None:
    pod = await runs(up, requesting("half", koord(shared=1, core=50, ratio=50)))
    answer = await allocated_setup(up, pod)

    own = f"{pod['metadata']['uid']}_cuda"
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": cards(pod)[0]["id"],
        "CUDA_DEVICE_MEMORY_LIMIT": str(7680 * MIB),
        "CUDA_DEVICE_SM_LIMIT": "50",
        "LD_PRELOAD": "/usr/local/vgpu/libvgpu.so",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"/usr/local/vgpu/{own}.cache",
        "LIBCUDA_LOG_LEVEL": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    mounts = {mount.container_path: mount.read_only for mount in answer.mounts}
    assert mounts == {
        "/usr/local/vgpu": False,
        "/usr/local/vgpu/libvgpu.so": True,
        "/tmp/vgpulock": False,
        "/overrideEnv": True,
    }


@pytest.mark.parametrize(
    "limits", [koord(shared=2, core=200, ratio=200), {"nvidia.com/gpu": 2}], ids=["own", "vendor"]
)
async def test_koordinator_27_whole_cards_get_only_the_visible_devices(
    up: Stack, limits: dict[str, int | str]
) -> None:
    pod = await runs(up, requesting("cards", limits))

    assert [card["resources"]["koordinator.sh/gpu-memory"] for card in cards(pod)] == ["15Gi"] * 2
    found = await variables(up, pod)
    assert set(found) == {"NVIDIA_VISIBLE_DEVICES"}
    assert set(found["NVIDIA_VISIBLE_DEVICES"].split(",")) == {uuid(0), uuid(1)}


async def test_koordinator_31_containers_have_cards_and_limits_of_their_own(up: Stack) -> None:
    both = [container(n, koord(shared=1, core=50, ratio=r)) for n, r in (("a", 20), ("b", 30))]
    pod = await runs(up, requesting("pair", {}, containers=both))
    lease = (await leases(up))["pair"]

    found = [await variables(up, pod, name) for name in ("a", "b")]

    limits = [int(each["CUDA_DEVICE_MEMORY_LIMIT"]) for each in found]
    assert limits == [T4_MIB * MIB // 5, T4_MIB * 3 * MIB // 10]
    assert sum(limits) <= sum(share.memory_mib for share in lease.shares) * MIB
    assert {each["NVIDIA_VISIBLE_DEVICES"] for each in found} == {uuid(0), uuid(1)}


async def test_an_init_container_gets_its_limits_before_the_others(up: Stack) -> None:
    first = container("first", koord(shared=1, ratio=60), command=["true"])
    main = container("cuda", koord(shared=1, core=20, ratio=30))
    pod = await runs(up, requesting("staged", {}, initContainers=[first], containers=[main]))

    found = [await variables(up, pod, name) for name in ("first", "cuda")]

    limits = [int(each["CUDA_DEVICE_MEMORY_LIMIT"]) for each in found]
    assert limits == [T4_MIB * MIB * 6 // 10, T4_MIB * MIB * 3 // 10]
    assert "CUDA_DEVICE_SM_LIMIT" not in found[0]


async def test_the_refusal_of_a_container_without_a_card_count_names_what_to_add(up: Stack) -> None:
    text = await refused(up, requesting("bare", koord(core=50, ratio=50)))

    assert "container cuda: koordinator.sh/gpu.shared is missing" in text
    assert "add koordinator.sh/gpu.shared: 1" in text


async def test_koordinator_25_a_forged_allocation_grants_nothing(up: Stack) -> None:
    forged = {ALLOCATED: json.dumps({"gpu": [{"minor": 0, "id": uuid(0)}]})}
    pod = await runs(up, requesting("forger", {}, annotations=forged))
    real = await runs(up, requesting("honest", koord(shared=1, ratio=10), annotations=forged))

    assert not (await leases(up))["forger"].shares
    environment = (await up.exec("forger", "env")).out
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    assert annotations_of(pod)[ALLOCATED] == forged[ALLOCATED]
    assert cards(real)[0]["resources"]["koordinator.sh/gpu-memory-ratio"] == "10"


async def test_koordinator_19_and_29_shares_are_placed_only_where_the_isolation_library_is(
    up: Stack,
) -> None:
    wanted = koord(shared=1, core=10, ratio=10)
    library = up.root / "agents" / SPARE / "library" / "simulated" / "libvgpu.so"
    async with spare_agent(up):
        await node_allocatable(up, SPARE, {"koordinator.sh/gpu.shared": 200})
        await until(lambda: labels(up, SPARE), lambda found: found.get(ISOLATION) == "HAMi-core")
        library.unlink()
        await until(lambda: labels(up, SPARE), lambda found: ISOLATION not in found)

        text = await refused(up, requesting("waits", wanted, node=SPARE))
        other = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1000}
        vgpu = await refused(
            up, requesting("waits-too", other, node=SPARE, schedulerName="volcano")
        )
        explained = await up.leasehold("explain", "waits-too")
        others = [await bound(up, requesting(f"goes-{n}", wanted, node=None)) for n in range(3)]
        await runs(up, requesting("whole", koord(shared=1, core=100, ratio=100), node=SPARE))
        library.touch()
        await up.until("waits", running)

    assert "node affinity/selector" in text
    assert "1 node(s) had no working isolation library" in vgpu
    assert "HAMi-core's library is missing" in " ".join(explained.out.split())
    assert {pod["spec"]["nodeName"] for pod in others} == {NODE}


async def test_koordinator_20_an_unhealthy_card_gets_no_pod_and_keeps_its_pods(
    up: Stack, tmp_path: Path
) -> None:
    faults = tmp_path / "faults.json"
    wanted = koord(shared=1, core=10, ratio=10)
    async with spare_agent(up, "--fault-file", str(faults)):
        await node_allocatable(up, SPARE, {"koordinator.sh/gpu-core": 200})
        first = await runs(up, requesting("first", wanted, node=SPARE))
        unhealthy = cards(first)[0]["minor"]
        faults.write_text(json.dumps({str(unhealthy): "unhealthy"}))
        await node_allocatable(up, SPARE, {"koordinator.sh/gpu-core": 100})
        others = [await bound(up, requesting(f"next-{n}", wanted, node=SPARE)) for n in range(4)]
        object_now = json.loads(await up.kube.read(f"{DEVICES}/{SPARE}"))
        kept = (await leases(up))["first"]
        faults.write_text("{}")
        await node_allocatable(up, SPARE, {"koordinator.sh/gpu-core": 200})

    assert {cards(pod)[0]["minor"] for pod in others} == {1 - unhealthy}
    assert [share.index for share in kept.shares] == [unhealthy]
    assert [one["health"] for one in object_now["spec"]["devices"]] == [
        unhealthy != 0,
        unhealthy != 1,
    ]


async def test_koordinator_21_a_deleted_device_object_ends_no_lease_and_is_created_again(
    up: Stack,
) -> None:
    async with spare_agent(up):
        await runs(up, requesting("holder", koord(shared=1, core=60, ratio=60), node=SPARE))
        found, before = await device_object(up), (await leases(up))["holder"]
        await up.kube.delete(f"{DEVICES}/{SPARE}")
        again = await device_object(up)
        after = (await leases(up))["holder"]

    assert after.shares == before.shares
    assert again["spec"] == found["spec"]
    assert again["metadata"]["uid"] != found["metadata"]["uid"]


async def device_object(up: Stack) -> dict[str, Any]:
    """Wait until the second node has an object."""

    async def of_spare() -> dict[str, Any]:
        listed = json.loads(await up.kube.read(DEVICES))["items"]
        return next((one for one in listed if one["metadata"]["name"] == SPARE), {})

    found: dict[str, Any] = await until(of_spare)
    return found


async def test_koordinator_18_most_allocated_is_a_setting_and_least_the_default(up: Stack) -> None:
    await runs(up, requesting("one", koord(shared=1, ratio=40)))
    await runs(up, requesting("two", koord(shared=1, ratio=10)))

    pods = [await up.pod(name) for name in ("one", "two")]

    assert sorted(cards(pod)[0]["minor"] for pod in pods) == [0, 1]
