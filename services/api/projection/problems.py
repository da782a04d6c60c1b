"""Problems, one for each cause: missing components, closed or sick GPUs, old data; pure."""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from services.api.projection.projection import Projection
from shared.model.devices.device import END_LEFTOVERS, visible_fault
from shared.model.devices.enforcers import MissingEnforcer
from shared.model.events.pod_events import Heartbeat
from shared.model.names import (
    AGENTS_NAMESPACE,
    REQUIRED_SERVICES,
    SYSTEM_NAMESPACE,
    Namespace,
    NodeName,
)
from shared.model.views.gpus import DeviceView
from shared.model.views.view import View
from shared.nats.subjects import most_replicas


class Problem(View, frozen=True, kw_only=True):
    """What is wrong for one cause."""

    severity: str
    """`error`: pods may not be placed, or what is shown is old; `warning`; or `info`."""
    cause: str
    text: str
    hint: str
    since: float | None
    count: int
    affected: tuple[str, ...]


class DataAge(View, frozen=True, kw_only=True):
    """When data was last received; 0: never."""

    ledger_at: float = 0.0
    usage_at: float = 0.0


MISSED_HEARTBEATS = 3
"""A replica is late after them."""
RETENTION_S = 300.0
"""How long a late replica is reported while other replicas of its service run."""
AGENT = "node-agent"
GRACE_PERIOD_S = 15.0
"""After the API's start, components that have never sent a heartbeat are not yet missing."""
OLD_S = 30.0
"""The ledger is read every few seconds."""
MOST_NAMED = 20
NAMED = 3
SEVERITIES = ("error", "warning", "info")
LATE = "No heartbeats"
NATS_DELIVERS_NOTHING = "NATS delivers no heartbeats, not even those of the API"
NATS = (
    f"restart NATS if it does not reply: kubectl -n {SYSTEM_NAMESPACE} get pods | grep nats; "
    "leasehold doctor; running pods are not affected"
)
PODS = "check NATS and the pods: kubectl -n {} get pods -o wide"
LEDGER = "check that Redis and NATS run: leasehold doctor"
AGENTS = f"check that the agents run and reach NATS: kubectl -n {AGENTS_NAMESPACE} get pods -o wide"
OLD = "Leases cannot be read from Redis"
SICK = "pods on it stay; it gets no new ones until it is healthy again; see leasehold doctor"
STATE_AND_CODE = re.compile(r"^(\w+: )+")
SLOW_S = 1.5
"""A server that takes longer to reply is overloaded."""
REDIS = "redis"
NATS_SERVER = "nats"
API_SERVER = "api-server"
SERVERS = {
    REDIS: (
        "Redis",
        "pods are placed late",
        "redis-cli --latency; redis-cli slowlog get; give its machine CPU and a faster disk",
    ),
    NATS_SERVER: (
        "NATS",
        "leases and events arrive late",
        "see nats-server's log, and give it CPU; if all services of a machine are slow, that one",
    ),
    API_SERVER: (
        "The API server",
        "pods are seen, placed and bound late",
        "kubectl get --raw /readyz?verbose; see the latency of etcd",
    ),
}
CLOCK_S = 5.0
"""A difference at which leases and reservations end too early or too late."""
CLOCKS = "Clocks differ"
SET_CLOCKS = (
    "timedatectl; chronyc tracking, and chronyc makestep, on that machine: all need the same time "
    "servers"
)
HOT = "Slowed down by temperature"
COOL = (
    "pods on it are slower; check fans, airflow and its power limit (nvidia-smi -q -d POWER); "
    "leasehold cordon NODE/GPU keeps new pods away meanwhile"
)
LOST = (
    "running containers keep their limits, and may not start again; new pods are placed elsewhere; "
    "see leasehold doctor on the node"
)
CLOSED = "pods on it stay; leasehold uncordon opens it, or remove the annotation"
NO_RESPONSE = "does not respond"
"""Part of why a node is closed whose agent has not replied to the binder."""
CORDONED = "pods on it stay; new ones are placed elsewhere"
HIDDEN = "a reason that viewers of all namespaces see"
"""An agent may name the pod that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedObject:
    service: str = ""
    node: str = ""
    """Of an agent that is missing or not ready."""
    name: str
    since: float | None = None
    cause: str
    hint: str = ""
    severity: str = "error"


@dataclass(slots=True)
class _Replica:
    heartbeat: Heartbeat
    received_at: float
    unready_since: float | None = None
    ahead_s: tuple[float, ...] = ()
    """How far the sender's clock was ahead of ours, less each message's way."""


class ComponentMonitor:
    """NATS has authenticated a heartbeat's service and node, and not its replica.

    So of each sender, as many replicas are known as it can have.
    """

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self._replicas: dict[str, OrderedDict[str, _Replica]] = {}
        """By sender and name, the one that was silent for longest first."""

    def record(self, event: Heartbeat, now: float) -> None:
        """A replica that stops on purpose is not missing."""
        replicas = self._replicas.setdefault(event.route, OrderedDict())
        before = replicas.pop(event.instance, None)
        if not event.stopping:
            since = before.unready_since if before else None
            unready_since = (since or now) if event.unready_reasons else None
            ahead_s = before.ahead_s if before else ()
            if event.sent_at:
                ahead_s = (*ahead_s, event.sent_at - now)[-MISSED_HEARTBEATS:]
            replicas[event.instance] = _Replica(event, now, unready_since, ahead_s)
        while len(replicas) > most_replicas(event.route):
            replicas.popitem(last=False)
        if not replicas:
            del self._replicas[event.route]

    def missing(self, nodes: Iterable[NodeName], now: float) -> list[AffectedObject]:
        """A replica that is not ready is listed once for each of its reasons."""
        names = set(nodes)
        self._remove_expired(names, now)
        return [
            *self._missing_services(now),
            *self._missing_replicas(now),
            *self._missing_agents(names, now),
        ]

    def running(self, now: float) -> dict[str, tuple[str, ...]]:
        versions: dict[str, set[str]] = {}
        for replica in self._known():
            if not _is_late(replica, now):
                service = replica.heartbeat.service
                versions.setdefault(service, set()).add(replica.heartbeat.version)
        return {service: tuple(sorted(versions[service])) for service in sorted(versions)}

    def clocks(self, others: Mapping[str, float], now: float) -> dict[str, tuple[str, float]]:
        """Return service and seconds ahead of most, by name.

        A message that was late counts only if the latest ones all were.
        """
        clocks = {
            _shown_name(replica.heartbeat): (replica.heartbeat.service, max(replica.ahead_s))
            for replica in self._known()
            if len(replica.ahead_s) == MISSED_HEARTBEATS and not _is_late(replica, now)
        }
        clocks |= {name: (name, ahead_s) for name, ahead_s in others.items()}
        usual_s = median(ahead_s for _, ahead_s in clocks.values()) if clocks else 0.0
        return {name: (service, ahead_s - usual_s) for name, (service, ahead_s) in clocks.items()}

    def lateness_s(self) -> float:
        """Return by how much the latest heartbeats of most replicas were late."""
        late_s = [
            max(replica.ahead_s) - min(replica.ahead_s)
            for replica in self._known()
            if len(replica.ahead_s) == MISSED_HEARTBEATS
        ]
        return median(late_s) if late_s else 0.0

    def _known(self) -> Iterator[_Replica]:
        for replicas in self._replicas.values():
            yield from replicas.values()

    def _remove_expired(self, nodes: Collection[NodeName], now: float) -> None:
        """Keep the last replica of a service or node."""
        running = self.running(now)
        for sender, replicas in list(self._replicas.items()):
            for name, replica in list(replicas.items()):
                event = replica.heartbeat
                is_last = len(replicas) == 1
                is_needed = (
                    is_last and event.node in nodes
                    if event.service == AGENT
                    else not running.get(event.service)
                )
                if now - replica.received_at > RETENTION_S and not is_needed:
                    del replicas[name]
            if not replicas:
                del self._replicas[sender]

    def _missing_services(self, now: float) -> Iterator[AffectedObject]:
        services = {replica.heartbeat.service for replica in self._known()}
        for name in REQUIRED_SERVICES if now - self.started_at >= GRACE_PERIOD_S else ():
            if name not in services:
                yield _late(name, name, self.started_at)

    def _missing_replicas(self, now: float) -> Iterator[AffectedObject]:
        all_late = all(_is_late(replica, now) for replica in self._known())
        late = NATS_DELIVERS_NOTHING if all_late else LATE
        for replica in sorted(self._known(), key=_name_of):
            event = replica.heartbeat
            name = _shown_name(event)
            if _is_late(replica, now):
                yield _late(event.service, name, replica.received_at, event.node, cause=late)
                continue
            for reason in event.unready_reasons:
                _, _, text = reason.partition(": ")
                cause, _, hint = (text or reason).partition("; ")
                since = replica.unready_since
                yield AffectedObject(
                    service=event.service,
                    node=event.node,
                    name=name,
                    since=since,
                    cause=cause,
                    hint=hint,
                )

    def _missing_agents(self, nodes: Iterable[NodeName], now: float) -> Iterator[AffectedObject]:
        events = (replica.heartbeat for replica in self._known())
        with_agent = {event.node for event in events if event.service == AGENT}
        for name in sorted(nodes) if now - self.started_at >= GRACE_PERIOD_S else ():
            if name not in with_agent:
                yield _late(AGENT, f"{AGENT} of {name}", self.started_at, name)


def _shown_name(event: Heartbeat) -> str:
    return f"{event.service} of {event.node}" if event.node else event.instance


def slow_servers(replies_s: Mapping[str, float]) -> Iterator[AffectedObject]:
    for name, reply_s in replies_s.items():
        if reply_s > SLOW_S:
            _, effect, hint = SERVERS[name]
            yield AffectedObject(name=effect, cause=_slow(name), hint=hint, severity="warning")


def _slow(name: str) -> str:
    server, *_ = SERVERS[name]
    return f"{server} is slow"


def clock_problems(clocks: Mapping[str, tuple[str, float]]) -> Iterator[AffectedObject]:
    for name, (_, ahead_s) in sorted(clocks.items()):
        if abs(ahead_s) > CLOCK_S:
            text = f"{name} is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
            yield AffectedObject(name=text, cause=CLOCKS, hint=SET_CLOCKS, severity="warning")


def _name_of(replica: _Replica) -> tuple[str, str, str]:
    event = replica.heartbeat
    return event.service, event.instance, event.node


def _late(
    service: str, name: str, since: float, node: str = "", *, cause: str = LATE
) -> AffectedObject:
    hint = PODS.format(AGENTS_NAMESPACE if service == AGENT else SYSTEM_NAMESPACE)
    if cause == NATS_DELIVERS_NOTHING:
        hint = NATS
    return AffectedObject(
        service=service, node=node, name=name, since=since, cause=cause, hint=hint
    )


def _is_late(replica: _Replica, now: float) -> bool:
    return now - replica.received_at > MISSED_HEARTBEATS * replica.heartbeat.interval_s


def problems_of(
    projection: Projection,
    components: Iterable[AffectedObject],
    data: DataAge,
    *,
    visible: Callable[[Namespace], bool],
    now: float,
) -> tuple[Problem, ...]:
    causes: dict[str, list[AffectedObject]] = {}
    for affected in affected_objects(projection, components, data, visible=visible, now=now):
        causes.setdefault(affected.cause, []).append(affected)
    problems = [_problem(cause, affected_objects) for cause, affected_objects in causes.items()]
    return tuple(sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)))


def affected_objects(
    projection: Projection,
    components: Iterable[AffectedObject],
    data: DataAge,
    *,
    visible: Callable[[Namespace], bool],
    now: float,
) -> Iterator[AffectedObject]:
    if data.ledger_at and now - data.ledger_at > OLD_S:
        name = "everything shown is old"
        yield AffectedObject(name=name, since=data.ledger_at, cause=OLD, hint=LEDGER)
    missing = list(components)
    yield from missing
    yield from _sick_or_closed(projection, visible)
    for node, lost in lost_enforcers(projection.devices.values()):
        yield AffectedObject(name=node, cause=lost.reason, hint=LOST, severity="warning")
    silent = {affected.node for affected in missing}
    if any(affected.cause == _slow(NATS_SERVER) for affected in missing):
        silent |= projection.nodes.keys()  # what agents report comes late
    yield from _cordoned(projection, silent, visible)


def visible_reason(closed_by: str, visible: Callable[[Namespace], bool]) -> str:
    """Return why a node is closed, without pods of hidden namespaces."""
    return visible_fault(closed_by, visible) or (closed_by and HIDDEN)


def lost_enforcers(devices: Iterable[DeviceView]) -> Iterable[tuple[NodeName, MissingEnforcer]]:
    """Return what holds leases of a node and is not offered to new ones."""
    return dict.fromkeys(
        (view.node, missing)
        for view in devices
        for missing in (view.missing if view.healthy else ())
        if any(missing.name in (share.memory, share.compute) for share in view.shares)
    )


def _sick_or_closed(
    projection: Projection, visible: Callable[[Namespace], bool]
) -> Iterator[AffectedObject]:
    for view in projection.devices.values():
        where = f"GPU {view.index} of {view.node}"
        if not view.healthy:
            fault = STATE_AND_CODE.sub("", visible_fault(view.fault, visible))
            reason, _, remedy = fault.partition(": ")
            cause = f"Unhealthy: {reason or 'the agent reports no reason'}"
            hint = f"{remedy}; {SICK}" if remedy else SICK
            yield AffectedObject(name=where, cause=cause, hint=hint, severity="warning")
        elif view.leftovers:
            cause = "Processes of earlier pods still hold memory"
            yield AffectedObject(name=where, cause=cause, hint=END_LEFTOVERS, severity="warning")
        elif view.excluded:
            cause = f"Closed to new pods: {view.excluded}"
            yield AffectedObject(name=where, cause=cause, hint=CLOSED, severity="info")
        hardware = projection.hardware.get(view.uuid)
        if view.healthy and hardware is not None and hardware.is_hot:
            yield AffectedObject(name=where, cause=HOT, hint=COOL, severity="warning")


def _cordoned(
    projection: Projection,
    with_silent_agents: Collection[str],
    visible: Callable[[Namespace], bool],
) -> Iterator[AffectedObject]:
    for name in projection.unmeasured_nodes():
        if name not in with_silent_agents:
            cause = "Agents report no usage"
            yield AffectedObject(name=name, cause=cause, hint=AGENTS, severity="warning")
    for node in projection.nodes.values():
        is_reported = node.node in with_silent_agents and NO_RESPONSE in node.closed_by
        if node.closed_by and not is_reported:
            cause = visible_reason(node.closed_by, visible)
            severity = "warning" if node.cordoned else "info"
            yield AffectedObject(name=node.node, cause=cause, hint=CORDONED, severity=severity)


def _problem(cause: str, affected: list[AffectedObject]) -> Problem:
    since = [item.since for item in affected if item.since is not None]
    names = [item.name for item in affected]
    return Problem(
        severity=affected[0].severity,
        cause=cause,
        text=f"{cause}: {_listed(names)}",
        hint=affected[0].hint,
        since=min(since, default=None),
        count=len(affected),
        affected=tuple(names[:MOST_NAMED]),
    )


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    shown = ", ".join(names[:NAMED] if more > 1 else names)
    return f"{shown} and {more} more" if more > 1 else shown
