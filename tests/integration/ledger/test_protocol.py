"""The lease protocol holds whatever fails, and without any of its checks it does not."""

import pytest

from shared.model.request import Gang
from tests.model.faults import LeaseProtocol
from tests.model.mutations import mutated
from tests.model.rules import Step
from tests.model.runs import model_on_server

MAX_RUNS = 60
FIRST_SEEDS = {
    "reserve without memory": 5,
    "release keeps totals": 1,
    "fences stay": 3,
    "gone pods are placed": 10,
    "devices with shares move": 5,
    "nodes take idle devices": 15,
    "fences of any height count": 7,
    "leases of other nodes are activated": 5,
}
"""Seeds that find these mutations at once; with other rules it may take some more."""

ROLLED_BACK = (
    Step("redis", {"what": "save"}),
    Step("create_pods", {"mib": (60,)}),
    Step("flow", {}),
    Step("redis", {"what": "roll back unseen"}),
)
LATE_BINDING = (
    Step("slow_api", {"writes": 1}),
    Step("create_pods", {"mib": (100,)}),
    Step("flow", {}),
    Step("redis", {"what": "flush"}),
    Step("create_pods", {"mib": (100, 100, 100)}),
    Step("work", {}),
    Step("pass_time", {"seconds": 7.0}),
    Step("work", {}),
    Step("answer_write", {"position": 0, "outcome": "done"}),
    Step("flow", {}),
)
"""A Binding that a rebuild did not wait for: its pod's device is leased a second time."""
RED = Gang(name="ns/red-2", min_member=2)
GANG_ENDS = (
    Step("create_gang", {"mib": 30, "gang": RED, "members": 2}),
    Step("flow", {}),
    Step("delete_pod", {"position": 0, "force": True}),
    Step("flow", {}),
    Step("create_gang", {"mib": 30, "gang": RED, "members": 1}),
    Step("deliver_half", {"position": 0, "replica": 0, "spared_calls": 1}),
    Step("pod_succeeds", {"position": 0}),
    Step("deliver", {"deliveries": ((0, 0, False),)}),
    Step("restore_link", {"position": 0}),
)
"""The last other pod of a gang ends after a placer has counted it."""
PLACERS_READ_NUMBERS_TWICE = (
    Step("redis", {"what": "save"}),
    Step("create_pods", {"mib": (100, 100, 100)}),
    Step("deliver", {"deliveries": ((0, 0, False),) * 3}),
    Step("pass_time", {"seconds": 7.0}),
    *(Step("disturb_link", {"number": n, "what": "delay", "spared_calls": 0}) for n in (2, 3)),
    Step("redis", {"what": "roll back"}),
    *(Step("delete_pod", {"position": 0, "force": True}),) * 3,
    *(Step("cordon_or_uncordon", {"position": 1}), Step("flow", {})) * 5,
    *(Step("restore_link", {"position": 0}),) * 2,
)
"""Placers have read of reservations that are lost; the feed's numbers are given again meanwhile."""
SHRINK = (
    Step("create_pods", {"mib": (60,)}),
    Step("flow", {}),
    Step("work", {}),
    Step("use_memory", {"position": 0, "percent": 100}),
    Step("resize", {"position": 0, "mib": 30, "number": 0}),
    Step("work", {}),
)
ONLY_B = (Step("cordon_or_uncordon", {"position": 0}), Step("work", {}), Step("work", {}))
"""All placers know that node a is cordoned."""
OLDER_STATE = (
    *(Step("cordon_or_uncordon", {"position": 0}),) * 2,
    Step("deliver", {"deliveries": ((1, 0, False), (0, 0, False))}),
)
"""A node is cordoned and uncordoned, and the binder handles the later state first."""
ONE_POSITION = (
    *ONLY_B,
    Step("create_instance_pods", {"mib": (25, 25), "mode": "mig"}),
    Step("deliver", {"deliveries": ((0, 0, True), (0, 1, True))}),
)
TWO_LAYOUTS = (
    *ONLY_B,
    Step("create_instance_pods", {"mib": (25, 25), "mode": "mig"}),
    Step("deliver", {"deliveries": ((0, 0, False),) * 2}),
    Step("delete_pod", {"position": 0, "force": True}),
    Step("deliver", {"deliveries": ((2, 0, False),)}),
    Step("create_instance_pods", {"mib": (50,), "mode": "mig"}),
    Step("deliver", {"deliveries": ((3, 1, True),)}),
)
"""Position 0 is free again, and a placer that knows of no lease chooses it in another layout."""
LOST_INSTANCES = (
    Step("redis", {"what": "save"}),
    Step("create_instance_pods", {"mib": (25, 25), "mode": "mig"}),
    Step("flow", {}),
    Step("redis", {"what": "roll back unseen"}),
    Step("create_instance_pods", {"mib": (100, 100), "mode": "mig"}),
    Step("flow", {}),
)
"""The ledger has lost the leases of instances in use, and leases their devices as a whole."""
FORCED = (
    Step("create_claim", {"mib": 60}),
    Step("allocate_claim", {"position": 0, "device": 0}),
    Step("flow", {}),
    Step("leave_claim", {"position": 0, "force": True}),
    Step("deliver", {"deliveries": ((1, 0, False),)}),
)
"""The binder reads of the deallocation while the container runs."""
UNWRITTEN = (
    Step("slow_api", {"writes": 9}),
    Step("create_claim", {"mib": 30}),
    Step("begin_allocation", {"position": 0, "device": 0, "replicas": (0, 1), "is_lost": False}),
    Step("cordon_or_uncordon", {"position": 0}),
    Step("allocate_claim", {"position": 0, "device": 3}),
)
"""The write of an allocation is slow, and another scheduler allocates another device meanwhile."""
ENDING = (Step("create_pods", {"mib": (60,), "run_s": 60}), Step("flow", {}), Step("work", {}))
FILL = (Step("create_pods", {"mib": (100, 100, 100)}), Step("flow", {}))
START = (
    Step("create_pods", {"mib": (60, 60, 60), "run_s": 60}),
    Step("work", {}),
    Step("create_pods", {"mib": (100,)}),
    *(Step("work", {}),) * 4,
)
"""A pod waits for one of the devices that these pods have for a minute."""
CORDONED = START + tuple(Step("cordon_or_uncordon", {"position": n}) for n in (0, 1))
DELETED = (*START, Step("delete_pod", {"position": 3, "force": True}), Step("work", {}))
LET_IN = START + tuple(
    step
    for n in range(3)
    for step in (
        Step("create_claim", {"mib": 30}),
        Step("allocate_claim", {"position": 0, "device": n}),
        Step("flow", {}),
    )
)
"""kube-scheduler gives ResourceClaims what is left of the devices, one of which is claimed."""


