"""How long pods run, learned from earlier ones of the same controller; pure."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from shared.model.bounds import MOST_RUN_S, Amount
from shared.model.errors import UNDECODABLE
from shared.model.leases.lease import Lease
from shared.model.names import Namespace

MOST_SERIES = 512
LEAST_RUNS = 2
"""So many pods must have ended before."""
NEWEST_WEIGHT = 0.2
"""Of the newest run time, once there are many."""
LONGEST_LOG = math.log(MOST_RUN_S)

_RANDOM = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}$")
_TEMPLATE_HASH = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{8,10}$")
_NUMBER = re.compile(r"[0-9]+")


class RunSeries(msgspec.Struct, frozen=True, array_like=True, gc=False):
    runs: Amount = 0
    log_mean_s: Annotated[float, Meta(ge=0, le=LONGEST_LOG)] = 0.0
    """Of the logarithms, so that a few long runs do not hide many short ones."""


def series_of(namespace: Namespace, name: str) -> str:
    """Numbers and random parts of names are left out, as in `train-x7k2p` or `worker-3`."""
    stem, is_random = _RANDOM.subn("", name)
    stem, is_hashed = _TEMPLATE_HASH.subn("", stem) if is_random else (stem, 0)
    return f"{namespace}/{_NUMBER.sub('#', stem)}{'-*' * (is_random + is_hashed)}"


class RunTimes:
    def __init__(self, series: dict[str, RunSeries] | None = None) -> None:
        self.series = series or {}

    def expected_s(self, lease: Lease) -> float | None:
        """Return None if too few ended before."""
        series = self.series.get(series_of(lease.namespace, lease.name)) if self.series else None
        return math.exp(series.log_mean_s) if series and series.runs >= LEAST_RUNS else None

    def learn(self, ended: Iterable[tuple[Lease, float]]) -> None:
        for lease, run_s in ended:
            name = series_of(lease.namespace, lease.name)
            seconds = math.log(min(max(run_s, 1.0), MOST_RUN_S))
            series = self.series.pop(name, RunSeries())
            weight = max(NEWEST_WEIGHT, 1 / (series.runs + 1))
            mean = series.log_mean_s + weight * (seconds - series.log_mean_s)
            self.series[name] = RunSeries(series.runs + 1, mean)
        self._forget()

    def _forget(self) -> None:
        """Namespaces with the most series lose some first."""
        if len(self.series) <= MOST_SERIES:
            return
        of_namespace: dict[str, list[str]] = {}
        for name in self.series:
            of_namespace.setdefault(name.partition("/")[0], []).append(name)
        most = MOST_SERIES
        while most > 1 and sum(min(len(x), most) for x in of_namespace.values()) > MOST_SERIES:
            most -= 1
        oldest = [name for names in of_namespace.values() for name in names[:-most]]
        for name in oldest or list(self.series)[:-MOST_SERIES]:
            del self.series[name]

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self.series)

    @classmethod
    def load(cls, data: bytes) -> Self:
        try:
            return cls(msgspec.msgpack.decode(data, type=dict[str, RunSeries]))
        except UNDECODABLE:
            return cls()
