"""What a container gets whose cores are held by GPU time; pure."""

from collections.abc import Iterable
from dataclasses import replace

from shared.dialects import hami_core
from shared.dialects.dialect import ContainerSetup, Mount, Paths
from shared.model.leases.lease import Share

DIRECTORY = "/usr/local/leasehold"
LIBRARY = f"{DIRECTORY}/libleasehold-time.so"
LIMITS = f"{DIRECTORY}/time-limits"
"""Read-only in the container. Here and below, paths are inside containers."""
USE_DIRECTORY = "/tmp/leasehold-time"  # noqa: S108 - inside the container
"""Of the file that the container's processes share."""
PRELOAD = "/etc/ld.so.preload"
_PRELOAD_VARIABLE = "LD_PRELOAD"


def with_compute_time(
    setup: ContainerSetup, shares: Iterable[Share], own: str, paths: Paths
) -> ContainerSetup:
    """Return the setup with the library of compute time, if a share needs it.

    `own` begins the container's paths on the node. HAMi-core's own limit of cores is off beside it:
    two limiters would hold each other up.
    """
    if not any(share.compute == "time" for share in shares):
        return setup
    environment = dict(setup.environment)
    mounts = [mount for mount in setup.mounts if mount.container_path != PRELOAD]
    is_joint = hami_core.is_limited(setup)
    if is_joint:
        environment |= {hami_core.POLICY: "disable", hami_core.CORES_LIMIT: "0"}
    if _PRELOAD_VARIABLE in environment:
        environment[_PRELOAD_VARIABLE] = f"{LIBRARY} {environment[_PRELOAD_VARIABLE]}"
    else:
        preload = paths.joint_preload if is_joint else paths.time_preload
        mounts.append(hami_core.mount(PRELOAD, preload, read_only=True))
    return replace(
        setup,
        environment=environment,
        mounts=(
            *mounts,
            hami_core.mount(LIBRARY, paths.time_library, read_only=True),
            hami_core.mount(LIMITS, f"{own}.time-limits", read_only=True),
            hami_core.mount(USE_DIRECTORY, f"{own}.time"),
        ),
    )


def mounted_at(setup: ContainerSetup, container_path: str) -> Mount | None:
    mounts = (mount for mount in setup.mounts if mount.container_path == container_path)
    return next(mounts, None)
