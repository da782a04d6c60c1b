"""A container's request in Koordinator's resources: GPUs, and its part of each; pure.

The rules are those of Koordinator's mutating webhook and of its scheduler plugin `DeviceShare`,
applied to each container separately. Upstream adds up all containers of a pod and gives each of
them all GPUs; here two containers of a pod never share a GPU, and each is limited to its own part.
"""

from collections.abc import Mapping

from shared.dialects.dialect import PodManifest, Rules
from shared.dialects.strict_values import check_range
from shared.model.errors import RequestError
from shared.model.lease import MIB
from shared.model.request import GpuRequest, SharingPolicy

NAME = "koordinator"
SCHEDULER = "koord-scheduler"
"""`spec.schedulerName` of pods for Koordinator."""
NVIDIA_GPUS = "nvidia.com/gpu"
"""The one resource name that two dialects read. In pods for Koordinator's scheduler it means whole
GPUs here; in all other pods the NVIDIA dialect reads it. That dialect serves it in both cases."""
PREFIX = "koordinator.sh/"
DEPRECATED = "kubernetes.io/"
"""Prefix of the names before Koordinator 1.0, which are read and never written."""

GPU = "gpu"
SHARED = "gpu.shared"
CORE = "gpu-core"
MEMORY = "gpu-memory"
RATIO = "gpu-memory-ratio"
HYPHEN = "koordinator.sh/gpu-shared"
"""Some tutorials have this name; Koordinator never had it."""
NPUS = "huawei.com/npu-"

FULL = 100
"""Percent of one GPU, and the number of device IDs it is served in."""

_ALIASES: Mapping[str, str] = {
    **{PREFIX + name: name for name in (GPU, SHARED, CORE, MEMORY, RATIO)},
    **{DEPRECATED + name: name for name in (GPU, CORE, MEMORY, RATIO)},
}
RESOURCES = frozenset({*_ALIASES, HYPHEN})

VALID_COMBINATIONS = frozenset(
    {
        frozenset({GPU}),
        frozenset({MEMORY}),
        frozenset({RATIO}),
        frozenset({CORE, MEMORY}),
        frozenset({CORE, RATIO}),
        frozenset({SHARED, MEMORY}),
        frozenset({SHARED, RATIO}),
        frozenset({SHARED, CORE, MEMORY}),
        frozenset({SHARED, CORE, RATIO}),
    }
)
"""The combinations of names that are valid in one container."""


def reads_nvidia_gpus(pod: PodManifest, rules: Rules) -> bool:
    """Return whether `nvidia.com/gpu` in this pod is for the Koordinator dialect.

    Where that dialect is disabled, the NVIDIA dialect reads such pods, too, so that no pod with the
    resource ever counts as a pod without a GPU.
    """
    enabled = NAME in (rules.enabled or {NAME}) and NAME not in rules.disabled
    return enabled and pod.scheduler == SCHEDULER


def parse_part(
    container: str, limits: Mapping[str, int], *, init: bool = False
) -> GpuRequest | None:
    """Parse one container's limits; the shorthand and a missing GPU count are completed.

    None: no GPU is requested. Amounts of 0 are ignored. Raises RequestError naming container,
    resource, value and rule.
    """
    where = f"container {container}"
    amounts = _amounts(where, limits)
    if amounts:
        _check_other_resources(where, limits, amounts)
        _check_names(where, amounts)
        _check_percent(where, amounts)
    elif (vendor := limits.get(NVIDIA_GPUS, 0)) > 0:
        amounts = {SHARED: vendor, CORE: vendor * FULL, RATIO: vendor * FULL}
    else:
        return None
    full = _completed(amounts)
    gpus = full[SHARED]
    for name in (CORE, RATIO):
        _check_divides(where, name, full.get(name), gpus)
    if MEMORY in full and full[MEMORY] < gpus * MIB:
        raise RequestError(
            f"{where}: {PREFIX}{MEMORY} is a number of bytes, of all its GPUs together: "
            f"{full[MEMORY]} over {gpus} is less than 1 MiB each; for as many MiB write "
            f"{full[MEMORY]}Mi"
        )
    whole = full.get(CORE) == full.get(RATIO) == FULL * gpus
    return GpuRequest(
        container=container,
        gpus=gpus,
        memory_percent=full[RATIO] // gpus if RATIO in full and not whole else None,
        percent_of_mib=True,
        memory_bytes=full[MEMORY] // gpus if MEMORY in full else None,
        cores_percent=full.get(CORE, 0) // gpus,
        whole=whole,
        sharing=SharingPolicy.SHARED if CORE in full else SharingPolicy.BEST_EFFORT,
        slots=FULL,
        init=init,
        records_requested_units=True,
    )


