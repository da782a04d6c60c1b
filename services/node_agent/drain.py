"""How an agent stops without harm: no pod is refused because its agent is gone.

First it says that it serves nothing and lets no more pods be bound, then it goes on until the
kubelet has asked for every pod that was on its way.
"""

import logging
from collections.abc import Sequence

from services.node_agent.allocate.pod_resolver import LeaseRequester
from services.node_agent.kubelet.admission_window import AdmissionWindow
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import LeasesReply, LeasesRequest
from shared.model.lease import Lease
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""A binder that was told a moment ago that all is well has committed by then."""
LONGEST_S = 10.0
LOOK_S = 0.1
ASK_S = 1.0


async def drained(
    node: NodeName, turns: AdmissionWindow, asking: LeaseRequester, clock: Clock
) -> Sequence[Lease]:
    """Wait until nobody is on the way to the node; return who still is after `LONGEST_S`.

    Where nobody can tell the ledger's side, it is those who are known here: whoever was let through
    may be bound by a binder that needs nobody else for that.
    """
    turns.draining = True
    until = clock.ticks() + LONGEST_S
    await clock.sleep(GRACE_S)
    while True:
        asked_at = turns.leases.revision
        try:
            told = await asking.request(LeasesRequest(node=node), LeasesReply, timeout_s=ASK_S)
        except UnavailableError as error:
            logger.debug("leaving, and nobody says who else is on the way: %s", error)
        else:
            turns.leases.sync(told.leases, since=asked_at)
        left = list(turns.in_flight().values())
        if not left:
            return ()
        if clock.ticks() > until:
            logger.warning(
                "leaving while %d pods are on the way, which the kubelet will refuse: %s",
                len(left),
                ", ".join(f"{lease.namespace}/{lease.name}" for lease in left),
            )
            return left
        await clock.sleep(LOOK_S)
