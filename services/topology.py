"""The list of services, and the drawing of who says what to whom, read from their signatures."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    Heartbeat,
    LeaseChanged,
    LeaseResized,
    LedgerRebuilt,
    PodBound,
    PodQueued,
    ResyncRequested,
)
from shared.model.events.request_reply import (
    BindRequest,
    LeasesRequest,
    LimitsRequest,
    ResizeRequest,
    TerminationRequest,
)
from shared.runtime.service import Role, roles_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceListed:
    """Where a service's class is, and what it says outside its handlers and sources."""

    name: str
    module: str
    cls: str
    also_publishes: tuple[type[Event], ...] = ()
    """From loops and adapters: questions it asks, and facts that follow from no one event."""

    per_node: bool = False
    """Each replica looks after one node, and speaks and asks for that one only."""

    @property
    def folder(self) -> str:
        """The package that holds it."""
        return self.module.rpartition(".")[0]


SERVICES: tuple[ServiceListed, ...] = (
    ServiceListed(name="watcher", module="services.watcher.service", cls="Watcher"),
    ServiceListed(name="placer", module="services.placer.service", cls="Placer"),
    ServiceListed(
        name="binder",
        module="services.binder.service",
        cls="Binder",
        also_publishes=(
            BindRequest,
            BindingFailed,
            TerminationRequest,
            LeaseChanged,
            LeaseResized,
            LedgerRebuilt,
            LimitsRequest,
            ResyncRequested,
            PodBound,
            PodQueued,
        ),
    ),
    ServiceListed(
        name="node-agent",
        module="services.node_agent.service",
        cls="NodeAgent",
        also_publishes=(LeasesRequest,),
        per_node=True,
    ),
    ServiceListed(
        name="timekeeper",
        module="services.timekeeper.service",
        cls="Timekeeper",
        also_publishes=(BudgetChanged,),
    ),
    ServiceListed(name="webhook", module="services.webhook.service", cls="Webhook"),
    ServiceListed(name="auth", module="services.auth.service", cls="AuthService"),
    ServiceListed(name="dashboard", module="services.dashboard.service", cls="Dashboard"),
)
OPERATOR = ServiceListed(name="operator", module="", cls="", also_publishes=(ResizeRequest,))
"""No service: whoever types commands, and the questions that these put."""
ALL_SERVICES_PUBLISH = (Heartbeat,)
"""What the runtime says for each replica of any service."""

NO_CONSUMER = "(whoever listens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One service says an event that another hears."""

    publisher: str
    consumer: str
    event: type[Event]
    is_request: bool = False
    observed: bool = False
    """Overheard: the hearer takes it from nobody."""

    @property
    def manner(self) -> str:
        """How it travels: work, news, question or copy."""
        if self.observed:
            return "observed"
        return "request" if self.is_request else str(self.event.delivery)


def roles() -> dict[str, tuple[Role, ...]]:
    """Return the roles of every service, by its name."""
    return {
        listed.name: roles_of(getattr(importlib.import_module(listed.module), listed.cls))
        for listed in SERVICES
    }


def edges() -> tuple[Edge, ...]:
    """Return who says what to whom; what no service hears goes to `NOBODY`."""
    also = {listed.name: (*listed.also_publishes, *ALL_SERVICES_PUBLISH) for listed in SERVICES}
    return edges_of(roles() | {OPERATOR.name: ()}, also | {OPERATOR.name: OPERATOR.also_publishes})


def edges_of(
    roles_by_name: Mapping[str, tuple[Role, ...]], also: Mapping[str, tuple[type[Event], ...]]
) -> tuple[Edge, ...]:
    """Join what is said with those who hear it, sorted by speaker, hearer and subject."""
    hears: dict[type[Event], set[str]] = {}
    asked: set[type[Event]] = set()
    copied: set[tuple[str, type[Event]]] = set()
    for name, held in roles_by_name.items():
        for role in held:
            for event in role.consumes:
                hears.setdefault(event, set()).add(name)
                if role.kind == "answers":
                    asked.add(event)
                if role.kind == "observes":
                    copied.add((name, event))
    said = {
        (name, event)
        for name, held in roles_by_name.items()
        for event in (
            *(event for role in held if role.kind != "answers" for event in role.publishes),
            *also.get(name, ()),
        )
    }
    found = [
        Edge(
            publisher=name,
            consumer=hearer,
            event=event,
            is_request=event in asked,
            observed=(hearer, event) in copied,
        )
        for name, event in said
        for hearer in hears.get(event, {NO_CONSUMER})
    ]
    return tuple(
        sorted(found, key=lambda edge: (edge.publisher, edge.consumer, edge.event.subject))
    )


def unsaid() -> tuple[tuple[str, type[Event]], ...]:
    """Return what a service hears and no service says: a mistake in one of the signatures."""
    said = {edge.event for edge in edges()}
    return tuple(
        (name, event)
        for name, held in roles().items()
        for role in held
        for event in role.consumes
        if event not in said
    )


def mermaid() -> str:
    """Draw a Mermaid flowchart: work with full lines, news and copies dotted, questions thick."""
    arrows = {"work": "-->", "broadcast": "-.->", "observed": "-.->", "request": "==>"}
    names: dict[str, str] = {}
    for edge in edges():
        for name in (edge.publisher, edge.consumer):
            names.setdefault(name, name.strip("()").replace(" ", "_").replace("-", "_"))
    lines = ["flowchart LR", *(f'  {key}["{name}"]' for name, key in sorted(names.items()))]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for edge in edges():
        key = (names[edge.publisher], arrows[edge.manner], names[edge.consumer])
        grouped.setdefault(key, []).append(edge.event.__name__)
    lines += [
        f'  {says} {arrow}|"{"<br/>".join(events)}"| {hears}'
        for (says, arrow, hears), events in grouped.items()
    ]
    return "\n".join(lines)


def table() -> str:
    """Write one line per speaker, event and hearer."""
    rows = [(edge.publisher, edge.event.subject, edge.manner, edge.consumer) for edge in edges()]
    rows.insert(0, ("SAYS", "EVENT", "AS", "HEARS"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
