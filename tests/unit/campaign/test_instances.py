"""What the judge finds of MIG instances."""

from typing import Any

from tests.campaign.observations import HardwareInstance
from tests.campaign.workload import MIG_LAYOUTS, Want
from tests.support.campaign import AT, found, grant, lease, ledger, pod, sample, waiting

MIG = frozenset({"gpu-0"})
INSTANCE = HardwareInstance(uuid="MIG-a", device="gpu-0", mib=9728)
THERE: dict[str, Any] = {"mig_devices": MIG, "instances": {"MIG-a": INSTANCE}}
WANT = Want(1, 9000, mig=True)
SMALL, LARGE = MIG_LAYOUTS["group1"][0], MIG_LAYOUTS["group4"][0]


def mig_pod(uid: str = "a", **changes: Any) -> Any:
    return pod(uid, want=WANT, copied_mib=(SMALL,), **changes)


def mig_lease(uid: str = "a", position: int = 0, layout: str = "group1", mib: int = SMALL) -> Any:
    return lease(uid, mib, position, position + 1, layout=layout)


def given(uid: str = "a", mib: int = 9728, **changes: Any) -> Any:
    return grant(uid, mib, 0, **{"instance": "MIG-a"} | changes)


def waits_for(mib: int, *leases: Any) -> set[str]:
    """Return what is found while a pod that needs an instance waits for long."""
    states = (
        sample(
            waiting(want=Want(1, mib, mig=True)), at=AT + second, ledger=ledger(*leases), **THERE
        )
        for second in range(20)
    )
    return found(*states) - {"P2", "P6"}


def test_an_instance_that_is_large_enough_is_right() -> None:
    state = sample(mig_pod(), ledger=ledger(mig_lease()), grants=(given(),), **THERE)

    assert not found(state)


def test_s1_two_containers_with_one_instance_are_found() -> None:
    leases = ledger(mig_lease(), mig_lease("b", 1))
    pods = (mig_pod(), mig_pod("b"))

    assert found(sample(*pods, grants=(given(), given("b")), ledger=leases, **THERE)) == {"S1"}


def test_s1_leases_of_two_layouts_of_one_device_are_found() -> None:
    leases = ledger(mig_lease(), mig_lease("b", 1, "group2"))

    assert found(sample(mig_pod(), mig_pod("b"), ledger=leases, **THERE)) == {"S1"}


def test_s7_an_instance_that_is_too_small_or_gone_is_found() -> None:
    leases = ledger(mig_lease())
    small = sample(mig_pod(), grants=(given(mib=8000),), ledger=leases, **THERE)
    gone = sample(mig_pod(), grants=(given(),), ledger=leases, mig_devices=MIG)
    none = sample(mig_pod(), grants=(grant(mib=9000, cores=0),), ledger=leases, **THERE)

    assert found(small) == found(gone) == found(none) == {"S7"}


def test_p4_a_pod_that_fits_on_an_instance_does_not_wait() -> None:
    seventh = [mig_lease(str(position), position) for position in range(7)]

    assert waits_for(30_000) == {"P4"}
    assert waits_for(9000, mig_lease("x")) == {"P4"}
    assert waits_for(30_000, mig_lease("x")) == set()
    assert waits_for(9000, *seventh) == set()
    assert waits_for(9000, mig_lease("x", layout="group4", mib=LARGE)) == set()
