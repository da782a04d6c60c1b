"""What the watcher reads of ResourceClaims, quotas and lists of pods."""

import asyncio
from collections.abc import AsyncIterator, Container
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml

from services.watcher.claim_sources import ClaimReflector
from services.watcher.pod_group_sources import PodGroupConditions
from services.watcher.pod_sources import CHUNK_BYTES, LEASE_BYTES, ManagedPodLister
from services.watcher.quota_sources import load_file
from services.watcher.service import ClaimTracker, Watcher
from shared.dialects.tencent.gpu_quota import parse_config_map
from shared.kubernetes.client import KubernetesClient, Page
from shared.kubernetes.errors import ErrorResponse, ForbiddenError
from shared.kubernetes.kinds.gpu_quotas import merge_sources, parse_spec
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedDevice, ClaimAllocated, ClaimDeallocated
from shared.model.events.pod_events import LEASE_PRESENT, ListedPods, PodsListed, ResyncRequested
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import Namespace, PodUid
from shared.model.requests.claim import LEASED, REFUSED
from shared.nats.wire import encode
from tests.support.binder.world import allocated, on
from tests.support.placer.ledger import uuid

GPU = uuid("a", 0)
RESULT = {
    "request": "gpu",
    "driver": "gpu.leasehold.dev",
    "pool": "node-a",
    "device": "gpu-a",
    "shareID": "9cbf540b",
    "consumedCapacity": {"memory": "30000Mi", "cores": "50", "slots": "1"},
}


def parsed(*results: dict[str, Any], **status: Any) -> Any:
    allocation = {
        "devices": {"results": list(results)},
        "allocationTimestamp": "2031-05-01T10:00:00Z",
    }
    claim = {
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
        "status": {"allocation": allocation, **status},
    }
    return allocated_claim(msgspec.json.decode(msgspec.json.encode(claim), type=ApiResourceClaim))


def entry(condition: str, **more: Any) -> dict[str, Any]:
    device = {"driver": "gpu.leasehold.dev", "pool": "node-a", "device": "gpu-a", **more}
    return {**device, "conditions": [{"type": condition, "status": "True"}]}


def test_an_allocation_is_read_with_what_it_consumes() -> None:
    reserved = [{"resource": "pods", "name": "p", "uid": "u2"}, {"resource": "pods", "uid": "u1"}]

    claim = parsed(RESULT, reservedFor=reserved)

    assert claim.devices == (
        AllocatedDevice(
            request="gpu",
            device="gpu-a",
            share_id="9cbf540b",
            memory_mib=30_000,
            cores_percent=50,
        ),
    )
    assert (claim.node, claim.consumers, claim.answer) == ("node-a", ("u1", "u2"), "")
    assert claim.generation == "2031-05-01T10:00:00Z gpu/gpu-a/9cbf540b"


def test_memory_is_rounded_up_and_without_capacity_it_is_the_whole_device() -> None:
    claim = parsed(
        RESULT | {"consumedCapacity": {"memory": "1048577"}}, RESULT | {"consumedCapacity": None}
    )

    assert [device.memory_mib for device in claim.devices] == [2, None]


def test_devices_of_other_drivers_and_for_administrators_take_nothing() -> None:
    other = RESULT | {"driver": "gpu.nvidia.com"}
    admin = RESULT | {"adminAccess": True}

    assert parsed(other, admin) is None
    assert len(parsed(other, RESULT).devices) == 1


def test_administrative_access_is_answered_where_its_pods_wait_for_it() -> None:
    waiting = {"adminAccess": True, "bindingConditions": [LEASED], "request": "admin"}

    alone = parsed(RESULT | waiting)
    mixed = parsed(RESULT | waiting, RESULT)
    half = parsed(RESULT | waiting, RESULT, devices=[entry(LEASED)])
    both = parsed(RESULT | waiting, RESULT, devices=[entry(LEASED), entry(LEASED)])

    assert [len(each.devices) for each in (alone, mixed)] == [0, 1]
    assert [each.admin_devices[0].request for each in (alone, mixed)] == ["admin", "admin"]
    assert [half.answer, both.answer] == ["", LEASED]


def test_devices_of_two_nodes_cannot_be_ours() -> None:
    with pytest.raises(RequestError, match="several nodes: node-a, node-b"):
        parsed(RESULT, RESULT | {"pool": "node-b"})


