"""One simulated kubelet: its node, pods and sockets; it can restart as a real one does."""

import asyncio
import itertools
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import msgspec

from shared.model.quantity import parse_resources
from simcluster.apimachinery.objects import Json
from simcluster.credentials import api_server_certificates, load_secret
from simcluster.kubelet.api_link import ApiLink
from simcluster.kubelet.claims.claim_manager import ClaimManager
from simcluster.kubelet.claims.drivers import ClaimDrivers
from simcluster.kubelet.containers.container_state import PodState
from simcluster.kubelet.devices.checkpoint import FILE_NAME
from simcluster.kubelet.devices.device_manager import DeviceManager
from simcluster.kubelet.devices.plugin_client import PluginConnection, checked_socket
from simcluster.kubelet.devices.pod_resources import PodResourcesService, serve_pod_resources
from simcluster.kubelet.devices.registration import SOCKET_NAME, serve_registration
from simcluster.kubelet.endpoint import KubeletEndpoint, serve_https
from simcluster.kubelet.node import (
    LEASE_NAMESPACE,
    lease_object,
    node_object,
    node_status,
    same_but_heartbeat,
    without_extended,
)
from simcluster.kubelet.pods.pod_manager import PodManager
from simcluster.kubelet.pods.predicates import KubeletNodeFacts
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms
from simcluster.kubelet.programs.processes import NodeProcesses, Programs
from simcluster.kubelet.settings import NodeFiles, NodeSettings, replace_file
from simcluster.ports import ClusterStore, Outage

COALESCE_S = 0.05
FULL_STATUS_S = 300.0


ProgramsOf = Callable[[NodeFiles], Programs]


