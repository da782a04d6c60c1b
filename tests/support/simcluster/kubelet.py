"""A simulated kubelet in this process, and a device plugin that does what a test sets.

async with slots("a", "b") as (node, plugin):
    node.create(pod("one", limits={SLOT: 1}))
    await node.phase("one", "Running")
"""

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import grpc

from shared.kubelet_api.deviceplugin import api_pb2, api_pb2_grpc
from shared.kubelet_api.podresources import api_pb2 as podresources
from shared.kubelet_api.podresources import api_pb2_grpc as podresources_grpc
from simcluster.apimachinery.objects import Json
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.kubelet.containers.container_state import ContainerState
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.kubelet import ProgramsOf, SimKubelet
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms
from simcluster.kubelet.settings import NodeSettings
from tests.support.waiting import until

NODE = "node-0"
SLOT = "example.com/slot"
"""The resource of plugins."""


def pod(
    name: str,
    *,
    limits: Mapping[str, int] | None = None,
    containers: list[Json] | None = None,
    node: str | None = NODE,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Json:
    """Return a pod bound to `node`, with one container `main` unless others are given."""
    own = containers or [container("main", limits=limits)]
    bound = {"nodeName": node} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": dict(annotations or {}),
        },
        "spec": {"containers": own, **bound, **spec},
    }


def container(name: str, *, limits: Mapping[str, int] | None = None, **more: Any) -> Json:
    """Return a container with these limits."""
    amounts = {resource: str(count) for resource, count in (limits or {}).items()}
    return {"name": name, "image": "app", "resources": {"limits": amounts}, **more}


@dataclass(slots=True)
class Node:
    """One kubelet on a store, and what tests ask about it."""

    store: ObjectStore
    kubelet: SimKubelet

    @property
    def device_plugins(self) -> Path:
        return self.kubelet.files.device_plugins

    def create(self, obj: Json) -> Json:
        return self.store.create("pods", obj)

    def pod(self, name: str) -> Json:
        return self.store.read("pods", "default", name)

    def exists(self, name: str) -> bool:
        return self.store.find("pods", "default", name) is not None

    def node(self) -> Json:
        return self.store.read("nodes", None, self.kubelet.name)

    def amount(self, resource: str, part: str = "allocatable") -> str | None:
        amount: str | None = self.node()["status"][part].get(resource)
        return amount

    async def allocatable(self, resource: str, count: int) -> None:
        await until(lambda: self.amount(resource) == str(count))

    async def phase(self, name: str, phase: str) -> Json:
        def reached() -> Json | None:
            pod = self.pod(name)
            return pod if pod["status"].get("phase") == phase else None

        reached_pod: Json = await until(reached)
        return reached_pod

    async def run(self, name: str, **spec: Any) -> Json:
        """Create a pod and wait until it runs."""
        self.create(pod(name, **spec))
        return await self.phase(name, "Running")

    def container(self, name: str, container: str = "main") -> ContainerState:
        state = self.kubelet.state_of("default", name)
        assert state is not None
        return state.containers[container]

    def url(self, path: str) -> str:
        return f"https://{self.kubelet.settings.host}:{self.kubelet.port}{path}"

    async def request(
        self, path: str, *, method: str = "GET", token: str | None = None
    ) -> tuple[int, bytes]:
        """Ask the HTTPS endpoint, trusting its own certificate authority."""
        description = json.loads(self.kubelet.files.description.read_text())
        context = ssl.create_default_context(cafile=description["caPath"])
        used = Path(description["tokenPath"]).read_text() if token is None else token
        headers = {"Authorization": f"Bearer {used}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.request(method, self.url(path), headers=headers) as reply_type,
        ):
            return reply_type.status, await reply_type.read()

    async def list_pods(self) -> list[Json]:
        """Return the pods of `/pods`."""
        _, body = await self.request("/pods")
        items: list[Json] = json.loads(body)["items"]
        return items

    async def allocated_devices(self) -> dict[tuple[str, str], set[str]]:
        """Return the device IDs per pod and container, as PodResources shows them."""
        async with grpc.aio.insecure_channel(
            f"unix:{self.kubelet.files.pod_resources_socket}",
            options=(("grpc.default_authority", "localhost"),),
        ) as channel:
            stub = podresources_grpc.PodResourcesListerStub(channel)
            answer = await _within_the_rate(stub.List, podresources.ListPodResourcesRequest())
        return {
            (pod_resource.name, container.name): {
                d for devices in container.devices for d in devices.device_ids
            }
            for pod_resource in answer.pod_resources
            for container in pod_resource.containers
        }


