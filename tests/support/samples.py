"""One sample of every event, with a value for each field that is not its default."""

from enum import Enum
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as types

from shared.model.events import claim_events, node_events, plan_events, pod_events, request_reply
from shared.model.events.event import Event
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, NodeName, PodUid

T = TypeVar("T")
POD = PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
NODE = NodeName("gpu-a")
NAMED: dict[str, str] = {
    "pod": POD,
    "namespace": Namespace("default"),
    "name": "train",
    "node": NODE,
    "container": "main",
    "device": "GPU-a",
    "new_pods": "admit",
    "uuid": "GPU-a",
    "trace": "00-7f7c2c5e57a54d3c9d0e0d7e6c1f2a3b-00f067aa0ba902b7-01",
}
"""Texts that mean something, by the names of their fields."""
KINDS = [
    kind
    for module in (claim_events, node_events, plan_events, pod_events, request_reply)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.__module__ == module.__name__
]


def value(kind: types.Type, name: str = "") -> Any:
    """Return a value of a type, as JSON has it, for a field of this name."""
    match kind:
        case types.DataclassType() | types.StructType():
            made = {field.encode_name: value(field.type, field.name) for field in kind.fields}
            return made | {it.encode_name: False for it in kind.fields if it.default is True}
        case types.UnionType():
            known = next(it for it in kind.types if not isinstance(it, types.NoneType))
            # A device has replicas in a mode that is not the sample's.
            return None if name == "replicas" else value(known, name)
        case types.VarTupleType() | types.ListType() | types.FrozenSetType():
            return [value(kind.item_type, name)]
        case types.TupleType():
            return [value(item_type) for item_type in kind.item_types]
        case types.DictType():
            return {value(kind.key_type): value(kind.value_type)}
    return single(kind, name)


def single(kind: types.Type, name: str) -> bool | float | str:
    match kind:
        case types.EnumType():
            members: list[Enum] = list(kind.cls)
            return members[min(1, len(members) - 1)].value  # type: ignore[no-any-return]
        case types.LiteralType():
            return str(kind.values[0])
        case types.BoolType():
            return True
        case types.IntType():
            return max(kind.ge or 0, kind.gt or 0) + 1
        case types.FloatType():
            return max(kind.ge or 0.0, kind.gt or 0.0) + 1.5
        case types.StrType():
            return NAMED.get(name, "x")
    raise TypeError(f"no sample is known for {kind}")


def sample(kind: type[T]) -> T:
    """Return an object of a type with a value in each field."""
    return msgspec.convert(value(types.type_info(kind)), kind, strict=False)


SAMPLES: tuple[Event, ...] = tuple(sample(kind) for kind in KINDS)
LEASE = sample(Lease)
