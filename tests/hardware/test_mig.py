"""MIG is only read: what NVML offers beside the table of published figures."""

import pynvml
import pytest

from services.node_agent.gpus.nvml import mig
from services.node_agent.gpus.nvml.calls import with_nvml
from services.node_agent.mig.gpu_models import A100_80, GPU_MODELS
from services.node_agent.mig.instances import InstanceProfile
from services.node_agent.mig.layouts import derive_layouts
from tests.hardware.conftest import Add
from tests.hardware.machine import Machine, first_gpu
from tests.support.gpu_driver import gpu

Facts = tuple[int, int, int, tuple[int, ...]]


def facts(profile: InstanceProfile) -> Facts:
    return profile.compute_slices, profile.memory_slices, profile.count, profile.starts


def test_profiles_are_those_of_our_table(machine: Machine, seen: Add) -> None:
    if machine.driver:
        machine.driver.create(gpu(1, mig=True, profiles=A100_80))
    found = first_gpu()

    def read() -> tuple[InstanceProfile, ...]:
        handle = pynvml.nvmlDeviceGetHandleByUUID(found.uuid)
        return tuple(mig._profiles(handle))

    if found.mig is None:
        pytest.skip(f"{found.model} does not support MIG")
    offered = {profile.name: profile for profile in with_nvml(read)}
    mode = "on" if found.mig.enabled else "off"
    seen("MIG mode, and profiles by NVML", f"{mode}, {len(offered)}")
    if not offered and not found.mig.enabled:
        pytest.skip("the driver lists no profiles while MIG is off")
    known = next((m for m in GPU_MODELS.values() if m.product == found.model), None)
    if known is None:
        layouts = derive_layouts(tuple(offered.values()))
        seen("layouts of a card that our table lacks", len(layouts), "derived", holds=bool(layouts))
        return
    for profile in known.mig:
        other = offered.pop(profile.name, None)
        figure = f"{facts(other)}, {other.memory_mib} MiB" if other else "not offered"
        target = f"{facts(profile)}, {profile.memory_mib} MiB within 5 %"
        holds = (
            other is not None
            and facts(other) == facts(profile)
            and (abs(other.memory_mib - profile.memory_mib) <= profile.memory_mib * 0.05)
        )
        seen(f"slices, count and starts of {profile.name}", figure, target, holds=holds)
    seen("profiles that our table lacks", ", ".join(sorted(offered)) or "none")
