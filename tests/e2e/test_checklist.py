"""Volcano's acceptance checklist, end to end: placement, annotations and refusals.

The items that a node's agent decides are in `test_checklist_node.py`. One stack serves all tests:
its first node is as `up` starts it, the second has no agent.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.dialects.checklist import (
    CARD_MIB,
    GPUS,
    IDS,
    INDEX,
    MEMORY,
    NODE,
    NUMBER,
    SIX,
    SPARE,
    annotate,
    annotation_of,
    annotations_of,
    asking,
    bound,
    condition_text,
    container,
    delete_all_pods,
    device_indices,
    failing,
    leases,
    node_allocatable,
    on,
    refused,
    runs,
    shares,
    unschedulable_text,
    uuid,
)
from tests.support.stack import PODS, Stack, running, stack, vgpu
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONF = """
tiers:
  - plugins:
      - name: deviceshare
        arguments: {deviceshare.SchedulePolicy: %s}
"""
REGISTER = "volcano.sh/node-vgpu-register"
VGPU = "volcano.sh/vgpu-number"
GROUP = {
    "volcano.sh/vgpu-podgroup-policy": "spread",
    "scheduling.k8s.io/group-name": "gang",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(conf: Path) -> AsyncIterator[Stack]:
    """Everything but the second node's agent."""
    conf.write_text(CONF % '""')
    options = ("--nodes", "2", "--gpus", GPUS)
    own = (f"agent-{SPARE}",)
    async with stack(*options, without=own, env={"LEASEHOLD_VOLCANO_CONF": str(conf)}) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """With no pod left over."""
    yield whole
    await delete_all_pods(whole)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conf() -> AsyncIterator[Path]:
    """The scheduler configuration that the watcher reads when it starts."""
    with tempfile.TemporaryDirectory(prefix="lh-") as directory:
        yield Path(directory) / "volcano-scheduler.conf"


async def test_item_1_the_node_shows_memory_and_number_of_its_cards(up: Stack) -> None:
    node = await node_allocatable(up, NODE, {MEMORY: 89424, NUMBER: 8})

    assert (node["status"]["capacity"][MEMORY], node["status"]["capacity"][NUMBER]) == (
        "89424",
        "8",
    )


async def test_item_12_the_register_annotation_has_a_record_per_card_by_minor_number(
    up: Stack,
) -> None:
    node = json.loads(await up.kube.read(f"/api/v1/nodes/{NODE}"))

    model = "NVIDIA-NVIDIA GeForce GTX 1080 Ti"
    assert annotation_of(node, REGISTER) == "".join(
        f"{uuid(index)},10,{CARD_MIB},{model},true,hami-core:" for index in range(8)
    )


async def test_item_34_a_node_without_device_data_never_gets_a_vgpu_pod(up: Stack) -> None:
    text = await refused(up, asking("bare", vgpu(memory=1000), node=SPARE))
    free = await bound(up, asking("free", vgpu(memory=1000), nodeSelector={}))

    assert (
        "1 node(s) had no GPU" in text or "1 node(s) did not serve volcano.sh/vgpu-number" in text
    )
    assert free["spec"]["nodeName"] == NODE


@asynccontextmanager
async def registered(up: Stack, record: str) -> AsyncIterator[None]:
    """Have the second node show what Volcano's own device plugin would."""
    path, amounts = f"/api/v1/nodes/{SPARE}", {VGPU: "10", "volcano.sh/vgpu-memory": "15360"}
    shown: dict[str, str | None] = dict(amounts)
    removed: dict[str, str | None] = dict.fromkeys(amounts)
    await up.kube.patch_merge(
        f"{path}/status", {"status": {"capacity": shown, "allocatable": shown}}
    )
    await annotate(up, SPARE, {REGISTER: f"{record}:"})
    uuid = record.partition(",")[0]
    await until(lambda: up.leasehold("gpus", "--json"), lambda listed: uuid in listed.out)
    try:
        yield
    finally:
        await annotate(up, SPARE, {REGISTER: None})
        await up.kube.patch_merge(
            f"{path}/status", {"status": {"capacity": removed, "allocatable": removed}}
        )


