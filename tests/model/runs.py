"""Runs of the model on a server of their own, each from a seed; and the shortest run that fails."""

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.model.faults import LeaseProtocol
from tests.model.machine import BrokenInvariantError
from tests.model.redis_links import RedisServer
from tests.model.rules import Step, random_steps, rules_of
from tests.support.servers.valkey import valkey_server

IN_MEMORY = Path("/dev/shm")
"""Checkpoints are written here, where there is such a directory: each save waits for its disk."""
Steps = Callable[[LeaseProtocol], Iterable[Step]]


@dataclass(slots=True)
class Run:
    """The steps of one run, and what came of them."""

    steps: list[Step] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    """The steps, and below each what it made the actors do."""
    failure: str = ""
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def invariant(self) -> str:
        """The first invariant that was broken."""
        return self.failure.partition(":")[0]

    def __str__(self) -> str:
        return "\n".join([self.failure, *self.story])


class Model:
    """Runs, one after the other, on one server."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def run(self, seed: int, *, steps: int) -> Run:
        """Run as many random steps."""
        return self._run(lambda machine: random_steps(machine, seed, steps))

    def repeat(self, steps: Sequence[Step]) -> Run:
        """Run these steps, those left out that are not possible any more."""
        rules = rules_of(LeaseProtocol)
        return self._run(lambda machine: (step for step in steps if rules[step.rule].when(machine)))

    def shorten(self, run: Run, *, limit_s: float) -> Run:
        """Leave out steps of a failed run for as long as it breaks the same invariant."""
        until = time.monotonic() + limit_s
        length = len(run.steps) // 2
        while length and time.monotonic() < until:
            position = 0
            before = len(run.steps)
            while position < len(run.steps) and time.monotonic() < until:
                shorter = self.repeat(run.steps[:position] + run.steps[position + length :])
                if shorter.invariant == run.invariant:
                    run = shorter
                else:
                    position += length
            if length > 1 or len(run.steps) == before:
                length //= 2
        return run

    def _run(self, choose_steps: Steps) -> Run:
        run = Run()
        machine = LeaseProtocol(
            self.server, self.folder, lambda text: run.story.append(f"  {text}")
        )
        try:
            for step in choose_steps(machine):
                run.steps.append(step)
                run.story.append(str(step))
                machine.make(step)
            machine.settle()
        except BrokenInvariantError as error:
            run.failure = str(error)
        except Exception as error:  # noqa: BLE001 - a bug of the model, or of the product
            run.failure = f"{type(error).__name__}: {error}"
        finally:
            machine.close()
        run.figures = machine.figures
        return run


@contextmanager
def model_on_server() -> Iterator[Model]:
    """Start a server, and yield a model that uses it."""
    logged_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    parent = IN_MEMORY if IN_MEMORY.is_dir() else None
    try:
        with valkey_server() as server, tempfile.TemporaryDirectory(dir=parent) as folder:
            asyncio.run(server.ready())
            redis = RedisServer(server.url)
            yield Model(redis, Path(folder))
            redis.wire.close()
    finally:
        logging.disable(logged_before)


def run_seeds(seeds: Iterable[int], *, steps: int, shorten_s: float) -> list[tuple[int, Run]]:
    """Run these seeds on a server; return all runs, those without a failure with figures only."""
    done: list[tuple[int, Run]] = []
    with model_on_server() as model:
        for seed in seeds:
            run = model.run(seed, steps=steps)
            if run.failure and shorten_s:
                run = model.shorten(run, limit_s=shorten_s)
            done.append((seed, run if run.failure else Run(figures=run.figures)))
    return done
