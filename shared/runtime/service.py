"""Roles of a service's methods (handlers, sources, replies, loops), from their signatures; pure.

A method marked `@handles` takes a sequence of one event type (or a union) and returns the events to
publish, or None. `@observes` marks a handler of copies, which consumes nothing. `@emits` marks an
async generator of batches of events. `@answers` takes a request and returns the reply. `@loops`
marks a loop, or one step of it, which returns like a handler.

For example::

    class Binder:
        @handles
        async def bind(self, events: Sequence[PlacementChosen]) -> list[PodBound]: ...
"""

import collections.abc
import typing
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, overload

from shared.model.events.event import Event

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type)
Step = TypeVar("Step", bound=Callable[..., Awaitable[Sequence[Event] | None]])
Publish = Callable[[Sequence[Event]], Awaitable[None]]
"""For events that cannot wait for a handler's return; raises UnavailableError if NATS did not
accept them."""
Interval = float | Callable[[Any], float]
Wait = Callable[[Any], Awaitable[object]]
_MARK = "__leasehold_role__"
_PUBLISHES = "__leasehold_publishes__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    kind: str
    """`handles`, `observes`, `emits`, `answers`, `loops`, or `publishes` of the whole class."""
    method: str
    part: str = ""
    consumes: tuple[type[Event], ...] = ()
    publishes: tuple[type[Event], ...] = ()
    concurrency: int = 1
    gather_s: float = 0.0
    """The pause after a batch: events that arrive meanwhile share the next."""
    every_s: Interval | None = None
    """How often a loop takes its step: at multiples of this time, together with other loops."""
    wait: Wait | None = None
    """The pause between a loop's steps, if it is not `every_s`."""
    waits_first: bool = False

    service: object = field(default=None, compare=False, repr=False)

    def owner(self) -> Any:
        return getattr(self.service, self.part) if self.part else self.service

    def bound(self) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.owner(), self.method)
        return method

    @property
    def is_periodic(self) -> bool:
        return self.every_s is not None or self.wait is not None


def _marked(function: F, kind: str, **facts: object) -> F:
    setattr(function, _MARK, {"kind": kind, **facts})
    return function


@overload
def handles(method: F) -> F: ...
@overload
def handles(*, concurrency: int = 1, gather_s: float = 0.0) -> Callable[[F], F]: ...
def handles(
    method: F | None = None, *, concurrency: int = 1, gather_s: float = 0.0
) -> F | Callable[[F], F]:
    def mark(function: F) -> F:
        return _marked(function, "handles", concurrency=concurrency, gather_s=gather_s)

    return mark if method is None else mark(method)


def observes(method: F) -> F:
    """Mark a handler of copies: each replica receives all, and some may be lost."""
    return _marked(method, "observes")


def emits(method: F) -> F:
    return _marked(method, "emits")


@overload
def answers(method: F) -> F: ...
@overload
def answers(*, concurrency: int) -> Callable[[F], F]: ...
def answers(method: F | None = None, *, concurrency: int = 1) -> F | Callable[[F], F]:
    def mark(function: F) -> F:
        return _marked(function, "answers", concurrency=concurrency)

    return mark if method is None else mark(method)


@overload
def loops(method: F) -> F: ...
@overload
def loops(*, every_s: Interval, waits_first: bool = False) -> Callable[[Step], Step]: ...
@overload
def loops(*, wait: Wait) -> Callable[[Step], Step]: ...
def loops(
    method: F | None = None,
    *,
    every_s: Interval | None = None,
    wait: Wait | None = None,
    waits_first: bool = False,
) -> F | Callable[[F], F]:
    """Mark a method that runs until the service stops, or one step of it with the pause between.

    The runtime restarts what raises.
    """

    def mark(function: F) -> F:
        return _marked(function, "loops", every_s=every_s, wait=wait, waits_first=waits_first)

    return mark if method is None else mark(method)


def publishes(*events: type[Event]) -> Callable[[K], K]:
    """Declare events that no signature of the class's methods contains."""

    def mark(kind: K) -> K:
        setattr(kind, _PUBLISHES, events)
        return kind

    return mark


def roles_of(service: type | object) -> tuple[Role, ...]:
    """Return the roles of a service's methods, in order of their names, then of its class.

    The fields of a data class are its parts: their methods have roles, too.
    """
    kind = service if isinstance(service, type) else type(service)
    declared = getattr(kind, _PUBLISHES, ())
    whole = Role(kind="publishes", method=kind.__name__, publishes=declared, service=service)
    roles = [*_roles(kind)]
    for name, part in _parts(kind):
        roles += (replace(role, part=name) for role in _roles(part))
    roles = [replace(role, service=service) for role in roles]
    roles.sort(key=lambda role: role.method)
    return (*roles, *((whole,) if declared else ()))


def _parts(service: type) -> Iterator[tuple[str, type]]:
    if is_dataclass(service):
        hints = typing.get_type_hints(service)
        for field in fields(service):
            if isinstance(hints[field.name], type):
                yield field.name, hints[field.name]


def _roles(service: type) -> Iterator[Role]:
    for name in sorted(dir(service)):
        method = getattr(service, name)
        mark = getattr(method, _MARK, None)
        if mark is None:
            continue
        hints = typing.get_type_hints(method)
        publishes = _events_in(hints.pop("return", None))
        consumes = tuple(event for hint in hints.values() for event in _events_in(hint))
        yield Role(**mark, method=name, consumes=consumes, publishes=publishes)


def _events_in(hint: Any) -> tuple[type[Event], ...]:
    if isinstance(hint, type) and not typing.get_args(hint):
        return (hint,) if issubclass(hint, Event) else ()
    origin = typing.get_origin(hint)
    if origin in {list, tuple, UnionType, typing.Union} or (
        isinstance(origin, type)
        and issubclass(origin, collections.abc.Sequence | collections.abc.AsyncIterator)
    ):
        return tuple(event for part in typing.get_args(hint) for event in _events_in(part))
    return ()
