"""Drain: shutdown of an agent without pods that the kubelet refuses.

The agent admits no more binds, reports that it serves nothing, and waits until the kubelet has
requested devices for every admitted pod, and has asked to start the containers that just got some.
"""

import logging
from collections.abc import Sequence

from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.kubelet.container_starts import ContainerStarts
from services.node_agent.records.lease_sync import LeaseSync
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.lease import Lease

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""After this time, binders have bound the pods that were admitted last."""
LOOK_S = 0.1
REPLY_S = 1.0


async def drain(
    window: AdmissionWindow,
    lease_sync: LeaseSync,
    starts: ContainerStarts,
    *,
    clock: Clock,
    limit_s: float,
) -> Sequence[Lease]:
    """Wait until no pod is in flight; return the leases left after `limit_s`.

    Without a reply of a binder, the known leases count.
    """
    window.draining = True
    until = clock.ticks() + limit_s
    await clock.sleep(GRACE_S)
    while True:
        try:
            await lease_sync.sync(timeout_s=REPLY_S)
        except UnavailableError as error:
            logger.debug("draining without a list of the node's leases: %s", error)
        left = list(window.in_flight().values())
        is_late = clock.ticks() > until
        if not left and (is_late or not starts.any_due()):
            return ()
        if is_late:
            logger.warning(
                "stopping while %d pods wait for devices, which the kubelet will refuse: %s",
                len(left),
                ", ".join(f"{lease.namespace}/{lease.name}" for lease in left),
            )
            return left
        await clock.sleep(LOOK_S)
