"""Node selectors by which users of NVIDIA's plugin and of GKE choose GPUs that are shared; pure."""

from collections.abc import Iterator, Mapping

from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.nvidia.plugin_config import (
    ALL_PERCENT,
    PRODUCT_LABEL,
    REPLICAS_LABEL,
    SHARED_PRODUCT,
    STRATEGY_LABEL,
)
from shared.dialects.strict_values import shown
from shared.model.quantity import parse_decimal

GKE_STRATEGY = "cloud.google.com/gke-gpu-sharing-strategy"
GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
_NUMBERS = (REPLICAS_LABEL, GKE_CLIENTS)


def find_sharing_selectors(selector: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each label that no node of Leasehold has, with what to request instead.

    >>> [text] = find_sharing_selectors({"nvidia.com/gpu.replicas": "4"})
    >>> text.rpartition(" by ")[2]
    'nvidia.com/gpumem-percentage: 25'
    """
    for key, value in sorted(selector.items()):
        if key == GKE_PARTITION:
            instead = f"a part of a GPU by {nvidia.MEMORY} and the annotation {nvidia.MODE}: mig"
        elif _selects_replicas(key, value):
            instead = f"a part of a GPU by {nvidia.PERCENTAGE}{_percent(key, value)}"
        else:
            continue
        yield (
            f"nodeSelector {key}: {shown(value)} selects GPUs that another device plugin shares, "
            "and the pod waits, as no node of Leasehold has this label: leave it out, and request "
            f"{instead}"
        )


def _selects_replicas(key: str, value: str) -> bool:
    is_of_shared = {
        STRATEGY_LABEL: value != "none",
        PRODUCT_LABEL: value.endswith(SHARED_PRODUCT),
        REPLICAS_LABEL: value not in {"0", "1"},
        GKE_STRATEGY: True,
        GKE_CLIENTS: True,
    }
    return is_of_shared.get(key, False)


def _percent(key: str, value: str) -> str:
    number = parse_decimal(value) if key in _NUMBERS else None
    return f": {ALL_PERCENT // number}" if number and number <= ALL_PERCENT else ""
