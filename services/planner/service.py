"""The planner: decides what has to end, or to wait, so that other pods can start.

One replica leads and plans; all reply to requests.
"""

from dataclasses import dataclass

from services.planner.cluster_view import ClusterView, LeaseMirror
from services.planner.dry_run import dry_run
from services.planner.preemption_planner import PreemptionPlanner
from shared.model.events.plan_events import PlansChanged, StartReported
from shared.model.events.request_reply import DryRunReply, DryRunRequest
from shared.runtime.service import answers, publishes


@publishes(PlansChanged, StartReported)
@dataclass(eq=False, kw_only=True)
class Planner:
    mirror: LeaseMirror
    view: ClusterView
    preemptions: PreemptionPlanner

    @answers
    async def plan_preemption(self, event: DryRunRequest) -> DryRunReply:
        return await dry_run(event, self.preemptions)
