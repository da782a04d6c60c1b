"""Exclusive use: the device has no other lease."""

from services.node_agent.enforcers.enforcer import Enforcer, Facts


class Exclusive(Enforcer):
    facts = Facts(
        name="exclusive",
        memory="all of the device",
        compute="all of the device",
        parts=False,
        not_held="nothing: there is no other pod",
        needs="a pod that requests whole GPUs",
        resize="no",
        shown="NVML lists the processes of each GPU: one without a lease is a violation",
    )
