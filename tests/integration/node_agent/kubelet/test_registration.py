"""Registration of device plugins with a scripted kubelet."""

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.kubelet import registration
from services.node_agent.kubelet.device_plugin import PluginServer, encode_list
from services.node_agent.kubelet.registration import DevicePlugins
from shared.dialects.advertised import PluginDeviceId
from shared.dialects.dialect import ContainerSetup
from shared.dialects.volcano.gpushare import unit_id
from shared.kubelet_api.deviceplugin import api_pb2, api_pb2_grpc
from shared.model.errors import RequestError
from tests.support.node_agent.node import node_of
from tests.support.waiting import until

RESOURCE = "volcano.sh/vgpu-number"


class ScriptedKubelet(api_pb2_grpc.RegistrationServicer):  # type: ignore[misc]
    """Takes registrations as a kubelet does, dialling back inside the call."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "kubelet.sock"
        self.directory = directory
        self.endpoints: list[str] = []
        self.authorities: list[str] = []
        self.lists: list[list[tuple[str, str]]] = []
        self.options: list[Any] = []
        self.ended = 0
        self.watches = True
        """Whether it requests the list of what is registered."""
        self._streams: list[tuple[grpc.aio.Channel, asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        for path in self.directory.glob("*.sock"):
            # The agent removes its own sockets meanwhile.
            path.unlink(missing_ok=True)
        self.server = grpc.aio.server()
        api_pb2_grpc.add_RegistrationServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.socket}")
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()
        await self.server.stop(None)

    async def hang_up(self) -> None:
        """End every stream."""
        for channel, task in self._streams:
            task.cancel()
            await channel.close()
        self._streams.clear()

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        channel = grpc.aio.insecure_channel(
            f"unix:{self.directory / request.endpoint}",
            options=(
                ("grpc.default_authority", "localhost"),
                ("grpc.max_receive_message_length", 4 * 1024 * 1024),
                ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        plugin = self.plugin = api_pb2_grpc.DevicePluginStub(channel)
        self.options.append(
            await plugin.GetDevicePluginOptions(api_pb2.Empty(), timeout=10, wait_for_ready=True)
        )
        self.endpoints.append(request.endpoint)
        if self.watches:
            task = asyncio.create_task(self._follow(plugin.ListAndWatch(api_pb2.Empty())))
            self._streams.append((channel, task))
        return api_pb2.Empty()

    async def _follow(self, stream: Any) -> None:
        try:
            async for message in stream:
                self.lists.append([(device.ID, device.health) for device in message.devices])
        except grpc.aio.AioRpcError:
            self.ended += 1


class FakeHandler:
    """Accepts every device ID but `bad`."""

    def __init__(self) -> None:
        self.preferences: list[tuple[str, int]] = []

    def note_registered(self) -> None:
        pass

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        self.preferences.append((resource, len(available)))
        return list(available)[:size]

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        if "bad" in device_ids:
            raise RequestError("Leasehold refuses: a reason")
        names = {f"V{number}": "x" for number in range(20)}
        return ContainerSetup(environment=names)

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        if "bad" in device_ids:
            raise RequestError("not allocated")


def ids(*names: str, healthy: bool = True) -> dict[str, PluginDeviceId]:
    return {name: PluginDeviceId(id=name, healthy=healthy) for name in names}


@pytest.fixture
def directory() -> Any:
    made = Path(tempfile.mkdtemp(prefix="lh-"))
    yield made
    shutil.rmtree(made)


def plugins_of(directory: Path) -> DevicePlugins:
    async def all_of_it(_: str) -> int:
        return 1

    handler: Any = FakeHandler()
    return DevicePlugins(node_of(), directory, handler, all_of_it)


@asynccontextmanager
async def plugins_in(
    directory: Path, **served: dict[str, PluginDeviceId]
) -> AsyncIterator[DevicePlugins]:
    plugins = plugins_of(directory)
    plugins.serve({RESOURCE: ids("a", "b")} | {f"volcano.sh/{k}": v for k, v in served.items()})
    running = asyncio.create_task(plugins.run())
    try:
        yield plugins
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_16_registers_with_a_kubelet_that_dials_back_inside_the_call(directory: Path) -> None:
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory) as plugins:
        await until(lambda: kubelet.lists)
        await until(lambda: plugins.unready_reason() is None)

    assert kubelet.lists[0] == [("a", "Healthy"), ("b", "Healthy")]
    assert kubelet.options[0].pre_start_required
    assert kubelet.options[0].get_preferred_allocation_available
    assert not list(directory.glob("leasehold-*.sock")), "no socket is left behind"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration after one of the longer pauses would come too late."""
    for pause in ("LOOK_S", "MIN_PAUSE_S"):
        monkeypatch.setattr(registration, pause, 600.0)


