"""The fleet of simulated kubelets: all nodes of a cluster, and access to their containers."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import at_path, name_of, namespace_of
from simcluster.kubelet.containers.container_commands import (
    LogReader,
    exec_command,
    is_built_in,
)
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState, PodState
from simcluster.kubelet.kubelet import ProgramsOf, SimKubelet
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms
from simcluster.kubelet.settings import NodeSettings
from simcluster.ports import ClusterStore, ExecStreams, LogOptions, Outage, Usage

SettingsOf = Callable[[str], NodeSettings]


class KubeletFleet:
    """Runs a kubelet per node in `<directory>/nodes/<name>`; is a `ContainerRuntime`."""

    def __init__(
        self,
        store: ClusterStore,
        directory: Path,
        *,
        nodes: int,
        settings: NodeSettings | SettingsOf,
        prefix: str = "node-",
        programs: ProgramsOf = SimulatedPrograms,
    ) -> None:
        chosen = settings if callable(settings) else lambda _name: settings
        names = [f"{prefix}{number}" for number in range(nodes)]
        self._store = store
        self._stack = AsyncExitStack()
        self.kubelets = {
            name: SimKubelet(
                store,
                name,
                directory / "nodes" / name,
                chosen(name),
                index=index,
                programs=programs,
            )
            for index, name in enumerate(names)
        }

    async def __aenter__(self) -> Self:
        self._remove_other_nodes()
        try:
            for kubelet in self.kubelets.values():
                await self._stack.enter_async_context(kubelet)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _remove_other_nodes(self) -> None:
        """Delete the nodes of an earlier, larger fleet, and their pods."""
        others = {name_of(node) for node in self._store.list("nodes")} - self.kubelets.keys()
        for pod in self._store.list("pods") if others else ():
            if at_path(pod, "spec.nodeName") in others:
                self._store.delete("pods", namespace_of(pod), name_of(pod), grace_s=0)
        for name in others:
            self._store.delete("nodes", None, name)

    async def exec(
        self,
        namespace: str,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        tty: bool,
        streams: ExecStreams,
    ) -> int:
        """Run a command in a running container and return its exit code."""
        kubelet, running_pod, state = self._running(namespace, pod, container)
        if kubelet.processes.programs.has(command, built_in=is_built_in(command)):
            return await kubelet.processes.run(running_pod.uid, state, command, streams, tty=tty)
        return await exec_command(state, command, tty=tty, streams=streams)

    async def attach(self, namespace: str, pod: str, container: str, streams: ExecStreams) -> None:
        """Attach a client to a container's own command until that ends."""
        kubelet, _, state = self._running(namespace, pod, container)
        if not await kubelet.processes.attach(state.container_id, streams):
            text = f"container {container} is simulated: it has no process to attach to"
            raise ApiError.bad_request(text)

    def _running(
        self, namespace: str, pod: str, container: str
    ) -> tuple[SimKubelet, PodState, ContainerState]:
        """Return a running container, its pod and their kubelet."""
        kubelet, running_pod = self._pod(namespace, pod)
        state = None if running_pod is None else running_pod.containers.get(container)
        if (
            kubelet is None
            or running_pod is None
            or state is None
            or state.phase is not ContainerPhase.RUNNING
        ):
            raise ApiError(
                500,
                "InternalError",
                f'unable to upgrade connection: container not found ("{container}")',
            )
        return kubelet, running_pod, state

    def log(
        self, namespace: str, pod: str, container: str, options: LogOptions
    ) -> AsyncIterator[bytes]:
        """Yield the container's log; with `follow`, until the container ends."""
        state = self._state(namespace, pod, container)
        if state is None or not state.container_id:
            text = f'container "{container}" in pod "{pod}" is waiting to start: ContainerCreating'
            raise ApiError.bad_request(text)
        waits = state.phase is ContainerPhase.WAITING and state.last_termination is not None
        if options.previous and not (state.restarts or waits):
            text = f'previous terminated container "{container}" in pod "{pod}" not found'
            raise ApiError.bad_request(text)
        return LogReader(state, options).chunks()

    def usage(self) -> Mapping[str, Usage]:
        """Return the use of the containers with processes, by the last part of their ID."""
        return {
            container: Usage(node, cores, memory_bytes)
            for node, kubelet in self.kubelets.items()
            for container, (cores, memory_bytes) in kubelet.processes.usage().items()
        }

    def miss_api_server(self, outage: Outage) -> None:
        """Have all kubelets do without the API server for a while."""
        for kubelet in self.kubelets.values():
            kubelet.miss_api_server(outage)

    def _state(self, namespace: str, pod: str, container: str) -> ContainerState | None:
        _, running_pod = self._pod(namespace, pod)
        return None if running_pod is None else running_pod.containers.get(container)

    def _pod(self, namespace: str, pod: str) -> tuple[SimKubelet | None, PodState | None]:
        """Return a pod's kubelet, and its state there."""
        node = at_path(self._store.read("pods", namespace, pod), "spec.nodeName")
        kubelet = self.kubelets.get(node)
        return kubelet, None if kubelet is None else kubelet.state_of(namespace, pod)
