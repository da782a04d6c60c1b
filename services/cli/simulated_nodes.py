"""Node agents with simulated GPUs, which `leasehold up` runs and `leasehold doctor` checks."""

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from services.node_agent.gpu_access import NodeGpus
from services.node_agent.settings import AgentSettings
from shared.model.errors import RequestError


class SimulatedNodes(Protocol):
    """The module `simcluster.node_agent.agent`."""

    SimulatedAgentSettings: type[AgentSettings]
    check_layout: Callable[[str], None]
    simulated_gpus: Callable[[AgentSettings], NodeGpus]


def load_simulated_nodes() -> SimulatedNodes:
    """Raises RequestError if the simulated cluster is not installed."""
    try:
        return cast(SimulatedNodes, importlib.import_module("simcluster.node_agent.agent"))
    except ModuleNotFoundError as error:
        raise RequestError(
            "the simulated cluster is not installed: pip install 'leasehold[embedded]'"
        ) from error
