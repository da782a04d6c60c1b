"""The names of the environment variables that each component reads."""

import dataclasses
from collections.abc import Mapping

import services.cli.commands  # noqa: F401 - declares the commands
from services.cli.__main__ import DEBUG_VARIABLE
from services.cli.arguments import COMMANDS
from services.cli.state_dir import SUPERVISED_VARIABLE
from services.node_agent.partitioner import PartitionerSettings
from shared.runtime.probe import PROBE_VARIABLE
from shared.runtime.settings import argument_variables
from shared.runtime.variables import variable_of
from simcluster.node_agent.agent import SimulatedAgentSettings
from simcluster.node_agent.partitioner import SimulatedPartitionerSettings
from tools.generate.reference import settings_kinds


def names_of_components() -> Mapping[str, set[str]]:
    """Return the names that each component, and each command, reads."""
    kinds = {
        **settings_kinds(),
        "partitioner": PartitionerSettings,
        "simulated agent": SimulatedAgentSettings,
        "simulated partitioner": SimulatedPartitionerSettings,
    }
    of_components = {
        name: {variable_of(item.name) for item in dataclasses.fields(kind)}
        for name, kind in kinds.items()
    }
    of_commands = {
        f"leasehold {name}": argument_variables(entry.arguments) for name, entry in COMMANDS.items()
    }
    return of_components | of_commands


def names_of_development() -> set[str]:
    """Return the names that processes read themselves, and those of compose.yaml and the tests."""
    return {
        *(DEBUG_VARIABLE, SUPERVISED_VARIABLE, PROBE_VARIABLE),
        *("LEASEHOLD_IMAGE", "LEASEHOLD_KUBECTL", "LEASEHOLD_LIBVGPU", "LEASEHOLD_TEST_REPEATS"),
    }
