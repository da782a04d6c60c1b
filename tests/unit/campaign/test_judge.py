"""The judge can fail: for each invariant a state that violates it, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import judge as judge_module
from tests.campaign import liveness, safety
from tests.campaign.judge import INVARIANTS, Judge, checks_of
from tests.campaign.observations import Resources, Sample, SeenNode
from tests.campaign.workload import DEVICE_MIB, Want
from tests.support.campaign import (
    AT,
    NODE,
    agent_grant,
    charge,
    found,
    grant,
    lease,
    ledger,
    limits,
    pod,
    sample,
    waiting,
)

HALF = DEVICE_MIB // 2 + 1
TWO_NODES = frozenset({NODE, "node-1"})
TWO = (pod("a", HALF), pod("b", HALF))
NO_DEVICES: dict[str, Any] = {"devices": (), "lease_node": ""}
FORGED = pod(forged=True, **NO_DEVICES)
ELSEWHERE = ledger(lease(node="node-1"))
OTHER_DEVICE = ledger(lease(device="gpu-1"))
EXCLUSIVE = (pod("a", want=Want(1, DEVICE_MIB, 100, exclusive=True)), pod("b"))


def lasting(*pods: Any, for_s: float, **changes: Any) -> tuple[Sample, ...]:
    """The same state, each second, for so long."""
    return tuple(sample(*pods, at=AT + n, **changes) for n in range(int(for_s) + 1))


def ledger_of(*leases: Any, **changes: Any) -> dict[str, Any]:
    return {"ledger": ledger(*leases, **changes)}


SAFETY: dict[str, tuple[str, tuple[Sample, ...]]] = {
    "containers on one device": (
        "S1",
        (sample(grants=(grant("a", HALF), grant("b", HALF)), ledger=None),),
    ),
    "containers take more cores than there are": (
        "S1",
        (sample(grants=(grant("a", cores=60), grant("b", cores=60)), ledger=None),),
    ),
    "an exclusive device with a second container": (
        "S1",
        (sample(grants=(grant("a", exclusive=True, mib=5), grant("b", 5)), ledger=None),),
    ),
    "bound pods on one device": ("S1", (sample(*TWO, ledger=None),)),
    "leases on one device": (
        "S1",
        (sample(**ledger_of(lease("a", HALF), lease("b", HALF, slot=1))),),
    ),
    "two leases in one slot": ("S2", (sample(**ledger_of(lease("a"), lease("b"))),)),
    "a lease on another node": ("S2", (sample(pod(), ledger=ELSEWHERE),)),
    "a container with devices of two nodes": (
        "S2",
        (sample(agents=(agent_grant(), agent_grant(node="node-1", device="gpu-9"))),),
    ),
    "a container without a lease in its Binding": (
        "S3",
        (sample(pod(**NO_DEVICES), grants=(grant(),), ledger=None),),
    ),
    "an older fence than before": (
        "S4",
        (
            sample(agents=(agent_grant("a", fence=5),)),
            sample(agents=(agent_grant("b", fence=4, activated_at=AT + 1),), at=AT + 1),
        ),
    ),
    "a forged grant": ("S5", (sample(FORGED, grants=(grant(),), ledger=None),)),
    "a window that is not the sum of its charges": (
        "S6",
        (sample(**ledger_of(charges=(charge(0, 10),), used_units={"w": 101})),),
    ),
    "a charge that is not weight times interval": (
        "S6",
        (sample(**ledger_of(charges=(charge(0, 10, units=99),), used_units={"w": 99})),),
    ),
    "a gap between charges": (
        "S6",
        (sample(**ledger_of(charges=(charge(0, 10), charge(11, 20)), used_units={"w": 190})),),
    ),
    "charges that overlap": (
        "S6",
        (sample(**ledger_of(charges=(charge(0, 10), charge(9, 20)), used_units={"w": 210})),),
    ),
    "a higher limit than requested": ("S7", (sample(pod(), grants=(grant(mib=1001),)),)),
    "fewer devices than requested": (
        "S7",
        (sample(pod(want=Want(2, 1000, 10)), grants=(grant(),)),),
    ),
    "another device than leased": ("S7", (sample(pod(), grants=(grant(),), ledger=OTHER_DEVICE),)),
    "no lease while it runs": (
        "S8",
        lasting(pod(), grants=(grant(),), for_s=3, **ledger_of()),
    ),
    "more in the checkpoint than there is": (
        "S9",
        (
            sample(
                *TWO,
                agents=(agent_grant("a", mib=HALF), agent_grant("b", slot=1, fence=2, mib=HALF)),
            ),
        ),
    ),
    "a slot twice in the checkpoint": (
        "S9",
        (sample(agents=(agent_grant("a"), agent_grant("b"))),),
    ),
    "an exclusive device twice in the checkpoint": (
        "S9",
        (sample(agents=(agent_grant("a", exclusive=True), agent_grant("b", slot=1))),),
    ),
    "a container that may use more than its lease": (
        "S7",
        lasting(pod(), limits=limits(mib=1001), grants=(grant(),), for_s=1),
    ),
    "a refusal without a reason": ("O3", (sample(waiting(reason="")),)),
    "a refusal without numbers": ("O3", (sample(waiting(message="No room. Wait a bit.")),)),
    "advice to request nothing": (
        "O3",
        (sample(waiting(message="0/1 nodes are available. Request at most 0 MiB.")),),
    ),
    "a refusal without advice": ("O3", (sample(waiting(message="0/1 nodes")),)),
}


@pytest.mark.parametrize(("invariant", "samples"), SAFETY.values(), ids=SAFETY)
def test_safety_is_judged_at_once(invariant: str, samples: tuple[Sample, ...]) -> None:
    assert invariant in found(*samples)


CLAIMED = {uuid: replace(each, is_claimed=True) for uuid, each in ledger().devices.items()}
REGION_BELOW = {"pods": (pod(),), "limits": limits(mib=999), **ledger_of(lease())}
LIVENESS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "neither bound nor explained": ("P1", 15, {"pods": (waiting(message="", reason=""),)}),
    "bound and not started": ("P1", 30, {"pods": (pod(runs=False, phase="Pending"),)}),
    "a lease without a pod": ("P2", 30, ledger_of(lease())),
    "a lease of a pod that ended": (
        "P2",
        30,
        {"pods": (pod(phase="Succeeded", runs=False),), **ledger_of(lease())},
    ),
    "a reservation that has expired": (
        "P2",
        5,
        {
            "pods": (waiting(),),
            **ledger_of(lease(state="reserved", expires_at=AT - 1, device="gpu-0")),
        },
    ),
    "a waiting record without a pod": ("P2", 30, ledger_of(waiting=frozenset({"gone"}))),
    "a waiting record of a bound pod": (
        "P2",
        30,
        {"pods": (pod(),), **ledger_of(lease(), waiting=frozenset({"a"}))},
    ),
    "a device that is claimed for no pod": ("P2", 10, ledger_of(devices=CLAIMED)),
    "a part that stays unready": ("P3", 10, {"unready": {"binder": "no Redis"}}),
    "an API server that does not answer": ("P3", 10, {"no_api": True}),
    "a node whose agent stays distrusted": ("P3", 20, ledger_of(distrusted=frozenset({NODE}))),
    "a waiting pod that fits": ("P4", 12, {"pods": (waiting(),)}),
    "a gang of which a part was bound": (
        "P5",
        10,
        {"pods": (pod("a", gang="g", gang_min=2), waiting("b", gang="g", gang_min=2))},
    ),
    "a bound pod without a lease": ("P6", 10, {"pods": (pod(),), **ledger_of()}),
    "a ledger that stays closed": ("P6", 10, ledger_of(ready=False)),
    "a container that may use less than its lease": ("S7", 30, REGION_BELOW),
    "a copy of another size": ("P6", 10, {"pods": (pod(copied_mib=(999,)),), **ledger_of(lease())}),
    "a node that the ledger lacks": ("P6", 10, ledger_of(nodes=frozenset())),
    "a device that the ledger has on another node": (
        "P6",
        10,
        {"homes": {"gpu-0": "node-1"}, "nodes": {one: SeenNode(name=one) for one in TWO_NODES}}
        | ledger_of(nodes=TWO_NODES),
    ),
    "wrong sums of a device": (
        "P6",
        10,
        {"pods": (pod(),), **ledger_of(lease(), devices=ledger().devices)},
    ),
}


@pytest.mark.parametrize(("invariant", "bound_s", "state"), LIVENESS.values(), ids=LIVENESS)
def test_liveness_is_judged_after_its_bound(
    invariant: str, bound_s: float, state: dict[str, Any]
) -> None:
    changes = dict(state)
    pods = changes.pop("pods", ())
    if changes.pop("no_api", False):
        changes["pods"] = None

    assert invariant not in found(*lasting(*pods, for_s=bound_s, **changes))
    assert invariant in found(*lasting(*pods, for_s=bound_s + 2, **changes))


def test_p7_a_part_that_cannot_work_and_is_ready_is_found() -> None:
    state = sample(at=AT + 11, faults=("cut",))

    assert found(state, cannot_work={"binder": AT}) == {"P7"}
    assert found(replace(state, unready={"binder": ""}), cannot_work={"binder": AT}) == {"P7"}
    assert not found(replace(state, unready={"binder": "Redis"}), cannot_work={"binder": AT})


def test_m4_a_request_of_a_service_that_is_denied_is_found() -> None:
    assert found(sample(denied={"binder": "PATCH /api/v1/nodes/n: Forbidden"})) == {"M4"}


def test_p7_a_pod_bound_to_a_node_cordoned_long_before_is_found() -> None:
    cordoned: dict[str, Any] = {"nodes": {NODE: SeenNode(name=NODE, cordoned=True)}}

    late = sample(pod(), at=AT + 12, **cordoned)

    assert found(sample(**cordoned), late) == {"P7"}
    assert not found(sample(**cordoned), sample(pod(), at=AT + 4, **cordoned))


def test_p7_a_node_that_gets_no_pods_since_another_agent_is_hostile_is_found() -> None:
    for hostile, others in ((frozenset({NODE}), set()), (frozenset({"node-1"}), {"P7"})):
        judge = Judge()
        judge.begin_round(redis_lost=False, hostile=hostile)

        judge.observe(sample(**ledger_of(distrusted=frozenset({NODE}))), cannot_work={})

        assert {each.check for each in judge.violations} == others


def test_p4_a_pod_may_wait_for_a_node_while_its_agent_is_distrusted() -> None:
    distrusted = ledger_of(distrusted=frozenset({NODE}))

    assert "P4" not in found(*lasting(waiting(), for_s=20, **distrusted))


def test_p4_a_pod_that_does_not_fit_may_wait() -> None:
    holders = (
        pod("b", DEVICE_MIB, devices=("gpu-0",)),
        pod("c", DEVICE_MIB, devices=("gpu-1",)),
    )
    leases = ledger_of(lease("b", DEVICE_MIB), lease("c", DEVICE_MIB, device="gpu-1"))

    states = lasting(waiting(), *holders, for_s=20, **leases)

    assert "P4" not in found(*states)


def test_p4_a_pod_waits_for_devices_whose_cores_are_taken_or_that_are_claimed() -> None:
    holders = tuple(pod(name, cores=100, devices=(f"gpu-{n}",)) for n, name in enumerate("bc"))

    assert "P4" not in found(*lasting(waiting(), *holders, for_s=20))
    assert "P4" not in found(*lasting(waiting(), for_s=20, **ledger_of(devices=CLAIMED)))


def test_o1_two_traces_of_one_pod_and_no_trace_are_found() -> None:
    judge = Judge()
    judge.observe(sample(pod("a"), pod("b"), pod("c")), cannot_work={})
    spans = [
        {"trace": trace, "attributes": {"k8s.pod.uid": uid}}
        for uid, trace in (("a", "1"), ("b", "2"), ("b", "3"))
    ]

    judge.judge_traces(spans, AT)

    assert {each.check for each in judge.violations} == {"O1"}
    assert {pod for each in judge.violations for pod in each.pods} == {"b", "c"}


def test_o2_an_audit_that_sees_less_or_more_than_the_judge_is_found() -> None:
    silent, loud = Judge(), Judge()
    for state in lasting(pod(), **ledger_of(), for_s=12):
        silent.observe(state, cannot_work={})
        silent.judge_liveness(state.at)
    loud.observe(sample(pod()), cannot_work={})

    silent.judge_audit({"differences": []}, AT)
    loud.judge_audit({"differences": [{"invariant": "S1", "subject": "x", "text": "y"}]}, AT)

    assert [each.check for each in silent.violations] == ["P6", "O2"]
    assert [each.check for each in loud.violations] == ["O2"]


def test_m1_a_part_that_grew_and_keys_that_stay_are_found() -> None:
    judge = Judge()
    begin = Resources(memory_mib={"nats": 20, "valkey": 10}, keys=15)
    end = Resources(memory_mib={"nats": 120, "valkey": 12}, keys=90)

    judge.judge_resources(begin, end, AT)

    assert [(each.check, each.subject) for each in judge.violations] == [
        ("M1", "nats"),
        ("M1", "Redis"),
    ]


def test_s6_a_weight_that_the_pod_did_not_request_is_found() -> None:
    right = ledger(lease(), charges=(charge(0, 10, weight=100, units=1000),))
    wrong = ledger(lease(), charges=(charge(0, 10, weight=101, units=1010),))

    assert "S6" not in found(sample(pod(cores=10), ledger=right))
    assert "S6" in found(sample(pod(cores=10), ledger=wrong))


def test_o3_a_refusal_that_counts_other_nodes_and_misleading_advice_are_found() -> None:
    text = "0/{} nodes are available: 1 Insufficient GPU memory. Request at most {} MiB."
    stale = lasting(waiting(message=text.format(3, 10)), for_s=20)
    misleading = sample(waiting(message=text.format(1, 4000)))

    assert "O3" in found(*stale)
    assert "O3" in found(misleading)
    assert "O3" not in found(*lasting(waiting(message=text.format(1, 10)), for_s=20))


def test_p4_a_pod_of_lower_priority_may_wait() -> None:
    states = lasting(waiting(), waiting("b", DEVICE_MIB + 1, priority=5), for_s=20)

    assert "P4" not in found(*states)


def test_a_state_that_is_right_violates_nothing() -> None:
    right = lasting(
        pod("a"),
        pod("b"),
        grants=(grant("a"), grant("b")),
        agents=(agent_grant("a"), agent_grant("b", slot=1, fence=2)),
        for_s=60,
    )

    assert not found(*right)


def test_every_invariant_has_a_state_that_violates_it() -> None:
    shown = {invariant for invariant, *_ in (*SAFETY.values(), *LIVENESS.values())}

    assert shown | {"P7", "M1", "M2", "M3", "M4", "O1", "O2"} == set(INVARIANTS)


def test_every_invariant_names_what_watches_it() -> None:
    promised = {*(f"S{n}" for n in range(1, 10)), *(f"P{n}" for n in range(1, 8)), "O1", "O2", "O3"}

    assert promised <= INVARIANTS.keys()
    assert all(checks_of(invariant) for invariant in INVARIANTS)


def test_everything_that_watches_an_invariant_is_called() -> None:
    in_every_sample = {check.__name__ for check in (*safety.CHECKS, *liveness.CHECKS)}
    named = {name.rpartition(".")[2] for each in INVARIANTS for name in checks_of(each)}
    called = Path(judge_module.__file__).read_text()

    assert {name for name in named - in_every_sample if f".{name}(" not in called} == set()


def test_a_resize_between_two_samples_is_not_judged() -> None:
    before = sample(pod(), limits=limits(), grants=(grant(),))
    after = sample(
        pod(), limits=limits(mib=1000), grants=(grant(),), **ledger_of(lease(mib=500, version=2))
    )

    assert "S7" not in found(before, after)


def test_patience_multiplies_the_bounds_of_liveness() -> None:
    judge = Judge(patience=2.0)
    for state in lasting(waiting(message="", reason=""), for_s=31):
        judge.observe(state, cannot_work={})
        judge.judge_liveness(state.at)
        if state.at < AT + 30:
            assert "P1" not in {each.check for each in judge.violations}
    judge.judge_liveness(AT + 32)

    assert "P1" in {each.check for each in judge.violations}


def test_what_there_was_to_judge_is_counted() -> None:
    judge = Judge()
    judge.observe(sample(pod(), grants=(grant(),), agents=(agent_grant(),)), cannot_work={})
    judge.observe(replace(sample(), ledger=None, pods=None), cannot_work={})

    assert str(judge.coverage) == (
        "2 samples, 1 with an API server, 1 with Redis; 1 containers with devices, 1 pods in "
        "checkpoints, 1 leases, 0 charges; 0 pods with MIG instances, 0 with limits of HAMi-core, "
        "0 of them resized; 0 pods evicted"
    )


def test_a_violation_is_reported_once() -> None:
    judge = Judge()
    for state in lasting(*TWO, for_s=5, ledger=None):
        judge.observe(state, cannot_work={})

    assert [each.check for each in judge.violations] == ["S1"]
