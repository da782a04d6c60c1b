"""Which sizes a running lease can get, and why not others."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.binder.resize.rules import SizeChange, decide, is_smaller, no_capacity
from shared.dialects import DIALECTS
from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.device import DeviceUse
from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.leases.lease import (
    MIB,
    Lease,
    LeaseState,
    MigPlacement,
    RequestedUnits,
    Share,
    ShareSize,
    WaitingSize,
)
from shared.model.leases.ledger import LedgerNode, NoCapacity
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.request import SharingPolicy
from tests.support.build import V100_MIB, device, lease, ledger_node, share

NODE = ledger_node("n1", device(), device("GPU-b", 1), served=("volcano.sh/vgpu-number",))


def running(*shares: Share, dialect: str = "volcano-vgpu", **fields: Any) -> Lease:
    given_ = shares or (share(memory_mib=4_000, cores_percent=20),)
    known = {"dialect": dialect, "state": LeaseState.ACTIVE, "version": 3, **fields}
    return lease("uid-1", "n1", *given_, **known)


def resize_to(
    mib: int | None = None, cores: int | None = None, container: str = ""
) -> ResizeRequest:
    return ResizeRequest(
        pod=PodUid("uid-1"), container=container, memory_mib=mib, cores_percent=cores
    )


def assert_refused(
    before: Lease | None, requested: ResizeRequest, node: LedgerNode | None = NODE
) -> tuple[str, str]:
    found = decide(before, requested, node)
    assert isinstance(found, ResizeReply), found
    return found.reason, found.hint


def assert_changed(before: Lease, requested: ResizeRequest, node: LedgerNode = NODE) -> SizeChange:
    found = decide(before, requested, node)
    assert isinstance(found, SizeChange), found
    return found


def test_memory_and_cores_change_alone_or_together() -> None:
    before = running()

    for requested, size in (
        (resize_to(6_000), (6_000, 20)),
        (resize_to(cores=30), (4_000, 30)),
        (resize_to(2_000, 99), (2_000, 99)),
    ):
        change = assert_changed(before, requested)
        (now,) = change.after
        assert (now.memory_mib, now.cores_percent) == size
        assert now.requested_size == ShareSize(memory_mib=4_000, cores_percent=20)
        assert change.shrinks == (size[0] < 4_000)
        assert change.lease.version == before.version


def test_what_the_driver_holds_is_resized_without_the_library() -> None:
    held: dict[str, Any] = {"memory": "driver", "compute": "none", "mode": "driver"}
    before = running(share(memory_mib=4_000, cores_percent=0, **held))

    (now,) = assert_changed(before, resize_to(2_001)).after

    assert (now.memory_mib, now.memory) == (2_001, "driver")
    unheld = structs.replace(before.shares[0], memory="none")
    reason, _ = assert_refused(running(unheld, dialect="volcano-gpushare"), resize_to(2_000))
    assert "neither the driver nor HAMi-core enforces" in reason


def test_one_container_of_a_pod_waits_for_a_smaller_size() -> None:
    size = {"memory_mib": 1_000, "cores_percent": 20}
    of_a = WaitingSize(container="a", since=1.0, **size)
    before = running(
        *(share(container=name, memory_mib=4_000, cores_percent=20) for name in "ab"),
        waiting_size=of_a,
    )

    again = assert_changed(before, resize_to(1_000, container="a")).waiting(9.0)
    other = assert_changed(before, resize_to(1_000, container="b"))
    least = assert_changed(before, resize_to(999, container="a")).waiting(9.0)

    assert again == before
    assert isinstance(least, Lease)
    assert least.waiting_size == WaitingSize(
        container="a", memory_mib=999, cores_percent=20, since=9.0
    )
    assert least.shares == before.shares
    assert other.lease.waiting_size == of_a
    refusal = other.waiting(9.0)
    assert isinstance(refusal, ResizeReply)
    assert "container a waits for 1000 MiB already" in refusal.reason
    assert assert_changed(before, resize_to(4_000, container="a")).lease.waiting_size is None


def test_the_same_size_is_no_change_and_the_requested_size_clears_the_former_one() -> None:
    before = running()
    larger = assert_changed(before, resize_to(6_000)).lease

    assert assert_changed(before, resize_to(4_000, 20)).is_none
    assert assert_changed(larger, resize_to(4_000)).lease.shares == before.shares


def test_only_the_named_container_changes_and_all_its_devices_do() -> None:
    before = running(
        share(memory_mib=4_000),
        share("GPU-b", 1, memory_mib=3_000),
        share("GPU-b", 1, "side", memory_mib=1_000),
    )

    change = assert_changed(before, resize_to(3_500, container="main"))

    assert [each.memory_mib for each in change.lease.shares] == [3_500, 3_500, 1_000]
    assert change.shrinks
    assert assert_refused(before, resize_to(3_500)) == (
        "2 of its containers have shares: main, side",
        "name one of them: -c main",
    )
    reason, hint = assert_refused(before, resize_to(3_500, container="other"))
    assert "container other has no share; these have: main, side" in reason
    assert hint == "-c main"


@pytest.mark.parametrize(
    ("before", "requested", "reason", "hint"),
    [
        (None, resize_to(1), "has no lease", "explain"),
        (running(state=LeaseState.BOUND), resize_to(1), "its lease is bound", "once the pod runs"),
        (
            running(share(mig=MigPlacement(layout="l", position=0, profile="1g.5gb"))),
            resize_to(1_000),
            "MIG instance 1g.5gb",
            "an instance that fits",
        ),
        (running(share(whole=True)), resize_to(1_000), "has GPU 0 whole", "delete the pod"),
        (running(share(init=True)), resize_to(1_000), "is an init container", "-c"),
        (running(), resize_to(), "no size is requested", "--memory 6Gi"),
        (running(), resize_to(0), "0 MiB is not a size", "--memory"),
        (running(), resize_to(V100_MIB + 1), f"{V100_MIB} MiB in all", "larger model"),
        (running(), resize_to(cores=100), "1 to 99 percent", "device to itself"),
        (running(), resize_to(cores=0), "1 to 99 percent", "device to itself"),
        (
            running(share(cores_percent=100, sharing=SharingPolicy.EXCLUSIVE)),
            resize_to(cores=50),
            "to itself",
            "--memory alone",
        ),
        (
            running(share(unit_mib=256)),
            resize_to(1_000),
            "units of 256 MiB",
            "768Mi or --memory 1024Mi",
        ),
        (
            running(share(unit_mib=30_000)),
            resize_to(31_000),
            "units of 30000 MiB",
            "--memory 30000Mi",
        ),
        (running(share("GPU-gone")), resize_to(1_000), "is not reported", "doctor"),
        (
            running(share(memory_mib=4_000), dialect="volcano-gpushare"),
            resize_to(2_000),
            "neither the driver nor HAMi-core enforces",
            "delete the pod",
        ),
        (running(dialect="klingon"), resize_to(2_000), "how its GPU was requested: 'klingon'", ""),
    ],
)
def test_an_impossible_size_is_refused_with_reason_and_hint(
    before: Lease | None, requested: ResizeRequest, reason: str, hint: str
) -> None:
    message, tried = assert_refused(before, requested)

    assert reason in message
    assert hint in tried


def test_a_resource_counted_in_device_ids_cannot_change() -> None:
    cards = ledger_node("n1", device(), served=("tencent.com/vcuda-core",))
    before = running(share(memory_mib=4_096, cores_percent=20), dialect="tencent")

    reason, _ = assert_refused(before, resize_to(cores=30), cards)

    assert "counts tencent.com/vcuda-core in 20 device IDs" in reason
    assert assert_changed(before, resize_to(2_048), cards).shrinks


def test_koordinators_units_and_annotation_follow() -> None:
    terms = RequestedUnits(memory_mib=16_384, memory_percent=50)
    before = running(
        share(
            memory_mib=16_384, requested_units=terms, sharing=SharingPolicy.BEST_EFFORT, slots=100
        ),
        dialect="koordinator",
    )

    now = assert_changed(before, resize_to(8_192, 30)).lease

    assert now.shares[0].limit_bytes == 8_192 * MIB
    assert now.shares[0].sharing is SharingPolicy.SHARED
    written = DIALECTS["koordinator"].resized_annotations(now)
    assert '"koordinator.sh/gpu-memory":"8Gi"' in next(iter(written.values()))
    reason, _ = assert_refused(before, resize_to(V100_MIB))
    assert (
        "would have a share of koordinator that neither the driver nor HAMi-core enforces" in reason
    )


def full(code: str, **fields: Any) -> NoCapacity:
    use = DeviceUse(memory_mib=30_000, cores_percent=90, shares=3)
    return NoCapacity(
        pod=PodUid("uid-1"), reason=code, devices={DeviceUuid("GPU-a"): use}, **fields
    )


@pytest.mark.parametrize(
    ("why", "reason", "hint"),
    [
        ("memory of GPU-a", "2768 of them free, and 4000 more", "--memory 6768Mi would fit"),
        ("cores of GPU-a", "10 % of the cores of GPU 0", "--cores 30 would fit now"),
        ("claimed of GPU-a", "reserved for a pod", "leasehold preemptions"),
        ("device-unhealthy of GPU-a", "unhealthy", "smaller"),
        ("device-excluded of GPU-a", "annotation", "smaller"),
        ("device-moved of GPU-a", "device-moved", "doctor"),
        ("device-unknown of GPU-x", "does not know GPU GPU-x", ""),
    ],
)
def test_missing_capacity_is_explained_in_numbers(why: str, reason: str, hint: str) -> None:
    change = assert_changed(running(), resize_to(8_000, 40))

    refusal = no_capacity(full(why), change, NODE)

    assert reason in refusal.reason
    assert hint in refusal.hint


@given(
    st.integers(1, 9_000),
    st.sampled_from([1, 10, 256]),
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 90)), min_size=2, max_size=2),
)
def test_the_size_that_a_hint_names_fits_every_gpu_of_the_container(
    mib: int, unit: int, others: list[tuple[int, int]]
) -> None:
    cards = (device("GPU-a", memory_mib=10_000), device("GPU-b", 1, memory_mib=10_000))
    node = ledger_node("n1", *cards, served=("volcano.sh/vgpu-number",))
    held = max(mib - mib % unit, unit)
    before = running(
        *(share(c.uuid, c.index, memory_mib=held, cores_percent=5, unit_mib=unit) for c in cards)
    )
    taken = {
        card.uuid: DeviceUse(
            memory_mib=min(held + other, 10_000), cores_percent=5 + cores, shares=2, fence=1
        )
        for card, (other, cores) in zip(cards, others, strict=True)
    }

    largest = resize_to(10_000 - 10_000 % unit)
    for wanted, code in ((largest, "memory"), (resize_to(None, 99), "cores")):
        change = decide(before, wanted, node)
        if not isinstance(change, SizeChange) or change.is_none:
            continue
        lacking = NoCapacity(pod=before.pod, reason=f"{code} of GPU-a", devices=taken)
        hint = no_capacity(lacking, change, node).hint
        [(size, amount)] = re.findall(r"--(memory|cores) (\d+)", hint)
        tried = resize_to(int(amount)) if size == "memory" else resize_to(None, int(amount))
        found = decide(before, tried, node)
        assert not isinstance(found, ResizeReply)
        if isinstance(found, SizeChange):
            for old, new in zip(found.before, found.after, strict=True):
                use = taken[old.device]
                assert use.memory_mib - old.memory_mib + new.memory_mib <= 10_000
                assert use.cores_percent - old.cores_percent + new.cores_percent <= 100


@pytest.mark.parametrize(
    ("fault", "told"),
    [("XID 79", "XID 79"), ("pod secret/train uses it", "no new lease can use it")],
)
def test_a_fault_that_names_pods_is_not_told_to_the_tenant_of_another(
    fault: str, told: str
) -> None:
    change = assert_changed(running(), resize_to(8_000, 40))
    node = ledger_node("n1", device("GPU-a", healthy=False, fault=fault))

    refusal = no_capacity(full("device-unhealthy of GPU-a"), change, node)

    assert refusal.reason.endswith(f"is unhealthy: {told}")


def test_an_exceeded_quota_is_named() -> None:
    excess = QuotaExcess(measure="memoryMiB", limit=5_000, used=1_000, requested=8_000)

    refusal = no_capacity(
        full("quota", quotas=(excess,)), assert_changed(running(), resize_to(8_000)), NODE
    )

    assert refusal.reason == (
        "the GPU quota of namespace default allows 5000 MiB of GPU memory; other leases have 1000 "
        "MiB of GPU memory, and this one would have 8000 MiB of GPU memory"
    )
    assert refusal.hint.startswith("--memory 4000Mi would be within it, or ask an administrator")
    assert "gpuquota default" in refusal.hint


@pytest.mark.parametrize(
    ("measure", "limit", "used"),
    [("memoryMiB", 5_000, 1_000), ("memoryMiB", 5_001, 0), ("cores", 450, 100)],
)
def test_the_size_that_a_hint_about_a_quota_names_is_within_it(
    measure: str, limit: int, used: int
) -> None:
    excess = QuotaExcess(measure=measure, limit=limit, used=used, requested=8_000)
    change = assert_changed(running(), resize_to(8_000, 80))

    hint = no_capacity(full("quota", quotas=(excess,)), change, NODE).hint

    [(size, amount)] = re.findall(r"--(memory|cores) (\d+)", hint)
    tried = resize_to(int(amount)) if size == "memory" else resize_to(None, int(amount))
    usage = charge_of(assert_changed(running(), tried).after, {DeviceUuid("GPU-a"): V100_MIB})
    held = {"memory": usage.memory_mib, "cores": usage.cores_milli}[size]
    assert limit - used - 10 < held <= limit - used


@given(st.integers(1, V100_MIB), st.integers(1, 99), st.integers(1, V100_MIB), st.integers(1, 99))
def test_a_resize_and_its_reverse_restore_the_lease(mib: int, cores: int, to: int, tc: int) -> None:
    before = running(share(memory_mib=mib, cores_percent=cores))
    there = decide(before, resize_to(to, tc), NODE)
    assert isinstance(there, SizeChange)
    assert there.is_none is ((mib, cores) == (to, tc))

    back = assert_changed(structs.replace(there.lease, version=4), resize_to(mib, cores))

    assert back.lease == structs.replace(before, version=4)


@pytest.mark.parametrize(("kept_mib", "counts"), [(8_001, False), (8_000, True), (0, False)])
def test_a_container_keeps_no_more_than_its_lease(kept_mib: int, *, counts: bool) -> None:
    """Its agent says how much, and the agent may be stolen."""
    held = running(share(memory_mib=8_000))
    kept = ResizeRequest(pod=held.pod, container="main", memory_mib=kept_mib)

    assert is_smaller(kept, held) is counts
