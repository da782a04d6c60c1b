"""How KAI and its node agent show that they give out parts of a node's GPUs; pure."""

from collections.abc import Iterable

CONDITIONS = ("gpu-fractioning.nvidia.com/Ready", "gpu-sharing.nvidia.com/Ready")
"""Of a node on which a program enforces NvFractions; the latter in earlier releases."""
RESERVATIONS = "kai-resource-reservation"
"""Namespace of the pods by which KAI's binder reserves shared GPUs."""


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
    """Return which pods of a node, by their namespaces, reserve GPUs for KAI, or ""."""
    namespace = min(namespaces, default="")
    return f"pods of namespace {namespace}" if namespace else ""
