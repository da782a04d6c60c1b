"""Node files that the doctor reads: the agent's checkpoint, CDI specifications."""

import json
from pathlib import Path

import msgspec
import yaml

from shared.model.errors import UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.findings import SkipError


def read_allocations(state_dir: Path) -> tuple[Allocation, ...]:
    """Read the checkpoint of an agent with this state directory; an unreadable one stays.

    Raises SkipError if no agent has run, UnavailableError if the checkpoint is not valid.
    """
    path = state_dir / "checkpoint.json"
    if not state_dir.is_dir():
        raise SkipError(f"{state_dir} is missing: no agent has run here")
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_text())
        entries = [entry["allocation"] for entry in content["entries"]]
        return msgspec.convert(entries, tuple[Allocation, ...])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnavailableError(f"{path} is not a checkpoint of an agent: {error}") from error


def read_cdi_kind(path: Path) -> str:
    """Return the kind of a CDI specification; empty: the file is not one."""
    try:
        document = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        return ""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""
