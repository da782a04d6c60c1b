"""What lets a waiting pod run; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.dialects import DIALECTS
from shared.dialects.dialect import Dialect
from shared.model.change import Change, Place, words
from shared.model.devices.device import MIB
from shared.model.quantity import amount_text, peak
from shared.model.requests.request import (
    DeviceSelection,
    GpuRequest,
    NodeRequirements,
    PodRequest,
)

RECOVERS = "the pod gets one that has recovered"


@dataclass(frozen=True, slots=True)
class Advice:
    changes: tuple[Change, ...] = ()
    node: str = ""
    models: str = ""
    ends: bool = False
    """Other pods on that node have to end, too."""
    waiting: str = ""
    """A node that fits the unchanged pod once other pods have ended, or ""."""
    meant: str = ""
    soon: str = ""
    """What helps within seconds, or what authors of pods can do."""
    administrator: str = ""
    unchanged: str = ""
    """What helps on a node that refuses the pod for a passing state only."""
    leftovers: str = ""
    """What pods that have ended still hold of GPUs."""
    isolation: str = ""
    """That no node offers what the pod demands, and what is offered."""
    reserved_until: int = 0
    """Unix seconds from which fitting GPUs are reserved for others, or 0."""

    @property
    def text(self) -> str:
        text = self._text_of_changes() if self.changes else self._text_without_changes()
        if not self.leftovers:
            return text
        return f"{text}; {self.leftovers}: ask an administrator to end them"

    def _text_without_changes(self) -> str:
        if self.waiting:
            return f"wait until pods on node {self.waiting} have ended"
        if self.soon:
            return self.soon
        administrator = f"ask an administrator: {self.administrator}"
        if not self.meant:
            return administrator
        meant = self.meant if self.meant.endswith("?") else f"{self.meant}."
        return f"{meant} Otherwise {administrator}"

    def _text_of_changes(self) -> str:
        changed = words(self.changes)
        node = f"node {self.node}"
        if self.isolation:
            changed = f"{self.isolation}: {changed}"
        if self.models and any(change.place is Place.ANNOTATION for change in self.changes):
            node += f" ({self.models})"
        if self.waiting:
            return (
                f"{changed}, as {node} has room for it now; or wait until pods on node "
                f"{self.waiting} have ended"
            )
        alone = "alone " if self.ends else ""
        room = f"as {node} has room for it now"
        if self.ends:
            room = f"and wait until pods on {node} have ended"
        if self.unchanged:
            return f"{self.unchanged}; or {changed}, {room}"
        return f"waiting {alone}does not help: {changed}, {room}"


@dataclass(frozen=True, slots=True)
class QuotaChanges:
    changes: tuple[Change, ...] = ()
    node: str = ""


def changes_between(before: PodRequest, after: PodRequest) -> tuple[Change, ...]:
    dialect = DIALECTS.get(before.dialect)
    changes = list[Change]()
    if dialect is not None:
        for old, new in zip(before.containers, after.containers, strict=True):
            changes += _limit_changes(old, new, before, after, dialect)
            was = dialect.annotations(old, before)
            now = dialect.annotations(new, after)
            changes += [
                Change(Place.ANNOTATION, key, now.get(key, ""))
                for key in {**was, **now}
                if was.get(key) != now.get(key)
            ]
        for name, annotations in dialect.request_fields.items():
            if field_of(before, name) != field_of(after, name):
                changes += [Change(Place.ANNOTATION, annotation) for annotation in annotations]
    for name, amount in after.resources.items():
        beside = before.resources[name] - limits_peak(name, before)
        if amount - limits_peak(name, after) != beside:
            own = dialect is not None and name in dialect.node_wide and len(after.containers) == 1
            place, container = (
                (Place.RESOURCE, after.containers[0].container) if own else (Place.TOTAL, "")
            )
            changes.append(Change(place, name, _amount(name, amount), container))
    changes += [
        Change(Place.TOTAL, name) for name in sorted(before.resources.keys() - after.resources)
    ]
    changes += _node_changes(before.node_requirements, after.node_requirements)
    return tuple(
        {(change.place, change.name, change.container): change for change in changes}.values()
    )


def limits_peak(name: str, request: PodRequest) -> int:
    dialect = DIALECTS.get(request.dialect)
    if dialect is None or name not in dialect.node_wide:
        return 0
    return peak([(dialect.limits(e, request).get(name, 0), e.init) for e in request.containers], 0)


def _limit_changes(
    old: GpuRequest, new: GpuRequest, before: PodRequest, after: PodRequest, dialect: Dialect
) -> Iterator[Change]:
    was = dialect.limits(old, before)
    now = dialect.limits(new, after)
    for name in [*now, *(name for name in was if name not in now)]:
        if was.get(name) != now.get(name):
            value = _amount(name, now[name]) if name in now else ""
            yield Change(Place.RESOURCE, name, value, old.container)


def _amount(name: str, amount: int) -> str:
    if amount >= MIB and amount % MIB == 0 and name != "cpu":
        return f"{amount // MIB}Mi"
    return amount_text(name, amount)


def field_of(request: PodRequest, name: str) -> object:
    part = request.selection if name in DeviceSelection.__struct_fields__ else request
    return getattr(part, name)


def _node_changes(before: NodeRequirements, after: NodeRequirements) -> Iterator[Change]:
    now = dict(after.selector)
    for key, value in before.selector:
        if now.get(key) != value:
            yield Change(Place.SELECTOR, key, now.get(key, ""))
    if before.required and not after.required:
        yield Change(Place.FIELD, "spec.affinity.nodeAffinity")
    for path in before.unsupported if not after.unsupported else ():
        yield Change(Place.FIELD, path)
    for toleration in after.tolerations[len(before.tolerations) :]:
        yield Change(Place.TOLERATION, toleration.key, f"{toleration.value}:{toleration.effect}")
