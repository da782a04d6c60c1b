"""Builds the planner from ports, and the ports from real clients."""

from dataclasses import dataclass

from services.planner.clients import PlannerClient
from services.planner.cluster_view import ClusterView, LeaseMirror, PodReader
from services.planner.preemption_planner import PreemptionPlanner
from services.planner.rules import DEFAULT_RULES, PreemptionRules
from services.planner.service import Planner
from services.planner.settings import PlannerSettings
from services.planner.start_planner import StartPlanner, StartReports
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reachability import ApiServerReachability
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.clock import Clock
from shared.runtime.leadership import Leadership
from shared.runtime.run import open_bus, serve
from shared.runtime.service import Publish
from shared.runtime.shared_process import SharedProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPorts:
    ledger: RedisLeases
    pods: PodReader
    publish: Publish
    clock: Clock
    """The ledger's: stored times are compared with it."""


def build_planner(ports: PlannerPorts, *, rules: PreemptionRules = DEFAULT_RULES) -> Planner:
    store = ports.ledger.part(Preemptions)
    mirror = LeaseMirror(ports.ledger, ports.clock)
    starts = StartPlanner(
        ledger=ports.ledger,
        store=store,
        mirror=mirror,
        reports=StartReports(ports.publish),
        clock=ports.clock,
        after_s=rules.plan_starts_after_s,
        most=rules.planned_starts,
    )
    view = ClusterView(mirror, ports.pods)
    preemptions = PreemptionPlanner(
        ledger=ports.ledger,
        store=store,
        view=view,
        clock=ports.clock,
        rules=rules,
        starts=starts,
        publish=ports.publish,
        leadership=Leadership(store, "planner"),
    )
    return Planner(mirror=mirror, view=view, preemptions=preemptions)


async def serve_planner(settings: PlannerSettings, process: SharedProcess | None = None) -> None:
    credentials = load_credentials(settings.kubeconfig)
    clock = LedgerClock()
    async with (
        KubernetesClient(credentials, timeout_s=settings.api_timeout_s) as client,
        ApiServerReachability.observed(client) as api_server,
        open_bus(settings, "planner", process=process) as bus,
        RedisLeases.connect(
            settings.redis_url,
            credentials=settings.redis_client_credentials,
            detects_lost_writes=True,
            clock=clock,
        ) as ledger,
    ):
        planner = build_planner(
            PlannerPorts(
                ledger=ledger, pods=PlannerClient(client), publish=bus.publish, clock=clock
            ),
            rules=settings.rules,
        )
        await serve(
            "planner",
            planner,
            bus=bus,
            settings=settings,
            probes={"api": api_server.unready_reason, "redis": ledger.unready_reason},
            process=process,
        )
