"""The lease protocol holds whatever fails, and without any of its checks it does not."""

from collections.abc import Callable, Mapping
from itertools import count

import pytest

from shared.model.requests.request import Gang
from tests.model.faults import LeaseProtocol
from tests.model.mutations import mutated
from tests.model.rules import Step
from tests.model.runs import model_on_server
from tests.support.effort import tries


class _Do:
    """Steps, each written as a call of its rule."""

    def __getattr__(self, rule: str) -> Callable[..., Step]:
        return lambda **arguments: Step(rule, arguments)


do = _Do()
MAX_RUNS = 60
FIRST_SEEDS = {
    "reserve without memory": 5,
    "release keeps totals": 1,
    "fences stay": 9,
    "gone pods are placed": 31,
    "devices with shares move": 7,
    "nodes take idle devices": 91,
    "fences of any height count": 30,
    "leases of other nodes are activated": 108,
}
"""Seeds that find these mutations at once; with other rules it may take some more."""

ROLLED_BACK = (
    do.redis(what="save"),
    do.create_pods(mib=(60,)),
    do.flow(),
    do.redis(what="roll back unseen"),
)
LATE_BINDING = (
    do.slow_api(writes=1),
    do.create_pods(mib=(100,)),
    do.flow(),
    do.redis(what="flush"),
    do.create_pods(mib=(100, 100, 100)),
    do.work(),
    do.pass_time(seconds=7.0),
    do.work(),
    do.answer_write(position=0, outcome="done"),
    do.flow(),
)
"""A Binding that a rebuild did not wait for: its pod's device is leased a second time."""
RED = Gang(name="ns/red-2", min_member=2)
GANG_ENDS = (
    do.create_gang(mib=30, gang=RED, members=2),
    do.flow(),
    do.delete_pod(position=0, force=True),
    do.flow(),
    do.create_gang(mib=30, gang=RED, members=1),
    do.deliver_half(position=0, replica=0, spared_calls=1),
    do.pod_succeeds(position=0),
    do.deliver(deliveries=((0, 0, False),)),
    do.restore_link(position=0),
)
"""The last other pod of a gang ends after a placer has counted it."""
PLACERS_READ_NUMBERS_TWICE = (
    do.redis(what="save"),
    do.create_pods(mib=(100, 100, 100)),
    do.deliver(deliveries=((0, 0, False),) * 3),
    do.pass_time(seconds=7.0),
    *(do.disturb_link(number=n, what="delay", spared_calls=0) for n in (2, 3)),
    do.redis(what="roll back"),
    *(do.delete_pod(position=0, force=True),) * 3,
    *(do.cordon_or_uncordon(position=1), do.flow()) * 5,
    *(do.restore_link(position=0),) * 2,
)
"""Placers have read of reservations that are lost; the feed's numbers are given again meanwhile."""
CLAIMING = (do.create_claiming_pods(mib=(60,)), do.flow())
CLAIM_GONE = (*CLAIMING, do.delete_volume_claim(position=0), do.flow(), do.work())
SHRINK = (
    do.create_pods(mib=(60,)),
    do.flow(),
    do.work(),
    do.use_memory(position=0, percent=100),
    do.resize(position=0, mib=30, number=0),
    do.work(),
)
ONLY_B = (do.cordon_or_uncordon(position=0), do.work(), do.work())
"""All placers know that node a is cordoned."""
OLDER_STATE = (
    *(do.cordon_or_uncordon(position=0),) * 2,
    do.deliver(deliveries=((1, 0, False), (0, 0, False))),
)
"""A node is cordoned and uncordoned, and the binder handles the later state first."""
ONE_POSITION = (
    *ONLY_B,
    do.create_instance_pods(mib=(25, 25), mode="mig"),
    do.deliver(deliveries=((0, 0, True), (0, 1, True))),
)
TWO_LAYOUTS = (
    *ONLY_B,
    do.create_instance_pods(mib=(25, 25), mode="mig"),
    do.deliver(deliveries=((0, 0, False),) * 2),
    do.delete_pod(position=0, force=True),
    do.deliver(deliveries=((2, 0, False),)),
    do.create_instance_pods(mib=(50,), mode="mig"),
    do.deliver(deliveries=((3, 1, True),)),
)
"""Position 0 is free again, and a placer that knows of no lease chooses it in another layout."""
LOST_INSTANCES = (
    do.redis(what="save"),
    do.create_instance_pods(mib=(25, 25), mode="mig"),
    do.flow(),
    do.redis(what="roll back unseen"),
    do.create_instance_pods(mib=(100, 100), mode="mig"),
    do.flow(),
)
"""The ledger has lost the leases of instances in use, and leases their devices as a whole."""
FORCED = (
    do.create_claim(mib=60),
    do.allocate_claim(position=0, device=0),
    do.flow(),
    do.leave_claim(position=0, force=True),
    do.deliver(deliveries=((1, 0, False),)),
)
"""The binder reads of the deallocation while the container runs."""
UNWRITTEN = (
    do.slow_api(writes=9),
    do.create_claim(mib=30),
    do.begin_allocation(position=0, device=0, replicas=(0, 1), is_lost=False),
    do.cordon_or_uncordon(position=0),
    do.allocate_claim(position=0, device=3),
)
"""The write of an allocation is slow, and another scheduler allocates another device meanwhile."""
ENDING = (do.create_pods(mib=(60,), run_s=60), do.flow(), do.work())
OUTLIVED = (
    *ONLY_B,
    do.create_pods(mib=(100,)),
    do.work(),
    do.process_stays(position=0),
    do.pod_succeeds(position=0),
    do.create_pods(mib=(50, 50)),
    do.flow(),
    *(do.work(),) * 3,
)
"""A pod ends, a process of it does not, and two other pods get its device at once."""
SICK = (
    *ONLY_B,
    do.cut_off_or_reconnect(node="b"),
    do.create_pods(mib=(60,)),
    do.flow(),
    do.device_hangs(node="b", position=1),
    *(do.pass_time(seconds=7.0),) * 3,
    do.cut_off_or_reconnect(node="b"),
    *(do.work(),) * 3,
)
"""The device of a pod hangs before the node's agent is asked whether the pod may be bound."""
SICK_WHILE_BOUND = (
    do.device_hangs(node="b", position=1),
    *(do.pass_time(seconds=7.0),) * 3,
    do.flow(),
    do.answer_write(position=0, outcome="done"),
    *(do.work(),) * 3,
)
"""Its device hangs before the Binding of a pod arrives; its agent is asked again meanwhile."""
TWO_IN_FLIGHT = (
    *ONLY_B,
    do.create_pods(mib=(30,)),
    do.flow(),
    do.create_pods(mib=(20, 20)),
    do.deliver(deliveries=((0, 0, False),) * 4),
    do.device_hangs(node="b", position=1),
    *(do.pass_time(seconds=7.0),) * 3,
    *(do.work(),) * 3,
)
"""Two pods are placed on a device to which the kubelet has just given another one, and it hangs."""
UNSENT = (
    *ONLY_B,
    do.create_pods(mib=(60,)),
    do.deliver(deliveries=((0, 0, False),)),
    do.slow_api(writes=1),
    do.flow(),
    do.device_hangs(node="b", position=1),
    *(do.pass_time(seconds=7.0),) * 3,
    do.answer_write(position=0, outcome="lost"),
    *(do.work(),) * 3,
)
"""The lease of a pod is committed, and its Binding is lost; its device hangs meanwhile."""
HANGS = (
    *ONLY_B,
    do.device_hangs(node="b", position=0),
    do.create_instance_pods(mib=(25, 25), mode="mig"),
    do.flow(),
    *(do.pass_time(seconds=7.0), do.work()) * 7,
)
"""Two pods need a MIG layout of a device that hangs."""
STOLEN_WHILE_IT_HANGS = (
    do.device_hangs(node="b", position=0),
    do.kill(which="agent", number=1),
    do.agent_lies(what="devices", size="same", node="a", number=0),
    do.flow(),
)
"""A device hangs while its agent restarts, and the agent of another node says that it has it."""
UNSEEN_LEASE = (
    *ONLY_B,
    do.create_pods(mib=(60,)),
    *(do.deliver(deliveries=((0, 0, False),)),) * 2,
    do.lose(position=0),
    do.cut_off_or_reconnect(node="b"),
    do.part_works(node="b", what="kubelet"),
    do.pass_time(seconds=7.0),
    do.cut_off_or_reconnect(node="b"),
    do.work(),
)
"""A pod is bound, and its agent is cut off from the binders before it knows of the lease."""
OLD_LIST = (
    *ONLY_B,
    do.kubelet_loses_api(node="b", what="old"),
    do.kubelet_finds_api(position=0, what="old"),
    do.create_pods(mib=(60,)),
    do.flow(),
    do.work(),
)
"""A kubelet admits a pod that its list does not contain yet."""
REPLICAS_IN_USE = (
    *ONLY_B,
    do.create_pods(mib=(60,)),
    do.flow(),
    do.configure_replicas(node="b", number=2, strategy="time-slicing"),
    *(do.work(),) * 3,
)
REPLICAS_UNREAD = (
    *ONLY_B,
    do.create_pods(mib=(60,)),
    *(do.deliver(deliveries=((0, 0, False),)),) * 2,
    do.lose(position=0),
    do.configure_replicas(node="b", number=2, strategy="time-slicing"),
    do.pass_time(seconds=31.0),
    do.part_works(node="b", what="kubelet"),
    do.work(),
)
"""The agent does not know of the lease of a pod that it admitted long ago."""
FILL = (do.create_pods(mib=(100, 100, 100)), do.flow())
START = (
    do.create_pods(mib=(60, 60, 60), run_s=60),
    do.work(),
    do.create_pods(mib=(100,)),
    *(do.work(),) * 4,
)
"""A pod waits for one of the devices that these pods have for a minute."""
CORDONED = START + tuple(do.cordon_or_uncordon(position=n) for n in (0, 1))
DELETED = (*START, do.delete_pod(position=3, force=True), do.work())
LET_IN = START + tuple(
    step
    for n in range(3)
    for step in (do.create_claim(mib=30), do.allocate_claim(position=0, device=n), do.flow())
)
"""kube-scheduler gives ResourceClaims what is left of the devices, one of which is claimed."""

