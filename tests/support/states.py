"""The content of `state.json`, for tests of the commands that read it."""

from typing import Any

from services.cli.state_dir import State


def state(**changes: Any) -> State:
    """Return the state of a stack without components."""
    empty = {"nats_url": "", "redis_url": "", "kubeconfig": "", "nodes": {}}
    return State(**{"pid": 1, "started_at": 1.0, "ready": True, **empty, **changes})
