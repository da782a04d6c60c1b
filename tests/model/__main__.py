"""`python -m tests.model --runs 10000 --seed 1`: seeded runs of the model, with figures."""

import argparse
import time
from collections.abc import Iterable

from tests.model.mutations import MUTATIONS, mutated
from tests.model.runs import model_server, run

CHUNK = 250
"""Runs per seed: hypothesis remembers what it tried, and its memory grows with it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--shrink", action="store_true", help="search for the smallest trace of a violation"
    )
    parser.add_argument(
        "--mutations", nargs="*", metavar="NAME", help="take checks out: each must be found"
    )
    options = parser.parse_args()
    if options.mutations is None:
        find_violations(
            runs=options.runs, steps=options.steps, seed=options.seed, shrink=options.shrink
        )
    else:
        find_mutations(
            options.mutations or MUTATIONS,
            runs=options.runs,
            steps=options.steps,
            seed=options.seed,
        )


def find_violations(*, runs: int, steps: int, seed: int, shrink: bool) -> None:
    """Run the model; print each violation with its trace, and what happened in all runs."""
    began, done, violations = time.monotonic(), 0, 0
    with model_server() as machine:
        while done < runs:
            count, of_chunk = min(CHUNK, runs - done), seed + done // CHUNK
            try:
                run(machine, runs=count, steps=steps, seed=of_chunk, shrink=shrink)
            except Exception as error:  # noqa: BLE001 - an invariant, or a bug of the model
                violations += 1
                trace = "\n".join(getattr(error, "__notes__", []))
                print(f"seed {of_chunk}: {error}\n{trace}")  # noqa: T201
            done += count
            tried, seconds = machine.figures["runs"], time.monotonic() - began
            text = f"{tried} runs of {steps} steps in {seconds:.0f} s, {violations} violations"
            print(text, flush=True)  # noqa: T201
        for what, number in sorted(machine.figures.items()):
            print(f"{number:>10,} {what}")  # noqa: T201


def find_mutations(names: Iterable[str], *, runs: int, steps: int, seed: int) -> None:
    """Print after how many runs each mutation was found, and by which invariant."""
    for name in names:
        with model_server() as machine, mutated(name, machine.server):
            machine.figures.clear()
            found, done = "NOT FOUND", 0
            try:
                while done < runs:
                    count = min(CHUNK, runs - done)
                    run(machine, runs=count, steps=steps, seed=seed + done // CHUNK, shrink=False)
                    done += count
            except AssertionError as error:
                found = str(error).splitlines()[0]
            print(f"{machine.figures['runs']:>6} runs  {name}: {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