CROWDED = (
    *FILL,
    do.work(),
    *(do.disturb_link(number=n, what="delay", spared_calls=0) for n in (0, 1)),
    do.create_pods(mib=(100,)),
    *(do.work(),) * 2,
)
"""No binder looks at plans: it would cancel one for a pod that has no higher priority."""
BLUE = Gang(name="ns/blue-3", min_member=3)
GANG_OUTRANKED = (do.outrank(mib=100, gang=BLUE, needed=1, before=6, rounds=4),)
"""A pod of higher priority needs the device of one pod of a gang, which needs all three."""
PODS_OUTRANKED = (do.outrank(mib=100, gang=None, needed=2, before=1, rounds=4),)
"""A gang of two has a higher priority than the pods that have all devices."""


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
        ("agents admit what they refuse", OUTLIVED, "P8"),
        ("agents admit pods to devices that hang", SICK, "P8"),
        ("several pods of a device are in flight", TWO_IN_FLIGHT, "P8"),
        ("committed pods are bound although they are refused", UNSENT, "P8"),
        ("devices that hang count as removed", STOLEN_WHILE_IT_HANGS, "S10"),
        ("agents refuse what they cannot see", UNSEEN_LEASE, "P8"),
        ("only listed pods count", OLD_LIST, "P8"),
        ("devices in use become replicas", REPLICAS_IN_USE, "S1"),
        ("leases are not read before devices become replicas", REPLICAS_UNREAD, "S1"),
        ("leases shrink before limits", SHRINK, "S7"),
        ("positions do not matter", ONE_POSITION, "S2"),
        ("layouts do not matter", TWO_LAYOUTS, "S1"),
        ("leases of prepared claims end", FORCED, "S8"),
        ("leases of other allocations count", UNWRITTEN, "P1"),
        ("activations are early", ENDING, "S11"),
        ("starts are withdrawn without a word", CORDONED, "S11"),
        ("starts are promised too early", START, "S11"),
        ("claims outlive their starts", DELETED, "S11"),
        ("devices stay claimed", DELETED, "S11"),
        ("claims let everything in", LET_IN, "S11"),
        ("gangs are evicted in part", GANG_OUTRANKED, "P5"),
        ("pods are evicted for a part of a gang", PODS_OUTRANKED, "P5"),
        ("any priority evicts", CROWDED, "M2"),
        ("preemptions stay", PODS_OUTRANKED, "M2"),
        ("pods are bound before their claims", CLAIMING, "V1"),
        ("claims that fail keep leases", CLAIM_GONE, "V2"),
    ],
)
def test_these_steps_find_the_mutation_and_nothing_else(
    name: str, steps: tuple[Step, ...], invariant: str
) -> None:
    check_found(name, steps, invariant)