@pytest.mark.parametrize("name", FIRST_SEEDS)
def test_random_runs_find_the_mutation(name: str) -> None:
    with mutated(name), model_on_server() as model:
        seeds = range(FIRST_SEEDS[name], FIRST_SEEDS[name] + MAX_RUNS)
        assert any(model.run(seed, steps=50).failure for seed in seeds)


@pytest.mark.parametrize(
    ("name", "steps", "invariant"),
    [
        ("older states of nodes count", OLDER_STATE, "P7"),
        ("lost leases stay lost", ROLLED_BACK, "P6"),
        ("agents give out anything", ROLLED_BACK + FILL, "S9"),
        ("agents give out anything", LATE_BINDING, "S9"),
        ("gangs begin short", GANG_ENDS, "P5"),
        ("leases shrink before limits", SHRINK, "S7"),
        ("positions do not matter", ONE_POSITION, "S2"),
        ("layouts do not matter", TWO_LAYOUTS, "S1"),
        ("leases of prepared claims end", FORCED, "S8"),
        ("leases of other allocations count", UNWRITTEN, "P1"),
        ("agents destroy instances in use", LOST_INSTANCES, "S1"),
        ("activations are early", ENDING, "S11"),
        ("starts are withdrawn without a word", CORDONED, "S11"),
        ("starts are promised too early", START, "S11"),
        ("claims outlive their starts", DELETED, "S11"),
        ("devices stay claimed", DELETED, "S11"),
        ("claims let everything in", LET_IN, "S11"),
    ],
)
def test_these_steps_find_the_mutation_and_nothing_else(
    name: str, steps: tuple[Step, ...], invariant: str
) -> None:
    with model_on_server() as model:
        assert not model.repeat(steps).failure
    with mutated(name), model_on_server() as model:
        assert model.repeat(steps).invariant == invariant