async def _within_the_rate(call: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Call, and retry while the kubelet limits the rate of calls."""

    async def attempt() -> Any:
        try:
            return await call(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        return None

    return await until(attempt, lambda answer: answer is not None)


def new_store() -> ObjectStore:
    """Return a store with the namespaces that every cluster has."""
    store = open_store()
    for name in ("default", "kube-system", "kube-node-lease"):
        if store.find("namespaces", None, name) is None:
            store.create("namespaces", {"metadata": {"name": name}})
    return store


FAST = NodeSettings(retry_s=0.05, back_off_s=0.05)


@asynccontextmanager
async def one_kubelet(
    settings: NodeSettings = FAST,
    *,
    store: ObjectStore | None = None,
    directory: Path | None = None,
    programs: ProgramsOf = SimulatedPrograms,
) -> AsyncIterator[Node]:
    """Start one kubelet named `node-0` in a directory with a short path."""
    used = new_store() if store is None else store
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        place = Path(root) if directory is None else directory
        async with SimKubelet(used, NODE, place, settings, programs=programs) as kubelet:
            yield Node(used, kubelet)


@asynccontextmanager
async def one_fleet(
    settings: NodeSettings = FAST, *, nodes: int = 1, programs: ProgramsOf = SimulatedPrograms
) -> AsyncIterator[tuple[KubeletFleet, Node]]:
    """Start a fleet in a directory with a short path; return it with its last node."""
    store = new_store()
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        async with KubeletFleet(
            store, Path(root), nodes=nodes, settings=settings, programs=programs
        ) as fleet:
            yield fleet, Node(store, fleet.kubelets[f"node-{nodes - 1}"])


def healthy(*devices: str) -> dict[str, str]:
    """Return a list of devices that are all healthy."""
    return dict.fromkeys(devices, "Healthy")


Hook = Callable[[list[str]], Awaitable[Mapping[str, str]]]


class PluginRefusalError(Exception):
    """Raised by a hook to make the plugin refuse a call with this text."""


class ScriptedPlugin(api_pb2_grpc.DevicePluginServicer):  # type: ignore[misc]
    """A device plugin over a real socket; records its calls and replies by its hooks."""

    def __init__(
        self,
        directory: Path,
        resource: str = SLOT,
        *,
        endpoint: str = "scripted.sock",
        pre_start: bool = False,
        prefers: bool = False,
    ) -> None:
        self.directory = directory
        self.resource = resource
        self.endpoint = endpoint
        self.options = api_pb2.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=prefers
        )
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.requests: list[Any] = []
        self.on_allocate: Hook = _no_env
        self.on_preferred: Callable[[Any], Awaitable[list[str]]] = _first_ones
        self.on_pre_start: Hook = _no_env
        self.mounts: list[api_pb2.Mount] = []
        self._devices: dict[str, str] = {}
        self._streams: set[asyncio.Queue[bool]] = set()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1),))
        api_pb2_grpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / self.endpoint}")
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_streams()
        if self._server is not None:
            await self._server.stop(None)

    async def register(self, **changes: Any) -> None:
        """Register with the kubelet, as a plugin does; raises grpc.aio.AioRpcError if refused."""
        fields = {
            "version": "v1beta1",
            "endpoint": self.endpoint,
            "resource_name": self.resource,
            **changes,
        }
        async with grpc.aio.insecure_channel(
            f"unix:{self.directory / 'kubelet.sock'}",
            options=(("grpc.default_authority", "localhost"),),
        ) as channel:
            stub = api_pb2_grpc.RegistrationStub(channel)
            await stub.Register(api_pb2.RegisterRequest(**fields))

    async def serve(self, node: Node, *devices: str) -> None:
        """Register with these healthy devices, and wait until they are allocatable."""
        self.report(healthy(*devices))
        await self.register()
        await node.allocatable(self.resource, len(devices))

    def report(self, devices: Mapping[str, str]) -> None:
        """Send a complete list to every open stream, and to those that open later."""
        self._devices = dict(devices)
        for stream in self._streams:
            stream.put_nowait(True)

    def end_streams(self) -> None:
        """End every stream, as a plugin that dies does."""
        for stream in self._streams:
            stream.put_nowait(False)

    def device_ids(self, method: str) -> list[tuple[str, ...]]:
        """Return the device IDs of every call of a method."""
        return [devices for name, devices in self.calls if name == method]

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("GetDevicePluginOptions", ()))
        return self.options

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls.append(("ListAndWatch", ()))
        stream: asyncio.Queue[bool] = asyncio.Queue()
        self._streams.add(stream)
        try:
            going = True
            while going:
                yield api_pb2.ListAndWatchResponse(
                    devices=[
                        api_pb2.Device(ID=name, health=health)
                        for name, health in self._devices.items()
                    ]
                )
                going = await stream.get()
        finally:
            self._streams.discard(stream)

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        container_request = request.container_requests[0]
        self.calls.append(("GetPreferredAllocation", tuple(container_request.available_deviceIDs)))
        self.requests.append(request)
        answer = api_pb2.ContainerPreferredAllocationResponse(
            deviceIDs=await self.on_preferred(container_request)
        )
        return api_pb2.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        devices = list(request.container_requests[0].devices_ids)
        self.calls.append(("Allocate", tuple(devices)))
        try:
            env = await self.on_allocate(devices)
        except PluginRefusalError as fault:
            await context.abort(grpc.StatusCode.UNKNOWN, str(fault))
        response = api_pb2.ContainerAllocateResponse(envs=env, mounts=self.mounts)
        return api_pb2.AllocateResponse(container_responses=[response])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("PreStartContainer", tuple(request.devices_ids)))
        try:
            await self.on_pre_start(list(request.devices_ids))
        except PluginRefusalError as fault:
            await context.abort(grpc.StatusCode.UNKNOWN, str(fault))
        return api_pb2.PreStartContainerResponse()


async def _no_env(_devices: list[str]) -> Mapping[str, str]:
    return {}


async def _first_ones(request: Any) -> list[str]:
    return list(request.available_deviceIDs)[: request.allocation_size]


@asynccontextmanager
async def slots(
    *devices: str, settings: NodeSettings = FAST, **options: Any
) -> AsyncIterator[tuple[Node, ScriptedPlugin]]:
    """Start a kubelet and a plugin of these devices; `options` are the plugin's."""
    async with (
        one_kubelet(settings) as node,
        ScriptedPlugin(node.device_plugins, **options) as plugin,
    ):
        if devices:
            await plugin.serve(node, *devices)
        yield node, plugin


def answering(variables: Mapping[str, str]) -> Hook:
    """Return a hook that gives a container these variables."""

    async def answer(_devices: list[str]) -> Mapping[str, str]:
        return variables

    return answer


def refusing(text: str) -> Hook:
    """Return a hook that refuses each call."""

    async def refuse(_devices: list[str]) -> Mapping[str, str]:
        raise PluginRefusalError(text)

    return refuse
