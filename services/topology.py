"""The list of services, and the drawing of who says what to whom, read from their signatures."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    BudgetChanged,
    LeaseChanged,
    LeaseResized,
    LedgerRebuilt,
    ListingWanted,
    PartReported,
    PodBound,
    PodQueued,
)
from shared.model.events.request_reply import (
    BindAsked,
    EndAsked,
    LeasesAsked,
    LimitsAsked,
    ResizeAsked,
)
from shared.runtime.service import Role, roles_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceListed:
    """Where a service's class is, and what it says outside its handlers and sources."""

    name: str
    module: str
    cls: str
    also_says: tuple[type[Event], ...] = ()
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
        also_says=(
            BindAsked,
            BindingFailed,
            EndAsked,
            LeaseChanged,
            LeaseResized,
            LedgerRebuilt,
            LimitsAsked,
            ListingWanted,
            PodBound,
            PodQueued,
        ),
    ),
    ServiceListed(
        name="node-agent",
        module="services.node_agent.service",
        cls="NodeAgent",
        also_says=(LeasesAsked,),
        per_node=True,
    ),
    ServiceListed(
        name="timekeeper",
        module="services.timekeeper.service",
        cls="Timekeeper",
        also_says=(BudgetChanged,),
    ),
    ServiceListed(name="webhook", module="services.webhook.service", cls="Webhook"),
    ServiceListed(name="doorkeeper", module="services.auth.service", cls="Doorkeeper"),
    ServiceListed(name="dashboard", module="services.dashboard.service", cls="Dashboard"),
)
OPERATOR = ServiceListed(name="operator", module="", cls="", also_says=(ResizeAsked,))
"""No service: whoever types commands, and the questions that these put."""
EVERYBODY_SAYS = (PartReported,)
"""What the runtime says for each replica of any service."""

NOBODY = "(whoever listens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One service says an event that another hears."""

    says: str
    hears: str
    event: type[Event]
    question: bool = False
    copy: bool = False
    """Overheard: the hearer takes it from nobody."""

    @property
    def manner(self) -> str:
        """How it travels: work, news, question or copy."""
        if self.copy:
            return "copy"
        return "question" if self.question else str(self.event.delivery)


def roles() -> dict[str, tuple[Role, ...]]:
    """Return the roles of every service, by its name."""
    return {
        listed.name: roles_of(getattr(importlib.import_module(listed.module), listed.cls))
        for listed in SERVICES
    }


def edges() -> tuple[Edge, ...]:
    """Return who says what to whom; what no service hears goes to `NOBODY`."""
    also = {listed.name: (*listed.also_says, *EVERYBODY_SAYS) for listed in SERVICES}
    return edges_of(roles() | {OPERATOR.name: ()}, also | {OPERATOR.name: OPERATOR.also_says})


def edges_of(
    roles_by_name: Mapping[str, tuple[Role, ...]], also: Mapping[str, tuple[type[Event], ...]]
) -> tuple[Edge, ...]:
    """Join what is said with those who hear it, sorted by speaker, hearer and subject."""
    hears: dict[type[Event], set[str]] = {}
    asked: set[type[Event]] = set()
    copied: set[tuple[str, type[Event]]] = set()
    for name, held in roles_by_name.items():
        for role in held:
            for event in role.hears:
                hears.setdefault(event, set()).add(name)
                if role.kind == "answers":
                    asked.add(event)
                if role.kind == "overhears":
                    copied.add((name, event))
    said = {
        (name, event)
        for name, held in roles_by_name.items()
        for event in (
            *(event for role in held if role.kind != "answers" for event in role.says),
            *also.get(name, ()),
        )
    }
    found = [
        Edge(
            says=name,
            hears=hearer,
            event=event,
            question=event in asked,
            copy=(hearer, event) in copied,
        )
        for name, event in said
        for hearer in hears.get(event, {NOBODY})
    ]
    return tuple(sorted(found, key=lambda edge: (edge.says, edge.hears, edge.event.subject)))


def unsaid() -> tuple[tuple[str, type[Event]], ...]:
    """Return what a service hears and no service says: a mistake in one of the signatures."""
    said = {edge.event for edge in edges()}
    return tuple(
        (name, event)
        for name, held in roles().items()
        for role in held
        for event in role.hears
        if event not in said
    )


def mermaid() -> str:
    """Draw a Mermaid flowchart: work with full lines, news and copies dotted, questions thick."""
    arrows = {"work": "-->", "news": "-.->", "copy": "-.->", "question": "==>"}
    names: dict[str, str] = {}
    for edge in edges():
        for name in (edge.says, edge.hears):
            names.setdefault(name, name.strip("()").replace(" ", "_").replace("-", "_"))
    lines = ["flowchart LR", *(f'  {key}["{name}"]' for name, key in sorted(names.items()))]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for edge in edges():
        key = (names[edge.says], arrows[edge.manner], names[edge.hears])
        grouped.setdefault(key, []).append(edge.event.__name__)
    lines += [
        f'  {says} {arrow}|"{"<br/>".join(events)}"| {hears}'
        for (says, arrow, hears), events in grouped.items()
    ]
    return "\n".join(lines)


def table() -> str:
    """Write one line per speaker, event and hearer."""
    rows = [(edge.says, edge.event.subject, edge.manner, edge.hears) for edge in edges()]
    rows.insert(0, ("SAYS", "EVENT", "AS", "HEARS"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
