"""The entries of a ResourceClaim's `status.devices` that answer it.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/
"""

from typing import Any

from services.binder.ports.claims import ClaimAnswer
from services.binder.report.explanations import stamp
from shared.model.bounds import cut
from shared.model.claim import DRIVER
from shared.model.events.claim_events import AllocatedClaim


def device_statuses(
    claim: AllocatedClaim, answer: ClaimAnswer, *, now: float
) -> list[dict[str, Any]]:
    """Return an entry for each device of our driver, the first with the copy of the lease."""
    condition = {
        "type": answer.condition,
        "status": "True",
        "reason": answer.reason,
        "message": cut(answer.message),
        "lastTransitionTime": stamp(now),
    }
    return [
        {
            "driver": DRIVER,
            "pool": claim.node,
            "device": device.device,
            **({"shareID": device.share_id} if device.share_id else {}),
            "conditions": [condition],
            **({"data": answer.lease} if answer.lease and number == 0 else {}),
        }
        for number, device in enumerate((*claim.devices, *claim.admin_devices))
    ]
