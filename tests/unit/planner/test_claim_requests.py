"""What a ResourceClaim requests: the devices that its lease takes once they are allocated."""

import json
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from services.claims.claim_shares import reservation_of
from services.planner.claim_requests import (
    CLASSES,
    SELECTOR,
    ClaimDemand,
    demand_of,
)
from shared.kubernetes.claim_specs import ClaimWithSpec, ClassWithSpec
from shared.model.devices.enforcers import HeldBy
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.leases.ledger import Reservation
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import device_name
from shared.model.requests.request import LEAST_SHARE_MIB, PodRequest
from shared.placing.trial_cluster import TrialCluster
from tests.support.build import device, ledger_node
from tests.support.effort import tries
from tools.generate.pages import ROOT

MANIFESTS = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"
SHIPPED = {made["metadata"]["name"]: made for made in yaml.safe_load_all(MANIFESTS.read_text())}
MIB = 1 << 20
NODE = ledger_node("n1", *(device(f"GPU-{gpu}", gpu, memory_mib=16_000) for gpu in range(2)))
OWNED: dict[str, Any] = {
    "ownerReferences": [{"kind": "Pod", "name": "p", "uid": "u", "controller": True}]
}


def read(kind: Any, manifest: object) -> Any:
    return msgspec.json.decode(json.dumps(manifest), type=kind)


CLASS_OBJECTS = {name: read(ClassWithSpec, SHIPPED[name]) for name in SHIPPED}


def requested(
    exactly: dict[str, Any] | None = None,
    *,
    devices: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    classes: dict[str, ClassWithSpec] | None = None,
    **metadata: Any,
) -> ClaimDemand | None:
    request = {"name": "gpu", "exactly": {"deviceClassName": CLASSES[0], **(exactly or {})}}
    claim = {
        "metadata": {"name": "c", "uid": "uid-c", **metadata},
        "spec": {"devices": {"requests": [request], **(devices or {})}},
        "status": status or {},
    }
    return demand_of(read(ClaimWithSpec, claim), CLASS_OBJECTS if classes is None else classes)


def test_the_classes_have_the_selector_by_which_plans_are_made() -> None:
    for name in CLASSES:
        [selector] = SHIPPED[name]["spec"]["selectors"]
        assert selector["cel"]["expression"] == SELECTOR


@pytest.mark.parametrize(
    ("exactly", "expected"),
    [
        ({}, {"gpus": 1, "whole": True, "cores_percent": 100}),
        ({"count": 2}, {"gpus": 2, "whole": True}),
        ({"deviceClassName": "whole-gpu.leasehold.dev"}, {"whole": True}),
        ({"capacity": {"requests": {"cores": "100"}}}, {"whole": True, "cores_percent": 100}),
        (
            {"capacity": {"requests": {"cores": "50"}}},
            {"whole": False, "cores_percent": 50, "memory_bytes": None},
        ),
        (
            {"allocationMode": "ExactCount", "capacity": {"requests": {"memory": "8Gi"}}},
            {"whole": False, "cores_percent": 0, "memory_bytes": 8 << 30},
        ),
        (
            {"capacity": {"requests": {"memory": "1Mi"}}},
            {"memory_bytes": LEAST_SHARE_MIB * MIB},
        ),
    ],
)
def test_a_request_is_as_one_by_resource_names(
    exactly: dict[str, Any], expected: dict[str, Any]
) -> None:
    demand = requested(exactly)

    assert demand is not None
    [gpu] = demand.containers
    assert {name: getattr(gpu, name) for name in expected} == expected
    assert (demand.claim.claim, demand.claim.name, gpu.container) == ("uid-c", "c", "gpu")


def test_only_a_claim_of_one_pod_may_be_held_by_the_driver() -> None:
    exactly = {"capacity": {"requests": {"memory": "8Gi"}}}
    shared = requested(exactly)
    own = requested(exactly, **OWNED)

    assert shared is not None
    assert own is not None
    assert shared.containers[0].held_by == HeldBy(memory="hami-core")
    assert own.containers[0].held_by == HeldBy()


