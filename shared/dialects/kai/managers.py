"""How KAI shows that it gives out parts of a node's GPUs; pure."""

from collections.abc import Iterable

CONDITIONS = ("gpu-fractioning.nvidia.com/Ready", "gpu-sharing.nvidia.com/Ready")
"""A program enforces NvFractions there; the latter in earlier releases."""
RESERVATIONS = "kai-resource-reservation"
"""KAI's binder reserves shared GPUs by pods there."""


def managing_condition(true_conditions: Iterable[str]) -> str:
    """Return the node's condition that shows another manager, or "".

    >>> managing_condition(["Ready", "gpu-fractioning.nvidia.com/Ready"])
    'condition gpu-fractioning.nvidia.com/Ready'
    """
    shown = next((name for name in true_conditions if name in CONDITIONS), "")
    return f"condition {shown}" if shown else ""


def reserves_gpus(namespace: str) -> bool:
    return namespace == RESERVATIONS


def managing_pods(namespaces: Iterable[str]) -> str:
    namespace = min(namespaces, default="")
    return f"pods of namespace {namespace}" if namespace else ""
