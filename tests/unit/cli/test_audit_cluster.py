"""The audit of waiting pods, gangs, nodes and accounts."""

from dataclasses import replace

from msgspec import structs

from services.cli.audit.account_checks import window_totals
from services.cli.audit.invariants import differences
from services.cli.audit.snapshot import Snapshot
from services.timekeeper.accounts.accrual import RESTORED
from shared.model.budget import BudgetWindow, ChargeEntry
from shared.model.fair_share import fair_share_of
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quota import Quota, QuotaLimits, QuotaTotals
from tests.support.audit import (
    DEVICE,
    GANG,
    GPU,
    NODE,
    NOW,
    account,
    facts,
    found,
    lease,
    pod,
    waits,
)
from tests.support.placer.quotas import charge_of


def test_a_gang_counted_with_other_pods_than_its_leases_is_found() -> None:
    member = structs.replace(lease("a"), gang=GANG.name)
    sound = facts(account(member), gangs={GANG.name: frozenset({member.pod})})
    wrong = replace(sound, gangs={"default/other": frozenset({member.pod})})

    assert found(sound) == []
    assert found(wrong) == [
        ("P5", "1 of its pods hold a lease and are not counted"),
        ("P5", "1 pods are counted that do not hold a lease"),
    ]


def test_a_gang_that_counts_a_pod_that_is_gone_is_found() -> None:
    member = structs.replace(lease("a"), gang=GANG.name)
    uncounted = facts(account(member), pods=())
    counted = replace(uncounted, gangs={GANG.name: frozenset({member.pod})})

    assert [text for invariant, text in found(uncounted) if invariant == "P5"] == []
    assert [text for invariant, text in found(counted) if invariant == "P5"] == [
        "1 pods are counted that are gone, as if they hold a lease"
    ]


def test_a_gang_counted_with_other_pods_than_wait_is_found() -> None:
    pods = (pod("a", node="", phase="Pending"), pod("b", node="", phase="Pending"))
    members = tuple(waits(name, GANG) for name in ("a", "b"))
    uids = frozenset(each.pod for each in pods)
    sound = facts(pods=pods, waiting=members, waiting_gangs={GANG.name: uids})

    assert found(sound) == []
    assert found(
        replace(sound, waiting_gangs={GANG.name: frozenset({PodUid("uid-a"), PodUid("x")})})
    ) == [
        ("P5", "1 of its pods wait and are not counted"),
        ("P5", "1 pods are counted that do not wait"),
    ]


def test_a_waiting_pod_that_is_gone_bound_or_terminated_is_found() -> None:
    pods = (
        pod("waits", node="", phase="Pending"),
        pod("bound", annotations={}),
        pod("ended", node="", phase="Failed"),
    )
    waiting = tuple(map(waits, ("waits", "bound", "ended", "gone")))

    assert found(facts(pods=pods, waiting=waiting)) == [
        ("P2", f"the pod is bound to {NODE} and the ledger has it as waiting"),
        ("P2", "the pod has failed and the ledger has it as waiting"),
        ("P2", "the pod is gone and the ledger has it as waiting"),
    ]


def test_nodes_that_only_the_ledger_or_only_the_api_server_has_are_found() -> None:
    ledger = account()
    other = NodeName("node-1")

    assert found(facts(ledger, api_nodes=None)) == []
    assert found(facts(ledger, api_nodes=frozenset({NODE}))) == []
    assert found(facts(ledger, api_nodes=frozenset({other}))) == [
        ("O2", "the ledger has it, the API server does not"),
        ("O2", "the API server has it, the ledger does not"),
    ]
    assert found(facts(replace(ledger, known=False), api_nodes=frozenset())) == []


def test_a_quota_whose_usage_and_charges_differ_is_found() -> None:
    one = lease("one")
    team = one.namespace
    charge = charge_of(one, {GPU: DEVICE.memory_mib})
    sound = QuotaTotals(
        quotas={team: Quota(namespace=team, limits=QuotaLimits(cards=1))},
        used={team: {"": charge}},
        charges={one.pod: (team, {"": charge})},
    )
    turns = fair_share_of([DEVICE], [one], {})
    facts = Snapshot(
        read_at=NOW, nodes=(account(one),), pods=(pod("one"),), quotas=sound, fair_share=turns
    )

    uncharged = replace(facts, quotas=replace(sound, charges={}))
    orphaned = replace(facts, nodes=(account(),), fair_share=replace(turns, used={}))

    assert not differences(facts)
    assert [found.text for found in differences(uncharged)] == [
        "its lease is not charged to its quota",
        "the ledger counts 300 milli-GPU, 1 devices as used, charges add up to 0 on 0",
    ]
    assert "it is charged and has no lease" in [found.text for found in differences(orphaned)]


def test_a_fair_share_usage_that_no_lease_has_is_found_with_both_numbers() -> None:
    sound = facts(account(lease("a")))
    wrong = replace(sound, fair_share=replace(sound.fair_share, used={}))

    [difference] = differences(wrong)

    assert difference.subject == "namespace default"
    assert "counts 0 % of cores and 0 MiB for it, its leases take" in difference.text


def test_a_budget_whose_usage_differs_from_its_entries_is_found_with_both_numbers() -> None:
    window = BudgetWindow(id="2031-04", start_ms=1, used_units=30)
    entries = [
        ChargeEntry(
            window="2031-04", kind="adjust", units=10, reason=f"{RESTORED} the status of 5"
        ),
        ChargeEntry(window="2031-04", kind="adjust", units=99, reason="the limit was 1 and is 100"),
        ChargeEntry(window="2031-04", kind="charge", units=20),
        ChargeEntry(window="2031-04", kind="grant", units=7),
        ChargeEntry(window="2031-03", kind="charge", units=50),
    ]
    team = Namespace("team-a")
    sound = replace(facts(account()), budget_windows=(window_totals(team, window, entries),))
    wrong = replace(facts(account()), budget_windows=(window_totals(team, window, entries[1:]),))

    assert differences(sound) == ()
    [difference] = differences(wrong)
    assert (difference.invariant, difference.subject) == ("S6", "budget team-a")
    assert "has 30" in difference.text
    assert "add up to 20" in difference.text
