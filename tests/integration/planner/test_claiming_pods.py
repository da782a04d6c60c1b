"""Pods are preempted for one that waits for a ResourceClaim, which gets what that frees."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from services.planner.cluster_view import MOST_UNSEEN
from shared.model.events.request_reply import DryRunRequest
from shared.model.leases.lease import ClaimAllocation
from shared.model.leases.ledger import (
    NoCapacity,
    Reservation,
    ReservedLease,
    waits_for_kube_scheduler,
)
from shared.model.leases.preemption import PreemptionStage
from shared.model.names import PREEMPTIBLE, Namespace, NodeName, PodUid
from shared.model.requests.claim import DRIVER
from shared.model.requests.placement import Placement
from tests.support.placer.ledger import device, facts, report, share
from tests.support.planner.scene import Scene, waiting_pod
from tools.generate.pages import ROOT

API = "/apis/resource.k8s.io/v1"
CLASSES = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"
SIZE = 16_000
PART: dict[str, Any] = {"capacity": {"requests": {"memory": "8Gi", "cores": "50"}}}


async def claim(at: Scene, name: str = "gpu", **exactly: Any) -> PodUid:
    """A ResourceClaim of namespace `b` for a whole GPU, or for what is said."""
    wanted = {"deviceClassName": "gpu.leasehold.dev", **exactly}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": wanted}]}}
    path = f"{API}/namespaces/b/resourceclaims"
    made = await at.kube.create(path, {"metadata": {"name": name}, "spec": spec}, dict)
    return PodUid(made["metadata"]["uid"])


async def slices(at: Scene, node: str = "a") -> None:
    """The node lists its devices for claims."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": []}
    made = {"metadata": {"name": f"{node}-{DRIVER}"}, "spec": spec}
    await at.kube.create(f"{API}/resourceslices", made)


async def claiming(at: Scene, name: str = "new", **exactly: Any) -> tuple[PodUid, PodUid]:
    """A pod of priority 1,000 that waits for a claim, and the claim."""
    for manifest in yaml.safe_load_all(CLASSES.read_text()):
        await at.kube.create(f"{API}/deviceclasses", manifest)
    await slices(at)
    uid = await claim(at, **exactly)
    uses = [{"name": "gpu", "resourceClaimName": "gpu"}]
    made = await at.pod(name, "b", spec={"resourceClaims": uses})
    pod = PodUid(made["metadata"]["uid"])
    await hand_over(at, pod, name)
    return pod, uid


async def hand_over(at: Scene, pod: PodUid, name: str) -> None:
    """The pod waits for kube-scheduler."""
    queued = waiting_pod(pod, name=name, gpus=0, priority=1_000, by_kube_scheduler=True)
    queued = replace(queued, handed_over="spec.resourceClaims[0]")
    refused = waits_for_kube_scheduler(queued, "1 cannot allocate all claims", at.clock.now())
    await at.ledger.waiting_pods.hand_over([refused])


async def allocated(at: Scene, uid: PodUid, *, gpu: int = 0, mib: int = SIZE) -> Any:
    """kube-scheduler allocates so much of a GPU: what the ledger replies."""
    place = Placement(node=NodeName("a"), shares=(share("a", gpu, mib=mib),))
    wanted = Reservation(
        pod=uid,
        namespace=Namespace("b"),
        name="gpu",
        candidates=(place,),
        claim=ClaimAllocation(generation="1", consumers=()),
    )
    [outcome] = await at.ledger.reserve([wanted], now=at.clock.now(), ttl_s=30)
    return outcome


@pytest.mark.parametrize("exactly", [{}, PART], ids=["whole", "part"])
async def test_what_evictions_free_is_kept_for_the_claim_and_only_it(
    at: Scene, exactly: dict[str, Any]
) -> None:
    old = await at.running("old", mib=SIZE)
    pod, uid = await claiming(at, **exactly)
    other = await claim(at, "other")
    binder = at.binder()

    await at.evict(binder)
    assert await at.is_deleting(old.name)
    assert (await at.state()).preemption_for(pod) is not None
    assert binder.agents.renewed == []
    await at.terminate(old)
    assert await at.steps(binder, 2) == []
    assert binder.agents.renewed == ["a"]

    assert await at.thief()
    assert isinstance(await allocated(at, other), NoCapacity)
    reserved = await allocated(at, uid)
    assert isinstance(reserved, ReservedLease)
    # Until the API server has the allocation, the pod is not bound, and the plan is not over.
    assert await at.steps(binder, 2) == []
    assert await at.stages() == [PreemptionStage.EVICTING]
    await at.ledger.bind([reserved.lease])
    assert await at.steps(binder, 2) == []
    assert await at.stages() == []
    assert "1 pod is evicted for it on a" in at.reports.of("new")[0]


