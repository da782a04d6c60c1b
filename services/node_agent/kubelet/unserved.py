"""Resources that the kubelet cannot allocate now, and why; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

STILL_PLUGIN = (
    "the kubelet still allocates {} by device plugin, until all containers with its IDs have "
    "ended, and five minutes after its plugin has stopped"
)


@dataclass(frozen=True, slots=True)
class Unserved:
    """A resource that the kubelet cannot allocate now, and for how long."""

    for_s: float
    plugin_amount: str = ""
    """The amount that the kubelet still allocates by device plugin; empty: no registration."""


def explain_unserved(resources: Mapping[str, Unserved]) -> str:
    """Return why these resources cannot be allocated."""
    missing = sorted(name for name, each in resources.items() if not each.plugin_amount)
    amounts = sorted({each.plugin_amount for each in resources.values()} - {""})
    reasons = [f"not registered with the kubelet: {', '.join(missing)}"] if missing else []
    return "; ".join((*reasons, *(STILL_PLUGIN.format(amount) for amount in amounts)))