@pytest.mark.parametrize("name", ["lost writes unseen", "replaced changes unseen"])
def test_placers_recognise_lost_changes_by_versions_and_by_what_replaced_them(name: str) -> None:
    with mutated(name), model_on_server() as model:
        assert not model.repeat(PLACERS_READ_NUMBERS_TWICE).failure
    with (
        mutated("lost writes unseen"),
        mutated("replaced changes unseen"),
        model_on_server() as model,
    ):
        assert model.repeat(PLACERS_READ_NUMBERS_TWICE).invariant == "P4"


RUNS = 200
DELIVERS_HALF = 6
"""A seed of a run in which it counts how many calls reach the server."""


def test_no_run_of_the_model_breaks_an_invariant() -> None:
    with model_on_server() as model:
        for seed in range(RUNS):
            run = model.run(seed, steps=50)
            if run.failure:
                raise AssertionError(f"seed {seed}: {model.shorten(run, limit_s=60)}")


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    with model_on_server() as model:
        first, second = (model.run(DELIVERS_HALF, steps=50) for _ in range(2))

    assert any(step.rule == "deliver_half" for step in first.steps)
    assert first.story == second.story


def test_a_pod_waits_where_resizes_freed_memory_and_no_cores() -> None:
    steps = [
        Step("create_pods", {"mib": (100, 100, 100)}),
        Step("work", {}),
        Step("resize", {"position": 2, "mib": 30, "number": 0}),
        Step("create_pods", {"mib": (60,)}),
        Step("work", {}),
        Step("resize", {"position": 3, "mib": 10, "number": 0}),
        Step("create_pods", {"mib": (60,)}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert sum(": resized" in line for line in run.story) == 2


def test_a_device_with_a_pod_of_which_no_record_is_left_takes_no_more_pods() -> None:
    steps = [
        Step("redis", {"what": "save"}),
        Step("create_pods", {"mib": (30, 30, 30)}),
        Step("flow", {}),
        Step("kill", {"which": "checkpoint", "number": 0}),
        Step("kill", {"which": "checkpoint", "number": 1}),
        Step("redis", {"what": "roll back unseen"}),
        Step("work", {}),
        Step("create_pods", {"mib": (60, 60, 60)}),
    ]
    with model_on_server() as model:
        assert not model.repeat(steps).failure


def test_a_resize_that_the_ledger_lost_unseen_is_restored_from_the_container() -> None:
    steps = [
        Step("create_pods", {"mib": (30, 30)}),
        Step("work", {}),
        Step("redis", {"what": "save"}),
        Step("resize", {"position": 0, "mib": 60, "number": 0}),
        Step("resize", {"position": 1, "mib": 10, "number": 0}),
        Step("work", {}),
        Step("redis", {"what": "roll back unseen"}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert "  binder 0 on p0-3 with 60 MiB: resized " in run.story


def test_a_size_in_use_is_restored_although_no_reply_says_that_the_container_has_it() -> None:
    steps = [
        Step("create_pods", {"mib": (10,)}),
        Step("work", {}),
        *(Step("lose_limits_reply", {"node": node}) for node in ("a", "b")),
        Step("resize", {"position": 0, "mib": 30, "number": 1}),
        Step("use_memory", {"position": 0, "percent": 100}),
        Step("redis", {"what": "flush"}),
    ]
    with model_on_server() as model:
        assert not model.repeat(steps).failure


def test_a_lowered_limit_that_cannot_be_raised_again_becomes_the_size_of_the_lease() -> None:
    """The ledger has lost the resize, and the agent has closed the device meanwhile."""
    steps = [
        Step("create_pods", {"mib": (60, 60, 30)}),
        Step("create_instance_pods", {"mib": (50,), "mode": "mig"}),
        Step("flow", {}),
        Step("create_pods", {"mib": (30, 60)}),
        Step("redis", {"what": "save"}),
        Step("work", {}),
        Step("kill", {"which": "checkpoint", "number": 0}),
        Step("redis", {"what": "roll back unseen"}),
        Step("deliver", {"deliveries": ((1, 1, True), (0, 1, False), (0, 1, True))}),
        Step("resize", {"position": 6, "mib": 10, "number": 0}),
        Step("redis", {"what": "roll back unseen"}),
    ]
    with model_on_server() as model:
        assert not model.repeat(steps).failure


@pytest.mark.parametrize("loss", ["roll back", "flush"])
def test_a_rollback_is_seen_although_the_ledger_was_being_rebuilt_before_it(loss: str) -> None:
    steps = [
        Step("redis", {"what": "save"}),
        Step("create_pods", {"mib": (60,)}),
        Step("flow", {}),
        Step("redis", {"what": loss}),
        Step("kill", {"which": "binder", "number": 0}),
        Step("redis", {"what": "roll back"}),
    ]
    with model_on_server() as model:
        machine = LeaseProtocol(model.server, model.folder, lambda _: None)
        for step in steps:
            machine.make(step)
        assert not machine.judge.read_ledger().ready
        machine.settle()
        machine.close()


@pytest.mark.parametrize("outcome", ["done", "lost"])
def test_of_two_schedulers_that_allocate_a_claim_one_writes_and_its_lease_stays(
    outcome: str,
) -> None:
    first, second = (
        {"position": 0, "device": n, "replicas": (n,), "is_lost": False} for n in (0, 1)
    )
    steps = [
        Step("create_claim", {"mib": 60}),
        Step("slow_api", {"writes": 1}),
        Step("begin_allocation", first),
        Step("begin_allocation", second),
        Step("answer_write", {"position": 0, "outcome": outcome}),
        Step("work", {}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert [line for line in run.story if "gives c0" in line] == [
        "  agent a gives c0-1 60 MiB of GPU-a-1"
    ]


def test_a_slow_change_of_a_layout_destroys_no_instance_that_was_given_out_meanwhile() -> None:
    steps = [
        Step("cordon_or_uncordon", {"position": 0}),
        Step("flow", {}),
        Step("create_instance_pods", {"mib": (25,), "mode": "mig"}),
        Step("flow", {}),
        Step("pod_succeeds", {"position": 0}),
        Step("work", {}),
        Step("disturb_driver", {"node": "b", "fault": "stuck"}),
        Step("create_instance_pods", {"mib": (50,), "mode": "mig"}),
        Step("flow", {}),
        *(Step("pass_time", {"seconds": 7.0}),) * 3,
        *(Step("flow", {}),) * 2,
        Step("create_instance_pods", {"mib": (25,), "mode": "mig"}),
        Step("flow", {}),
        Step("pass_time", {"seconds": 31.0}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert any("partitioner b destroys MIG-GPU-b-7@0+1" in line for line in run.story)
    assert sum("gives" in line and "MIG-GPU-b-7@0+1" in line for line in run.story) == 2


def test_no_instance_is_destroyed_on_a_device_with_a_pod_of_which_no_record_is_left() -> None:
    steps = [
        Step("redis", {"what": "save"}),
        Step("cordon_or_uncordon", {"position": 0}),
        Step("create_instance_pods", {"mib": (100, 50, 10), "mode": "mig"}),
        Step("flow", {}),
        Step("kill", {"which": "checkpoint", "number": 1}),
        Step("redis", {"what": "roll back unseen"}),
        Step("flow", {}),
        Step("work", {}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert any("gives p0" in line for line in run.story)


def test_a_container_starts_again_although_its_instance_and_its_record_are_lost() -> None:
    steps = [
        Step("create_instance_pods", {"mib": (25,), "mode": "mig"}),
        Step("work", {}),
        Step("reset_device", {"node": "a"}),
        Step("reset_device", {"node": "b"}),
        Step("kill", {"which": "checkpoint", "number": 0}),
        Step("kill", {"which": "checkpoint", "number": 1}),
        Step("work", {}),
    ]
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert sum("gives p0" in line for line in run.story) == 2