@pytest.mark.parametrize("at", [2], indirect=True)
async def test_a_claim_that_is_allocated_elsewhere_ends_its_plan_and_nobody_is_evicted(
    at: Scene,
) -> None:
    old = await at.running("old", mib=SIZE)
    ends = await at.running("ends", gpu=1, mib=SIZE, labels={PREEMPTIBLE: "false"})
    _, uid = await claiming(at)
    binder = at.binder()
    await binder.preempt()
    assert await at.stages() == [PreemptionStage.ANNOUNCED]

    await at.terminate(ends)
    reserved = await allocated(at, uid, gpu=1)
    assert isinstance(reserved, ReservedLease)
    await at.ledger.bind([reserved.lease])
    at.clock.advance(30)
    await at.steps(binder, 2)

    assert await at.stages() == []
    assert not await at.is_deleting(old.name)
    assert await at.announced_for(old.name) is None


async def test_a_claim_that_does_not_take_what_was_freed_has_no_more_pods_evicted(
    at: Scene,
) -> None:
    old = await at.running("old", mib=SIZE)
    pod, _ = await claiming(at)
    binder = at.binder()
    await at.evict(binder)
    await at.terminate(old)
    at.clock.advance(120)
    await at.steps(binder, 2)
    assert await at.stages() == []

    later = await at.running("later", mib=SIZE, owner="another-owner")
    at.clock.advance(60)
    await at.steps(binder, 3)
    dry_run = await binder.dry_run(DryRunRequest(pod=pod))

    assert await at.stages() == []
    assert dry_run.plan is None
    assert "kube-scheduler has not allocated its ResourceClaim" in dry_run.reason
    at.clock.advance(600)
    await at.evict(binder)
    assert await at.is_deleting(later.name)


async def test_a_reservation_that_comes_to_no_allocation_ends_the_plan_with_the_reason(
    at: Scene,
) -> None:
    old = await at.running("old", mib=SIZE)
    _, uid = await claiming(at)
    binder = at.binder()
    await at.evict(binder)
    await at.terminate(old)
    await binder.preempt()

    reserved = await allocated(at, uid)
    await at.ledger.release([uid], reason="it was not written", version=reserved.lease.version)
    await at.steps(binder, 2)

    assert await at.stages() == []
    assert "was allocated, and given back" in at.reports.of("new")[-1]


@pytest.mark.parametrize(
    "exactly",
    [
        {"selectors": [{"cel": {"expression": "true"}}]},
        {"tolerations": [{"operator": "Exists"}]},
        {"deviceClassName": "mps.leasehold.dev"},
    ],
    ids=["selector", "toleration", "class"],
)
async def test_no_pod_is_evicted_for_a_claim_that_only_kube_scheduler_understands(
    at: Scene, exactly: dict[str, Any]
) -> None:
    await at.running("old", mib=SIZE)
    pod, _ = await claiming(at, **exactly)
    binder = at.binder()

    await at.steps(binder, 3)
    dry_run = await binder.dry_run(DryRunRequest(pod=pod))

    assert await at.stages() == []
    assert "may choose other GPUs than those that evictions would free" in dry_run.reason


async def test_no_pod_is_evicted_for_a_claim_whose_class_an_administrator_has_changed(
    at: Scene,
) -> None:
    await at.running("old", mib=SIZE)
    await claiming(at)
    of_one_model = [{"cel": {"expression": "device.attributes['x'].model == 'T4'"}}]
    path = f"{API}/deviceclasses/gpu.leasehold.dev"
    await at.kube.patch_merge(path, {"spec": {"selectors": of_one_model}})

    await at.steps(at.binder(), 3)

    assert await at.stages() == []


