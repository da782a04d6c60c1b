"""Problems, one for each cause: missing components, GPUs that are sick or closed, old data; pure.

`now` is an argument, Unix seconds.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.api.projection import Projection
from shared.model.device import visible_fault
from shared.model.events.pod_events import Heartbeat
from shared.model.names import (
    AGENTS_NAMESPACE,
    REQUIRED_SERVICES,
    SYSTEM_NAMESPACE,
    Namespace,
    NodeName,
)
from shared.model.views import View


class Problem(View, frozen=True, kw_only=True):
    """What is wrong for one cause."""

    severity: str
    """`error`: pods may not be placed, or what is shown is old; `warning`; or `info`."""
    cause: str
    text: str
    """The cause, and what is affected."""
    hint: str
    since: float | None
    """Null if it is not known."""
    count: int
    affected: tuple[str, ...]
    """The first ones."""


class DataAge(View, frozen=True, kw_only=True):
    """When data was last received; 0: never."""

    ledger_at: float = 0.0
    """Leases, devices and waiting pods, as read from the ledger."""
    usage_at: float = 0.0
    """What agents measure."""


MISSED_HEARTBEATS = 3
"""After so many missed heartbeats, a replica is late."""
RETENTION_S = 300.0
"""A late replica is reported this long while other replicas of its service run."""
AGENT = "node-agent"
GRACE_PERIOD_S = 15.0
"""After the API's start, components that have never sent a heartbeat are not yet missing."""
OLD_S = 30.0
"""The ledger is read every few seconds."""
MOST_NAMED = 20
NAMED = 3
SEVERITIES = ("error", "warning", "info")
LATE = "No heartbeats"
PODS = "check NATS and the pods: kubectl -n {} get pods -o wide"
REDIS = "check that Redis and NATS run: leasehold doctor"
AGENTS = f"check that the agents run and reach NATS: kubectl -n {AGENTS_NAMESPACE} get pods -o wide"
OLD = "Leases cannot be read from Redis"
SICK = "pods on it stay; it gets no new ones until it is healthy again; see leasehold doctor"
STATE_AND_CODE = re.compile(r"^(\w+: )+")
CLOSED = "pods on it stay; leasehold uncordon opens it, or remove the annotation"
CORDONED = "pods on it stay; new ones are placed elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Affected:
    """A component that is missing or not ready, or what else a cause affects."""

    service: str = ""
    name: str
    since: float | None = None
    cause: str
    """The same for all that it affects."""
    hint: str = ""
    severity: str = "error"


