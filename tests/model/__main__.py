"""`python -m tests.model --runs 10000 --seed 1`: seeded runs of the model, with figures."""

import argparse
import time

from tests.model.faults import IN_CI, UNMENDED, Fault
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
        "--with",
        dest="more",
        action="append",
        default=[],
        choices=["all", *UNMENDED],
        help="a fault that is known to break an invariant",
    )
    parser.add_argument(
        "--mutations", action="store_true", help="take checks out of scripts: each must be found"
    )
    options = parser.parse_args()
    if options.mutations:
        find_mutations(runs=options.runs, steps=options.steps, seed=options.seed)
        return
    more = frozenset(UNMENDED) if "all" in options.more else frozenset(map(Fault, options.more))
    faults, began, done = IN_CI | more, time.monotonic(), 0
    with model_server() as machine:
        while done < options.runs:
            count = min(CHUNK, options.runs - done)
            run(machine, faults, runs=count, steps=options.steps, seed=options.seed + done // CHUNK)
            done += count
        print(f"{done} runs of {options.steps} steps in {time.monotonic() - began:.0f} s")  # noqa: T201
        for what, number in sorted(machine.figures.items()):
            print(f"{number:>10,} {what}")  # noqa: T201


def find_mutations(*, runs: int, steps: int, seed: int) -> None:
    """Print after how many runs each mutation was found, and by which invariant."""
    for name in MUTATIONS:
        with model_server() as machine:
            machine.server.scripts.update(mutated(name))
            machine.figures.clear()
            found = "NOT FOUND"
            try:
                run(machine, IN_CI, runs=runs, steps=steps, seed=seed, shrink=False)
            except AssertionError as error:
                found = str(error).splitlines()[0]
            print(f"{machine.figures['runs']:>6} runs  {name}: {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
