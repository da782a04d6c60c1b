"""Node selectors of NVIDIA's and GKE's users for shared GPUs; pure."""

from collections.abc import Iterator, Mapping

from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.nvidia.replica_labels import (
    GKE_CLIENTS,
    GKE_STRATEGY,
    PRODUCT_LABEL,
    REPLICAS_LABEL,
    SHARED_PRODUCT,
    STRATEGY_LABEL,
)
from shared.dialects.strict_values import shown
from shared.model.requests.request import PodRequest

GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"


def find_sharing_selectors(selector: Mapping[str, str], request: PodRequest) -> Iterator[str]:
    """Yield a sentence for each label that no node has on which the pod could get its GPUs."""
    by_number = all(container.number_of for container in request.containers)
    for key, value in sorted(selector.items()):
        if key == GKE_PARTITION:
            yield (
                f"nodeSelector {key}: {shown(value)} selects nodes of another device plugin, and "
                "the pod waits, as no node of Leasehold has this label: leave it out, and request "
                f"a part of a GPU by {nvidia.MEMORY} and the annotation {nvidia.MODE}: mig"
            )
        elif not by_number and _selects_replicas(key, value):
            yield (
                f"nodeSelector {key}: {shown(value)} selects nodes that offer GPUs as replicas, "
                "and the pod waits, as it requests amounts, which these do not have: leave it out, "
                f"or request {nvidia.COUNT} alone"
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
