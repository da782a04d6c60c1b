"""The topology: edges from signatures, and signatures that match what services publish."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

from services import topology
from shared.model import events
from shared.model.events.event import Event
from shared.model.events.pod_events import PodQueued
from shared.model.events.request_reply import LeasesRequest
from shared.runtime.service import Role

ROOT = Path(topology.__file__).parents[1]


class Waited(Event, subject="pod.waited.v1"):
    pass


def event_types() -> dict[str, type[Event]]:
    """Return the events of every module of `shared.model.events`, by their name."""
    modules = [
        importlib.import_module(f"{events.__name__}.{module.name}")
        for module in pkgutil.walk_packages(events.__path__)
    ]
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Event) and hasattr(kind, "subject")
    }


def test_edges_join_publishers_with_consumers() -> None:
    roles = {
        "source": (Role(kind="emits", method="pods", publishes=(PodQueued, Waited)),),
        "worker": (
            Role(kind="handles", method="place", consumes=(PodQueued,)),
            Role(kind="publishes", method="Worker", publishes=(LeasesRequest,)),
        ),
        "replier": (
            Role(kind="answers", method="reply", consumes=(LeasesRequest,), publishes=(Waited,)),
        ),
    }

    edges = topology.edges_of(roles)

    assert [(e.publisher, e.event.subject, e.delivery, e.consumer) for e in edges] == [
        ("source", "pod.waited.v1", "broadcast", topology.NO_CONSUMER),
        ("source", "pod.queued.v1", "work", "worker"),
        ("worker", "leases.request.v1", "request", "replier"),
    ]


def test_every_event_that_a_service_consumes_is_published_by_one() -> None:
    published = {edge.event for edge in topology.edges()}
    consumed = {
        event for roles in topology.roles().values() for role in roles for event in role.consumes
    }

    assert consumed <= published


def test_only_agents_publish_what_is_marked_as_theirs() -> None:
    """Receivers believe the subject of such an event: no other service publishes one."""
    by_agents, by_others = (
        {
            event
            for service in topology.SERVICES
            if service.per_node is per_node
            for event in topology.published(topology.roles()[service.name])
        }
        for per_node in (True, False)
    )

    assert by_agents & by_others == set()
    assert by_agents == {event for event in event_types().values() if event.is_of_agent}


@pytest.mark.parametrize("service", topology.SERVICES, ids=lambda service: service.name)
def test_a_service_publishes_what_its_signatures_declare(service: topology.ServiceEntry) -> None:
    known = event_types()
    folders = [ROOT / folder.replace(".", "/") for folder in service.folders]
    constructed = {
        node.func.id
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known
    }
    service_roles = topology.roles()[service.name]
    declared = {event.__name__ for role in service_roles for event in role.publishes}

    assert constructed <= declared


@pytest.mark.parametrize("service", topology.SERVICES, ids=lambda service: service.name)
def test_a_service_declares_no_event_that_it_never_names(service: topology.ServiceEntry) -> None:
    folders = [ROOT / folder.replace(".", "/") for folder in service.folders]
    named = {
        node.id
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name)
    }

    published = topology.published(topology.roles()[service.name])

    assert {event.__name__ for event in published} <= named
