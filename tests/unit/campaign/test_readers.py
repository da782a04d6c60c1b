"""What the judge reads from Redis, containers, checkpoints and the API server."""

import json
from typing import Any

import msgspec
from msgspec import structs

from services.binder.bind.agent_presence import REFUSED
from services.node_agent.isolation.region_image import RegionSeed, image_of
from shared.ledger.rows.lease_rows import encode_lease
from shared.model.lease import Lease, LeaseState, MigPlacement, Share
from shared.model.lease_copy import dump_lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.campaign.api_objects import seen_node, seen_pod
from tests.campaign.containers import (
    REGION_BYTES,
    REGION_HEAD,
    checkpoint_grants,
    grants_of,
    region_limits,
)
from tests.campaign.observations import Grant, HardwareInstance, RawLease, RawShare, RegionLimits
from tests.campaign.raw_ledger import decode_charges, decode_lease, distrusted_nodes
from tests.campaign.workload import DEVICE_MIB, PodPlan, Want, manifest


def share(device: str, slot: int | None, fence: int) -> Share:
    return Share(
        container="main",
        device=DeviceUuid(device),
        index=0,
        device_mib=DEVICE_MIB,
        memory_mib=1000,
        cores_percent=20,
        slot=slot,
        fence=fence,
    )


def stored(*shares: Share) -> Lease:
    return Lease(
        pod=PodUid("a"),
        namespace=Namespace("default"),
        name="pod-a",
        node=NodeName("node-0"),
        shares=shares,
        dialect="nvidia",
        state=LeaseState.BOUND,
        version=7,
        created_at=5.0,
        expires_at=9.0,
    )


def raw(*shares: tuple[str, int, int]) -> RawLease:
    return RawLease(
        pod="a",
        node="node-0",
        state="bound",
        version=7,
        created_at=5.0,
        expires_at=9.0,
        shares=tuple(
            RawShare(container="main", device=device, mib=1000, cores=20, slot=slot, fence=fence)
            for device, slot, fence in shares
        ),
    )


def test_a_stored_lease_of_one_share_is_decoded() -> None:
    value = encode_lease(stored(share("gpu-0", 3, 11)))

    assert decode_lease("a", value) == raw(("gpu-0", 3, 11))


def test_a_stored_lease_of_two_shares_is_decoded() -> None:
    value = encode_lease(stored(share("gpu-0", 3, 11), share("gpu-1", None, 12)))

    assert decode_lease("a", value) == raw(("gpu-0", 3, 11), ("gpu-1", -1, 12))


def test_charges_are_decoded() -> None:
    entry = {"window": "w", "kind": "charge", "units": 50, "lease": "a/1", "weight": 10}
    text = json.dumps(entry | {"from_ms": 5, "to_ms": 10}).encode()

    [charge] = decode_charges([(b"1-0", {b"e": text})])

    assert (charge.start_ms, charge.end_ms, charge.weight, charge.units) == (5, 10, 10, 50)


def test_nodes_whose_agents_are_refused_are_read_from_the_reasons_of_cordons() -> None:
    cordons = {b"node-0": f"{REFUSED}node-1 has GPU-a".encode(), b"node-1": b"it does not respond"}

    assert distrusted_nodes(cordons) == {"node-0"}


def container(started_at: float = 1.0, phase: str = "running", **env: str) -> dict[str, Any]:
    main = {"phase": phase, "started_at": started_at, "env": env}
    return {"uid": "a", "containers": {"main": main}}


def read(state: dict[str, Any]) -> list[Grant]:
    return list(grants_of(state, "node-0", {0: "gpu-0", 1: "gpu-1"}, at=2.0))


def given(device: str, mib: int, cores: int = 0, **changes: Any) -> Grant:
    return Grant(pod="a", node="node-0", device=device, mib=mib, cores=cores, **changes)


def test_the_limits_of_each_vocabulary_are_read() -> None:
    per_device = container(
        NVIDIA_VISIBLE_DEVICES="gpu-1,gpu-0",
        CUDA_DEVICE_MEMORY_LIMIT_0="500m",
        CUDA_DEVICE_MEMORY_LIMIT_1="600m",
        CUDA_DEVICE_SM_LIMIT="30",
    )
    in_bytes = container(NVIDIA_VISIBLE_DEVICES="gpu-0", CUDA_DEVICE_MEMORY_LIMIT="4294967296")
    by_index = container(NVIDIA_VISIBLE_DEVICES="1", VOLCANO_GPU_ALLOCATED="2000")
    whole = container(NVIDIA_VISIBLE_DEVICES="gpu-0")

    assert read(per_device) == [given("gpu-1", 500, 30), given("gpu-0", 600, 30)]
    assert read(in_bytes) == [given("gpu-0", 4096, 0)]
    assert read(by_index) == [given("gpu-1", 2000, 0)]
    assert read(whole) == [given("gpu-0", DEVICE_MIB, 100, exclusive=True)]