def test_a_claim_is_answered_when_all_its_devices_are() -> None:
    copy = {"data": {"format": 1}}

    both = parsed(RESULT, RESULT, devices=[entry(LEASED, **copy), entry(LEASED)])
    half = parsed(RESULT, RESULT, devices=[entry(LEASED)])
    refused = parsed(RESULT, RESULT, devices=[entry(REFUSED)])
    of_another = parsed(RESULT, devices=[{**entry(LEASED), "driver": "gpu.nvidia.com"}])

    assert [each.answer for each in (both, half, refused, of_another)] == [LEASED, "", REFUSED, ""]
    assert both.lease == '{"format":1}'


def test_an_allocation_and_its_end_are_published_once() -> None:
    tracker = ClaimTracker()
    claim = allocated("c", on(GPU))

    assert tracker.update(claim.claim, None) == []
    assert tracker.update(claim.claim, claim) == [ClaimAllocated(claim=claim)]
    assert tracker.update(claim.claim, replace(claim, answer=LEASED, resource_version="2")) == []
    [gone] = tracker.update(claim.claim, None)
    assert isinstance(gone, ClaimDeallocated)
    assert (gone.claim, gone.generation) == (claim.claim, "g1")
    assert tracker.update(claim.claim, None) == []


def test_a_new_allocation_ends_the_one_before() -> None:
    tracker = ClaimTracker()
    first = allocated("c", on(GPU))
    second = allocated("c", on(GPU), generation="g2")
    tracker.update(first.claim, first)

    gone, new = tracker.update(first.claim, second)

    assert isinstance(gone, ClaimDeallocated)
    assert gone.generation == "g1"
    assert new == ClaimAllocated(claim=second)


def test_other_consumers_and_a_lost_answer_are_published() -> None:
    tracker = ClaimTracker()
    claim = allocated("c", on(GPU))
    answered = replace(claim, answer=LEASED)
    tracker.update(claim.claim, answered)
    shared = replace(answered, consumers=("p1", "p2"))  # type: ignore[arg-type]

    assert tracker.update(claim.claim, shared) == [ClaimAllocated(claim=shared)]
    lost = replace(shared, answer="")
    assert tracker.update(claim.claim, lost) == [ClaimAllocated(claim=lost)]


def test_a_claim_without_an_answer_is_published_again() -> None:
    tracker = ClaimTracker()
    claim = allocated("c", on(GPU))
    tracker.update(claim.claim, claim)

    assert tracker.resync_unanswered() == []
    assert tracker.resync_unanswered() == [ClaimAllocated(claim=claim)]
    answered = replace(claim, answer=LEASED)
    tracker.update(claim.claim, answered)
    assert tracker.resync_unanswered() == []
    assert tracker.resync() == [ClaimAllocated(claim=answered)]


@pytest.mark.parametrize("field", ["request", "device", "shareID", "pool"])
def test_an_allocation_with_a_field_that_is_too_long_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match="ResourceClaim ns/c: a field is out of its bounds"):
        parsed(RESULT | {field: "x" * 318})


TEAM = Namespace("team")


def test_a_quota_is_read_field_by_field() -> None:
    spec = {
        "maxMilliGPU": 2500,
        "maxCorePercent": 150,
        "maxMemory": "80Gi",
        "maxCards": 3,
        "models": [{"name": "T4", "maxCards": 1}, {"name": "A100"}],
        "onlyModels": True,
        "pools": ["public"],
        "defaultRunTime": "90m",
        "maxRunTime": "2h30m",
    }

    assert parse_spec(TEAM, spec) == Quota(
        namespace=TEAM,
        limits=QuotaLimits(milli_gpu=2500, cores_milli=1500, memory_mib=81920, cards=3),
        models=(("T4", QuotaLimits(cards=1)), ("A100", QuotaLimits())),
        only_models=True,
        pools=("public",),
        pool_label="gaia.tencent.com/gpu-pool",
        default_run_s=5400,
        max_run_s=9000,
    )
    assert parse_spec(TEAM, None).limits == QuotaLimits()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"maxGPUs": 3}, "maxGPUs"),
        ({"maxCards": -1}, "spec.maxCards: Expected `int` >= 0"),
        ({"maxCards": "three"}, "maxCards"),
        ({"maxMemory": "80 apples"}, "spec.maxMemory: must be a quantity of bytes"),
        ({"maxMemory": "1e99"}, "to below 1E"),
        ({"models": [{"maxCards": 1}]}, "spec.models[0]: Object missing required field `name`"),
        ([], "GPUQuota team: spec"),
        ({"maxRunTime": "2 days"}, "spec.maxRunTime: "),
        ({"maxRunTime": "0h"}, "spec.maxRunTime: "),
        ({"maxRunTime": "1h", "defaultRunTime": "61m"}, "defaultRunTime must not be longer"),
        ({"pools": ["p"] * 257}, "spec.pools: Expected `array` of length <= 64"),
    ],
)
def test_an_invalid_quota_is_refused_with_its_field(spec: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_spec(TEAM, spec)

    assert message in str(caught.value)


def test_gpu_admissions_config_map_means_cores_by_node_label() -> None:
    data = {"gpu_quota": '{"team": {"quota": {"M40": 2, "P100": 3}, "pool": ["public"]}, "b": {}}'}

    quotas = parse_config_map(data)

    assert quotas[TEAM] == Quota(
        namespace=TEAM,
        models=(("M40", QuotaLimits(cores_milli=2000)), ("P100", QuotaLimits(cores_milli=3000))),
        only_models=True,
        model_label="gaia.tencent.com/gpu-model",
        pools=("public",),
        pool_label="gaia.tencent.com/gpu-pool",
    )
    assert quotas[Namespace("b")].models == ()
    assert quotas[Namespace("b")].only_models


LONG = {"gpu_quota": '{"%s": {}}' % ("n" * 64)}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"gpu_quota": "{"},
        {"gpu_quota": '{"a": {"quota": 3}}'},
        {"gpu_quota": '{"a": {"quota": {"T4": 8}}, "a": {"quota": {"T4": 1}}}'},
        {"gpu_quota": "[" * 100_000},
        LONG,
    ],
)
def test_a_config_map_that_gpu_admission_would_refuse_is_refused(data: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="kube-system/gpuquota"):
        parse_config_map(data)