async def test_a_dry_run_shows_the_plan_of_a_pod_that_waits_for_a_claim(at: Scene) -> None:
    await at.running("old", mib=SIZE)
    pod, _ = await claiming(at, **PART)

    dry_run = await at.binder().dry_run(DryRunRequest(pod=pod))

    assert dry_run.plan is not None
    assert [victim.pod for victim in dry_run.plan.victims] == ["a/old"]
    assert [shown.memory_mib for shown in dry_run.plan.shares] == [8192]
    assert await at.stages() == []


async def test_no_pod_is_evicted_where_no_device_is_listed_for_claims(at: Scene) -> None:
    spared = await at.running("old", mib=SIZE)
    await claiming(at)
    await at.kube.delete(f"{API}/resourceslices/a-{DRIVER}")
    binder = at.binder()
    await at.steps(binder, 3)
    assert await at.stages() == []

    await at.ledger.save_nodes([facts("b")])
    await at.ledger.save_devices([report("b", [device("b", 0)])])
    await slices(at, "b")
    made = await at.pod("other", "a", spec={})
    uid = PodUid(made["metadata"]["uid"])
    place = Placement(node=NodeName("b"), shares=(share("b", 0, mib=SIZE),))
    reserved = await at.reserve(uid, "other", place, age_s=3600)
    await at.ledger.bind([reserved.lease])
    await at.kube.bind_pod("a", "other", uid, "b", {})
    at.clock.advance(20)
    await at.evict(binder)

    assert await at.is_deleting("other")
    assert not await at.is_deleting(spared.name)


async def test_a_claim_that_is_made_later_or_made_anew_is_the_one_that_gets_the_gpu(
    at: Scene,
) -> None:
    old = await at.running("old", mib=SIZE)
    pod, first = await claiming(at)
    path = f"{API}/namespaces/b/resourceclaims"
    binder = at.binder(preemption_notice_s=0)
    await at.kube.delete(f"{path}/gpu")
    await at.steps(binder, 2)
    assert await at.stages() == []

    second = await claim(at)
    at.clock.advance(3)
    assert (await binder.dry_run(DryRunRequest(pod=pod))).plan is not None
    await at.kube.delete(f"{path}/gpu")
    third = await claim(at)
    for _ in range(3):
        at.clock.advance(5)
        await binder.preempt()

    own = (await at.state()).preemption_for(pod)
    assert own is not None
    assert own.holders == (third,)
    assert third not in {first, second}
    assert await at.is_deleting(old.name)


async def test_no_pod_is_evicted_for_one_of_several_claims(at: Scene) -> None:
    await at.running("old", mib=SIZE)
    await claiming(at)
    uses = [
        {"name": "gpu", "resourceClaimName": "gpu"},
        {"name": "other", "resourceClaimTemplateName": "other"},
    ]
    made = await at.pod("several", "b", spec={"resourceClaims": uses})
    pod = PodUid(made["metadata"]["uid"])
    await hand_over(at, pod, "several")

    dry_run = await at.binder().dry_run(DryRunRequest(pod=pod))

    assert dry_run.plan is None
    assert "kube-scheduler allocates its ResourceClaims" in dry_run.reason


async def test_many_pods_of_one_namespace_delay_no_plan_for_a_claim_of_another(at: Scene) -> None:
    pod, uid = await claiming(at)
    [waits] = await at.ledger.waiting_pods.load([pod])
    many = [
        waits_for_kube_scheduler(
            replace(waits.queued, pod=PodUid(f"p{number}"), namespace=Namespace("a")), "", 0.0
        )
        for number in range(MOST_UNSEEN)
    ]

    demands = await at.binder().planner.view.claim_demands([*many, waits])

    assert [demand.claim.claim for demand in demands.values()] == [uid]


async def test_no_pod_is_evicted_for_one_that_another_scheduler_places_with_its_group(
    at: Scene,
) -> None:
    await at.running("old", mib=SIZE)
    pod, _ = await claiming(at)
    [waits] = await at.ledger.waiting_pods.load([pod])
    grouped = replace(waits.queued, scheduler="default-scheduler", handed_over="")
    await at.ledger.waiting_pods.hand_over(
        [waits_for_kube_scheduler(grouped, "1 cannot allocate all claims", at.clock.now())]
    )
    binder = at.binder()

    await at.steps(binder, 3)
    dry_run = await binder.dry_run(DryRunRequest(pod=pod))

    assert await at.stages() == []
    assert "another scheduler places it, and it is of a group" in dry_run.reason