def test_a_container_that_does_not_run_at_the_time_has_nothing() -> None:
    device: dict[str, Any] = {"NVIDIA_VISIBLE_DEVICES": "gpu-0"}

    assert read(container(started_at=3.0, **device)) == []
    assert read(container(phase="terminated", **device)) == []
    assert read(container(NVIDIA_VISIBLE_DEVICES="none")) == []


def test_a_checkpoint_is_read_by_container() -> None:
    lease = msgspec.to_builtins(stored(share("gpu-0", 3, 11)))
    allocation = {"pod": "a", "container": "main", "lease": lease, "activated_at": 4.0}

    [found] = checkpoint_grants({"node": "node-0", "entries": [{"allocation": allocation}]})
    none = checkpoint_grants(
        {"node": "node-0", "entries": [{"allocation": allocation | {"container": "other"}}]}
    )

    assert (found.pod, found.device, found.slot, found.fence) == ("a", "gpu-0", 3, 11)
    assert list(none) == []


def test_an_instance_is_read_from_a_lease_and_from_a_container() -> None:
    place = MigPlacement(layout="group1", position=2, profile="1g.10gb")
    value = encode_lease(stored(structs.replace(share("gpu-0", 2, 11), mig=place)))
    known = {"MIG-a": HardwareInstance(uuid="MIG-a", device="gpu-0", mib=9728)}
    state = container(NVIDIA_VISIBLE_DEVICES="MIG-a")

    [leased] = decode_lease("a", value).shares
    [read_from_env] = grants_of(state, "node-0", {}, 2.0, known)

    assert (leased.layout, leased.slot, leased.cores) == ("group1", 2, 0)
    assert read_from_env == given("gpu-0", 9728, instance="MIG-a")


def test_the_limits_of_a_region_are_read() -> None:
    seed = RegionSeed(memory_bytes=(5 << 30, 3 << 30), cores_percent=(40, 0))
    head = bytes(image_of(seed))

    limits = region_limits("a", head[:REGION_HEAD])

    assert len(head) == REGION_BYTES
    assert limits == RegionLimits(pod="a", mib=(5 << 10, 3 << 10), cores=(40, 100))
    assert region_limits("a", bytes(REGION_HEAD)) is None


def test_a_lowered_limit_in_a_checkpoint_counts() -> None:
    before, after = (msgspec.to_builtins(stored(share("gpu-0", 3, 11))) for _ in range(2))
    after["shares"][0]["memory_mib"] = 500
    allocation = {"pod": "a", "container": "main", "lease": before, "activated_at": 4.0}
    entry = {"allocation": allocation, "lowered": {"lease": after}}

    grants = checkpoint_grants({"node": "node-0", "entries": [entry, entry]})

    assert [each.mib for each in grants] == [500]


def test_the_copy_of_a_lease_is_read() -> None:
    pod = api_pod()
    pod["metadata"]["annotations"]["leasehold.dev/lease"] = dump_lease(
        stored(share("gpu-0", 3, 11), share("gpu-1", 4, 12))
    )

    seen = seen_pod(pod)

    assert seen is not None
    assert (seen.devices, seen.copied_mib) == (("gpu-0", "gpu-1"), (1000, 1000))


PLAN = PodPlan(name="p", vocabulary="hami", want=Want(2, 1000, 5), gang="g", gang_min=3)


def api_pod(**status: Any) -> dict[str, Any]:
    pod = manifest(PLAN)
    pod["metadata"] |= {"uid": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return pod | {"status": status}


def test_a_pod_of_the_campaign_is_seen_with_what_it_requests() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "r", "message": "m"}

    seen = seen_pod(api_pod(phase="Pending", conditions=[condition]))

    assert seen is not None
    assert (seen.want, seen.gang, seen.gang_min) == (PLAN.want, "g", 3)
    assert (seen.reason, seen.message, seen.forged, seen.runs) == ("r", "m", False, False)


def test_a_pod_of_another_user_is_ignored() -> None:
    pod = api_pod()
    pod["metadata"]["annotations"] = {}

    assert seen_pod(pod) is None


def test_a_node_is_ready_and_cordoned_as_its_object_states() -> None:
    node = {
        "metadata": {"name": "n"},
        "spec": {"unschedulable": True},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }

    assert (seen_node(node).ready, seen_node(node).cordoned) == (True, True)
    assert not seen_node(node | {"status": {}}).ready
