"""Runs of the model on a server of their own."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import LeaseProtocol
from tests.model.redis_links import RedisServer
from tests.support.servers.valkey import valkey_server

IN_MEMORY = Path("/dev/shm")
"""Checkpoints are written here, where there is such a directory: each save waits for its disk."""


@contextmanager
def model_server() -> Iterator[type[LeaseProtocol]]:
    """Start a server; yield the machine that uses it."""
    parent = IN_MEMORY if IN_MEMORY.is_dir() else None
    with valkey_server() as server, tempfile.TemporaryDirectory(dir=parent) as folder:
        asyncio.run(server.ready())
        LeaseProtocol.server = RedisServer(server.url)
        LeaseProtocol.folder = Path(folder)
        yield LeaseProtocol
        LeaseProtocol.server.wire.close()


def run(
    machine: type[LeaseProtocol],
    *,
    runs: int,
    steps: int,
    seed: int,
    shrink: bool = True,
) -> None:
    """Run the model; raises what failed, with hypothesis' smallest trace if it may `shrink`."""
    logging.disable(logging.CRITICAL)
    wanted = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, *([Phase.shrink] if shrink else [])),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seeded(seed)(machine), settings=wanted)
