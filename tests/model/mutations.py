"""Checks that are taken out of the ledger and of services, one at a time: each must be found."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

from services.binder.ledger_sync.agent_reports import LostAllocations
from services.node_agent.allocate.patience import Patience
from services.node_agent.gpus.device_faults import NOT_LISTED
from services.planner.plan import plan_for_gang
from shared.ledger.function_library import modules
from shared.model.clock import Clock
from shared.model.devices.enforcers import NO_DEMAND, HeldBy, Holding, Offer, SharingMode
from shared.model.leases.preemption import PreemptionCause
from tests.model.redis_links import EDITS


async def _nothing(*_: object) -> frozenset[Any]:
    return frozenset()


async def _nothing_lost(*_: object) -> LostAllocations:
    return LostAllocations()


def _ignore(*_: object) -> None:
    pass


async def _true(*_: object) -> bool:
    return True


def _without_demand(
    self: Offer, _: HeldBy, *, mode: SharingMode | Literal[""], capped: bool, limited: bool = True
) -> Holding | None:
    return HOLDING(self, NO_DEMAND, mode=mode, capped=capped, limited=limited)


def _without_patience(clock: Clock, _: float) -> Patience:
    return Patience(clock, sight_s=0.0)


HOLDING = Offer.holding
MUTATIONS: Mapping[str, tuple[str, Any]] = {
    "reserve without memory": (
        "  if not (memory >= 0 and memory_taken + memory <= device[MEMORY_MIB])"
        " then return 'memory' end\n",
        "",
    ),
    "release keeps totals": ("  capacity.add_demand(demand, resources, groups_text, -1)\n", ""),
    "fences stay": ("  device[FENCE] = device[FENCE] + 1\n", ""),
    "gangs begin short": (
        "waiting.gang_lease_count(gang_needs[1]) + #reserved_pods < gang_needs[2]",
        "false",
    ),
    "lost writes unseen": (
        "if M.is_ready and server.known_version > M.version then",
        "if false then",
    ),
    "older states of nodes count": (
        "if revision < known or (revision == known and pods_revision < known_pods) then",
        "if false then",
    ),
    "gone pods are placed": ("if scores[i] then", "if false then"),
    "devices with shares move": (
        "is_ours = device[D.SHARES] == 0 and not is_reported_by(device[D.NODE], uuid)",
        "is_ours = true",
    ),
    "nodes take idle devices": (
        "is_ours = device[D.SHARES] == 0 and not is_reported_by(device[D.NODE], uuid)",
        "is_ours = device[D.SHARES] == 0",
    ),
    "fences of any height count": ("and fence <= ledger.highest_number(time) then", "then"),
    "leases of other nodes are activated": (
        "of_pod.demand[DEMAND.NODE] ~= row[2] then",
        "false then",
    ),
    "activations are early": (
        "= server.now_in_ms() / 1000 end",
        "= server.now_in_ms() / 1000 - 99 end",
    ),
    "layouts do not matter": (
        "if device[SHARES] > 0 and device[LAYOUT] ~= layout or held and held.layout ~= layout",
        "if held and held.layout ~= layout",
    ),
    "positions do not matter": (
        "if position > MOST_SLOT or position >= 0 and M.is_slot_taken(device, position) then",
        "if false then",
    ),
    "leases of prepared claims end": (
        "services.claims.claim_answers.ClaimEnder.is_unprepared",
        _true,
    ),
    "leases of other allocations count": (
        "services.claims.claim_leaser.covers",
        lambda *_: True,
    ),
    "agents destroy instances in use": (
        "services.node_agent.partition.layout_reconciler.LayoutReconciler._used_instances",
        _nothing,
    ),
    "agents give out anything": (
        "services.node_agent.records.device_guard._overcommitment",
        lambda *_: "",
    ),
    "agents admit what they refuse": (
        "services.node_agent.allocate.admission_window.AdmissionWindow._refusal",
        lambda *_: "",
    ),
    "several pods of a device are in flight": (
        "services.node_agent.allocate.admission_window._devices_of",
        lambda _: frozenset(),
    ),
    "committed pods are bound although they are refused": (
        "services.binder.bind.binding_sender.BindingSender.has_sent",
        lambda *_: True,
    ),
    "agents admit pods to devices that hang": (
        "services.node_agent.allocate.admission_window.check_open",
        _ignore,
    ),
    "devices that hang stay open": (
        "services.node_agent.gpus.health_monitor.HealthMonitor.faults",
        property(lambda _: {}),
    ),
    "devices that hang count as removed": (
        "services.node_agent.gpus.health_monitor.missing_fault",
        lambda *_: NOT_LISTED,
    ),
    "what fails closes nothing": (
        "services.node_agent.node.Node.closed",
        property(lambda _: {}),
    ),
    "agents refuse what they cannot see": (
        "services.node_agent.allocate.handler.Patience",
        _without_patience,
    ),
    "only listed pods count": (
        "services.node_agent.allocate.handler.unlisted_pods",
        lambda *_: (),
    ),
    "sharing modes do not matter": (
        "if device[SHARES] > 0 and device[D.MODE] ~= mode or held and held.mode ~= mode then",
        "if false then",
    ),
    "devices in use become replicas": (
        "services.node_agent.offered_mode.share_holders",
        lambda *_: set(),
    ),
    "leases are not read before devices become replicas": (
        "services.node_agent.offered_mode.OfferedMode._holders_in_ledger",
        _nothing,
    ),
    "demands of enforcers do not matter": (
        "shared.model.devices.enforcers.Offer.holding",
        _without_demand,
    ),
    "pods are not limited before their containers": (
        "services.node_agent.memory_limits.container_limits.ContainerLimits.limit_pods",
        _nothing,
    ),
    "containers are not limited before they run": (
        "services.node_agent.memory_limits.container_limits.ContainerLimits._limit_container",
        _nothing,
    ),
    "limits that vanish are not put back": (
        "services.node_agent.enforcers.limit_audit.LimitAudit._put_back",
        _nothing,
    ),
    "limits that the driver keeps count as lowered": (
        "services.node_agent.resize.limit_updates.LimitUpdater._lower_exact",
        _nothing,
    ),
    "limits of other programs do not matter": (
        "services.node_agent.memory_limits.foreign_limits.ForeignLimits.reason",
        lambda *_: "",
    ),
    "sizes that wait are not tried again": (
        "services.binder.resize.resizer.Resizer._shrink",
        _nothing,
    ),
    "leases shrink before limits": ("services.binder.resize.rules.SizeChange.shrinks", False),
    "replaced changes unseen": ("shared.ledger.ledger_inventory.check_follows", _ignore),
    "lost leases stay lost": (
        "services.binder.ledger_sync.agent_reports.LostLeases.restore",
        _nothing_lost,
    ),
    "pods are bound before their claims": (
        "services.binder.bind.volume_binder.VolumeBinder.are_bound",
        _true,
    ),
    "claims that fail keep leases": (
        "services.binder.bind.volume_binder.VolumeBinder._fail",
        _nothing,
    ),
    "gangs are evicted in part": ("shared.placing.endable_leases.needs_others", lambda _: False),
    "pods are evicted for a part of a gang": (
        "services.planner.plan.plan_for_gang",
        lambda requests, _, gang, given: plan_for_gang(requests, 1, gang, given),
    ),
    "any priority evicts": (
        "services.planner.plan.cause_for",
        lambda *_: PreemptionCause.PRIORITY,
    ),
    "preemptions stay": ("shared.ledger.preemptions.Preemptions.close", _true),
    "starts are withdrawn without a word": (
        "services.planner.start_planner.StartPlanner._report_withdrawal",
        _ignore,
    ),
    "starts are promised too early": ("shared.model.leases.lease.END_MARGIN_S", -75.0),
    "claims outlive their starts": ("  write_ended(end_claims(pods))\n", ""),
    "devices stay claimed": ("[D.IS_CLAIMED] = is_claimed", "[D.IS_CLAIMED] = true"),
    "claims let everything in": (
        "not (M.ends_by and M.ends_by <= device[D.CLAIMED_UNTIL])",
        "device[D.CLAIMED_UNTIL] == 0",
    ),
}
"""By name: a piece of the functions and its replacement, or the name of a function and another."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Take a check out. Raises ValueError if no module contains it."""
    what, replacement = MUTATIONS[name]
    if not isinstance(replacement, str):
        with patch(what, replacement):
            yield
        return
    if not any(what in text for text in modules().values()):
        raise ValueError(f"no module contains what {name!r} takes out: {what!r}")
    edit = (what, replacement)
    EDITS.append(edit)
    try:
        yield
    finally:
        EDITS.remove(edit)
