"""Simulated GPUs that another `--gpus` has removed: their agents do not miss them."""

import json
from collections.abc import Mapping

from services.cli.state_dir import StateDir


def forget_devices(
    directory: StateDir, before: Mapping[str, str], layouts: Mapping[str, str]
) -> None:
    """Let the agents of nodes whose layout differs from the last run forget their devices."""
    for node, layout in layouts.items():
        file = directory.agent(node) / "checkpoint.json"
        if before.get(node) != layout and file.exists():
            content = json.loads(file.read_text())
            content.pop("devices", None)
            file.write_text(json.dumps(content))
