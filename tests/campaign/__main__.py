"""Run the fault campaign against a stack of its own.

Examples:
  python -m tests.campaign --seconds 600 --seed 7
  python -m tests.campaign --seconds 120 --seed 7 --fault redis-flush --fault kill
  python -m tests.campaign --seconds 600 --seed 7 --schedule     # print what would happen
  python -m tests.campaign --seconds 60 --seed 3 --keep /tmp/c   # keep state and logs there

The exit code is 1 if an invariant was violated. The same seed and seconds give the same schedule.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.campaign.report import table
from tests.campaign.runner import run_campaign
from tests.campaign.schedule import FAULTS, Round, rounds_of
from tests.proof.judge import INVARIANTS, checks_of


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.campaign",
        description=__doc__,
        epilog=watched(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--seconds", type=float, default=600.0, help="length of the campaign (%(default)s)")
    add("--seed", type=int, default=0, help="of the schedule (%(default)s)")
    add("--fault", action="append", choices=tuple(FAULTS), metavar="KIND", default=[],
        help=f"only this kind, may be repeated: {', '.join(FAULTS)}")  # fmt: skip
    add("--patience", type=float, default=1.0, metavar="FACTOR",
        help="multiply the bounds of liveness, on a busy machine (%(default)s)")  # fmt: skip
    add("--keep", type=Path, help="directory that keeps the state and the logs of all parts")
    add("--schedule", action="store_true", help="print the schedule and run nothing")
    return made


def watched() -> str:
    """Return every invariant with the functions of this package that watch it."""
    lines = [f"  {name}  {text}: {', '.join(checks_of(name))}" for name, text in INVARIANTS.items()]
    return "\n".join(("Invariants, and what watches them:", *lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and return the exit code."""
    options = parser().parse_args(arguments)
    rounds = rounds_of(options.seed, options.seconds, tuple(options.fault) or tuple(FAULTS))
    if options.schedule:
        print_schedule(rounds)
        return 0
    result, _, _ = asyncio.run(
        run_campaign(
            rounds,
            seed=options.seed,
            seconds=options.seconds,
            patience=options.patience,
            kept=options.keep,
        )
    )
    print(table(result))
    return 1 if result.violations else 0


def print_schedule(rounds: Sequence[Round]) -> None:
    """Print every action with its time in its round."""
    for planned_round in rounds:
        actions = [(fault.at_s, f"fault {fault}") for fault in planned_round.faults]
        actions += [
            (pods.at_s, f"{pods.verb} {pods.name} {pods.pod.vocabulary if pods.pod else ''}")
            for pods in planned_round.pods
        ]
        print(f"round {planned_round.number}")
        for at_s, text in sorted(actions):
            print(f"  {at_s:6.2f} s  {text}")


if __name__ == "__main__":
    sys.exit(main())
