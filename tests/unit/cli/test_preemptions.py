"""The output of `leasehold preemptions`, and how the audit counts claims."""

from dataclasses import replace

from services.binder.preempt.plan import NoPlan, PreemptionPlan
from services.binder.preempt.rules import EvictionTier, VictimCandidate
from services.cli.admin.preemption_render import DryRun, dry_run_shape, dry_run_text, shape, text
from services.cli.audit.invariants import differences
from services.cli.snapshot.snapshot import Snapshot
from shared.model.device import DeviceUse
from shared.model.ledger import LedgerNode, NodeTotals
from shared.model.names import NodeName
from shared.model.preemption import EvictionOutcome, PreemptionState, StoredPreemption
from tests.support.build import lease
from tests.support.placer.ledger import device, facts, share
from tests.unit.binder.preempt.test_rules import ANNOUNCED, EVICTED, NOW, eviction, victim

TIER = EvictionTier(unowned=True, cause=1, overdraft=-250, priority=3)
CHOSEN = VictimCandidate(
    lease=lease("v", "n", share("n"), namespace="a"), victim=victim(), tier=TIER, used_gpu_s=12.5
)
PLAN = PreemptionPlan(node=NodeName("n"), shares=(share("n", mib=8_000),), victims=(CHOSEN,))


def test_a_plan_shows_shares_victims_and_protected_pods() -> None:
    answer = DryRun(
        pod="b/p",
        found=PLAN,
        protected=(("a/web", "PodDisruptionBudget a/web allows no eviction now"),),
    )

    shown, shaped = dry_run_text(answer), dry_run_shape(answer)

    assert "8000 MiB of GPU 0 on n" in shown
    assert "a/v: reclaimable, budget exhausted" in shown
    assert "no controller replaces it" in shown
    assert "a/web: PodDisruptionBudget a/web allows no eviction now" in shown
    [left] = shaped["plan"]["victims"]
    assert (left["pod"], left["overdraft_permille"], left["gpu_s_lost"]) == ("a/v", 250, 12.5)


def test_no_plan_has_a_reason_and_one_in_progress_its_stage() -> None:
    none = DryRun(pod="b/p", found=NoPlan(reason="no lease may be preempted for it"))
    moving = DryRun(pod="b/p", found=NoPlan(reason="it is in progress"), in_progress=ANNOUNCED)

    assert "none: no lease may be preempted" in dry_run_text(none)
    assert "announced, not before 1970-01-12T13:47:10Z: a/v" in dry_run_text(moving)
    assert dry_run_shape(none)["plan"] is None


def test_the_journal_names_victim_cause_and_beneficiary() -> None:
    past = replace(eviction(NOW), for_pod="p", for_namespace="b", for_name="p")
    state = PreemptionState(
        open=(StoredPreemption(preemption=EVICTED, version=3, claimed=True),), evictions=(past,)
    )

    assert "evicted a/x on n for b/p: reclaimable, budget exhausted" in text(state)
    assert "for b/p: evicting" in text(state)
    shaped = shape(state)
    assert shaped["evictions"][0]["beneficiary"] == "b/p"
    assert shaped["in_progress"][0]["victims"] == [
        {"pod": "a/v", "outcome": EvictionOutcome.EVICTED}
    ]
    assert "no preemption in progress" in text(PreemptionState())


def test_the_audit_adds_claims_of_preemptions() -> None:
    use = DeviceUse(exclusive=True, claimed_by=True)
    node = LedgerNode(facts=facts("n"), used={"cpu": 100}, devices=((device("n", 0), use),))
    claimed = Snapshot(
        read_at=NOW,
        nodes=(NodeTotals(node=node, leases=()),),
        preemption_claims={NodeName("n"): {"cpu": 100}},
    )

    assert not differences(claimed)
    [wrong] = differences(replace(claimed, preemption_claims={}))
    assert "counts 100 of cpu" in wrong.text
