"""Node agents, asked over the bus."""

from shared.clients.bus import Bus
from shared.model.events import EndAsked, EndTold
from shared.model.names import NodeName, PodUid

ANSWER_S = 0.9


class BusAgents:
    """Questions to the agent of one node."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def has_ended(self, node: NodeName, pod: PodUid) -> bool:
        """Tell whether the pod's last container has ended; while nobody can be asked, it has not.

        Raises UnavailableError if the node's agent does not answer.
        """
        if not self.bus.connected:
            return False
        question = EndAsked(node=node, pod=pod)
        return (await self.bus.ask(question, EndTold, timeout_s=ANSWER_S)).ended
