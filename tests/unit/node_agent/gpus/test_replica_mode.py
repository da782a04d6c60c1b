"""When the GPUs of a node become replicas, or amounts again, and who is in the way."""

from dataclasses import replace

import pytest

from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.gpus.replica_mode import ReplicaMode, choose_mode
from services.node_agent.mig.instances import MigState
from shared.model.devices.device import Device, DeviceMode, Isolation
from shared.model.devices.replicas import Replicas
from shared.model.names import DeviceUuid
from tests.support.build import device

QUARTERS = Replicas(number=4, strategy="time-slicing", resource="nvidia.com/gpu")
BY_MPS = Replicas(number=4, strategy="mps", resource="nvidia.com/gpu")


def gpu_of(name: str = "GPU-a", index: int = 0) -> Gpu:
    return Gpu(uuid=DeviceUuid(name), index=index, model="Tesla T4", memory_mib=15_360)


def chosen(
    wanted: Replicas | None,
    *before: Device,
    holders: tuple[str, ...] | None = (),
    only_amounts: bool = False,
    gpus: tuple[Gpu, ...] = (gpu_of(),),
    missing_mps: str = "",
    isolation: Isolation = Isolation.SHARED,
) -> ReplicaMode:
    return choose_mode(
        SharingConfig(replicas=wanted, isolation=isolation),
        gpus,
        before,
        holders=holders,
        only_amounts=only_amounts,
        missing_mps=lambda _: missing_mps,
    )


def offered(replicas: Replicas | None) -> Device:
    if replicas is None:
        return device("GPU-a")
    return device("GPU-a", mode=DeviceMode.REPLICAS, replicas=replicas, slots=replicas.number)


def test_a_new_node_offers_what_its_configuration_says() -> None:
    assert chosen(QUARTERS, holders=None) == ReplicaMode(replicas=QUARTERS)
    assert chosen(None) == ReplicaMode()


def test_idle_gpus_change_in_both_directions() -> None:
    assert chosen(QUARTERS, offered(None)) == ReplicaMode(replicas=QUARTERS)
    assert chosen(None, offered(QUARTERS)) == ReplicaMode()
    assert chosen(BY_MPS, offered(QUARTERS)) == ReplicaMode(replicas=BY_MPS)


def test_pods_that_hold_parts_are_named_until_they_have_ended() -> None:
    holders = ("ml/b", "ml/a", *(f"ml/z{number}" for number in range(5)))

    waiting = chosen(QUARTERS, offered(None), holders=holders)

    assert waiting.replicas is None
    assert waiting.problem == (
        "GPUs are to be offered as 4 replicas by time-slicing once none is in use: ml/a, ml/b, "
        "ml/z0, ml/z1, ml/z2 and 2 more hold parts of them; cordon the node, and end them"
    )
    back = chosen(None, offered(QUARTERS), holders=("ml/a",))
    assert back.replicas == QUARTERS
    assert "offered by amounts once none is in use: ml/a hold" in back.problem


def test_nothing_changes_while_it_is_not_known_what_holds_gpus() -> None:
    waiting = chosen(QUARTERS, offered(None), holders=None)

    assert waiting.replicas is None
    assert "is not known yet" in waiting.problem


def test_the_mode_in_force_stays_whatever_is_known_of_its_holders() -> None:
    for holders in (None, ("ml/a",)):
        assert chosen(QUARTERS, offered(QUARTERS), holders=holders) == ReplicaMode(
            replicas=QUARTERS
        )


def test_a_gpu_that_is_not_listed_now_stays_as_it_was_offered_while_it_is_in_use() -> None:
    waiting = chosen(QUARTERS, offered(None), holders=("ml/a",), gpus=())

    assert waiting.replicas is None
    assert "ml/a hold" in waiting.problem
    assert chosen(QUARTERS, offered(None), gpus=()) == ReplicaMode(replicas=QUARTERS)


@pytest.mark.parametrize("before", [(), (offered(QUARTERS),)], ids=["no record", "replicas"])
def test_gpus_of_which_only_amounts_are_held_are_offered_by_amounts_until_they_end(
    before: tuple[Device, ...],
) -> None:
    """The agent has lost its records, or a claim's lease was on its way when the GPUs changed."""
    late = chosen(QUARTERS, *before, holders=("ml/a",), only_amounts=True)

    assert late.replicas is None
    assert "4 replicas by time-slicing once none is in use: ml/a hold" in late.problem
    assert chosen(QUARTERS, offered(None)) == ReplicaMode(replicas=QUARTERS)
    assert chosen(None, offered(None), holders=("ml/a",), only_amounts=True) == ReplicaMode()


def test_mps_beside_a_gpu_in_mig_mode_is_refused_at_the_node() -> None:
    mig = replace(gpu_of("GPU-m", 1), mig=MigState(enabled=True, pending=True, profiles=()))

    refused = chosen(BY_MPS, offered(None), gpus=(gpu_of(), mig))

    assert refused.replicas is None
    assert "GPU 1 is in MIG mode: MPS and MIG exclude each other" in refused.problem
    assert chosen(QUARTERS, offered(None), gpus=(gpu_of(), mig)).replicas == QUARTERS


def test_what_no_gpu_of_the_node_can_do_is_refused_with_the_reason() -> None:
    assert "mps, and GPU 0 has none: MPS is off" in chosen(BY_MPS, missing_mps="MPS is off").problem
    assert "isolation of this node is strict" in (
        chosen(QUARTERS, isolation=Isolation.STRICT).problem
    )
    small = replace(gpu_of(), memory_mib=3)
    assert "GPU 0 has 3 MiB: have fewer" in chosen(QUARTERS, gpus=(small,)).problem


def test_a_lost_gpu_is_offered_as_the_others_are() -> None:
    """Its record would keep the node's labels and resources of before."""
    lost = device("GPU-lost", 3)

    devices = devices_of([gpu_of()], SharingConfig(replicas=QUARTERS), [lost])

    assert [(card.uuid, card.replicas, card.slots) for card in devices] == [
        ("GPU-a", QUARTERS, 4),
        ("GPU-lost", QUARTERS, 4),
    ]
    assert all(card.mode is DeviceMode.REPLICAS for card in devices)
