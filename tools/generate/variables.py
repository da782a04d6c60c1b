"""The names of the environment variables that any component reads."""

import dataclasses

from services.cli.__main__ import DEBUG_VARIABLE
from services.cli.parser import build_parser
from services.cli.state_dir import SUPERVISED_VARIABLE
from services.node_agent.partitioner import PartitionerSettings
from shared.runtime.probe import PROBE_VARIABLE
from shared.runtime.variables import VariableText, variable_of
from simcluster.node_agent.agent import SimulatedAgentSettings
from simcluster.node_agent.partitioner import SimulatedPartitionerSettings
from tools.generate.pages import ROOT
from tools.generate.reference import actions, settings_kinds, subcommands

MODULE = ROOT / "shared" / "runtime" / "variable_names.py"
OTHERS = (DEBUG_VARIABLE, SUPERVISED_VARIABLE, PROBE_VARIABLE)
DEVELOPMENT = (
    "LEASEHOLD_IMAGE",
    "LEASEHOLD_KUBECTL",
    "LEASEHOLD_LIBVGPU",
    "LEASEHOLD_TEST_REPEATS",
)
"""Of compose.yaml and the tests, whose environment the processes inherit."""


def names() -> list[str]:
    """Return all names, sorted."""
    kinds = (
        *settings_kinds().values(),
        PartitionerSettings,
        SimulatedAgentSettings,
        SimulatedPartitionerSettings,
    )
    of_services = [variable_of(item.name) for kind in kinds for item in dataclasses.fields(kind)]
    of_commands = [
        action.default.variable
        for command in subcommands(build_parser()).values()
        for action in actions(command)
        if isinstance(action.default, VariableText)
    ]
    return sorted({*of_services, *of_commands, *OTHERS, *DEVELOPMENT})


def generated() -> str:
    """Return the module with the names of the current code."""
    lines = "".join(f'        "{name}",\n' for name in names())
    return (
        '"""The environment variables that any component reads, generated; pure."""\n\n'
        f"NAMES = frozenset(\n    {{\n{lines}    }}\n)\n"
    )
