"""The packages of the binder, as its handlers use them."""

from dataclasses import dataclass

from services.binder.bind.agent_presence import AgentPresence, NodeCordons
from services.binder.bind.binding_sender import BindingSender
from services.binder.bind.pod_binder import PodBinder
from services.binder.bind.scheduler_bindings import SchedulerBindings
from services.binder.bind.scheduler_offers import SchedulerOffers
from services.binder.claims.claim_admission import ClaimAdmission
from services.binder.claims.claim_ender import ClaimEnder
from services.binder.claims.claim_leaser import ClaimLeaser
from services.binder.ledger_sync.deleted_nodes import DeletedNodes
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.ledger_sync.node_refusals import NodeRefusals
from services.binder.ledger_sync.rebuild import LedgerRebuild
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.record_watch import RecordWatch
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.sweep import Sweeper
from services.binder.report.condition_writer import ConditionWriter
from services.binder.report.event_writer import EventWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The packages `bind` and `claims`."""

    pods: PodBinder
    chosen: SchedulerBindings
    offers: SchedulerOffers
    sender: BindingSender
    presence: AgentPresence
    cordons: NodeCordons
    claim_leaser: ClaimLeaser
    claim_admission: ClaimAdmission
    claim_ender: ClaimEnder


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSync:
    """The package `ledger_sync`."""

    updater: LedgerUpdater
    sweeper: Sweeper
    reconciler: Reconciler
    rebuild: LedgerRebuild
    records: RecordWatch
    deleted_nodes: DeletedNodes
    gates: SchedulingGates


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The package `report`."""

    events: EventWriter
    conditions: ConditionWriter
    refusals: NodeRefusals
