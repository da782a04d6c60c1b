"""Versions of the objects: what a watch has to send to a client that knows an earlier one."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from services.api.aggregated.objects import Kind, VisibleObject
from services.api.projection.projection import Projection
from services.api.projection.visible_cluster import all_namespaces
from services.api.service import ApiService
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import WaitingPod
from shared.model.quantity import parse_decimal

MOST_VERSIONS = 32
REMEMBERED_S = 15.0
"""Interval of older versions that are kept."""
OLDER_VERSIONS = 40
"""Of ten minutes."""
LAG_S = 2.0
"""Every replica shows a change of the ledger after this time, by its own clock: it reads changes
within 150 ms, and what events are about again after a second; clocks of nodes differ less."""
LEDGER_S = 15.0
"""Without a successful reading for so long, a replica does not know the latest changes."""
IDS = 1 << 10
Objects = Mapping[tuple[str, str], VisibleObject]


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    recorded_ms: int
    """By this replica's clock."""
    objects: Objects


@dataclass(slots=True)
class Versions:
    """A number has a time in ms, up to which its list is complete, and its replica's number.

    A client that continues at another replica gets the changes since that replica's version of the
    time: it may know some of them, and misses none.
    """

    kind: Kind
    id: int = field(default_factory=lambda: random.randrange(IDS))  # noqa: S311
    _older: deque[Version] = field(default_factory=lambda: deque(maxlen=OLDER_VERSIONS))
    _latest: deque[Version] = field(default_factory=deque)
    _issued_ms: int = 0
    _position: str = ""

    def update(self, service: ApiService) -> tuple[int, Objects]:
        """Raises UnavailableError at first: a client of another replica could not continue here."""
        self.record(service)
        version = self._latest[-1]
        now_ms = _ms(service.clock.now())
        first = self._older[0] if self._older else self._latest[0]
        if now_ms < first.recorded_ms + _ms(LAG_S):
            raise UnavailableError("this replica has just started; retry in a second")
        self._issued_ms = max(self._issued_ms, _complete_ms(service))
        return max(self._issued_ms * IDS + self.id, version.number), version.objects

    def record(self, service: ApiService) -> None:
        if self._position == service.feed.position:
            return
        self._position = service.feed.position
        objects = {item.key: item for item in self.kind.read(service.cluster(all_namespaces))}
        last = self._latest[-1] if self._latest else None
        if last is not None and last.objects == objects:
            return
        earlier = last.objects if last else {}
        objects |= {key: item for key, item in earlier.items() if objects.get(key) == item}
        self._issued_ms = max(self._issued_ms + 1, _complete_ms(service))
        number = self._issued_ms * IDS + self.id
        self._latest.append(Version(number, _ms(service.clock.now()), objects))
        if len(self._latest) > MOST_VERSIONS:
            self._keep(self._latest.popleft())

    def _keep(self, version: Version) -> None:
        last_ms = self._older[-1].recorded_ms if self._older else 0
        if version.recorded_ms - last_ms >= _ms(REMEMBERED_S):
            self._older.append(version)

    def at(self, number: str, service: ApiService) -> Objects | None:
        """Return what a client with this number may know, or None if that is forgotten."""
        if number in {"", "0"}:
            return {}
        given = parse_decimal(number) or 0
        at_ms, replica = divmod(given, IDS)
        if replica == self.id:
            own = (version.objects for version in self._newest_first() if version.number <= given)
            return next(own, None)
        earlier = (
            version.objects for version in self._newest_first() if version.recorded_ms <= at_ms
        )
        objects = next(earlier, None)
        gone = self._gone_since(at_ms, service)
        return None if objects is None or gone is None else {**gone, **objects}

    def _gone_since(self, at_ms: int, service: ApiService) -> Objects | None:
        """Return ended objects that no version has, or None if there were too many."""
        gone = [record for at, record in service.gone if _ms(at) >= at_ms]
        if len(gone) == service.gone.maxlen:
            return None
        shown = Projection()
        nodes = service.projection.totals
        leases = [lease for lease in gone if isinstance(lease, Lease) and lease.node in nodes]
        for name in {lease.node for lease in leases}:
            there = tuple(lease for lease in leases if lease.node == name)
            shown.update_nodes([name], [replace(nodes[name], leases=there)])
        shown.update_waiting(pod for pod in gone if isinstance(pod, WaitingPod))
        cluster = replace(service.cluster(all_namespaces), projection=shown)
        present = {item.key for item in self.kind.read(service.cluster(all_namespaces))}
        objects = {item.key: item for item in self.kind.read(cluster)}
        return {key: item for key, item in objects.items() if key not in present}

    def _newest_first(self) -> Iterator[Version]:
        return chain(reversed(self._latest), reversed(self._older))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _complete_ms(service: ApiService) -> int:
    now = service.clock.now()
    read_at = service.data.ledger_at
    is_late = read_at and now - read_at > LEDGER_S
    return _ms((read_at if is_late else now) - LAG_S)
