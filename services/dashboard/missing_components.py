"""Who has not been heard of: replicas that fell silent, services nobody runs, nodes without agents.

No clock: `now` is an argument, Unix seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.model.events.pod_events import Heartbeat
from shared.model.names import NodeName

MISSED = 3
"""Reports that a replica may miss before it counts as silent."""
FORGET_S = 300.0
"""A silent replica of a service that others of it run is named so long."""
NEEDED = ("watcher", "placer", "binder")
"""Without any replica of these nothing is placed."""
AGENT = "node-agent"
PATIENCE_S = 15.0
"""So long after its own start the dashboard does not miss what it has never heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """One part that is missed."""

    service: str
    instance: str = ""
    since: float = 0.0
    """When it was last heard of, or since when it is listened for."""
    text: str = ""


class Parts:
    """Replicas as they last reported."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self._last: dict[tuple[str, str, str], tuple[Heartbeat, float]] = {}
        """By service, replica and node: agents of two nodes may run on one host."""

    def hear(self, event: Heartbeat, now: float) -> None:
        """Note a report; one that leaves on purpose is not missed."""
        key = (event.service, event.instance, event.node)
        if event.stopping:
            self._last.pop(key, None)
        else:
            self._last[key] = (event, now)

    def silent(self, nodes: Iterable[NodeName], now: float) -> list[Silent]:
        """Return who is missed: replicas, services that are needed, agents of nodes with devices.

        A replica that says that it is not ready is named with its own words.
        """
        self._forget(now)
        found = [*self._missed_services(now), *self._missed_replicas(now)]
        named = {one.instance for one in found}
        return [*found, *self._missed_agents(nodes, named, now)]

    def running(self, now: float) -> dict[str, int]:
        """Count the replicas of each service that are heard of."""
        found: dict[str, int] = {}
        for event, heard_at in self._last.values():
            if not _is_late(event, heard_at, now):
                found[event.service] = found.get(event.service, 0) + 1
        return found

    def _forget(self, now: float) -> None:
        running = self.running(now)
        for key, (event, heard_at) in list(self._last.items()):
            if event.service != AGENT and running.get(event.service) and now - heard_at > FORGET_S:
                del self._last[key]

    def _missed_services(self, now: float) -> list[Silent]:
        if now - self.began_at < PATIENCE_S:
            return []
        running = self.running(now)
        known = {service for service, _, _ in self._last}
        return [
            Silent(service=name, since=self.began_at, text=f"no {name} is heard of")
            for name in NEEDED
            if not running.get(name) and name not in known
        ]

    def _missed_replicas(self, now: float) -> list[Silent]:
        found = []
        for (service, instance, _), (event, heard_at) in sorted(
            self._last.items(), key=lambda known: known[0]
        ):
            where = f" of {event.node}" if event.node else ""
            if _is_late(event, heard_at, now):
                text = f"{service}{where} ({instance}) is silent"
            elif event.unready_reasons:
                reasons = "; ".join(event.unready_reasons)
                text = f"{service}{where} ({instance}) is not ready: {reasons}"
            else:
                continue
            found.append(Silent(service=service, instance=instance, since=heard_at, text=text))
        return found

    def _missed_agents(
        self, nodes: Iterable[NodeName], named: Iterable[str], now: float
    ) -> list[Silent]:
        if now - self.began_at < PATIENCE_S:
            return []
        heard = {event.node for event, _ in self._last.values() if event.service == AGENT}
        return [
            Silent(
                service=AGENT,
                instance=name,
                since=self.began_at,
                text=f"no {AGENT} of {name} is heard of",
            )
            for name in sorted(nodes)
            if name not in heard and name not in named
        ]


def _is_late(event: Heartbeat, heard_at: float, now: float) -> bool:
    return now - heard_at > MISSED * event.interval_s
