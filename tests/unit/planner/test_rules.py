"""Which pods may be evicted for which, how often, and what the next step is."""

from dataclasses import replace
from typing import Any

import pytest

from services.binder.plans.steps import ObservedPreemption, Step, next_step
from services.planner.clients import selects
from services.planner.rules import (
    Allowance,
    PreemptionRules,
    allowance,
    cooldown_until,
    overdraft_permille,
)
from services.planner.settings import PlannerSettings
from shared.kubernetes.types import LabelSelector as Selector
from shared.kubernetes.types import SelectorRequirement
from shared.model.errors import ConflictError, RequestError
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import Reservation
from shared.model.leases.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    PreemptionStage,
    PreemptionState,
    StoredPreemption,
    Victim,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.placing.preemption_rules import PendingPod, cause_for
from tests.support.build import lease
from tests.support.placer.ledger import queued, verdict
from tests.support.planner.scene import budget

NOW = 1_000_000.0
A, B = Namespace("a"), Namespace("b")


def victim(name: str = "v", **fields: Any) -> Victim:
    known: dict[str, Any] = {
        "namespace": A,
        "node": NodeName("n"),
        "cause": PreemptionCause.RECLAIMABLE,
        "owner": "o",
        "budget": "exhausted",
        "grace_s": 30,
        "devices": (),
    }
    return Victim(pod=PodUid(name), name=name, **(known | fields))


def eviction(at: float, owner: str = "o", namespace: Namespace = A) -> EvictionRecord:
    return EvictionRecord(
        at=at,
        preemption="t",
        pod=PodUid("x"),
        namespace=namespace,
        name="x",
        node=NodeName("n"),
        owner=owner,
        cause=PreemptionCause.RECLAIMABLE,
        budget="exhausted",
        devices=(),
        outcome=EvictionOutcome.EVICTED,
    )


@pytest.mark.parametrize(
    ("theirs", "own", "priority", "cause"),
    [
        ("guaranteed", "guaranteed", 0, None),
        ("reclaimable", "guaranteed", 0, PreemptionCause.RECLAIMABLE),
        ("expired", "guaranteed", 0, PreemptionCause.EXPIRED),
        ("reclaimable", "guaranteed", 99, PreemptionCause.RECLAIMABLE),
        ("reclaimable", "reclaimable", 0, None),
        ("expired", "reclaimable", 0, None),
        ("guaranteed", "guaranteed", -1, PreemptionCause.PRIORITY),
        ("expired", "reclaimable", -1, PreemptionCause.PRIORITY),
        ("guaranteed", "reclaimable", -1, None),
    ],
)
def test_the_lease_class_decides_before_priority(
    theirs: str, own: str, priority: int, cause: PreemptionCause | None
) -> None:
    need = PendingPod(pod=PodUid("p"), namespace=B, priority=0)

    assert cause_for(need, budget("a", theirs), budget("b", own), priority) is cause


def test_a_pod_with_preemption_policy_never_preempts_none_by_priority() -> None:
    need = PendingPod(pod=PodUid("p"), namespace=B, priority=9, preempts=False)

    assert cause_for(need, None, None, 0) is None
    assert cause_for(need, budget("a", "expired"), None, 0) is PreemptionCause.EXPIRED


def test_the_overdraft_is_a_fraction_of_the_budget() -> None:
    def drawn(used: int, left: int | None) -> int:
        return overdraft_permille(budget("a", used_units=used, remaining_units=left))

    assert (drawn(15, -5), drawn(11, -1), drawn(5, 5), drawn(5, None)) == (500, 100, 0, 0)
    assert overdraft_permille(None) == 0


def test_gpusharing_32_the_cooldown_doubles_with_every_eviction() -> None:
    rules = PreemptionRules(preemption_cooldown_s=600)
    times = [NOW, NOW + 1_000, NOW + 3_000]

    pauses = [
        cooldown_until([eviction(at) for at in times[:count]], "o", rules) - times[count - 1]
        for count in (1, 2, 3)
    ]

    assert pauses == [600, 1200, 2400]
    assert cooldown_until([eviction(NOW, owner="other")], "o", rules) == 0