async def test_item_15_health_is_read_from_six_fields_and_not_from_five(up: Stack) -> None:
    async with registered(up, "GPU-five,10,15360,NVIDIA-Tesla T4,false"):
        five = await bound(up, asking("five", vgpu(memory=1000), node=SPARE))
    async with registered(up, "GPU-six,10,15360,NVIDIA-Tesla T4,false,hami-core"):
        await up.create(asking("six", vgpu(memory=1000), node=SPARE))
        await up.until("six", lambda pod: "unhealthy" in condition_text(pod))

    assert annotation_of(five, IDS) == "GPU-five,NVIDIA,1000,0:"


async def test_item_3_successive_pods_share_card_0_and_carry_nanoseconds(up: Stack) -> None:
    pods = [await runs(up, asking(f"p{n}", {MEMORY: 1024})) for n in range(2)]

    for pod in pods:
        assert annotation_of(pod, INDEX) == "0"
        assert re.fullmatch(r"\d{19}", annotation_of(pod, "volcano.sh/predicate-time"))


async def test_item_4_a_pod_that_no_longer_fits_card_0_gets_card_1_and_a_sum_of_20000_is_refused(
    up: Stack,
) -> None:
    await bound(up, asking("small", {MEMORY: 1024}))
    large = await bound(up, asking("large", {MEMORY: CARD_MIB}))
    both = [container(name, {MEMORY: 10000}) for name in "ab"]

    text = await refused(up, asking("sum", {}, containers=both))

    assert annotation_of(large, INDEX) == "1"
    assert text.startswith("0/2 nodes are available:")
    assert "1 Insufficient GPU memory" in text


async def test_item_5_init_containers_of_5000_and_3000_reserve_5000(up: Stack) -> None:
    init = [container("a", {MEMORY: 5000}), container("b", {MEMORY: 3000})]
    plain = [container("main")]
    pod = await runs(up, asking("init", {}, initContainers=init, containers=plain))

    beside = await runs(up, asking("beside", {MEMORY: CARD_MIB - 5000}))
    further = await bound(up, asking("further", {MEMORY: 1}))

    assert [annotation_of(p, INDEX) for p in (pod, beside, further)] == ["0", "0", "1"]


async def test_item_6_cards_that_an_operator_cordons_are_never_chosen(up: Stack) -> None:
    closed = "volcano.sh/gpu-unhealthy-ids"
    await annotate(up, NODE, {closed: "0,1"})
    async with asyncio.timeout(20):  # the watcher receives it in its own time
        while annotation_of(probe := await bound(up, asking("probe", {MEMORY: 1})), INDEX) != "2":
            await delete_all_pods(up)
    whole = [await bound(up, asking(f"whole-{n}", {MEMORY: CARD_MIB})) for n in range(5)]

    text = await refused(up, asking("none", {MEMORY: CARD_MIB}))

    assert [annotation_of(pod, INDEX) for pod in (probe, *whole)] == ["2", "3", "4", "5", "6", "7"]
    assert "1 Insufficient GPU memory" in text
    await annotate(up, NODE, {closed: None})
    opened = await up.until("none", lambda p: p["spec"].get("nodeName"))
    assert annotation_of(opened, INDEX) == "0"


async def test_item_10_memory_decides_if_a_pod_requests_both(up: Stack) -> None:
    pod = await runs(up, asking("both", {MEMORY: 1024, NUMBER: 2}))

    assert annotation_of(pod, INDEX) == "0"


async def test_item_18_two_gpus_are_one_element_with_two_devices(up: Stack) -> None:
    pod = await bound(up, asking("two", vgpu(2, memory=3000, cores=50)))

    assert shares(pod) == [(7, 3000, 50), (6, 3000, 50)]
    assert ";" not in annotation_of(pod, IDS)
    lease = (await leases(up))["two"]
    assert [share.memory_mib for share in lease.shares] == [3000, 3000]


