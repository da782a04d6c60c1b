"""Missing components: late or unready replicas, absent services, nodes without agent; pure.

`now` is an argument, Unix seconds.
"""

from collections.abc import Iterable

from shared.model.events.pod_events import Heartbeat
from shared.model.names import REQUIRED_SERVICES, NodeName
from shared.model.views import MissingComponent

MISSED_HEARTBEATS = 3
"""After so many missed heartbeats, a replica is late."""
RETENTION_S = 300.0
"""A late replica is reported this long while other replicas of its service run."""
AGENT = "node-agent"
GRACE_PERIOD_S = 15.0
"""After the API's start, components that have never sent a heartbeat are not yet missing."""


class ComponentMonitor:
    """The latest heartbeat of every replica."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self._heartbeats: dict[tuple[str, str, str], tuple[Heartbeat, float]] = {}
        """By service, replica and node: agents of two nodes may run on one host."""

    def record(self, event: Heartbeat, now: float) -> None:
        """Record a heartbeat; a replica that stops on purpose is not missing."""
        key = (event.service, event.instance, event.node)
        if event.stopping:
            self._heartbeats.pop(key, None)
        else:
            self._heartbeats[key] = (event, now)

    def missing(self, nodes: Iterable[NodeName], now: float) -> list[MissingComponent]:
        """Return missing replicas, required services, and agents of nodes with devices.

        A replica that is not ready is listed with its own reasons.
        """
        self._remove_expired(now)
        found = [*self._missing_services(now), *self._missing_replicas(now)]
        listed = {component.instance for component in found}
        return [*found, *self._missing_agents(nodes, listed, now)]

    def running(self, now: float) -> dict[str, int]:
        """Count the replicas of each service that are not late."""
        counts: dict[str, int] = {}
        for event, received_at in self._heartbeats.values():
            if not _is_late(event, received_at, now):
                counts[event.service] = counts.get(event.service, 0) + 1
        return counts

    def _remove_expired(self, now: float) -> None:
        running = self.running(now)
        for key, (event, received_at) in list(self._heartbeats.items()):
            expired = now - received_at > RETENTION_S
            if event.service != AGENT and running.get(event.service) and expired:
                del self._heartbeats[key]

    def _missing_services(self, now: float) -> list[MissingComponent]:
        if now - self.started_at < GRACE_PERIOD_S:
            return []
        running = self.running(now)
        known = {service for service, _, _ in self._heartbeats}
        return [
            MissingComponent(
                service=name, since=self.started_at, text=f"no heartbeat of any {name}"
            )
            for name in REQUIRED_SERVICES
            if not running.get(name) and name not in known
        ]

    def _missing_replicas(self, now: float) -> list[MissingComponent]:
        found = []
        for (service, instance, _), (event, received_at) in sorted(
            self._heartbeats.items(), key=lambda item: item[0]
        ):
            where = f" of {event.node}" if event.node else ""
            if _is_late(event, received_at, now):
                text = f"{service}{where} ({instance}) does not send heartbeats"
            elif event.unready_reasons:
                reasons = "; ".join(event.unready_reasons)
                text = f"{service}{where} ({instance}) is not ready: {reasons}"
            else:
                continue
            found.append(
                MissingComponent(service=service, instance=instance, since=received_at, text=text)
            )
        return found

    def _missing_agents(
        self, nodes: Iterable[NodeName], listed: Iterable[str], now: float
    ) -> list[MissingComponent]:
        if now - self.started_at < GRACE_PERIOD_S:
            return []
        alive = {event.node for event, _ in self._heartbeats.values() if event.service == AGENT}
        return [
            MissingComponent(
                service=AGENT,
                instance=name,
                since=self.started_at,
                text=f"no heartbeat of the {AGENT} of {name}",
            )
            for name in sorted(nodes)
            if name not in alive and name not in listed
        ]


def _is_late(event: Heartbeat, received_at: float, now: float) -> bool:
    return now - received_at > MISSED_HEARTBEATS * event.interval_s
