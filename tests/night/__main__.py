"""Make each fault of a night on call happen on one stack, and read what every place says.

Examples:
  python -m tests.night                                  # all faults, 30 to 60 minutes
  python -m tests.night --fault xid-79 --fault nats-deaf
  python -m tests.night --fault redis-full --words       # and print what each place says
  python -m tests.night --list

The exit code is 1 if a place has no words within 30 s, has more than one line for the fault, or is
not as before once the remedy was applied.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from tests.night.faults import FAULTS, page_table
from tests.night.report import table
from tests.night.runner import run_night
from tools.generate.pages import TROUBLESHOOTING, filled


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.night",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    names = [fault.name for fault in FAULTS]
    add("--fault", action="append", choices=names, metavar="NAME", default=[],
        help=f"only this one, may be repeated: {', '.join(names)}")  # fmt: skip
    add("--patience", type=float, default=1.0, metavar="FACTOR",
        help="multiply the limits, on a busy machine (%(default)s)")  # fmt: skip
    add("--words", action="store_true", help="print what each place says")
    add("--write-page", action="store_true",
        help="write the table to docs/troubleshooting.md, and make no fault")  # fmt: skip
    add("--list", action="store_true", help="print the faults and make none")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and return the exit code."""
    options = parser().parse_args(arguments)
    by_name = {fault.name: fault for fault in FAULTS}
    chosen = [by_name[name] for name in options.fault or by_name]
    if options.list:
        print("\n".join(f"{fault.name:<22}{fault.text}" for fault in chosen))
        return 0
    if options.write_page:
        TROUBLESHOOTING.write_text(filled(TROUBLESHOOTING, {"faults": page_table()}))
        return 0
    try:
        results = asyncio.run(
            run_night(chosen, patience=options.patience, prints_words=options.words)
        )
    except asyncio.CancelledError:
        print("stopped; nothing is left running", file=sys.stderr)
        return 130
    print(table(results))
    return 1 if any(result.misses for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
