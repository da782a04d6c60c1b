"""NVIDIA's device-list strategies, which pass devices to containers; pure.

The strategies and what each adds to the response to Allocate are those of NVIDIA's device plugin:
a variable or mounts for NVIDIA's container runtime, names for any runtime that supports CDI.
"""

import uuid
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
CDI_KEY = "cdi.k8s.io/nvidia-device-plugin_"
"""Prefix of a container annotation for its runtime; the suffix is unique for each response."""
_RESPONSES = uuid.UUID("c0a4c1f6-0e6b-4c0c-9a4f-5d6d3c5a7e42")


class DeviceListStrategy(StrEnum):
    """One way to name devices."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_CRI = "cdi-cri"
    CDI_ANNOTATIONS = "cdi-annotations"


DeviceListStrategies = tuple[DeviceListStrategy, ...]
DEFAULT_STRATEGIES: DeviceListStrategies = (DeviceListStrategy.ENVVAR,)
CDI_STRATEGIES = frozenset({DeviceListStrategy.CDI_CRI, DeviceListStrategy.CDI_ANNOTATIONS})


def parse_strategies(words: Sequence[str]) -> DeviceListStrategies:
    """Parse the names of strategies. Raises RequestError for an unknown name, or no name at all."""
    known = ", ".join(DeviceListStrategy)
    for word in words:
        if word not in set(DeviceListStrategy):
            raise RequestError(f"--device-list-strategy must be one of {known}, got {word!r}")
    if not words:
        raise RequestError(f"--device-list-strategy needs at least one of {known}")
    return tuple(dict.fromkeys(map(DeviceListStrategy, words)))


def name_devices(
    setup: ContainerSetup, devices: Sequence[str], strategies: DeviceListStrategies, response: str
) -> ContainerSetup:
    """Return the setup with its devices named by the strategies.

    `setup` names them in the variable, as all dialects do; `devices` are the UUIDs of GPUs and MIG
    instances, and `response` is the same for each response to the same container.
    """
    environment, mounts = dict(setup.environment), list(setup.mounts)
    annotations = dict(setup.annotations)
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
    names = tuple(map(qualified_name, devices))
    if DeviceListStrategy.CDI_ANNOTATIONS in strategies:
        annotations[f"{CDI_KEY}{uuid.uuid5(_RESPONSES, response)}"] = ",".join(names)
    return replace(
        setup,
        environment=environment,
        mounts=tuple(mounts),
        annotations=annotations,
        cdi_devices=names if DeviceListStrategy.CDI_CRI in strategies else (),
    )


def cdi_names_of(setup: ContainerSetup) -> frozenset[str]:
    """Return the CDI names of a container's devices, by either strategy."""
    annotated = (value for key, value in setup.annotations.items() if key.startswith(CDI_KEY))
    return frozenset(setup.cdi_devices).union(*(value.split(",") for value in annotated))
