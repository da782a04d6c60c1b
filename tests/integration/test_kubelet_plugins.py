"""A device plugin and a simulated kubelet over real sockets: registration, streams, restarts."""

from tests.support.kubelet import ScriptedPlugin, healthy, one_kubelet, pod

SLOT = "example.com/slot"


async def test_a_registered_plugin_s_devices_become_allocatable_and_serve_a_pod() -> None:
    async with one_kubelet() as node, ScriptedPlugin(node.device_plugins, SLOT) as plugin:
        plugin.report(healthy("a", "b"))
        await plugin.register()
        await node.allocatable(SLOT, 2)
        node.create(pod("one", limits={SLOT: 1}))

        await node.phase("one", "Running")

        assert plugin.asked("Allocate") == [("a",)]
        assert (await node.held())["one", "main"] == {"a"}