class ComponentMonitor:
    """The latest heartbeat of every replica."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self._heartbeats: dict[tuple[str, str, str], tuple[Heartbeat, float]] = {}
        """By service, replica and node: agents of two nodes may run on one host."""
        self._unready: dict[tuple[str, str, str], float] = {}
        """Since when replicas are not ready."""

    def record(self, event: Heartbeat, now: float) -> None:
        """Record a heartbeat; a replica that stops on purpose is not missing."""
        key = (event.service, event.instance, event.node)
        if event.unready_reasons and not event.stopping:
            self._unready.setdefault(key, now)
        else:
            self._unready.pop(key, None)
        if event.stopping:
            self._heartbeats.pop(key, None)
        else:
            self._heartbeats[key] = (event, now)

    def missing(self, nodes: Iterable[NodeName], now: float) -> list[Affected]:
        """Return missing replicas, required services, and agents of nodes with devices.

        A replica that is not ready is listed once for each of its reasons.
        """
        self._remove_expired(now)
        return [
            *self._missing_services(now),
            *self._missing_replicas(now),
            *self._missing_agents(nodes, now),
        ]

    def running(self, now: float) -> dict[str, tuple[str, ...]]:
        """Return the versions of the replicas of each service that are not late."""
        found: dict[str, set[str]] = {}
        for event, received_at in self._heartbeats.values():
            if not _is_late(event, received_at, now):
                found.setdefault(event.service, set()).add(event.version)
        return {service: tuple(sorted(found[service])) for service in sorted(found)}

    def _remove_expired(self, now: float) -> None:
        running = self.running(now)
        for key, (event, received_at) in list(self._heartbeats.items()):
            expired = now - received_at > RETENTION_S
            if event.service != AGENT and running.get(event.service) and expired:
                del self._heartbeats[key]

    def _missing_services(self, now: float) -> Iterator[Affected]:
        known = {service for service, _, _ in self._heartbeats}
        for name in REQUIRED_SERVICES if now - self.started_at >= GRACE_PERIOD_S else ():
            if name not in known:
                yield _late(name, name, self.started_at)

    def _missing_replicas(self, now: float) -> Iterator[Affected]:
        for key, (event, received_at) in sorted(self._heartbeats.items(), key=lambda item: item[0]):
            name = f"{event.service} of {event.node}" if event.node else event.instance
            if _is_late(event, received_at, now):
                yield _late(event.service, name, received_at)
                continue
            for reason in event.unready_reasons:
                _, _, text = reason.partition(": ")
                cause, _, hint = (text or reason).partition("; ")
                since = self._unready[key]
                yield Affected(
                    service=event.service, name=name, since=since, cause=cause, hint=hint
                )

    def _missing_agents(self, nodes: Iterable[NodeName], now: float) -> Iterator[Affected]:
        known = {event.node for event, _ in self._heartbeats.values() if event.service == AGENT}
        for name in sorted(nodes) if now - self.started_at >= GRACE_PERIOD_S else ():
            if name not in known:
                yield _late(AGENT, f"{AGENT} of {name}", self.started_at)


def _late(service: str, name: str, since: float) -> Affected:
    hint = PODS.format(AGENTS_NAMESPACE if service == AGENT else SYSTEM_NAMESPACE)
    return Affected(service=service, name=name, since=since, cause=LATE, hint=hint)


def _is_late(event: Heartbeat, received_at: float, now: float) -> bool:
    return now - received_at > MISSED_HEARTBEATS * event.interval_s


def problems_of(
    projection: Projection,
    components: Iterable[Affected],
    data: DataAge,
    *,
    visible: Callable[[Namespace], bool],
    now: float,
) -> tuple[Problem, ...]:
    """Return the problems, errors first."""
    causes: dict[str, list[Affected]] = {}
    if data.ledger_at and now - data.ledger_at > OLD_S:
        name = "everything shown is old"
        causes[OLD] = [Affected(name=name, since=data.ledger_at, cause=OLD, hint=REDIS)]
    for each in (*components, *_sick_or_closed(projection, visible), *_cordoned(projection)):
        causes.setdefault(each.cause, []).append(each)
    problems = [_problem(cause, found) for cause, found in causes.items()]
    return tuple(sorted(problems, key=lambda each: SEVERITIES.index(each.severity)))


def _sick_or_closed(
    projection: Projection, visible: Callable[[Namespace], bool]
) -> Iterator[Affected]:
    for view in projection.devices.values():
        where = f"GPU {view.index} of {view.node}"
        if not view.healthy:
            fault = STATE_AND_CODE.sub("", visible_fault(view.fault, visible))
            cause = f"Unhealthy: {fault or 'the agent reports no reason'}"
            yield Affected(name=where, cause=cause, hint=SICK, severity="warning")
        elif view.excluded:
            cause = f"Closed to new pods: {view.excluded}"
            yield Affected(name=where, cause=cause, hint=CLOSED, severity="info")


def _cordoned(projection: Projection) -> Iterator[Affected]:
    for name in projection.unmeasured_nodes():
        cause = "Agents report no usage"
        yield Affected(name=name, cause=cause, hint=AGENTS, severity="warning")
    for node in projection.nodes.values():
        if node.closed_by:
            cause = node.closed_by
            yield Affected(name=node.node, cause=cause, hint=CORDONED, severity="info")


def _problem(cause: str, found: list[Affected]) -> Problem:
    since = [each.since for each in found if each.since is not None]
    names = [each.name for each in found]
    return Problem(
        severity=found[0].severity,
        cause=cause,
        text=f"{cause}: {_listed(names)}",
        hint=found[0].hint,
        since=min(since, default=None),
        count=len(found),
        affected=tuple(names[:MOST_NAMED]),
    )


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    shown = ", ".join(names[:NAMED] if more > 1 else names)
    return f"{shown} and {more} more" if more > 1 else shown
