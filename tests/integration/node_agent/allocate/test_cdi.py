"""Devices named by CDI and by mounts, by an agent beside a simulated kubelet."""

import asyncio
from typing import Any

from proto.deviceplugin import api_pb2
from services.node_agent.allocate.cdi import FILE
from shared.model.lease import Lease
from simcluster.kubelet.devices.checkpoint import load_checkpoint
from tests.integration.node_agent.mig.test_mig import part
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.node_agent.cdi import cdi_devices
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until


def answer(at: Site, lease: Lease) -> api_pb2.ContainerAllocateResponse:
    """Return what the kubelet wrote down of the answer to Allocate."""
    ledger = load_checkpoint(at.node.kubelet.files.root / "device-plugins")
    assert ledger is not None
    (held,) = ledger.container_allocations(lease.pod, "main")
    return api_pb2.ContainerAllocateResponse.FromString(held.response)


def specified(at: Site) -> dict[str, dict[str, Any]]:
    return cdi_devices(at.root / "agent/cdi" / FILE)


async def test_a_share_is_named_by_cdi_and_its_limits_come_as_ever() -> None:
    async with site(device_list_strategy=("cdi-cri", "cdi-annotations")) as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(1, 1000))
        await at.node.phase("one", "Running")
        told = answer(at, lease)
        named = specified(at)

    name = f"leasehold.dev/gpu={lease.shares[0].device}"
    assert [device.name for device in told.cdi_devices] == [name]
    assert list(told.annotations.values()) == [name]
    assert "NVIDIA_VISIBLE_DEVICES" not in told.envs
    assert told.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert "/etc/ld.so.preload" in {mount.container_path for mount in told.mounts}
    assert name in named
    assert len(named) == 2


async def test_a_share_is_named_by_mounts() -> None:
    async with site(device_list_strategy=("volume-mounts",)) as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        told = answer(at, lease)

    place = "/var/run/nvidia-container-devices"
    assert told.envs["NVIDIA_VISIBLE_DEVICES"] == place
    mounted = {mount.container_path: mount.host_path for mount in told.mounts}
    assert mounted[f"{place}/{lease.shares[0].device}"] == "/dev/null"
    assert not (at.root / "agent/cdi").exists()


async def test_an_instance_made_for_a_pod_is_specified_before_its_container_starts() -> None:
    async with site("1xA100-40GB:mig", device_list_strategy=("cdi-cri",)) as at, at.running():
        assert specified(at) == {}
        lease = at.bind(pod("one", limits={NUMBER: 1}), part("group1"))
        await at.node.phase("one", "Running")
        (device,) = answer(at, lease).cdi_devices
        named = specified(at)

    assert device.name.startswith("leasehold.dev/gpu=MIG-")
    assert device.name in named
    assert len(named) == 7


async def test_when_cdi_is_given_up_the_file_stays_for_those_who_have_devices_by_it() -> None:
    async with site(device_list_strategy=("cdi-cri",)) as at:
        async with at.running():
            lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        at.changes["device_list_strategy"] = ("envvar",)
        async with at.running() as agent:
            await agent.watcher.look()
            kept = specified(at)
            at.node.store.delete("pods", "default", "one", grace_s=0)
            await until(lambda: not at.node.exists("one"))
            await agent.checkpoint.forget([lease.pod])
            await agent.watcher.look()
            gone = not (at.root / "agent/cdi" / FILE).exists()

    assert f"leasehold.dev/gpu={lease.shares[0].device}" in kept
    assert gone


async def test_every_look_puts_back_what_was_removed() -> None:
    async with site(device_list_strategy=("cdi-cri",)) as at, at.running():
        (at.root / "agent/cdi" / FILE).unlink()
        async with asyncio.timeout(30):
            while not (at.root / "agent/cdi" / FILE).exists():
                await asyncio.sleep(0.02)
        assert len(specified(at)) == 2
