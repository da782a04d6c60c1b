"""`python -m simcluster.node_agent`: the agent of one node, with simulated GPUs."""

from services.node_agent.__main__ import NAME, serve_node
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit
from simcluster.node_agent.agent import ABOUT, EXAMPLES, SimulatedAgentSettings, simulated_gpus


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        SimulatedAgentSettings,
        "python -m simcluster.node_agent",
        about=ABOUT,
        examples=EXAMPLES,
    )
    run(
        lambda: serve_node(settings, simulated_gpus(settings)),
        service=NAME,
        log_level=settings.log_level,
    )


if __name__ == "__main__":
    main()