def check_found(name: str, steps: tuple[Step, ...], invariant: str) -> None:
    """Check that steps break an invariant with a mutation, and none without it."""
    with model_on_server() as model:
        assert not model.repeat(steps).failure
    with mutated(name), model_on_server() as model:
        assert model.repeat(steps).invariant == invariant


def test_agents_destroy_no_instances_in_use_whatever_they_have_admitted() -> None:
    with mutated("agents admit what they refuse"), model_on_server() as model:
        assert not model.repeat(LOST_INSTANCES).failure
    with (
        mutated("agents admit what they refuse"),
        mutated("agents destroy instances in use"),
        model_on_server() as model,
    ):
        assert model.repeat(LOST_INSTANCES).invariant == "S1"


@pytest.mark.parametrize("name", ["devices that hang stay open", "what fails closes nothing"])
def test_a_device_that_hangs_is_closed_by_its_health_and_by_what_failed_on_it(name: str) -> None:
    with mutated(name), model_on_server() as model:
        assert not model.repeat(HANGS).failure
    with (
        mutated("devices that hang stay open"),
        mutated("what fails closes nothing"),
        model_on_server() as model,
    ):
        assert model.repeat(HANGS).invariant == "P8"


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


RUNS = tries(50)
COUNTING = "deliver_half"
"""A step for which it counts how many calls reach the server."""


