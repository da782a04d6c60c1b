"""What a kubelet shows and does while its API server is away, and after that."""

from collections.abc import Mapping

from simcluster.kubelet.containers.container_state import ContainerPhase
from simcluster.ports import Outage
from tests.support.simcluster.kubelet import SLOT, Node, pod, slots
from tests.support.waiting import until


async def code_of_pods(node: Node) -> int:
    return (await node.request("/pods"))[0]


async def phases(node: Node) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in await node.list_pods()}


async def test_pods_cannot_be_listed_during_an_outage_and_are_denied_for_a_while_after_it() -> None:
    async with slots("a") as (node, _):
        node.kubelet.miss_api_server(Outage(for_s=1.0, denied_s=1.0, relist_s=0.0))
        codes = [await until(lambda: code_of_pods(node), lambda code: code != 200)]
        _, body = await node.request("/pods")
        codes += [await until(lambda: code_of_pods(node), lambda code: code != 500)]
        codes += [await until(lambda: code_of_pods(node), lambda code: code != 403)]

    assert codes == [500, 403, 200]
    assert b"Authorization error" in body


async def test_new_pods_are_admitted_while_the_list_still_shows_those_before_the_outage() -> None:
    seen: list[dict[str, str]] = []
    async with slots("a") as (node, plugin):

        async def look(_devices: list[str]) -> Mapping[str, str]:
            seen.append(await phases(node))
            return {}

        brief = {"sim.leasehold.dev/run-for": "500ms"}
        node.create(pod("ended", annotations=brief, restartPolicy="Never"))
        await node.phase("ended", "Running")
        plugin.on_allocate = look
        node.kubelet.api.lose()
        await until(lambda: node.container("ended").phase is ContainerPhase.TERMINATED)
        node.create(pod("later", limits={SLOT: 1}))
        assert node.pod("ended")["status"]["phase"] == "Running", "no status can be written"

        node.kubelet.miss_api_server(Outage(for_s=0.0, denied_s=0.0, relist_s=0.5))
        await node.phase("ended", "Succeeded")
        assert await phases(node) == {"ended": "Running"}
        assert not seen, "no pod arrives before the kubelet lists them again"
        await node.phase("later", "Running")
        await until(lambda: phases(node), lambda shown: shown["ended"] == "Succeeded")

    assert seen == [{"ended": "Running", "later": "Pending"}]
