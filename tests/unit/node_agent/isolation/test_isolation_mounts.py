"""Host paths of containers with HAMi-core: no two containers can write to the same one."""

from itertools import combinations

import pytest

from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import LIBRARY
from shared.model.lease import Lease
from shared.model.request import GpuRequest
from shared.placing.choice.container_choice import share_of
from tests.support.dialects.builders import PATHS, device
from tests.support.node_agent.agent import lease_of

HELD = ("volcano-vgpu", "tencent", "nvidia", "koordinator")
"""Dialects whose shares HAMi-core holds to their limits."""
CARD = device(0)


def lease(pod: str, *containers: str, cores: int = 50) -> Lease:
    facts = {"memory_units": 3000, "cores_percent": cores, "records_requested_units": True}
    requests = [GpuRequest(container=name, gpus=1, **facts) for name in containers]  # type: ignore[arg-type]
    return lease_of(pod, *(share_of(one, CARD, 3000) for one in requests))


def setup_of(dialect: str, held: Lease, container: str) -> ContainerSetup:
    return DIALECTS[dialect].container_setup(held, container, {CARD.uuid: CARD}, PATHS)


def writable(setup: ContainerSetup) -> set[str]:
    return {mount.host_path for mount in setup.mounts if not mount.read_only}


@pytest.mark.parametrize("dialect", HELD)
def test_hami_core_33_no_two_containers_can_write_to_the_same_path_or_to_the_library(
    dialect: str,
) -> None:
    one, other = lease("u1", "a", "b"), lease("u2", "a")
    setups = [setup_of(dialect, *held) for held in ((one, "a"), (one, "b"), (other, "a"))]

    for first, second in combinations(setups, 2):
        assert writable(first)
        assert not writable(first) & writable(second)
    read_only = {mount.container_path for mount in setups[0].mounts if mount.read_only}
    loads = {m.container_path for m in setups[0].mounts if m.container_path[:5] == "/etc/"}
    assert read_only >= {LIBRARY, *loads}


@pytest.mark.parametrize(("cores", "policy"), [(1, "force"), (99, "force"), (0, None), (100, None)])
def test_the_core_policy_is_forced_only_with_a_core_limit(cores: int, policy: str | None) -> None:
    setup = setup_of("volcano-vgpu", lease("u1", "a", cores=cores), "a")

    assert setup.environment.get("GPU_CORE_UTILIZATION_POLICY") == policy