def test_no_run_of_the_model_breaks_an_invariant() -> None:
    with model_on_server() as model:
        for seed in range(RUNS):
            run = model.run(seed, steps=50)
            if run.failure:
                raise AssertionError(f"seed {seed}: {model.shorten(run, limit_s=60)}")


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    with model_on_server() as model:
        for seed in count():
            first = model.run(seed, steps=50)
            if any(step.rule == COUNTING for step in first.steps):
                break
        second = model.run(seed, steps=50)

    assert first.story == second.story


def two_allocations(outcome: str) -> tuple[Step, ...]:
    """Two schedulers allocate a claim; the first write takes long."""
    first, second = (
        do.begin_allocation(position=0, device=n, replicas=(n,), is_lost=False) for n in (0, 1)
    )
    return (
        do.create_claim(mib=60),
        do.slow_api(writes=1),
        first,
        second,
        do.answer_write(position=0, outcome=outcome),
        do.work(),
    )


@pytest.mark.parametrize("strategy", ["time-slicing", "mps"])
def test_words_28_devices_become_replicas_for_pods_of_numbers_and_have_amounts_again(
    strategy: str,
) -> None:
    """Whatever is about, no device has both at once: every run of the model checks that."""
    steps = (
        *ONLY_B,
        do.change_mode(node="b"),  # MPS and MIG exclude each other
        do.create_pods(mib=(60, 60), run_s=5),
        do.flow(),
        do.configure_replicas(node="b", number=2, strategy=strategy),
        *(do.work(),) * 5,
        do.create_number_pods(count=3, run_s=60),
        do.create_pods(mib=(60,)),
        *(do.work(),) * 3,
    )
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert run.figures[f"replicas given by {strategy}"] >= 2
    assert run.figures["devices offered by amounts"] == 1


