"""The model finds what it is for: each check that is taken out leads to a broken invariant."""

import pytest

from shared.model.request import Gang
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
    Step("create_claim", {"mib": 60}),
    Step("begin_allocation", {"position": 0, "device": 0, "replicas": (0,), "is_lost": True}),
    Step("begin_allocation", {"position": 0, "device": 1, "replicas": (1,), "is_lost": False}),
    Step("flow", {}),
)
"""A write of an allocation is lost after its lease, and another device is allocated."""
FILL = (Step("create_pods", {"mib": (100, 100, 100)}), Step("flow", {}))


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
