"""A device plugin and a simulated kubelet over real sockets: registration, streams, restarts."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from simcluster.kubelet.settings import NodeSettings
from tests.support.simcluster.kubelet import (
    SLOT,
    ScriptedPlugin,
    healthy,
    one_kubelet,
    pod,
    slots,
)
from tests.support.waiting import until


async def test_a_registered_plugin_s_devices_become_allocatable_and_serve_a_pod() -> None:
    async with slots("a", "b") as (node, plugin):
        node.create(pod("one", limits={SLOT: 1}))

        await node.phase("one", "Running")

        assert plugin.device_ids("Allocate") == [("a",)]
        assert (await node.allocated_devices())["one", "main"] == {"a"}


async def test_the_kubelet_dials_back_and_reads_the_options_inside_register() -> None:
    async with slots() as (_node, plugin):
        await plugin.register()

        assert plugin.calls[0] == ("GetDevicePluginOptions", ())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "v1"}, 'requested API version "v1" is not supported'),
        ({"resource_name": "slots"}, 'the ResourceName "slots" is invalid'),
        ({"resource_name": "kubernetes.io/slot"}, "is invalid"),
    ],
)
async def test_invalid_registrations_are_refused(changes: dict[str, str], text: str) -> None:
    async with slots() as (_node, plugin):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plugin.register(**changes)

        assert text in (refused.value.details() or "")
        assert plugin.calls == []


async def test_a_plugin_that_does_not_listen_is_refused() -> None:
    async with slots(settings=NodeSettings(plugin_dial_s=0.2)) as (_node, plugin):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plugin.register(endpoint="missing.sock")

        assert "failed to dial device plugin" in (refused.value.details() or "")


async def test_changes_of_health_reach_the_node_status_before_a_heartbeat() -> None:
    async with slots("a", "b", settings=NodeSettings(heartbeat_s=3600)) as (node, plugin):
        plugin.report({"a": "Healthy", "b": "Unhealthy"})
        await node.allocatable(SLOT, 1)

        assert node.amount(SLOT, "capacity") == "2"
        plugin.report(healthy("a", "b"))
        await node.allocatable(SLOT, 2)


async def test_when_the_stream_ends_nothing_is_allocatable_and_the_kubelet_does_not_reconnect() -> (
    None
):
    async with slots("a", "b") as (node, plugin):
        plugin.end_streams()
        await node.allocatable(SLOT, 0)
        node.create(pod("late", limits={SLOT: 1}))
        failed = await node.phase("late", "Failed")

        assert node.amount(SLOT, "capacity") == "2"
        assert "no healthy devices present" in failed["status"]["message"]
        assert [name for name, _ in plugin.calls].count("ListAndWatch") == 1
        await plugin.register()
        await node.allocatable(SLOT, 2)


async def test_after_the_grace_period_a_lost_plugins_resource_reads_0() -> None:
    async with slots("a", settings=NodeSettings(plugin_grace_s=0.2)) as (node, plugin):
        plugin.end_streams()

        await until(lambda: node.amount(SLOT, "capacity") == "0")


async def test_of_two_plugins_for_one_resource_the_later_registration_wins() -> None:
    async with (
        one_kubelet() as node,
        ScriptedPlugin(node.device_plugins, endpoint="old.sock") as old,
        ScriptedPlugin(node.device_plugins, endpoint="new.sock") as new,
    ):
        await old.serve(node, "old-1")
        await new.serve(node, "new-1", "new-2")

        old.end_streams()
        await node.run("one", limits={SLOT: 2})

        assert (len(old.device_ids("Allocate")), len(new.device_ids("Allocate"))) == (0, 1)
        assert node.amount(SLOT) == "2"


async def test_with_the_race_enabled_the_end_of_an_old_stream_disconnects_the_new_plugin() -> None:
    settings = NodeSettings(stale_stream_race=True)
    async with (
        one_kubelet(settings) as node,
        ScriptedPlugin(node.device_plugins, endpoint="old.sock") as old,
        ScriptedPlugin(node.device_plugins, endpoint="new.sock") as new,
    ):
        await old.serve(node, "old-1")
        await new.serve(node, "new-1", "new-2")

        old.end_streams()

        await node.allocatable(SLOT, 0)


async def test_a_device_list_above_4_mib_leaves_the_resource_at_zero() -> None:
    async with slots() as (node, plugin):
        plugin.report(healthy(*(f"{'x' * 50}-{number:06}" for number in range(70_000))))

        await plugin.register()

        await node.allocatable(SLOT, 0)
        assert node.amount(SLOT, "capacity") == "0"


async def test_patched_node_capacity_survives_a_restart() -> None:
    patch = {"status": {part: {"example.com/mib": "4096"} for part in ("capacity", "allocatable")}}
    async with slots("a") as (node, _plugin):
        node.store.patch("nodes", None, "node-0", patch, subresource="status")

        await node.kubelet.restart()

        assert node.amount("example.com/mib") == "4096"
        assert node.amount(SLOT) == "0"


async def test_a_restart_leaves_containers_alone_and_needs_a_new_registration() -> None:
    async with one_kubelet() as node:
        async with ScriptedPlugin(node.device_plugins) as plugin:
            await plugin.serve(node, "a", "b")
            await node.run("one", limits={SLOT: 1})
            before = node.container("one").container_id

            status, _ = await node.request("/debug/restart", method="POST")

            assert status == 200
            assert not (node.device_plugins / plugin.endpoint).exists()
            assert node.amount(SLOT) == "0"
        async with ScriptedPlugin(node.device_plugins) as plugin:
            await plugin.serve(node, "a", "b")
            await node.run("two", limits={SLOT: 1})

            assert plugin.device_ids("Allocate") == [("b",)]
            assert node.container("one").container_id == before
            assert (await node.allocated_devices())["one", "main"] == {"a"}


async def test_a_restart_in_the_middle_of_an_allocation_fails_that_pod_only() -> None:
    async with slots("a") as (node, plugin):
        allocate_called = asyncio.Event()

        async def never(_devices: list[str]) -> dict[str, str]:
            allocate_called.set()
            await asyncio.sleep(60)
            return {}

        plugin.on_allocate = never
        node.create(pod("unlucky", limits={SLOT: 1}))
        async with asyncio.timeout(30):
            await allocate_called.wait()

        await node.kubelet.restart()

        failed = await node.phase("unlucky", "Failed")
        assert failed["status"]["reason"] == "UnexpectedAdmissionError"


async def test_the_checkpoint_has_the_format_of_a_real_kubelet() -> None:
    async with slots("a", "b") as (node, _plugin):
        uid = node.create(pod("one", limits={SLOT: 1}))["metadata"]["uid"]
        await node.phase("one", "Running")

        content = json.loads((node.device_plugins / "kubelet_internal_checkpoint").read_text())

        (entry,) = content["Data"]["PodDeviceEntries"]
        assert (entry["PodUID"], entry["ContainerName"]) == (uid, "main")
        assert entry["DeviceIDs"] == {"-1": ["a"]}
        assert content["Data"]["RegisteredDevices"] == {SLOT: ["a", "b"]}


async def test_an_unreadable_checkpoint_is_ignored() -> None:
    async with one_kubelet() as node:
        checkpoint = node.device_plugins / "kubelet_internal_checkpoint"
        checkpoint.write_text('{"Data": ')

        await node.kubelet.restart()

        async with ScriptedPlugin(node.device_plugins, endpoint="again.sock") as plugin:
            await plugin.serve(node, "a")


async def test_a_directory_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(ValueError, match="107"):
        async with one_kubelet(directory=Path("/tmp") / ("x" * 100)):
            pass