def test_limits_count_past_and_planned_evictions() -> None:
    preemption = Preemption(
        id="t", victims=(victim(), victim("w", outcome=EvictionOutcome.EVICTED))
    )
    state = PreemptionState(
        open=(StoredPreemption(preemption=preemption, version=1, claimed=True),),
        evictions=(
            eviction(NOW - 30),
            eviction(NOW - 100),
            eviction(NOW - 4_000),
            eviction(NOW, "o", B),
        ),
    )

    def allowed(an_hour: int, a_minute: int = 30) -> Allowance:
        rules = PreemptionRules(
            preemption_per_namespace_hour=an_hour, preemption_per_minute=a_minute
        )
        return allowance(state, rules, NOW)

    found = allowed(6, 5)

    assert (found.of(A), found.of(B), found.of(Namespace("c"))) == (2, 2, 2)
    assert (allowed(3).of(A), allowed(6).of(A)) == (0, 3)


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (None, False),
        (Selector(), True),
        (Selector(match_labels={"app": "x"}), True),
        (Selector(match_labels={"app": "y"}), False),
        (Selector(match_expressions=(SelectorRequirement("app", "In", ("x", "z")),)), True),
    ],
)
def test_label_selectors_match_as_in_kubernetes(selector: Selector | None, chosen: bool) -> None:
    assert selects(selector, {"app": "x"}) is chosen


WANTED = Reservation(pod=PodUid("p"), namespace=B, name="p", candidates=())
ANNOUNCED = Preemption(
    id="p",
    victims=(victim(),),
    wanted=(WANTED,),
    stage=PreemptionStage.ANNOUNCED,
    evict_at=NOW + 30,
    expires_at=NOW + 90,
)
EVICTED = replace(
    ANNOUNCED,
    stage=PreemptionStage.EVICTING,
    victims=(victim(outcome=EvictionOutcome.EVICTED),),
    evict_at=NOW,
)
PENDING = verdict(queued("p"), capacity=0)
WAITING = ObservedPreemption(waiting=[PENDING], leases=[], leased_victims={PodUid("v")})
ENDED = replace(WAITING, leased_victims=())
MISSING = replace(WAITING, waiting=[])
RESERVED = replace(MISSING, leases=[lease("p")])
BOUND = replace(RESERVED, leases=[lease("p", state=LeaseState.BOUND)])


@pytest.mark.parametrize(
    ("preemption", "seen", "after_s", "step"),
    [
        (replace(ANNOUNCED, stage=PreemptionStage.OPENED), WAITING, 0, Step.ANNOUNCE),
        (ANNOUNCED, WAITING, 29, Step.WAIT),
        (ANNOUNCED, WAITING, 30, Step.EVICT),
        (ANNOUNCED, WAITING, 60, Step.ANNOUNCE),
        (ANNOUNCED, WAITING, 90, Step.CANCEL),
        (ANNOUNCED, replace(MISSING, gone={PodUid("p")}), 0, Step.CANCEL),
        (ANNOUNCED, MISSING, 30, Step.WAIT),
        (EVICTED, replace(MISSING, leased_victims=()), 1, Step.WAIT),
        (ANNOUNCED, RESERVED, 0, Step.CANCEL),
        (ANNOUNCED, BOUND, 0, Step.CANCEL),
        (EVICTED, WAITING, 1, Step.WAIT),
        (EVICTED, ENDED, 1, Step.RESERVE),
        (replace(EVICTED, by_kube_scheduler=True), ENDED, 1, Step.OFFER),
        (EVICTED, RESERVED, 1, Step.BIND),
        (EVICTED, BOUND, 1, Step.CLOSE),
        (EVICTED, WAITING, 91, Step.CANCEL),
        (replace(EVICTED, stage=PreemptionStage.HANDED), RESERVED, 1, Step.BIND),
        (replace(EVICTED, stage=PreemptionStage.HANDED), ENDED, 1, Step.CLOSE),
    ],
)
def test_the_next_step_depends_only_on_the_observed_state(
    preemption: Preemption, seen: ObservedPreemption, after_s: float, step: Step
) -> None:
    read = StoredPreemption(preemption=preemption, version=1, claimed=True)
    state = PreemptionState(budgets={A: budget("a")})

    assert next_step(read, seen, state, NOW + after_s)[0] is step


def test_a_stage_of_a_preemption_cannot_be_skipped() -> None:
    with pytest.raises(ConflictError):
        replace(ANNOUNCED, stage=PreemptionStage.OPENED).stepped(PreemptionStage.EVICTING)


def test_violations_are_parsed_exactly() -> None:
    PlannerSettings(evict_violators=("GpuLimitTampered",)).check()
    with pytest.raises(RequestError, match=r"--evict-violators must be among .*got 'all'"):
        PlannerSettings(evict_violators=("all",)).check()
