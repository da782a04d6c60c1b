"""NVIDIA's device-list strategies, which pass devices to containers; pure.

The strategies and what each adds to the response to Allocate are those of NVIDIA's device plugin:
a variable or mounts for NVIDIA's container runtime, names for any runtime that supports CDI.
"""

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
"""The first version of a container runtime that has CDI enabled as installed."""
_RUNTIME = re.compile(r"([\w-]+)://v?(\d{1,4})\.(\d{1,4})", re.ASCII)


class DeviceListStrategy(StrEnum):
    """One way to name devices."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_CRI = "cdi-cri"


DeviceListStrategies = tuple[DeviceListStrategy, ...]
DEFAULT_STRATEGIES: DeviceListStrategies = (DeviceListStrategy.ENVVAR,)


def parse_strategies(words: Sequence[str]) -> DeviceListStrategies:
    """Parse the names of strategies; none for `AUTO`. Raises RequestError for an unknown name."""
    if list(words) == [AUTO]:
        return ()
    known = ", ".join(DeviceListStrategy)
    for word in words or ("",):
        if word not in set(DeviceListStrategy):
            raise RequestError(
                f"--device-list-strategy must be {AUTO}, or some of {known}, got {word!r}"
            )
    return tuple(dict.fromkeys(map(DeviceListStrategy, words)))


def has_cdi(runtime: str) -> bool:
    """Return whether a runtime has CDI enabled as installed, by its name in the node's status."""
    found = _RUNTIME.match(runtime)
    since = CDI_SINCE.get(found[1]) if found else None
    return found is not None and since is not None and (int(found[2]), int(found[3])) >= since


def name_devices(
    setup: ContainerSetup, devices: Sequence[str], strategies: DeviceListStrategies
) -> ContainerSetup:
    """Return the setup with its devices named by the strategies.

    `setup` names them in the variable, as all dialects do; `devices` are the UUIDs of GPUs and MIG
    instances.
    """
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
