"""The table at the end of a campaign; pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from tests.campaign.schedule import FAULTS
from tests.proof.history import Finding
from tests.proof.judge import INVARIANTS
from tests.proof.observations import Resources

AIM_S = {False: 10.0, True: 20.0}
"""Time to quiescence that is aimed at; True: Redis lost contents."""


@dataclass(slots=True, kw_only=True)
class CampaignResult:
    """What a campaign counted."""

    seed: int
    rounds: int = 0
    pods: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    quiet_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind of fault, the seconds from the end of the last fault of a round to quiescence."""
    violations: Sequence[Finding] = ()
    begin: Resources = field(default_factory=Resources)
    end: Resources = field(default_factory=Resources)
    coverage: str = ""
    """What the judge saw."""


def table(result: CampaignResult) -> str:
    """Return the table."""
    lines = [
        f"seed {result.seed}: {result.rounds} rounds, {result.pods} pods, "
        f"{result.faults.total()} faults, {len(result.violations)} violations",
        f"judged: {result.coverage}",
        "",
        f"{'fault':<18}{'count':>6}{'p50 s':>8}{'max s':>8}  time to quiescence",
    ]
    for kind in sorted(result.faults):
        times = result.quiet_s.get(kind, [])
        shown = f"{median_low(times):>8.1f}{max(times):>8.1f}" if times else f"{'-':>8}{'-':>8}"
        late = times and max(times) > AIM_S[FAULTS[kind].rebuilds]
        mark = f"  above the aim of {AIM_S[FAULTS[kind].rebuilds]:g} s" if late else ""
        lines.append(f"{kind:<18}{result.faults[kind]:>6}{shown}{mark}")
    counts = Counter(violation.check for violation in result.violations)
    lines += ["", f"{'invariant':<73}{'violations':>12}"]
    lines += [f"{name} {text:<70}{counts[name]:>12}" for name, text in INVARIANTS.items()]
    lines += ["", f"{'memory MiB':<24}{'begin':>8}{'end':>8}"]
    begin, end = result.begin.memory_mib, result.end.memory_mib
    for part in sorted(begin.keys() | end.keys()):
        lines.append(f"{part:<24}{begin.get(part, 0):>8}{end.get(part, 0):>8}")
    lines.append(f"{'lasting Redis keys':<24}{result.begin.keys:>8}{result.end.keys:>8}")
    return "\n".join(lines)