def amount_changes(limits: Mapping[str, int]) -> dict[str, int | None]:
    """Return what admission changes in a container's requests and limits; None: it is removed.

    The shorthand `koordinator.sh/gpu` becomes core and memory ratio, and a missing GPU count is
    added, without which the kubelet would not call Allocate. Invalid requests are not changed.
    """
    amounts = {
        name: amount
        for key, name in _ALIASES.items()
        if (amount := limits.get(key, 0)) > 0
    }  # fmt: skip
    if frozenset(amounts) not in VALID_COMBINATIONS:
        return {}
    full = _completed(amounts)
    if GPU not in amounts:
        return {} if SHARED in amounts else {PREFIX + SHARED: full[SHARED]}
    added: dict[str, int | None] = {PREFIX + name: amount for name, amount in full.items()}
    return {key: None for key, name in _ALIASES.items() if name == GPU and key in limits} | added


def _completed(amounts: Mapping[str, int]) -> dict[str, int]:
    """Complete the shorthand, and the GPU count from the ratio, or else from core."""
    full = dict(amounts)
    if GPU in full:
        full[CORE] = full[RATIO] = full.pop(GPU)
    if SHARED not in full:
        percent = full.get(RATIO, full.get(CORE, 0))
        full[SHARED] = percent // FULL if percent > FULL and percent % FULL == 0 else 1
    return full


def _amounts(where: str, limits: Mapping[str, int]) -> dict[str, int]:
    if limits.get(HYPHEN):
        raise RequestError(
            f"{where}: there is no {HYPHEN}; the name has a dot: {PREFIX}{SHARED}"
        )  # fmt: skip
    amounts: dict[str, int] = {}
    for key, name in _ALIASES.items():
        amount = limits.get(key, 0)
        check_range(where, key, amount, 0)
        if amount and name in amounts:
            raise RequestError(f"{where}: {key} repeats {PREFIX}{name}; remove the old name")
        if amount:
            amounts[name] = amount
    return amounts


def _check_other_resources(
    where: str, limits: Mapping[str, int], amounts: Mapping[str, int]
) -> None:
    other = next((key for key in limits if key == NVIDIA_GPUS or key.startswith(NPUS)), None)
    if other is None or not limits[other]:
        return
    rule = (
        "whole GPUs are requested with one of them, not with both"
        if other == NVIDIA_GPUS
        else "memory of NPUs cannot be shared here"
    )
    raise RequestError(f"{where}: {other} {limits[other]} beside {_listed(amounts)}: {rule}")


def _check_names(where: str, amounts: Mapping[str, int]) -> None:
    if frozenset(amounts) in VALID_COMBINATIONS:
        return
    named = _listed(amounts)
    if GPU in amounts:
        rule = f"{PREFIX}{GPU} stands for core and memory, and must be alone"
    elif MEMORY in amounts and RATIO in amounts:
        rule = f"memory is requested in bytes or as a ratio, so remove {PREFIX}{MEMORY} or "
        rule += f"{PREFIX}{RATIO}"
    else:
        rule = f"memory is missing, so add {PREFIX}{RATIO} or {PREFIX}{MEMORY}"
    raise RequestError(f"{where}: {named}: {rule}")


def _check_percent(where: str, amounts: Mapping[str, int]) -> None:
    """Check a request without a GPU count: a part of one GPU, or whole GPUs."""
    if SHARED in amounts:
        return
    for name in (GPU, CORE, RATIO):
        amount = amounts.get(name, 0)
        if amount > FULL and amount % FULL:
            raise RequestError(
                f"{where}: {PREFIX}{name} must be 1 to {FULL} percent of a GPU or a multiple of "
                f"{FULL}, got {amount}"
            )


def _check_divides(where: str, name: str, amount: int | None, gpus: int) -> None:
    if amount is None:
        return
    if amount % gpus:
        raise RequestError(
            f"{where}: {PREFIX}{name} must be a multiple of {PREFIX}{SHARED} {gpus}, got {amount}"
        )
    if amount // gpus > FULL:
        raise RequestError(
            f"{where}: {PREFIX}{name} {amount} over {PREFIX}{SHARED} {gpus} is "
            f"{amount // gpus} percent of each GPU, and a GPU has {FULL}"
        )


def _listed(amounts: Mapping[str, int]) -> str:
    return " and ".join(f"{PREFIX}{name} {amount}" for name, amount in sorted(amounts.items()))
