"""Whether the node's GPUs are offered by amounts or as replicas now; pure."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.node_agent.gpus.inventory import Gpu, SharingConfig
from shared.model.devices.device import Device, DeviceMode, Isolation
from shared.model.devices.replicas import Replicas

MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMode:
    replicas: Replicas | None = None
    """None if GPUs are offered by amounts."""
    problem: str = ""


def choose_mode(
    config: SharingConfig,
    gpus: Collection[Gpu],
    before: Iterable[Device],
    *,
    holders: Collection[str] | None,
    only_amounts: bool,
    missing_mps: Callable[[Gpu], str],
) -> ReplicaMode:
    """`holders` hold parts of GPUs outside MIG mode; None if they are not known.

    With `only_amounts`, GPUs are offered by amounts, also if the agent has lost its records of
    that.
    """
    offered = [device.replicas for device in before if device.mode is not DeviceMode.MIG]
    wanted = config.replicas
    keeps_amounts = only_amounts and wanted is not None
    if offered and offered[0] == wanted and not keeps_amounts:
        return ReplicaMode(replicas=wanted)
    current = offered[0] if offered and not keeps_amounts else None
    problem = _conflict(config, gpus, missing_mps)
    if not problem and (offered or keeps_amounts):
        problem = _in_the_way(wanted, holders)
    if problem:
        return ReplicaMode(replicas=current, problem=problem)
    return ReplicaMode(replicas=wanted)


def _conflict(config: SharingConfig, gpus: Iterable[Gpu], missing_mps: Callable[[Gpu], str]) -> str:
    replicas = config.replicas
    if replicas is None:
        return ""
    if config.isolation is Isolation.STRICT:
        return (
            "the configuration shares GPUs as replicas, and --isolation of this node is strict: "
            "remove one of them"
        )
    for gpu in gpus:
        if gpu.memory_mib < replicas.number:
            return (
                f"the configuration has {replicas.number} replicas of each GPU, and GPU "
                f"{gpu.index} has {gpu.memory_mib} MiB: have fewer"
            )
        if replicas.strategy != "mps":
            continue
        if gpu.mode is DeviceMode.MIG:
            return (
                f"the configuration shares GPUs by mps, and GPU {gpu.index} is in MIG mode: MPS "
                "and MIG exclude each other; use timeSlicing, or turn MIG off"
            )
        if reason := missing_mps(gpu):
            return f"the configuration shares GPUs by mps, and GPU {gpu.index} has none: {reason}"
    return ""


def _in_the_way(wanted: Replicas | None, holders: Collection[str] | None) -> str:
    if holders is not None and not holders:
        return ""
    mode = f"as {wanted.number} replicas by {wanted.strategy}" if wanted else "by amounts"
    if holders is None:
        return f"GPUs are to be offered {mode}: what holds them is not known yet"
    names = sorted(holders)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (
        f"GPUs are to be offered {mode} once none is in use: {', '.join(names[:MOST_NAMED])}{more} "
        "hold parts of them; cordon the node, and end them"
    )
