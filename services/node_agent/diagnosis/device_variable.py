"""How the doctor judges whether NVIDIA's runtime lets pods name devices by a variable; pure.

https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/index.html
"""

import tomllib
from collections.abc import Sequence

from services.node_agent.allocate.device_list_strategies import (
    CDI_STRATEGIES,
    DeviceListStrategy,
)
from shared.dialects.reserved import VISIBLE
from shared.model.errors import RequestError
from shared.model.findings import Finding, fail, ok, warn

SWITCH = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS_SWITCH = "accept-nvidia-visible-devices-as-volume-mounts"
_CONFIGURE = "nvidia-ctk config --in-place --set"


def device_variable(path: str, text: str, strategies: Sequence[DeviceListStrategy]) -> Finding:
    """Judge the configuration of NVIDIA's runtime (TOML) beside the agent's strategies.

    Raises RequestError if the text is not TOML.
    """
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path}: {error}") from error
    by_cdi = not CDI_STRATEGIES.isdisjoint(strategies)
    by_mounts = DeviceListStrategy.VOLUME_MOUNTS in strategies
    if settings.get(SWITCH, True):
        return warn(
            f"every pod that reaches NVIDIA's runtime can name devices in {VISIBLE}, also from its "
            f"image: {SWITCH} is not false in {path}",
            f"pass devices by CDI (docs/install.md), then {_CONFIGURE} {SWITCH}=false",
        )
    if not (by_cdi or by_mounts):
        return fail(
            f"containers get their devices by {VISIBLE}, which {path} makes the runtime ignore",
            "pass devices by CDI (docs/install.md), or use --device-list-strategy volume-mounts",
        )
    if by_mounts and not by_cdi and not settings.get(MOUNTS_SWITCH, False):
        return fail(
            f"containers get their devices by mounts, which {path} makes the runtime ignore",
            f"{_CONFIGURE} {MOUNTS_SWITCH}=true",
        )
    return ok(f"unprivileged pods cannot name devices in {VISIBLE}")