async def given(up: Stack, **limits: int) -> list[tuple[int, int, int]]:
    """Run a pod with these limits on one GPU; return its shares."""
    requested = {
        f"volcano.sh/vgpu-{key.replace('_', '-')}": amount for key, amount in limits.items()
    }
    return shares(await runs(up, asking("one", {**vgpu(), **requested})))


async def test_item_19_a_number_alone_means_all_of_a_cards_memory_and_no_cores(up: Stack) -> None:
    assert await given(up) == [(7, CARD_MIB, 0)]


async def test_item_20_a_percentage_is_exact_and_fits_and_runs(up: Stack) -> None:
    assert await given(up, memory_percentage=20) == [(7, 2235, 0)]


async def test_item_21_a_percentage_overrides_memory(up: Stack) -> None:
    assert await given(up, memory_percentage=33, memory=3000) == [(7, 3688, 0)]


async def test_item_22_all_cores_require_an_idle_card_and_make_it_exclusive(up: Stack) -> None:
    await bound(up, asking("alone", vgpu(memory=10, cores=100), on(0)))
    await bound(up, asking("some", vgpu(memory=10, cores=1), on(1)))

    free = await refused(up, asking("no-cores", vgpu(memory=10), on(0)))
    more = await refused(up, asking("one-core", vgpu(memory=10, cores=1), on(0)))
    busy = await refused(up, asking("not-idle", vgpu(memory=10, cores=100), on(1)))
    never = await refused(up, asking("never", vgpu(memory=10, cores=101)))

    assert "1 node(s) had only GPUs that other pods use exclusively" in free
    assert "1 Insufficient GPU cores" in more
    assert "1 Insufficient GPU cores" in busy
    assert "container cuda: volcano.sh/vgpu-cores must be 0 to 100 percent of a GPU" in never


async def test_item_23_the_eleventh_share_of_ten_is_refused(up: Stack) -> None:
    names = [f"p{n}" for n in range(10)]
    await asyncio.gather(*(bound(up, asking(name, vgpu(memory=10), on(2))) for name in names))

    text = await refused(up, asking("eleventh", vgpu(memory=10), on(2)))

    assert "1 node(s) had no free GPU share slot" in text


async def test_item_24_more_gpus_than_cards_names_the_check_and_the_numbers(up: Stack) -> None:
    text = await refused(up, asking("nine", vgpu(9, memory=10)))

    assert "1 node(s) had fewer GPUs than the pod requests" in text
    assert f"Request at most 8 GPUs in one container, as node {NODE} has" in text


@pytest.mark.parametrize(
    ("annotations", "fits"),
    [
        ({"nvidia.com/use-gputype": "gtx 1080"}, True),
        ({"nvidia.com/use-gputype": "V100,"}, False),
        ({"nvidia.com/nouse-gputype": "GTX"}, False),
        ({"nvidia.com/use-gputype": "GTX", "nvidia.com/nouse-gputype": "GTX"}, True),
    ],
)
async def test_item_25_types_are_chosen_by_part_of_their_name(
    up: Stack, annotations: dict[str, str], fits: bool
) -> None:
    pod = asking("typed", vgpu(memory=10), annotations)

    if fits:
        await bound(up, pod)
    else:
        assert "1 node(s) had no GPU of an allowed type" in await refused(up, pod)


async def test_item_26_uuids_are_allowed_and_denied_exactly(up: Stack) -> None:
    use, deny = "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/vgpu-nouse-gpuuuid"
    both = {use: f" {uuid(4)} , {uuid(5)}", deny: uuid(5)}

    pod = await bound(up, asking("allowed", vgpu(memory=10), both))
    denied = await refused(up, asking("denied", vgpu(memory=10), {use: uuid(4), deny: uuid(4)}))
    case = await refused(up, asking("case", vgpu(memory=10), {use: uuid(4).upper()}))

    assert device_indices(pod) == [4]
    assert "1 node(s) had no GPU with an allowed UUID" in denied
    assert "1 node(s) had no GPU with an allowed UUID" in case