LOST_CHECKPOINTS = tuple(do.kill(which="checkpoint", number=n) for n in (0, 1))
STORIES: Mapping[str, tuple[tuple[Step, ...], dict[str, int]]] = {
    "a pod waits where resizes freed memory and no cores": (
        (
            do.create_pods(mib=(100, 100, 100)),
            do.work(),
            do.resize(position=2, mib=30, number=0),
            do.create_pods(mib=(60,)),
            do.work(),
            do.resize(position=3, mib=10, number=0),
            do.create_pods(mib=(60,)),
        ),
        {": resized": 2},
    ),
    "a device with a pod of which no record is left takes no more pods": (
        (
            do.redis(what="save"),
            do.create_pods(mib=(30, 30, 30)),
            do.flow(),
            *LOST_CHECKPOINTS,
            do.redis(what="roll back unseen"),
            do.work(),
            do.create_pods(mib=(60, 60, 60)),
        ),
        {},
    ),
    "a resize that the ledger lost unseen is restored from the container": (
        (
            do.create_pods(mib=(30, 30)),
            do.work(),
            do.redis(what="save"),
            do.resize(position=0, mib=60, number=0),
            do.resize(position=1, mib=10, number=0),
            do.work(),
            do.redis(what="roll back unseen"),
        ),
        {"binder 0 on p0-3 with 60 MiB: resized ": 1},
    ),
    "a size in use is restored although no reply says that the container has it": (
        (
            do.create_pods(mib=(10,)),
            do.work(),
            *(do.lose_limits_reply(node=node) for node in ("a", "b")),
            do.resize(position=0, mib=30, number=1),
            do.use_memory(position=0, percent=100),
            do.redis(what="flush"),
        ),
        {},
    ),
    "a lowered limit that cannot be raised again becomes the size of the lease": (
        (  # the ledger has lost the resize, and the agent has closed the device meanwhile
            do.create_pods(mib=(60, 60, 30)),
            do.create_instance_pods(mib=(50,), mode="mig"),
            do.flow(),
            do.create_pods(mib=(30, 60)),
            do.redis(what="save"),
            do.work(),
            do.kill(which="checkpoint", number=0),
            do.redis(what="roll back unseen"),
            do.deliver(deliveries=((1, 1, True), (0, 1, False), (0, 1, True))),
            do.resize(position=6, mib=10, number=0),
            do.redis(what="roll back unseen"),
        ),
        {},
    ),
    **{
        f"of two schedulers that allocate a claim one writes and its lease stays, {outcome}": (
            two_allocations(outcome),
            {"gives c0": 1, "agent a gives c0-1 60 MiB of GPU-a-1": 1},
        )
        for outcome in ("done", "lost")
    },
    "a slow change of a layout destroys no instance that was given out meanwhile": (
        (
            do.cordon_or_uncordon(position=0),
            do.flow(),
            do.create_instance_pods(mib=(25,), mode="mig"),
            do.flow(),
            do.pod_succeeds(position=0),
            do.work(),
            do.disturb_driver(node="b", fault="stuck"),
            do.create_instance_pods(mib=(50,), mode="mig"),
            do.flow(),
            *(do.pass_time(seconds=7.0),) * 3,
            *(do.flow(),) * 2,
            do.create_instance_pods(mib=(25,), mode="mig"),
            do.flow(),
            do.pass_time(seconds=31.0),
        ),
        # The other time is at the end, when the pods are deleted.
        {"partitioner b destroys MIG-GPU-b-7@0+1": 2, "of MIG-GPU-b-7@0+1": 2},
    ),
    "no instance is destroyed on a device with a pod of which no record is left": (
        (
            do.redis(what="save"),
            do.cordon_or_uncordon(position=0),
            do.create_instance_pods(mib=(100, 50, 10), mode="mig"),
            do.flow(),
            do.kill(which="checkpoint", number=1),
            do.redis(what="roll back unseen"),
            do.flow(),
            do.work(),
        ),
        {"gives p0": 1},
    ),
    "a container starts again although its instance and its record are lost": (
        (
            do.create_instance_pods(mib=(25,), mode="mig"),
            do.work(),
            *(do.reset_device(node=node) for node in ("a", "b")),
            *LOST_CHECKPOINTS,
            do.work(),
        ),
        {"gives p0": 2},
    ),
}
"""Steps, and how many lines of their story have which text."""


@pytest.mark.parametrize(("steps", "told"), STORIES.values(), ids=STORIES)
def test_these_steps_break_no_invariant(steps: tuple[Step, ...], told: dict[str, int]) -> None:
    with model_on_server() as model:
        run = model.repeat(steps)

    assert not run.failure
    assert {text: sum(text in line for line in run.story) for text in told} == told


@pytest.mark.parametrize("loss", ["roll back", "flush"])
def test_a_rollback_is_seen_although_the_ledger_was_being_rebuilt_before_it(loss: str) -> None:
    steps = [
        do.redis(what="save"),
        do.create_pods(mib=(60,)),
        do.flow(),
        do.redis(what=loss),
        do.kill(which="binder", number=0),
        do.redis(what="roll back"),
    ]
    with model_on_server() as model:
        machine = LeaseProtocol(model.server, model.folder, lambda _: None)
        for step in steps:
            machine.make(step)
        assert not machine.judge.read_ledger().ready
        machine.settle()
        machine.close()


@pytest.mark.parametrize(
    "loss", [(), (do.redis(what="roll back unseen"),)], ids=["", "the ledger has lost it"]
)
def test_no_agent_is_blamed_for_a_pod_whose_binding_was_sent_before(
    loss: tuple[Step, ...],
) -> None:
    steps = (
        *ONLY_B,
        do.create_pods(mib=(60,)),
        do.deliver(deliveries=((0, 0, False),)),
        do.redis(what="save"),
        do.slow_api(writes=1),
        do.flow(),
        *loss,
        *SICK_WHILE_BOUND,
    )
    with model_on_server() as model:
        assert not model.repeat(steps).failure
