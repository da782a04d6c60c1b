"""What may go wrong in a run; what is known to break an invariant stays out of CI until mended."""

from collections.abc import Mapping
from enum import StrEnum


class Fault(StrEnum):
    """Kinds of faults that a run may draw from."""

    LOSS = "loss"
    """Messages are lost."""
    KILL = "kill"
    """Placers, binders and agents are killed and started again."""
    LINK = "link"
    """Calls to Redis, or their replies, are late or lost."""
    SLOW_API = "slow-api"
    """Bindings take long, and their replies are lost."""
    SILENCE = "silence"
    """Agents and binders cannot reach each other."""
    FLUSH = "flush"
    """Redis loses everything."""
    ROLLBACK = "rollback"
    """Redis returns to an older state while a binder or placer remembers versions."""
    NODES = "nodes"
    """Nodes are deleted, and come back."""
    CHECKPOINT = "checkpoint"
    """An agent loses its checkpoint."""
    BINDING_ACROSS_REBUILD = "binding-across-rebuild"
    """A Binding is in flight, or a lease known to an agent, while the ledger is lost."""
    ROLLBACK_UNSEEN = "rollback-unseen"
    """Redis returns to an older state, and all that remember versions are killed."""
    DEVICE_TWICE = "device-twice"
    """A second node reports a device."""
    NODE_REORDERED = "node-reordered"
    """Events about one node are reordered, repeated, or lost."""
    GONE_FIRST = "gone-first"
    """The end of a pod is handled before, or while, the pod is placed."""


UNMENDED: Mapping[Fault, str] = {
    Fault.BINDING_ACROSS_REBUILD: "S1",
    Fault.ROLLBACK_UNSEEN: "S1",
    Fault.DEVICE_TWICE: "a release raises for everybody",
    Fault.NODE_REORDERED: "P7",
    Fault.GONE_FIRST: "P2, P5",
}
"""Faults that runs in CI leave out, and what breaks with them. Remove a row once it is mended."""
IN_CI = frozenset(Fault) - UNMENDED.keys()
