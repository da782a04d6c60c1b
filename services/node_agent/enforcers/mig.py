"""MIG: hardware instances with memory and cores of their own."""

from services.node_agent.enforcers.enforcer import Enforcer, Facts


class Mig(Enforcer):
    facts = Facts(
        name="mig",
        memory="by hardware",
        compute="by hardware",
        parts=False,
        not_held="nothing between instances",
        needs="a GPU in MIG mode, and resource names for which MIG instances are possible",
        resize="no: an instance has the size of its profile",
        shown="NVML lists the instances of each GPU: what is missing is refused, and made again",
    )
