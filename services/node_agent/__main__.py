"""`python -m services.node_agent`: one node's agent."""

from services.node_agent.gpu_access import NodeGpus, open_gpus
from services.node_agent.settings import ABOUT, EXAMPLES, AgentSettings
from services.node_agent.wiring import node_agent
from shared.runtime.run import Nats, open_bus, run_service, serve
from shared.runtime.telemetry import open_tracing

NAME = "node-agent"


async def serve_node(settings: AgentSettings, gpus: NodeGpus) -> None:
    tracing = open_tracing(NAME, settings)
    async with (
        open_bus(settings, NAME, settings.node_name) as bus,
        node_agent(settings, gpus, bus=bus, tracing=tracing) as agent,
    ):
        await serve(
            NAME,
            agent,
            bus=bus,
            settings=settings,
            nats=Nats.MEANWHILE,
            tracing=tracing,
            probes=agent.probes,
            drain=agent.drain,
        )


if __name__ == "__main__":
    run_service(
        AgentSettings,
        lambda settings: serve_node(settings, open_gpus(settings)),
        service=NAME,
        about=ABOUT,
        examples=EXAMPLES,
    )