class SimKubelet:
    """Runs from `__aenter__` to `__aexit__`; its containers survive it, without processes."""

    def __init__(
        self,
        store: ClusterStore,
        name: str,
        directory: Path,
        settings: NodeSettings,
        *,
        index: int = 0,
        programs: ProgramsOf = SimulatedPrograms,
    ) -> None:
        self.name = name
        self.files = NodeFiles(directory.absolute())
        self.settings = settings
        self.processes = NodeProcesses(self.files, programs(self.files))
        self.port = 0
        self.token = ""
        self.api = ApiLink()
        self._store = store
        self._index = index
        self._stack = AsyncExitStack()
        self._run_task: asyncio.Task[None] | None = None
        self._pods: PodManager | None = None
        self._node_written_at = -FULL_STATUS_S
        self._restart_lock = asyncio.Lock()
        self._node_changed = asyncio.Event()
        checked_socket(self.files.device_plugins / SOCKET_NAME)
        checked_socket(self.files.pod_resources_socket)

    async def __aenter__(self) -> Self:
        self.files.root.mkdir(parents=True, exist_ok=True)
        await self.processes.clear()
        self.token = load_secret(self.files.token, lambda: secrets.token_urlsafe(32))
        certificates = api_server_certificates(self.files.tls)
        self.endpoint = endpoint = KubeletEndpoint(
            self.token,
            self._list_pods,
            self.restart,
            topology_policy=self.settings.topology_policy,
            api=self.api,
        )
        runner, self.port = await serve_https(
            endpoint.application(), certificates, self.settings.host, self._earlier_port()
        )
        self._stack.push_async_callback(runner.cleanup)
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        self._write_description(certificates.ca)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()
        await self.processes.end_all()
        await self._stack.__aexit__(kind, error, trace)

    # Starts and restarts

    async def restart(self) -> None:
        """Restart the kubelet: plugins must register again, containers keep running."""
        async with self._restart_lock:
            await self._stop()
            await self._start()

    def miss_api_server(self, outage: Outage) -> None:
        """Do without the API server for a while."""
        self._group.create_task(self.api.miss(outage))

    async def reboot(self) -> None:
        """Reboot the node: no container survives, and each pod is admitted again."""
        async with self._restart_lock:
            await self._stop()
            await self.processes.end_all()
            await asyncio.to_thread(shutil.rmtree, self.files.pods, ignore_errors=True)
            await self._start()

    async def _start(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run_task = self._group.create_task(self._run(ready))
        await asyncio.wait([ready, self._run_task], return_when=asyncio.FIRST_COMPLETED)
        if self._run_task.done():
            self._run_task.result()

    async def _stop(self) -> None:
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.wait([self._run_task])

    async def _run(self, ready: asyncio.Future[None]) -> None:
        directory = self.files.device_plugins
        no_checkpoint = not (directory / FILE_NAME).exists()
        devices = DeviceManager(
            directory,
            grace_s=self.settings.plugin_grace_s,
            stale_stream_race=self.settings.stale_stream_race,
            aligns_numa=self.settings.topology_policy != "none",
            changed=self._node_changed.set,
        )
        drivers = ClaimDrivers(self.name, self.files.plugins_registry, self._store)
        self._register_node(no_checkpoint=no_checkpoint)
        self._write_node(devices)
        claims = ClaimManager(self.files.root, self.files.cdi, drivers=drivers, store=self._store)
        pods = self._pods = PodManager(
            self.name,
            self.settings,
            self._store,
            devices=devices,
            claims=claims,
            processes=self.processes,
            files=self.files,
            api=self.api,
            node_facts=lambda: self._node_facts(devices),
            free_pod_ip=self._free_pod_ip,
        )
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            stack.push_async_callback(devices.close)

            async def accept(connection: PluginConnection) -> None:
                await devices.accept(connection, group)

            service = PodResourcesService(lambda: devices.state, pods.active, claims.resources)
            stack.push_async_callback(
                _stop_server,
                await serve_registration(directory, accept, dial_s=self.settings.plugin_dial_s),
            )
            socket = self.files.pod_resources_socket
            stack.push_async_callback(_stop_server, await serve_pod_resources(socket, service))
            group.create_task(drivers.run())
            group.create_task(pods.run())
            group.create_task(self._report_node(devices))
            group.create_task(self._renew_lease())
            ready.set_result(None)

    # The node

    def _register_node(self, *, no_checkpoint: bool) -> None:
        record = self._store.find("nodes", None, self.name)
        if record is None:
            self._store.create("nodes", node_object(self.name, self.settings))
        elif no_checkpoint:
            status = without_extended(record.obj.get("status") or {})
            self._store.patch(
                "nodes", None, self.name, lambda obj: obj | {"status": status}, subresource="status"
            )

    async def _report_node(self, devices: DeviceManager) -> None:
        while True:
            wait_s = devices.expire()
            heartbeat_s = self.settings.heartbeat_s
            try:
                async with asyncio.timeout(
                    heartbeat_s if wait_s is None else min(wait_s, heartbeat_s)
                ):
                    await self._node_changed.wait()
            except TimeoutError:
                devices.expire()
            else:
                await asyncio.sleep(COALESCE_S)
            await self.api.there.wait()
            self._node_changed.clear()
            self._write_node(devices)

    def _write_node(self, devices: DeviceManager) -> None:
        """Write the node's status if it has changed or is more than 300 s old."""
        record = self._store.find("nodes", None, self.name)
        if record is None:
            return
        previous = record.obj.get("status") or {}
        counts = devices.counts()
        status = node_status(
            self.name,
            self.settings,
            port=self.port,
            previous=previous,
            counts=counts,
            now=time.time(),
        )
        is_recent = time.monotonic() - self._node_written_at < FULL_STATUS_S
        if is_recent and same_but_heartbeat(status, previous):
            return
        self._node_written_at = time.monotonic()
        self._store.patch(
            "nodes", None, self.name, lambda obj: obj | {"status": status}, subresource="status"
        )

    async def _renew_lease(self) -> None:
        if self._store.find("namespaces", None, LEASE_NAMESPACE) is None:
            self._store.create("namespaces", {"metadata": {"name": LEASE_NAMESPACE}})
        while True:
            await self.api.there.wait()
            wanted = lease_object(self.name, datetime.now(UTC).isoformat(timespec="microseconds"))
            wanted["spec"]["renewTime"] = wanted["spec"]["renewTime"].replace("+00:00", "Z")
            if self._store.find("leases", LEASE_NAMESPACE, self.name) is None:
                self._store.create("leases", wanted)
            else:
                patch = {"spec": wanted["spec"]}
                self._store.patch("leases", LEASE_NAMESPACE, self.name, patch)
            await asyncio.sleep(self.settings.heartbeat_s)

    def _node_facts(self, devices: DeviceManager) -> KubeletNodeFacts:
        record = self._store.find("nodes", None, self.name)
        node: Json = {} if record is None else record.obj
        return KubeletNodeFacts(
            name=self.name,
            labels=(node.get("metadata") or {}).get("labels") or {},
            allocatable=parse_resources((node.get("status") or {}).get("allocatable") or {}),
            managed=frozenset(devices.state.healthy),
        )

    def _free_pod_ip(self, taken: set[str]) -> str:
        addresses = (f"10.244.{self._index}.{number}" for number in itertools.count(2))
        return next(address for address in addresses if address not in taken)

    # Reads

    def _list_pods(self) -> list[Json]:
        return [] if self._pods is None else self._pods.list_pods()

    def state_of(self, namespace: str, name: str) -> PodState | None:
        """Return the state of an admitted pod; None for other pods."""
        return None if self._pods is None else self._pods.state_of(namespace, name)

    def _earlier_port(self) -> int:
        if not self.files.description.exists():
            return 0
        return int(msgspec.json.decode(self.files.description.read_bytes())["port"])

    def _write_description(self, ca: Path) -> None:
        description = {
            "name": self.name,
            "address": self.settings.host,
            "port": self.port,
            "tokenPath": str(self.files.token),
            "caPath": str(ca),
            "devicePluginDir": str(self.files.device_plugins),
            "podResourcesSocket": str(self.files.pod_resources_socket),
        }
        replace_file(self.files.description, msgspec.json.encode(description))


async def _stop_server(server: grpc.aio.Server) -> None:
    await server.stop(None)
