"""What a container gets whose shares MPS holds; pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.hami_core import mount
from shared.model.devices.enforcers import MPS
from shared.model.leases.lease import MIB, Share
from shared.model.names import DeviceUuid, PodUid

PIPES = "/tmp/nvidia-mps"  # noqa: S108 - inside the container
"""Where programs look for a daemon if the variable is unset, too."""
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ALL_THREADS = 100
SERVER = "gpu"
"""The name of a GPU's shared server, in a daemon of its own."""
_NAME = 16


def held_by_mps(share: Share) -> bool:
    return share.memory in MPS or share.compute in MPS


def daemon_name(holder: PodUid, container: str) -> str:
    """A socket's path is short."""
    return _short(f"{holder}/{container}")


def shared_daemon_name(device: DeviceUuid) -> str:
    return f"gpu-{_short(device)}"


def shared_gpu(shares: Sequence[Share]) -> DeviceUuid:
    """Return the GPU whose shared server holds the shares, or "".

    A program connects to one server.
    """
    gpus = (share.device for share in shares if "mps-shared" in (share.memory, share.compute))
    return next(gpus, DeviceUuid(""))


def pipe_directory(shares: Sequence[Share], holder: PodUid, container: str, root: str) -> str:
    """Return the directory on the node of the socket that a container's programs connect to."""
    name = daemon_name(holder, container)
    if gpu := shared_gpu(shares):
        return f"{root}/{shared_daemon_name(gpu)}/pipe/{SERVER}/{name}"
    return f"{root}/{name}/pipe"


def thread_percent(shares: Sequence[Share]) -> int:
    """All devices get the percentage of the smallest share.

    A share without a limit of cores has all threads.
    """
    percents = [share.cores_percent for share in shares if share.compute in MPS]
    return min((percent for percent in percents if percent > 0), default=ALL_THREADS)


def memory_limits_mib(shares: Sequence[Share]) -> dict[str, int]:
    return {share.device: share.limit_bytes // MIB for share in shares if share.memory in MPS}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME]


def with_mps(
    setup: ContainerSetup, shares: Sequence[Share], holder: PodUid, container: str, paths: Paths
) -> ContainerSetup:
    """Return the setup with the socket's directory, if MPS holds a share.

    Variables of the image are replaced: a limit of an absent device lifts all limits of a process.
    """
    if not any(map(held_by_mps, shares)):
        return setup
    memory = ",".join(f"{device}={mib}M" for device, mib in memory_limits_mib(shares).items())
    pipes = pipe_directory(shares, holder, container, paths.mps)
    return replace(
        setup,
        environment={
            **setup.environment,
            PIPE_VARIABLE: PIPES,
            THREADS_VARIABLE: str(thread_percent(shares)),
            **({MEMORY_VARIABLE: memory} if memory else {}),
        },
        mounts=(*setup.mounts, mount(PIPES, pipes)),
    )
