"""`python -m tests.model --runs 10000 --seed 1`: runs of the model, a seed each, with figures."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context

from tests.model.mutations import MUTATIONS, mutated
from tests.model.runs import Run, model_on_server, run_seeds

CHUNK = 100
"""Runs of a process on one server."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; the next has the next"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1, help="each with a server of its own")
    parser.add_argument(
        "--shorten", type=float, default=0.0, metavar="S", help="search so long for a shorter run"
    )
    parser.add_argument(
        "--mutations", nargs="*", metavar="NAME", help="take checks out: each must be found"
    )
    options = parser.parse_args()
    if options.mutations is None:
        sys.exit(find_violations(options))
    find_mutations(options.mutations or MUTATIONS, options)


def find_violations(options: argparse.Namespace) -> bool:
    """Run the model; print each violation with its story, and what happened in all runs."""
    began = time.monotonic()
    figures = Counter[str]()
    violations = 0
    for chunk in _chunks(options):
        for seed, run in chunk:
            figures += run.figures
            figures["runs"] += 1
            if run.failure:
                violations += 1
                print(f"seed {seed}: {run}", flush=True)  # noqa: T201
        text = f"{figures['runs']} runs of {options.steps} steps, {violations} violations"
        print(f"{text}, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
    for what, number in sorted(figures.items()):
        print(f"{number:>10,} {what}")  # noqa: T201
    return violations > 0


def _chunks(options: argparse.Namespace) -> Iterator[list[tuple[int, Run]]]:
    """Yield the runs of each chunk, with their seeds, as they end."""
    end = options.seed + options.runs
    work = partial(run_seeds, steps=options.steps, shorten_s=options.shorten)
    chunks = [range(first, min(first + CHUNK, end)) for first in range(options.seed, end, CHUNK)]
    if options.processes == 1:
        yield from map(work, chunks)
        return
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, chunk) for chunk in chunks]):
            yield done.result()


def find_mutations(names: Iterable[str], options: argparse.Namespace) -> None:
    """Print after how many runs each mutation was found, and by which invariant."""
    for name in names:
        began = time.monotonic()
        outcome = "NOT FOUND"
        number = 0
        with mutated(name), model_on_server() as model:
            for seed in range(options.seed, options.seed + options.runs):
                number += 1
                run = model.run(seed, steps=options.steps)
                if run.failure:
                    outcome = f"seed {seed}, {run.failure.splitlines()[0]}"
                    break
        seconds = time.monotonic() - began
        print(f"{number:>6} runs {seconds:>5.0f} s  {name}: {outcome}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
