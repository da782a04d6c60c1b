"""The quotas of gpu-admission, in its ConfigMap kube-system/gpuquota; pure.

Models and pools are values of node labels. A missing model is not allowed, no pools allow all, and
a missing namespace has no quota.
https://github.com/tkestack/gpu-admission
"""

from collections.abc import Mapping

import msgspec

from shared.dialects.strict_values import load_json
from shared.model.bounds import MOST, SHORT, check_bounds
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.errors import RequestError
from shared.model.names import Namespace

CONFIG_MAP_NAMESPACE, CONFIG_MAP_NAME = "kube-system", "gpuquota"
KEY = "gpu_quota"
MODEL_LABEL = "gaia.tencent.com/gpu-model"
POOL_LABEL = "gaia.tencent.com/gpu-pool"
MILLI = 1000
"""Of a GPU's cores."""


class _NamespaceQuota(msgspec.Struct, frozen=True):
    quota: dict[str, int] | None = None
    pool: tuple[str, ...] | None = None


def parse_config_map(data: Mapping[str, str]) -> dict[Namespace, Quota]:
    """Raise RequestError for what gpu-admission also refuses."""
    place = f"ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP_NAME}"
    if KEY not in data:
        raise RequestError(f"{place} has no key {KEY}")
    try:
        listed = msgspec.convert(load_json(data[KEY]), dict[str, _NamespaceQuota])
    except ValueError as error:
        raise RequestError(f"{place}: {KEY}: {error}") from error
    quotas = {
        Namespace(name): Quota(
            namespace=Namespace(name),
            models=tuple(
                (model, QuotaLimits(cores_milli=min(max(0, MILLI * gpus), MOST)))
                for model, gpus in sorted((limits.quota or {}).items())
            ),
            only_models=True,
            model_label=MODEL_LABEL,
            pools=limits.pool or (),
            pool_label=POOL_LABEL,
        )
        for name, limits in listed.items()
    }
    for name, quota in quotas.items():
        check_bounds(quota, f"{place}: {KEY}: {name[:SHORT]}")
    return quotas
