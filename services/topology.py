"""Which service publishes what to which other, read from their signatures."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

from shared.model.events.event import Event
from shared.model.events.pod_events import Heartbeat
from shared.runtime.service import Role, roles_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    name: str
    module: str
    class_name: str
    per_node: bool = False
    """Each replica serves one node, by subjects of its own."""
    beside: tuple[str, str] | None = None
    """Module and class of a service that runs in its process, under its name."""

    @property
    def classes(self) -> tuple[type, ...]:
        named = [(self.module, self.class_name), *([self.beside] if self.beside else ())]
        return tuple(getattr(importlib.import_module(module), name) for module, name in named)

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(kind.__module__.rpartition(".")[0] for kind in self.classes)


SERVICES: tuple[ServiceEntry, ...] = (
    ServiceEntry(name="watcher", module="services.watcher.service", class_name="Watcher"),
    ServiceEntry(name="placer", module="services.placer.service", class_name="Placer"),
    ServiceEntry(name="planner", module="services.planner.service", class_name="Planner"),
    ServiceEntry(
        name="binder",
        module="services.binder.service",
        class_name="Binder",
        beside=("services.claims.service", "Claims"),
    ),
    ServiceEntry(
        name="node-agent",
        module="services.node_agent.service",
        class_name="NodeAgent",
        per_node=True,
    ),
    ServiceEntry(name="timekeeper", module="services.timekeeper.service", class_name="Timekeeper"),
    ServiceEntry(name="webhook", module="services.webhook.service", class_name="Webhook"),
    ServiceEntry(name="extender", module="services.extender.service", class_name="Extender"),
    ServiceEntry(name="auth", module="services.auth.service", class_name="AuthService"),
    ServiceEntry(name="api", module="services.api.service", class_name="ApiService"),
)
OPERATOR = ServiceEntry(name="operator", module="", class_name="")
"""The user of `audit` and `doctor`."""
ALL_SERVICES_PUBLISH = (Heartbeat,)
"""By the runtime, for each replica."""
NO_CONSUMER = "(any observer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    publisher: str
    consumer: str
    event: type[Event]
    is_request: bool = False
    observed: bool = False
    """The consumer gets copies: another handles the event."""

    @property
    def delivery(self) -> str:
        """Return work, broadcast, request or observed."""
        if self.observed:
            return "observed"
        return "request" if self.is_request else str(self.event.delivery)


@cache
def roles() -> Mapping[str, tuple[Role, ...]]:
    return {
        service.name: tuple(chain.from_iterable(map(roles_of, service.classes)))
        for service in SERVICES
    }


def published(service_roles: tuple[Role, ...]) -> set[type[Event]]:
    """Return the events of a service, without replies."""
    return {event for role in service_roles if role.kind != "answers" for event in role.publishes}


def edges() -> tuple[Edge, ...]:
    by_name = dict(roles())
    runtime = Role(kind="publishes", method="runtime", publishes=ALL_SERVICES_PUBLISH)
    for service in SERVICES:
        by_name[service.name] = (*by_name[service.name], runtime)
    return edges_of(by_name)


def edges_of(roles_by_name: Mapping[str, tuple[Role, ...]]) -> tuple[Edge, ...]:
    consumers: dict[type[Event], set[str]] = {}
    requests: set[type[Event]] = set()
    observations: set[tuple[str, type[Event]]] = set()
    handled: set[tuple[str, type[Event]]] = set()
    for name, service_roles in roles_by_name.items():
        for role in service_roles:
            for event in role.consumes:
                consumers.setdefault(event, set()).add(name)
                if role.kind == "answers":
                    requests.add(event)
                if role.kind == "observes":
                    observations.add((name, event))
                if role.kind == "handles":
                    handled.add((name, event))
    unsorted = [
        Edge(
            publisher=name,
            consumer=consumer,
            event=event,
            is_request=event in requests,
            observed=(consumer, event) in observations - handled,
        )
        for name, service_roles in roles_by_name.items()
        for event in published(service_roles)
        for consumer in consumers.get(event, {NO_CONSUMER})
    ]
    return tuple(
        sorted(unsorted, key=lambda edge: (edge.publisher, edge.consumer, edge.event.subject))
    )


def mermaid() -> str:
    arrows = {"work": "-->", "broadcast": "-.->", "observed": "-.->", "request": "==>"}
    names: dict[str, str] = {}
    for edge in edges():
        for name in (edge.publisher, edge.consumer):
            names.setdefault(name, name.strip("()").replace(" ", "_").replace("-", "_"))
    lines = ["flowchart LR", *(f'  {key}["{name}"]' for name, key in sorted(names.items()))]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for edge in edges():
        key = (names[edge.publisher], arrows[edge.delivery], names[edge.consumer])
        grouped.setdefault(key, []).append(edge.event.__name__)
    lines += [
        f'  {publisher} {arrow}|"{"<br/>".join(events)}"| {consumer}'
        for (publisher, arrow, consumer), events in grouped.items()
    ]
    return "\n".join(lines)


def table() -> str:
    rows = [(edge.publisher, edge.event.subject, edge.delivery, edge.consumer) for edge in edges()]
    rows.insert(0, ("PUBLISHES", "EVENT", "AS", "CONSUMES"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
