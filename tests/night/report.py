"""The table of a night: seconds from a fault to the words of each place; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.night.faults import Fault
from tests.night.places import Place


@dataclass(slots=True, kw_only=True)
class NightResult:
    """What one fault led to."""

    fault: Fault
    seconds: dict[Place, float] = field(default_factory=dict)
    """From the fault to the words."""
    recovered_s: float | None = None
    """From the remedy until all places are as before, and a new pod runs."""
    misses: list[str] = field(default_factory=list)


def table(results: Sequence[NightResult]) -> str:
    """Return a line for each fault, and its misses below it."""
    head = "".join(f"{place:>18}" for place in Place)
    counts = sum(bool(result.misses) for result in results)
    return "\n".join(
        (
            f"{'fault':<22}{head}{'recovered':>11}",
            *map(lines_of, results),
            "",
            f"{len(results)} faults, {counts} with misses; seconds, - where it may be silent",
        )
    )


def lines_of(result: NightResult) -> str:
    cells = "".join(f"{_cell(result, place):>18}" for place in Place)
    recovered = "-" if result.recovered_s is None else f"{result.recovered_s:.1f}"
    misses = (f"\n    MISSED {miss}" for miss in result.misses)
    return f"{result.fault.name:<22}{cells}{recovered:>11}{''.join(misses)}"


def _cell(result: NightResult, place: Place) -> str:
    if place in result.seconds:
        return f"{result.seconds[place]:.1f}"
    return "MISSED" if place in result.fault.says else "-"
