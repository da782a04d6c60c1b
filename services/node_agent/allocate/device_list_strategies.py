"""NVIDIA's device-list strategies; pure."""

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from services.node_agent.allocate.cdi import qualified_name
from shared.dialects.dialect import ContainerSetup, Mount
from shared.dialects.reserved import VISIBLE
from shared.model.errors import RequestError

MOUNTS = "/var/run/nvidia-container-devices"
"""NVIDIA's runtime reads device names from mounts of `NULL_DEVICE` below this path."""
NULL_DEVICE = "/dev/null"
AUTO = "auto"
"""`CDI_CRI` where it works, else `ENVVAR`."""
CDI_SINCE = {"containerd": (2, 0), "cri-o": (1, 23)}
"""The first version of a runtime that has CDI enabled as installed."""
_RUNTIME = re.compile(r"([\w-]+)://v?(\d{1,4})\.(\d{1,4})", re.ASCII)


class DeviceListStrategy(StrEnum):
    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_CRI = "cdi-cri"


DeviceListStrategies = tuple[DeviceListStrategy, ...]
DEFAULT_STRATEGIES: DeviceListStrategies = (DeviceListStrategy.ENVVAR,)


def parse_strategies(words: Sequence[str]) -> DeviceListStrategies:
    """Return no strategies for `AUTO`. Raises RequestError for an unknown name.

    >>> parse_strategies(["envvar"])
    (<DeviceListStrategy.ENVVAR: 'envvar'>,)
    """
    if list(words) == [AUTO]:
        return ()
    names = ", ".join(DeviceListStrategy)
    for word in words or ("",):
        if word not in set(DeviceListStrategy):
            raise RequestError(
                f"--device-list-strategy must be {AUTO}, or some of {names}, got {word!r}"
            )
    return tuple(dict.fromkeys(map(DeviceListStrategy, words)))


def has_cdi(runtime: str) -> bool:
    """Whether a runtime has CDI enabled as installed, by its name in the node's status.

    >>> has_cdi("containerd://1.7.20"), has_cdi("containerd://2.0.1")
    (False, True)
    """
    match = _RUNTIME.match(runtime)
    since = CDI_SINCE.get(match[1]) if match else None
    return match is not None and since is not None and (int(match[2]), int(match[3])) >= since


def name_devices(
    setup: ContainerSetup, devices: Sequence[str], strategies: DeviceListStrategies
) -> ContainerSetup:
    """`setup` names its devices in the variable, as all dialects do; `devices` are UUIDs."""
    environment = dict(setup.environment)
    mounts = list(setup.mounts)
    if DeviceListStrategy.ENVVAR not in strategies:
        environment.pop(VISIBLE, None)
    if DeviceListStrategy.VOLUME_MOUNTS in strategies:
        environment[VISIBLE] = MOUNTS
        mounts += [
            Mount(
                container_path=f"{MOUNTS}/{device}",
                host_path=NULL_DEVICE,
                read_only=True,
                directory=False,
            )
            for device in devices
        ]
    by_cdi = DeviceListStrategy.CDI_CRI in strategies
    return replace(
        setup,
        environment=environment,
        mounts=tuple(mounts),
        cdi_devices=tuple(map(qualified_name, devices)) if by_cdi else (),
    )
