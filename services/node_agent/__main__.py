"""`python -m services.node_agent`: one node's agent."""

from services.node_agent.gpu_access import NodeGpus, open_gpus
from services.node_agent.settings import ABOUT, EXAMPLES, AgentSettings
from services.node_agent.wiring import node_agent
from shared.nats.bus import Bus
from shared.runtime.run import Nats, run, serve
from shared.runtime.settings import load_or_exit
from shared.runtime.telemetry import open_tracing

NAME = "node-agent"


async def serve_node(settings: AgentSettings, gpus: NodeGpus) -> None:
    """Run until stopped.

    The kubelet is served from the start: on a booting node, it requests devices before NATS is up.
    """
    tracing = open_tracing(NAME, settings)
    async with (
        Bus.connect_later(
            settings.nats_url,
            name=f"{NAME} {settings.node_name}",
            credentials=settings.nats_client_credentials(NAME, settings.node_name),
        ) as bus,
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


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        AgentSettings, "python -m services.node_agent", about=ABOUT, examples=EXAMPLES
    )
    gpus = open_gpus(settings)
    run(lambda: serve_node(settings, gpus), service=NAME, log_level=settings.log_level)


if __name__ == "__main__":
    main()