def test_a_file_has_objects_and_one_for_all_other_namespaces(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    objects = [
        {
            "apiVersion": "leasehold.dev/v1beta1",
            "kind": "GPUQuota",
            "metadata": {"name": name},
            "spec": {"maxCards": cards},
        }
        for name, cards in (("team", 3), ("*", 1))
    ]
    file.write_text(yaml.safe_dump_all(objects))

    assert {name: quota.limits.cards for name, quota in load_file(file).items()} == {
        "team": 3,
        "*": 1,
    }
    file.write_text(yaml.safe_dump_all([objects[0], objects[0]]))
    with pytest.raises(RequestError, match="team is defined twice"):
        load_file(file)
    with pytest.raises(RequestError, match=r"none\.yaml"):
        load_file(tmp_path / "none.yaml")


def test_a_limit_too_large_to_count_is_capped() -> None:
    most = 2**53 - 1

    cards = parse_config_map({"gpu_quota": f'{{"team-a":{{"quota":{{"T4":{2**62}}}}}}}'})[
        Namespace("team-a")
    ].models

    assert cards == (("T4", QuotaLimits(cores_milli=most)),)


def test_the_first_source_that_has_a_quota_counts() -> None:
    one, other = Quota(namespace=TEAM, limits=QuotaLimits(cards=1)), Quota(namespace=TEAM)

    assert merge_sources([{TEAM: one}, {TEAM: other}]) == (one,)


class OnePage:
    """An API server with these pods, each with this lease annotation."""

    def __init__(self, texts: list[str]) -> None:
        self.items = tuple(
            msgspec.Raw(msgspec.json.encode(_pod(n, t))) for n, t in enumerate(texts)
        )

    async def pages(self, path: str) -> AsyncIterator[Page]:
        yield Page(items=self.items)


def _pod(number: int, text: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"p{number}", "uid": f"u{number}", "annotations": {ANNOTATION: text}},
        "spec": {"schedulerName": "volcano", "nodeName": "n"},
        "status": {},
    }


async def chunks_of(texts: list[str], request_ids: tuple[str, ...] = ("r",)) -> list[PodsListed]:
    kube = cast("KubernetesClient", OnePage(texts))
    lister = ManagedPodLister(kube, frozenset({"volcano"}), ClaimReflector(kube))
    return [chunk async for chunk in lister.chunks(request_ids)]


async def test_a_list_is_cut_into_chunks_that_fit_a_message() -> None:
    texts = ["x" * (LEASE_BYTES - 1)] * 30

    chunks = await chunks_of(texts)

    assert [chunk.chunk for chunk in chunks] == list(range(chunks[0].chunks))
    assert [pod.lease for chunk in chunks for pod in chunk.pods.bound] == texts
    assert all(len(encode([chunk])) < 2 * CHUNK_BYTES for chunk in chunks)


async def test_an_annotation_that_is_too_long_for_a_lease_is_left_out() -> None:
    (chunk,) = await chunks_of(["x" * (LEASE_BYTES + 1), "lease"])

    assert [pod.lease for pod in chunk.pods.bound] == ["", "lease"]


