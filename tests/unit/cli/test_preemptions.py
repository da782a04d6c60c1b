"""What `leasehold reclaim` shows, and what the audit makes of claims."""

from dataclasses import replace

from services.binder.preempt.plan import NoPlan, PreemptionPlan, cost_of
from services.binder.preempt.rules import EvictionTier, VictimCandidate
from services.cli.admin.preemptions import Answer, answer_shape, answer_text, shape, text
from services.cli.audit.audit import differences
from services.cli.inspect.facts import Facts
from shared.model.device import DeviceUse
from shared.model.ledger import LedgerNode, NodeTotals
from shared.model.names import NodeName
from shared.model.preemption import EvictionOutcome, PreemptionState, StoredPreemption
from tests.support.build import lease
from tests.support.placer.ledger import device, facts, share
from tests.unit.binder.preempt.test_rules import EVICTED, NOW, TOLD, eviction, victim

TIER = EvictionTier(unowned=True, cause=1, overdraft=-250, priority=3)
CHOSEN = VictimCandidate(
    lease=lease("v", "n", share("n"), namespace="a"), victim=victim(), tier=TIER, used_gpu_s=12.5
)
PLAN = PreemptionPlan(
    node=NodeName("n"), shares=(share("n", mib=8_000),), victims=(CHOSEN,), cost=cost_of([CHOSEN])
)


def test_a_plan_says_what_fits_where_and_who_leaves_and_who_may_not() -> None:
    answer = Answer(
        pod="b/p", found=PLAN, kept=(("a/web", "PodDisruptionBudget a/web allows no eviction now"),)
    )

    shown, shaped = answer_text(answer), answer_shape(answer)

    assert "8000 MiB of GPU 0 on n" in shown
    assert "a/v: reclaimable, budget exhausted" in shown
    assert "nobody makes another" in shown
    assert "a/web: PodDisruptionBudget a/web allows no eviction now" in shown
    [left] = shaped["plan"]["victims"]
    assert (left["pod"], left["overdraft_permille"], left["gpu_s_lost"]) == ("a/v", 250, 12.5)


def test_no_plan_has_a_reason_and_one_under_way_its_stage() -> None:
    none = Answer(pod="b/p", found=NoPlan(reason="no lease may be taken back for it"))
    moving = Answer(pod="b/p", found=NoPlan(reason="it is under way"), under_way=TOLD)

    assert "none: no lease may be taken back" in answer_text(none)
    assert "announced, not before 1970-01-12T13:47:10Z: a/v" in answer_text(moving)
    assert answer_shape(none)["plan"] is None


def test_the_journal_names_victim_cause_and_beneficiary() -> None:
    past = replace(eviction(NOW), for_pod="p", for_namespace="b", for_name="p")
    affairs = PreemptionState(
        open=(StoredPreemption(preemption=EVICTED, version=3, claimed=True),), evictions=(past,)
    )

    assert "evicted a/x on n for b/p: reclaimable, budget exhausted" in text(affairs)
    assert "for b/p: evicting" in text(affairs)
    shaped = shape(affairs)
    assert shaped["evictions"][0]["for"] == "b/p"
    assert shaped["under_way"][0]["victims"] == [{"pod": "a/v", "outcome": EvictionOutcome.EVICTED}]
    assert "nothing is being taken back" in text(PreemptionState())


def test_the_audit_adds_what_claims_keep() -> None:
    use = DeviceUse(exclusive=True, claimed_by=True)
    node = LedgerNode(facts=facts("n"), used={"cpu": 100}, devices=((device("n", 0), use),))
    claimed = Facts(
        read_at=NOW,
        accounts=(NodeTotals(node=node, leases=()),),
        kept={NodeName("n"): {"cpu": 100}},
    )

    assert not differences(claimed)
    [wrong] = differences(replace(claimed, kept={}))
    assert "counts 100 of cpu" in wrong.text
