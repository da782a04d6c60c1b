"""The dialects: vendors' ways of requesting GPUs; pure."""

from collections.abc import Mapping

from shared.dialects.advertised import TRIGGER
from shared.dialects.dialect import Dialect
from shared.dialects.kai import dialect as kai
from shared.dialects.koordinator import dialect as koordinator
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.tencent import vcuda
from shared.dialects.volcano import gpushare, vgpu
from shared.model.names import EXPECTED_RUN_TIME, ISOLATION, MAX_RUN_TIME, OWN_SCHEDULER

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        vgpu.DIALECT,
        gpushare.DIALECT,
        vcuda.DIALECT,
        nvidia.DIALECT,
        koordinator.DIALECT,
        kai.DIALECT,
    )
}

GPU_RESOURCES = frozenset({TRIGGER}).union(*(d.resources for d in DIALECTS.values()))

STATUS_RESOURCES = frozenset().union(*(d.status_resources for d in DIALECTS.values()))
"""Written by node agents into node status."""

LEDGER_RESOURCES = GPU_RESOURCES.difference(*(d.node_wide for d in DIALECTS.values()))

RESOURCE_PREFIXES = (
    "volcano.sh/",
    "koordinator.sh/",
    "kubernetes.io/gpu",
    "tencent.com/vcuda-",
    "nvidia.com/gpu",
    "nvidia.com/vgpu",
    "nvidia.com/priority",
    "leasehold.dev/",
)
"""Other names may have them, too."""

SCHEDULERS = tuple(
    dict.fromkeys((OWN_SCHEDULER, *(d.scheduler for d in DIALECTS.values() if d.scheduler)))
)
"""Of pods that Leasehold places."""
KUBE_SCHEDULER = "leasehold-full"
"""A kube-scheduler with Leasehold's extender."""

REQUEST_ANNOTATIONS = frozenset({ISOLATION, MAX_RUN_TIME, EXPECTED_RUN_TIME}).union(
    *(d.request_annotations for d in DIALECTS.values())
)

REQUEST_PREFIXES = tuple(prefix for d in DIALECTS.values() for prefix in d.request_prefixes)
"""Of further annotations that requests depend on."""

REQUEST_LABELS = frozenset().union(*(d.request_labels for d in DIALECTS.values()))