async def test_a_list_that_answers_no_request_shows_only_which_pods_have_a_lease() -> None:
    (chunk,) = await chunks_of(["lease" * 1_000, ""], ())

    assert [pod.lease for pod in chunk.pods.bound] == [LEASE_PRESENT, ""]


async def test_an_empty_list_is_one_chunk() -> None:
    (chunk,) = await chunks_of([])

    assert (chunk.chunks, chunk.pods) == (1, ListedPods())


class Clock:
    def now(self) -> float:
        return 1_000.0

    def ticks(self) -> float:
        return 1_000.0

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)


class FlakyLister(ManagedPodLister):
    """A lister that fails a few times."""

    def __init__(self, failures: int) -> None:
        super().__init__(cast("Any", None), frozenset(), cast("Any", None))
        self.failures = failures
        self.attempts = 0

    async def chunks(
        self, request_ids: tuple[str, ...] = (), claiming: Container[PodUid] = ()
    ) -> AsyncIterator[PodsListed]:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise UnavailableError("the API server is away")
        listed = ListedPods()
        yield PodsListed(listing_id="l", chunk=0, chunks=1, pods=listed, request_ids=request_ids)


async def test_a_list_that_failed_is_retried_until_it_succeeds() -> None:
    lister = FlakyLister(failures=3)
    names = ("pod", "node", "group", "namespace", "quota", "claim", "class", "storage")
    sources = dict.fromkeys(names, cast("Any", None))
    watcher = Watcher(
        lister=lister,
        clock=Clock(),
        group_conditions=PodGroupConditions(cast("Any", None)),
        **{f"{name}_source": none for name, none in sources.items()},
    )

    await watcher.request_resync([ResyncRequested(reason="a test", request_id="t")])
    batches = watcher.resync()
    async with asyncio.timeout(30):
        first, second = [await anext(batches) for _ in range(2)]

    assert list(first) == []
    assert [event.request_ids for event in second if isinstance(event, PodsListed)] == [("t",)]
    assert lister.attempts == 4


FORBIDDEN = ErrorResponse(
    method="GET", path=CLAIMS_PATH, code=403, reason="Forbidden", message="not permitted"
)


class NoClaims(OnePage):
    """An API server that lets nobody list ResourceClaims."""

    refuses = True

    async def pages(self, path: str) -> AsyncIterator[Page]:
        if path == CLAIMS_PATH and self.refuses:
            raise ForbiddenError(FORBIDDEN)
        yield Page() if path == CLAIMS_PATH else Page(items=self.items)


async def test_pods_are_listed_although_claims_may_not_be_and_the_reason_is_reported() -> None:
    server = NoClaims(["lease"])
    kube = cast("KubernetesClient", server)
    claims = ClaimReflector(kube)
    lister = ManagedPodLister(kube, frozenset({"volcano"}), claims)

    (chunk,) = [chunk async for chunk in lister.chunks(("r",))]

    assert [pod.lease for pod in chunk.pods.bound] == ["lease"]
    assert claims.unreadable == f"ResourceClaims cannot be read: {ForbiddenError(FORBIDDEN)}"
    server.refuses = False
    assert len([chunk async for chunk in lister.chunks(("r",))]) == 1
    assert not claims.unreadable


async def test_pods_of_other_schedulers_that_wait_for_our_claims_are_listed_as_unbound() -> None:
    api = OnePage([])
    pods = [_pod(number, "x") for number in range(3)]
    for pod in pods:
        pod["spec"] = {"schedulerName": "default-scheduler"}
    pods[1]["spec"]["nodeName"] = "n"
    api.items = tuple(msgspec.Raw(msgspec.json.encode(pod)) for pod in pods)
    kube = cast("KubernetesClient", api)
    lister = ManagedPodLister(kube, frozenset({"volcano"}), ClaimReflector(kube))

    [chunk] = [chunk async for chunk in lister.chunks((), {PodUid("u0"), PodUid("u1")})]

    assert chunk.pods == ListedPods(unbound=(PodUid("u0"),))


async def test_a_list_needs_no_field_of_a_pod_but_its_names_and_its_node() -> None:
    api = OnePage([])
    pod = _pod(1, "x")
    pod["metadata"] |= {"labels": None, "creationTimestamp": "yesterday"}
    pod["spec"] |= {"containers": {"odd": True}, "priority": "high"}
    api.items = (msgspec.Raw(msgspec.json.encode(pod)),)

    kube = cast("KubernetesClient", api)
    lister = ManagedPodLister(kube, frozenset({"volcano"}), ClaimReflector(kube))

    [chunk] = [each async for each in lister.chunks()]

    assert [each.pod for each in chunk.pods.bound] == ["u1"]