@pytest.mark.parametrize(
    "changed",
    [
        {"exactly": {"selectors": [{"cel": {"expression": "true"}}]}},
        {"exactly": {"tolerations": [{"operator": "Exists"}]}},
        {"exactly": {"adminAccess": True}},
        {"exactly": {"allocationMode": "All"}},
        {"exactly": {"count": 0}},
        {"exactly": {"count": 33}},
        {"exactly": {"laterField": 1}},
        {"exactly": {"deviceClassName": "mig.leasehold.dev"}},
        {"exactly": {"deviceClassName": "mps.leasehold.dev"}},
        {"exactly": {"deviceClassName": "gpu.example.com"}},
        {"exactly": {"capacity": {"requests": {"slots": "1"}}}},
        {"exactly": {"capacity": {"requests": {"memory": "much"}}}},
        {"exactly": {"capacity": {"requests": {"cores": "101"}}}},
        {"exactly": {"capacity": {"requests": {"memory": "-1Gi"}}}},
        {"exactly": {"capacity": {"requests": {"memory": "9000Pi"}}}},
        {"exactly": {"capacity": {"requests": {"cores": "-1", "memory": "1Gi"}}}},
        {"devices": {"requests": []}},
        {"devices": {"requests": [{"name": "x", "firstAvailable": [{"name": "y"}]}]}},
        {"devices": {"constraints": [{"matchAttribute": "gpu.leasehold.dev/model"}]}},
        {"devices": {"config": [{"opaque": {"driver": "gpu.leasehold.dev"}}]}},
        {"status": {"allocation": {"devices": {"results": []}}}},
        {"classes": {}},
    ],
    ids=str,
)
def test_no_plan_is_made_for_what_kube_scheduler_alone_understands(changed: Any) -> None:
    assert requested(**changed) is None


@pytest.mark.parametrize(
    "spec",
    [
        {"selectors": []},
        {"selectors": [{"cel": {"expression": SELECTOR}}, {"cel": {"expression": "true"}}]},
        {"selectors": [{"cel": {"expression": f"{SELECTOR} && true"}}]},
        {"selectors": [{"cel": {"expression": SELECTOR}}], "config": [{"opaque": {}}]},
        {"selectors": "all"},
    ],
    ids=str,
)
def test_no_plan_is_made_for_a_class_that_selects_something_else(spec: dict[str, Any]) -> None:
    changed = {**CLASS_OBJECTS, CLASSES[0]: read(ClassWithSpec, {"spec": spec})}

    assert requested(classes=changed) is None
    assert requested({"deviceClassName": CLASSES[1]}, classes=changed) is not None


@settings(max_examples=tries(200), deadline=None)
@given(
    memory_mib=st.none() | st.integers(min_value=1, max_value=16_000),
    cores=st.none() | st.integers(min_value=0, max_value=100),
    count=st.integers(min_value=1, max_value=2),
    owned=st.booleans(),
)
def test_a_plan_has_the_shares_that_the_lease_of_the_allocation_takes(
    memory_mib: int | None, cores: int | None, count: int, owned: bool
) -> None:
    amounts = {"memory": f"{memory_mib}Mi", "cores": str(cores)}
    wanted = {"memory": memory_mib, "cores": cores}
    requests = {name: amounts[name] for name in wanted if wanted[name] is not None}
    capacity = {"capacity": {"requests": requests}} if requests else {}
    demand = requested({"count": count, **capacity}, **(OWNED if owned else {}))
    assert demand is not None

    planned = TrialCluster([NODE]).placement_on(
        NODE.facts.name, PodRequest(containers=demand.containers)
    )
    consumed = None if memory_mib is None else max(memory_mib, LEAST_SHARE_MIB)
    allocated = AllocatedClaim(
        claim=PodUid("uid-c"),
        namespace=Namespace("a"),
        name="c",
        node=NodeName("n1"),
        generation="1",
        devices=tuple(
            AllocatedDevice(
                request="gpu",
                device=device_name(gpu.uuid),
                memory_mib=consumed,
                cores_percent=cores or 0,
            )
            for gpu, _ in NODE.devices[:count]
        ),
        is_of_one_pod=owned,
    )
    leased = reservation_of(allocated, NODE)

    assert planned is not None
    assert isinstance(leased, Reservation)
    [placement] = leased.candidates

    def sizes(shares: Any) -> list[tuple[object, ...]]:
        return [
            (share.memory_mib, share.cores_percent, share.mode, share.memory) for share in shares
        ]

    if consumed == 16_000 and (cores or 0) in {0, 100}:  # the lease is for the whole device then
        assert [share.memory_mib for share in planned.shares] == [16_000] * count
    else:
        assert sizes(planned.shares) == sizes(placement.shares)