@pytest.mark.usefixtures("no_pauses")
async def test_registers_within_a_second_of_the_kubelets_socket_appearing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with plugins_in(directory) as plugins:
        await until(lambda: "waiting for the kubelet's socket" in caplog.text)
        assert plugins.unready_reason() == f"not registered with the kubelet: {RESOURCE}"
        async with ScriptedKubelet(directory) as kubelet:
            await until(lambda: kubelet.lists)


@pytest.mark.usefixtures("no_pauses")
async def test_17_registers_within_a_second_of_the_kubelets_socket_being_replaced(
    directory: Path,
) -> None:
    async with plugins_in(directory):
        async with ScriptedKubelet(directory) as first:
            await until(lambda: first.lists)
        async with ScriptedKubelet(directory) as second:
            await until(lambda: second.lists)

    assert first.endpoints[0] != second.endpoints[0]


async def test_17_registers_with_another_kubelet_whose_predecessor_keeps_its_streams(
    directory: Path,
) -> None:
    async with ScriptedKubelet(directory) as first, plugins_in(directory):
        await until(lambda: first.lists)
        async with ScriptedKubelet(directory) as second:
            await until(lambda: second.lists)


async def test_17_registers_at_once_with_a_kubelet_that_was_killed_and_started_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "REGISTER_AGAIN_S", 600.0)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(directory / "kubelet.sock"))
    async with plugins_in(directory):
        await until(lambda: list(directory.glob("leasehold-*.sock")))
        async with ScriptedKubelet(directory) as kubelet:
            await until(lambda: kubelet.lists)


async def delete_socket(kubelet: ScriptedKubelet, _: DevicePlugins) -> None:
    (kubelet.directory / kubelet.endpoints[0]).unlink()


async def end_streams(kubelet: ScriptedKubelet, _: DevicePlugins) -> None:
    await kubelet.hang_up()


async def show_nothing_allocatable(_: ScriptedKubelet, plugins: DevicePlugins) -> None:
    async def nothing(_: str) -> int:
        return 0

    plugins.allocatable = nothing


@pytest.mark.parametrize("lose", [delete_socket, end_streams, show_nothing_allocatable])
async def test_18_registers_again_on_a_fresh_socket_once_the_kubelet_has_lost_it(
    directory: Path, lose: Callable[[ScriptedKubelet, DevicePlugins], Awaitable[None]]
) -> None:
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory) as plugins:
        plugins.node.timing = AgentTiming(registration_check_s=0.3)
        await until(lambda: kubelet.lists)
        await lose(kubelet, plugins)
        await until(lambda: len(kubelet.lists) == 2)

    assert len(set(kubelet.endpoints)) == 2


async def test_registers_again_with_a_kubelet_that_has_not_requested_the_list(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "FIRST_LIST_S", 0.1)
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory):
        kubelet.watches = False
        await until(lambda: kubelet.endpoints)
        kubelet.watches = True
        await until(lambda: kubelet.lists)

    assert len(set(kubelet.endpoints)) == 2


async def test_a_change_is_sent_as_the_complete_list(directory: Path) -> None:
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory) as plugins:
        await until(lambda: kubelet.lists)
        plugins.serve({RESOURCE: ids("a") | ids("b", healthy=False)})
        await until(lambda: len(kubelet.lists) == 2)

    assert kubelet.lists[1] == [("a", "Healthy"), ("b", "Unhealthy")]
    assert len(kubelet.endpoints) == 1


async def test_resources_are_added_and_removed(directory: Path) -> None:
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory) as plugins:
        await until(lambda: kubelet.lists)
        plugins.serve({"leasehold.dev/share": ids("share-0")})
        await until(lambda: plugins.unready_reason() is None)
        await until(lambda: kubelet.ended == 1)

    assert [endpoint[:15] for endpoint in kubelet.endpoints] == [
        "leasehold-vgpu-",
        "leasehold-share",
    ]


