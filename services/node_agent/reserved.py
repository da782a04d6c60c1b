"""Variables that only a lease may set; pure.

The kubelet puts a pod's own variables after those of the device plugin, so that the pod's win: a
pod that sets one of these would choose its own limits.
"""

from collections.abc import Iterable, Iterator

from services.node_agent.identity import KubeletContainer

PREFIXES = ("CUDA_DEVICE_", "VOLCANO_GPU_")
NAMES = frozenset(
    {
        "CUDA_DISABLE_CONTROL",
        "CUDA_REDIRECT",
        "GPU_CORE_UTILIZATION_POLICY",
        "LD_PRELOAD",
        "NVIDIA_VISIBLE_DEVICES",
    }
)


def is_reserved(variable: str) -> bool:
    """Tell whether a pod may not set this variable."""
    return variable in NAMES or variable.startswith(PREFIXES)


def may_reserve(prefix: str) -> bool:
    """Tell whether variables with this prefix, whatever follows, are all reserved."""
    return prefix.startswith(PREFIXES)


def reserved_variable(container: KubeletContainer) -> str | None:
    """Say which variable of the container is reserved, or None.

    What a config map or a secret adds is seen by its prefix only.
    """
    return next(
        _named(container.variables, container.prefixes),
        None,
    )


def _named(variables: Iterable[str], prefixes: Iterable[str]) -> Iterator[str]:
    yield from (variable for variable in variables if is_reserved(variable))
    yield from (f"{prefix}* (from envFrom)" for prefix in prefixes if may_reserve(prefix))
