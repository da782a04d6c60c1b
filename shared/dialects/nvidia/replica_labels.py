"""Labels by which pods select nodes with replicas, as of NVIDIA's discovery and GKE; pure."""

import re
from collections.abc import Iterable, Mapping

from shared.dialects.koordinator.requests import NVIDIA_GPUS
from shared.model.devices.device import LABEL_LENGTH, Device

STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
PRODUCT_LABEL = "nvidia.com/gpu.product"
SHARED_PRODUCT = "-SHARED"
"""Follows the product in `PRODUCT_LABEL`, unless the resource is renamed."""
GKE_STRATEGY = "cloud.google.com/gke-gpu-sharing-strategy"
GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
GKE_STRATEGIES: Mapping[str, str] = {"time-slicing": "time-sharing", "mps": "mps"}
LABELS = frozenset({STRATEGY_LABEL, REPLICAS_LABEL, PRODUCT_LABEL, GKE_STRATEGY, GKE_CLIENTS})
_NO_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")


def labels_of(devices: Iterable[Device]) -> dict[str, str]:
    shared = [device for device in devices if device.replicas is not None]
    replicas = shared[0].replicas if shared else None
    if replicas is None:
        return {}
    models = {_NO_LABEL.sub("-", device.model) for device in shared}
    product = {}
    if replicas.resource == NVIDIA_GPUS and len(models) == 1:
        name = models.pop()[: LABEL_LENGTH - len(SHARED_PRODUCT)].strip("-_.")
        product[PRODUCT_LABEL] = f"{name}{SHARED_PRODUCT}"
    return {
        STRATEGY_LABEL: replicas.strategy,
        REPLICAS_LABEL: str(replicas.number),
        GKE_STRATEGY: GKE_STRATEGIES[replicas.strategy],
        GKE_CLIENTS: str(replicas.number),
        **product,
    }