async def test_a_list_of_180_000_units_is_accepted_and_gets_a_preference(directory: Path) -> None:
    units = ids(*(unit_id(str(card), n) for card in range(8) for n in range(22_500)))
    async with (
        ScriptedKubelet(directory) as kubelet,
        plugins_in(directory, **{"gpu-memory": units}),
    ):
        await until(lambda: any(len(sent) == 180_000 for sent in kubelet.lists))
        available = list(units) * 4  # more than the 4 MiB that gRPC accepts by default
        one = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, allocation_size=3
        )
        async with _channel(kubelet, "gpu-memory") as channel:
            answer = await api_pb2_grpc.DevicePluginStub(channel).GetPreferredAllocation(
                api_pb2.PreferredAllocationRequest(container_requests=[one])
            )

    assert len(answer.container_responses[0].deviceIDs) == 3


async def test_23_equal_requests_get_byte_identical_responses(directory: Path) -> None:
    request = allocate("a")
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory):
        await until(lambda: kubelet.lists)
        async with _channel(kubelet, "vgpu-number") as channel:
            call = channel.unary_unary(
                "/v1beta1.DevicePlugin/Allocate",
                request_serializer=api_pb2.AllocateRequest.SerializeToString,
            )
            answers = {await call(request) for _ in range(5)}

    assert len(answers) == 1


async def test_a_refusal_reaches_the_kubelet_with_its_message(directory: Path) -> None:
    bad = api_pb2.ContainerAllocateRequest(devices_ids=["bad"])
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory):
        await until(lambda: kubelet.lists)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kubelet.plugin.Allocate(api_pb2.AllocateRequest(container_requests=[bad]))
        with pytest.raises(grpc.aio.AioRpcError) as stopped:
            await kubelet.plugin.PreStartContainer(
                api_pb2.PreStartContainerRequest(devices_ids=["bad"])
            )

    assert refused.value.details() == "Leasehold refuses: a reason"
    assert stopped.value.details() == "not allocated"


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_each_container_of_a_request_gets_its_response(directory: Path, count: int) -> None:
    asked = [api_pb2.ContainerAllocateRequest(devices_ids=["a"])] * count
    async with ScriptedKubelet(directory) as kubelet, plugins_in(directory):
        await until(lambda: kubelet.lists)
        answer = await kubelet.plugin.Allocate(api_pb2.AllocateRequest(container_requests=asked))

    assert [len(each.envs) for each in answer.container_responses] == [20] * count


def allocate(*ids: str) -> api_pb2.AllocateRequest:
    return api_pb2.AllocateRequest(
        container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)]
    )


async def test_a_directory_too_long_for_a_socket_is_refused_with_the_flag_to_change() -> None:
    plugins = plugins_of(Path("/" + "x" * 90))

    with pytest.raises(RequestError, match="--kubelet-dir"):
        plugins.serve({RESOURCE: ids("a")})


async def test_sockets_of_an_earlier_agent_are_removed(directory: Path) -> None:
    left = directory / "leasehold-vgpu-number-0a0b0c.sock"
    other = directory / "leasehold-vgpu-number-of-another-0a0b0c.sock"
    left.touch()
    async with ScriptedKubelet(directory) as kubelet:
        left.touch()
        other.touch()
        async with plugins_in(directory):
            await until(lambda: kubelet.lists)

            assert not left.exists()
            assert other.exists(), "it belongs to a resource with a longer name"


@asynccontextmanager
async def _channel(kubelet: ScriptedKubelet, short: str) -> AsyncIterator[grpc.aio.Channel]:
    name = next(one for one in reversed(kubelet.endpoints) if f"-{short}-" in one)
    async with grpc.aio.insecure_channel(
        f"unix:{kubelet.directory / name}",
        options=(("grpc.default_authority", "localhost"), ("grpc.max_send_message_length", -1)),
    ) as channel:
        yield channel


@pytest.mark.parametrize("steps", range(4))
async def test_a_socket_whose_start_is_cancelled_is_closed(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        path = Path(root) / "plugin.sock"
        handler: Any = FakeHandler()
        watched = asyncio.Event().set
        server = PluginServer(RESOURCE, path, handler, encode_list({}), on_watched=watched)
        start = asyncio.create_task(server.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await server.stop()

        assert str(path) not in Path("/proc/net/unix").read_text()
