"""The output of `leasehold preemptions`."""

from dataclasses import replace

from services.api.projection.visible_cluster import all_namespaces, preemptions_view
from services.cli.admin.preemptions import dry_run_text, text
from services.planner.dry_run import plan_view
from services.planner.plan import PreemptionPlan
from services.planner.rules import EvictionTier, VictimCandidate
from shared.model.leases.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
    PreemptionState,
    StoredPreemption,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.views.plans import ProtectedPod
from shared.model.views.preemptions import DryRunView, PreemptionsView, VictimView
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.build import lease
from tests.support.placer.ledger import share
from tests.support.planner.scene import budget
from tests.unit.planner.test_rules import ANNOUNCED, EVICTED, NOW, eviction

TIER = EvictionTier(unowned=True, cause=1, overdraft=-250, priority=3)
CHOSEN = VictimCandidate(
    lease=lease("v", "n", share("n"), namespace="a"),
    pods=(PodSnapshot(PodUid("v"), NodeName("n"), namespace=Namespace("a"), name="v"),),
    cause=PreemptionCause.RECLAIMABLE,
    budget=budget("a"),
    tier=TIER,
    used_gpu_s=12.5,
)
PLACE = Placement(node=NodeName("n"), shares=(share("n", mib=8_000),))
PLAN = PreemptionPlan(placements=(PLACE,), victims=(CHOSEN,))


def shown_of(*opened: Preemption, evictions: tuple[EvictionRecord, ...] = ()) -> PreemptionsView:
    stored = tuple(StoredPreemption(preemption=each, version=3, claimed=True) for each in opened)
    return preemptions_view(PreemptionState(open=stored, evictions=evictions), all_namespaces)


def test_a_plan_shows_shares_victims_and_protected_pods() -> None:
    protected = ProtectedPod(pod="a/web", reason="PodDisruptionBudget a/web allows no eviction now")
    plan = plan_view(PLAN)

    view = DryRunView(pod="b/p", plan=plan, protected=(protected,), protected_left_out=4)
    shown = dry_run_text(view)

    assert "8000 MiB of GPU 0 on n" in shown
    assert "a/v: reclaimable, budget exhausted" in shown
    assert "no controller replaces it" in shown
    assert "a/web: PodDisruptionBudget a/web allows no eviction now" in shown
    assert shown.endswith("stays       4 more pods")
    [left] = plan.victims
    assert (left.pod, left.overdraft_permille, left.gpu_s_lost) == ("a/v", 250, 12.5)


def test_no_plan_has_a_reason_and_one_in_progress_its_stage() -> None:
    none = DryRunView(pod="b/p", reason="no pod may be preempted for it")
    (announced,) = shown_of(ANNOUNCED).in_progress
    moving = DryRunView(pod="b/p", reason="it is in progress", in_progress=announced)

    assert "none: no pod may be preempted" in dry_run_text(none)
    assert "announced, not before 1970-01-12T13:47:10Z: a/v" in dry_run_text(moving)


def test_the_journal_names_victim_cause_and_beneficiary() -> None:
    past = replace(eviction(NOW), for_pod="p", for_namespace="b", for_name="p")
    view = shown_of(EVICTED, evictions=(past,))

    assert "evicted a/x on n for b/p: reclaimable, budget exhausted" in text(view)
    assert "for b/p: evicting" in text(view)
    assert view.evictions[0].beneficiary == "b/p"
    assert view.in_progress[0].victims == (
        VictimView(pod="a/v", outcome=str(EvictionOutcome.EVICTED)),
    )
    assert "no preemption in progress" in text(shown_of())
