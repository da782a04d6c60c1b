"""ResourceClaims in the simulated cluster: made, allocated, bound by conditions, deallocated."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, list_at
from simcluster.apiserver.storage.store import ObjectStore
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.simcluster.workloads import workload_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.servers
DRIVER = "gpu.example.com"
LEASED = "example.com/Leased"
REFUSED = "example.com/Refused"


def device(name: str = "gpu-0", *, memory: str = "15Gi", **more: Any) -> Json:
    policy = {"default": "15Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}
    return {
        "name": name,
        "allowMultipleAllocations": True,
        "attributes": {"model": {"string": "T4"}},
        "capacity": {"memory": {"value": memory, "requestPolicy": policy}},
        **more,
    }


def guarded(**more: Any) -> Json:
    return device(bindingConditions=[LEASED], bindingFailureConditions=[REFUSED], **more)


def prepare(store: ObjectStore, *devices: Json, node: str = "node-0") -> None:
    expression = "device.driver == 'gpu.example.com'"
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    store.create("deviceclasses", {"metadata": {"name": "gpu"}, "spec": spec})
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    facts = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": list(devices)}
    store.create("resourceslices", {"metadata": {"name": f"{node}-slice"}, "spec": facts})


def exactly(memory: str = "", **more: Any) -> Json:
    capacity = {"capacity": {"requests": {"memory": memory}}} if memory else {}
    return {"name": "gpu", "exactly": {"deviceClassName": "gpu", **capacity, **more}}


def create_template(store: ObjectStore, *requests: Json) -> None:
    meta = {"name": "share", "namespace": "default"}
    spec = {"spec": {"devices": {"requests": list(requests)}}}
    store.create("resourceclaimtemplates", {"metadata": meta, "spec": spec})


def create_pod(store: ObjectStore, name: str, **entry: str) -> Json:
    entry = entry or {"resourceClaimTemplateName": "share"}
    return store.create(
        "pods",
        {
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "schedulerName": "default-scheduler",
                "containers": [{"name": "main", "image": "app"}],
                "resourceClaims": [{"name": "gpu", **entry}],
            },
        },
    )


def claims(store: ObjectStore) -> list[Json]:
    return store.list("resourceclaims")


def results(store: ObjectStore) -> list[Json]:
    return [
        result
        for claim in claims(store)
        for result in list_at(claim, "status.allocation.devices.results")
    ]


def node_of(store: ObjectStore, pod: str) -> str:
    return str(at_path(store.read("pods", "default", pod), "spec.nodeName") or "")


def message_of(store: ObjectStore, pod: str) -> str:
    conditions = list_at(store.read("pods", "default", pod), "status.conditions")
    return " ".join(condition.get("message", "") for condition in conditions)


def answer(store: ObjectStore, claim: Json, kind: str, message: str = "") -> None:
    [result] = claim["status"]["allocation"]["devices"]["results"]
    keys = {key: result[key] for key in ("driver", "pool", "device", "shareID")}
    condition = {"type": kind, "status": "True", "reason": "Ledger", "message": message}
    patch = {"status": {"devices": [{**keys, "conditions": [condition]}]}}
    name = claim["metadata"]["name"]
    store.patch("resourceclaims", "default", name, patch, subresource="status")


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[ApiUnderTest]:
    async with workload_cluster(nodes=1) as api:
        yield api


@pytest.fixture
def store(cluster: ApiUnderTest) -> ObjectStore:
    return cluster.store


async def test_shares_of_a_device_are_allocated_up_to_its_capacity(store: ObjectStore) -> None:
    prepare(store, device())
    create_template(store, exactly("7000.5Mi"))

    for name in ("a", "b", "c"):
        create_pod(store, name)
    await until(lambda: len(results(store)) == 2)
    await until(lambda: any("cannot allocate all claims" in message_of(store, p) for p in "abc"))

    amounts = [result["consumedCapacity"]["memory"] for result in results(store)]
    assert amounts == ["7001Mi", "7001Mi"]
    assert len({result["shareID"] for result in results(store)}) == 2


async def test_a_pod_is_bound_once_the_binding_conditions_are_true(store: ObjectStore) -> None:
    prepare(store, guarded())
    create_template(store, exactly("1Gi"))
    create_pod(store, "a")
    await until(lambda: results(store))
    [claim] = claims(store)
    assert not node_of(store, "a")

    answer(store, claim, LEASED)

    await until(lambda: node_of(store, "a") == "node-0")


async def test_a_failure_condition_deallocates_and_the_next_attempt_has_a_new_share(
    store: ObjectStore,
) -> None:
    prepare(store, guarded())
    create_template(store, exactly("1Gi"))
    create_pod(store, "a")
    await until(lambda: results(store))
    [claim] = claims(store)
    [first] = results(store)

    answer(store, claim, REFUSED, "pod x holds it")
    await until(lambda: 'message="pod x holds it"' in message_of(store, "a"))
    await until(lambda: (again := results(store)) and again[0]["shareID"] != first["shareID"])

    [claim] = claims(store)
    assert "devices" not in claim["status"]


async def test_a_claim_is_deallocated_after_its_last_pod_and_one_of_a_template_is_deleted(
    store: ObjectStore,
) -> None:
    prepare(store, device())
    create_template(store, exactly("1Gi"))
    meta = {"name": "own", "namespace": "default"}
    spec = {"devices": {"requests": [exactly("1Gi")]}}
    store.create("resourceclaims", {"metadata": meta, "spec": spec})
    create_pod(store, "a")
    create_pod(store, "b", resourceClaimName="own")
    create_pod(store, "c", resourceClaimName="own")
    await until(lambda: all(node_of(store, pod) for pod in "abc"))

    def consumers() -> int:
        return len(list_at(store.read("resourceclaims", "default", "own"), "status.reservedFor"))

    assert consumers() == 2
    for pod in ("a", "b"):
        store.delete("pods", "default", pod, grace_s=0)
    await until(lambda: [claim["metadata"]["name"] for claim in claims(store)] == ["own"])
    await until(lambda: consumers() == 1)
    assert len(results(store)) == 1
    store.delete("pods", "default", "c", grace_s=0)

    await until(lambda: not results(store))
    assert not store.read("resourceclaims", "default", "own")["metadata"].get("finalizers")


def create_extended(store: ObjectStore, name: str, **resources: int) -> None:
    containers = [
        {"name": f"c{number}", "image": "app", "resources": {"limits": {resource: str(count)}}}
        for number, (resource, count) in enumerate(resources.items())
    ]
    spec = {"schedulerName": "default-scheduler", "containers": containers}
    store.create("pods", {"metadata": {"name": name, "namespace": "default"}, "spec": spec})


async def test_a_claim_serves_the_extended_resources_of_classes(store: ObjectStore) -> None:
    own = "example.com/gpu"
    by_name = "deviceclass.resource.kubernetes.io/gpu"
    prepare(store, *(device(f"gpu-{number}") for number in range(3)))
    store.patch("deviceclasses", None, "gpu", {"spec": {"extendedResourceName": own}})

    create_extended(store, "a", **{own: 1, by_name: 2})
    await until(lambda: node_of(store, "a") == "node-0")
    create_extended(store, "b", **{own: 1})
    create_extended(store, "c", **{"example.com/other": 1})
    await until(lambda: "cannot allocate all claims" in message_of(store, "b"))
    await until(lambda: "1 Insufficient example.com/other." in message_of(store, "c"))

    [claim] = claims(store)
    status = store.read("pods", "default", "a")["status"]["extendedResourceClaimStatus"]
    assert status == {
        "resourceClaimName": claim["metadata"]["name"],
        "requestMappings": [
            {"containerName": "c0", "resourceName": own, "requestName": "container-0-request-0"},
            {
                "containerName": "c1",
                "resourceName": by_name,
                "requestName": "container-1-request-0",
            },
        ],
    }
    assert [result["request"] for result in results(store)] == [
        "container-0-request-0",
        "container-1-request-0",
        "container-1-request-0",
    ]
    store.delete("pods", "default", "a", grace_s=0)
    await until(lambda: node_of(store, "b") == "node-0")


async def test_a_resource_that_a_device_plugin_serves_waits_with_the_reason(
    store: ObjectStore,
) -> None:
    prepare(store, device())
    store.patch("deviceclasses", None, "gpu", {"spec": {"extendedResourceName": "example.com/gpu"}})
    status = {"status": {"allocatable": {"example.com/gpu": "4"}}}
    store.patch("nodes", None, "node-0", status, subresource="status")

    create_extended(store, "a", **{"example.com/gpu": 1})

    await until(lambda: "1 serve example.com/gpu by a device plugin" in message_of(store, "a"))
    assert not claims(store)


async def test_counts_prioritized_lists_selectors_and_taints_decide(store: ObjectStore) -> None:
    taints = [{"key": "sick", "value": "x", "effect": "NoSchedule"}]
    prepare(store, device("gpu-0", taints=taints), device("gpu-1"), device("gpu-2"))
    selector = "device.attributes['gpu.example.com'].model == 'A100'"
    create_template(
        store,
        {
            "name": "gpu",
            "firstAvailable": [
                {
                    "name": "best",
                    "deviceClassName": "gpu",
                    "selectors": [{"cel": {"expression": selector}}],
                },
                {"name": "two", "deviceClassName": "gpu", "count": 2},
            ],
        },
    )

    create_pod(store, "a")
    await until(lambda: node_of(store, "a"))

    chosen = [(result["request"], result["device"]) for result in results(store)]
    assert chosen == [("gpu/two", "gpu-1"), ("gpu/two", "gpu-2")]


async def test_devices_take_shared_counters_of_their_pool(store: ObjectStore) -> None:
    def part(name: str, *numbers: int) -> Json:
        counters = {f"slice-{number}": {"value": "1"} for number in numbers}
        return {"name": name, "consumesCounters": [{"counterSet": "gpu", "counters": counters}]}

    prepare(store, part("small", 0), part("all", 0, 1), part("other", 1))
    counters = {f"slice-{number}": {"value": "1"} for number in (0, 1)}
    pool = {"name": "node-0", "generation": 1, "resourceSliceCount": 2}
    spec = {"driver": DRIVER, "nodeName": "node-0", "pool": pool}
    shared = {"sharedCounters": [{"name": "gpu", "counters": counters}]}
    slice_of_counters = {"metadata": {"name": "counters"}, "spec": {**spec, **shared}}
    store.create("resourceslices", slice_of_counters)
    create_template(store, exactly(count=2))

    create_pod(store, "a")
    await until(lambda: node_of(store, "a"))
    create_pod(store, "b")
    await until(lambda: "cannot allocate all claims" in message_of(store, "b"))

    assert [result["device"] for result in results(store)] == ["small", "other"]


async def test_devices_of_one_counter_set_need_a_compatibility_group_in_common(
    store: ObjectStore,
) -> None:
    def mode(name: str, *groups: str) -> Json:
        consumed = {"counterSet": "gpu", "counters": {"modes": {"value": "1"}}}
        counted = {**consumed, "compatibilityGroups": list(groups)} if groups else consumed
        return {"name": name, "consumesCounters": [counted]}

    prepare(
        store,
        mode("shared", "a", "b"),
        mode("alone"),
        mode("first", "a"),
        mode("second", "b"),
        mode("third", "a"),
    )
    pool = {"name": "node-0", "generation": 1, "resourceSliceCount": 2}
    spec = {"driver": DRIVER, "nodeName": "node-0", "pool": pool}
    shared = {"sharedCounters": [{"name": "gpu", "counters": {"modes": {"value": "5"}}}]}
    store.create("resourceslices", {"metadata": {"name": "counters"}, "spec": {**spec, **shared}})
    create_template(store, exactly())

    for name in "abc":
        create_pod(store, name)
        await until(partial(node_of, store, name))
    create_pod(store, "d")
    await until(lambda: "cannot allocate all claims" in message_of(store, "d"))

    assert {result["device"] for result in results(store)} == {"shared", "first", "third"}


async def test_a_policy_with_valid_values_admits_these_amounts_only(store: ObjectStore) -> None:
    def parts(name: str, size: str, value: str) -> Json:
        policy = {"default": size, "validValues": [size]}
        capacity = {"memory": {"value": value, "requestPolicy": policy}}
        return {"name": name, "allowMultipleAllocations": True, "capacity": capacity}

    prepare(store, parts("small", "5Gi", "10Gi"), parts("large", "20Gi", "20Gi"))
    create_template(store, exactly(), {**exactly("8Gi"), "name": "larger"})

    create_pod(store, "a")
    await until(lambda: node_of(store, "a"))
    create_pod(store, "b")
    await until(lambda: "cannot allocate all claims" in message_of(store, "b"))

    amounts = [
        (result["device"], result["consumedCapacity"]["memory"]) for result in results(store)
    ]
    assert amounts == [("small", "5120Mi"), ("large", "20480Mi")]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"default": "5Gi", "validValues": ["10Gi", "5Gi"]}, "sorted in ascending order"),
        ({"default": "5Gi", "validValues": ["5Gi", "16Gi"]}, "larger than capacity value: 15Gi"),
        ({"default": "4Gi", "validValues": ["5Gi"]}, "default value is not valid"),
        ({"validValues": ["5Gi"]}, "default value is not valid"),
        (
            {"default": "1Gi", "validValues": [f"{number}Gi" for number in range(1, 12)]},
            "at most 10 items",
        ),
    ],
)
async def test_a_slice_with_an_impossible_policy_is_refused(
    store: ObjectStore, policy: Json, reason: str
) -> None:
    part = device()
    part["capacity"]["memory"]["requestPolicy"] = policy

    with pytest.raises(ApiError, match=reason):
        prepare(store, part)


async def test_a_policy_needs_a_device_that_several_claims_share(store: ObjectStore) -> None:
    with pytest.raises(ApiError, match="allowMultipleAllocations must be true"):
        prepare(store, device(allowMultipleAllocations=False))


async def test_a_count_gets_different_devices_and_further_requests_the_same_again(
    store: ObjectStore,
) -> None:
    """As kube-scheduler: a request goes through the devices once."""
    prepare(store, device())
    create_template(store, exactly("1Gi", count=2))
    meta = {"name": "apart", "namespace": "default"}
    requests = [exactly("1Gi"), {**exactly("1Gi"), "name": "other"}]
    spec = {"spec": {"devices": {"requests": requests}}}
    store.create("resourceclaimtemplates", {"metadata": meta, "spec": spec})

    create_pod(store, "a")
    create_pod(store, "b", resourceClaimTemplateName="apart")
    await until(lambda: node_of(store, "b"))
    await until(lambda: "cannot allocate all claims" in message_of(store, "a"))

    assert [result["device"] for result in results(store)] == ["gpu-0", "gpu-0"]


async def test_server_side_apply_changes_one_device_and_refuses_one_that_is_not_allocated(
    cluster: ApiUnderTest,
    store: ObjectStore,
) -> None:
    prepare(store, guarded())
    create_template(store, exactly("1Gi"), {**exactly("2Gi"), "name": "other"})
    create_pod(store, "a")
    await until(lambda: len(results(store)) == 2)
    [claim] = claims(store)
    name = claim["metadata"]["name"]
    path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}/status"

    async def apply(result: Json, **more: str) -> int:
        keys = {key: result[key] for key in ("driver", "pool", "device", "shareID")} | more
        condition = {"type": LEASED, "status": "True"}
        body = {"status": {"devices": [{**keys, "conditions": [condition]}]}}
        async with (
            cluster.client() as client,
            client.patch(
                path,
                json=body,
                params={"fieldManager": "test"},
                headers={"Content-Type": "application/apply-patch+yaml"},
            ) as response,
        ):
            return response.status

    statuses = [await apply(result) for result in results(store)]
    refused = await apply(results(store)[0], shareID="another")

    assert (statuses, refused) == ([200, 200], 422)
    assert len(claims(store)[0]["status"]["devices"]) == 2


async def test_a_claims_spec_is_immutable(store: ObjectStore) -> None:
    meta = {"name": "own", "namespace": "default"}
    spec = {"devices": {"requests": [exactly("1Gi")]}}
    store.create("resourceclaims", {"metadata": meta, "spec": spec})

    same = {
        "spec": {"devices": {"requests": [exactly("1Gi")]}}
    }  # as `kubectl apply` sends it again
    store.patch("resourceclaims", "default", "own", same)
    changed: Json = {"spec": {"devices": {"requests": []}}}

    with pytest.raises(ApiError, match="field is immutable"):
        store.patch("resourceclaims", "default", "own", changed)