async def test_item_27_a_required_mode_must_be_the_mode_of_the_node(up: Stack) -> None:
    mode = "volcano.sh/vgpu-mode"

    text = await refused(up, asking("mig", vgpu(memory=10), {mode: "mig"}))
    await bound(up, asking("core", vgpu(memory=10), {mode: "hami-core"}))
    async with registered(up, "GPU-m,10,15360,NVIDIA-A100,true,mig"):
        pod = asking("other", vgpu(memory=10), {mode: "hami-core"}, node=SPARE)
        await up.create(pod)
        await up.until("other", lambda p: "had only GPUs in another mode" in condition_text(p))

    assert "1 node(s) had only GPUs in another mode" in text


async def test_item_28_the_third_pod_of_a_spread_group_waits_for_one_of_two_cards(
    up: Stack,
) -> None:
    limits, notes = vgpu(memory=10), GROUP | on(0, 1)
    pods = [await bound(up, asking(f"p{n}", limits, notes)) for n in range(2)]
    text = await refused(up, asking("third", limits, notes))

    await up.kube.delete(f"{PODS}/p0")

    third = await up.until("third", lambda p: p["spec"].get("nodeName"))
    assert [device_indices(pod) for pod in (*pods, third)] == [[1], [0], [1]]
    assert "1 node(s) had only GPUs with a pod of the same group" in text


async def test_item_31_a_bound_pod_carries_all_six_keys(up: Stack) -> None:
    pod = await bound(up, asking("one", vgpu(memory=10)))

    assert set(SIX) <= annotations_of(pod).keys()
    assert re.fullmatch(r"\d{10}", annotation_of(pod, "volcano.sh/bind-time"))


async def test_item_32_a_placement_that_is_rolled_back_leaves_no_key_and_no_lease(
    up: Stack,
) -> None:
    async with failing(up, "rolled/binding", code=403):
        await up.create(asking("rolled", vgpu(memory=10)))
        await until(lambda: reasons(up, "rolled"), lambda found: "FailedBinding" in found)
        await until(lambda: leases(up), lambda held: "rolled" not in held)
        pod = await up.pod("rolled")
        assert not set(SIX) & annotations_of(pod).keys()

    await up.until("rolled", running)
    await up.audit()


async def reasons(up: Stack, name: str) -> set[str]:
    """Return the reasons of a pod's Events."""
    events = json.loads(await up.kube.read("/api/v1/namespaces/default/events"))["items"]
    return {event["reason"] for event in events if event["involvedObject"]["name"] == name}


async def test_item_33_memory_without_a_number_is_refused_with_the_rule(up: Stack) -> None:
    await up.create(asking("unnumbered", {"volcano.sh/vgpu-memory": 3000}))

    text = await unschedulable_text(up, "unnumbered")

    assert "container cuda: volcano.sh/vgpu-memory needs volcano.sh/vgpu-number" in text


@pytest.mark.parametrize(
    ("policy", "chosen"), [("binpack", [3, 3, 3]), ("spread", [3, 0, 1]), ('""', [3, 7, 7])]
)
async def test_item_29_binpack_takes_the_fullest_card_spread_the_emptiest_and_no_policy_the_highest(
    up: Stack, conf: Path, policy: str, chosen: list[int]
) -> None:
    conf.write_text(CONF % policy)
    up.kill("watcher")

    pods = [await bound(up, asking("p0", vgpu(memory=5000), on(3)))]
    pods += [await bound(up, asking(f"p{n}", vgpu(memory=1000))) for n in (1, 2)]

    assert [device_indices(pod) for pod in pods] == [[index] for index in chosen]


async def test_a_refusal_is_a_reason_and_a_hint(up: Stack) -> None:
    text = await refused(up, asking("huge", {MEMORY: 20000}))

    assert text == (
        "0/2 nodes are available: 1 Insufficient GPU memory, 1 node(s) didn't match Pod's node "
        f"affinity/selector. Waiting does not help: request at most {CARD_MIB} MiB, all the memory "
        f"of device 0 of node {NODE}."
    )
