"""The worker of one admitted pod: starts, restarts and stops its containers."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from typing import Protocol

from shared.kubelet_api.deviceplugin import api_pb2
from shared.model.clock import wait_for_event
from shared.model.errors import UnavailableError
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.claims.claim_manager import ClaimError
from simcluster.kubelet.containers.bundles import Bundles
from simcluster.kubelet.containers.container_commands import run_command
from simcluster.kubelet.containers.container_env import (
    MissingSourceError,
    environment,
    expand_references,
    mount_points,
)
from simcluster.kubelet.containers.container_spec import (
    ContainerRole,
    ContainerSpec,
    PodSpec,
    parse_behaviour,
    prints,
    stop_after_s,
)
from simcluster.kubelet.containers.container_state import (
    ContainerLog,
    ContainerPhase,
    ContainerState,
    PodState,
)
from simcluster.kubelet.containers.container_status import PAST_DEADLINE, phase
from simcluster.kubelet.containers.volumes import UnmountedError
from simcluster.kubelet.devices.kubelet_devices import AllocationError
from simcluster.kubelet.programs.cgroups import Cgroups
from simcluster.kubelet.programs.gpu_numbers import GpuNumbers
from simcluster.kubelet.programs.processes import KILLED, NodeProcesses, StartError
from simcluster.kubelet.settings import NodeSettings

MAX_BACK_OFF_S = 300.0
FORGIVEN_S = 600.0
"""After a run of this length, the next restart is immediate again."""
FINAL = frozenset({"Succeeded", "Failed"})


class WorkerHost(Protocol):
    """The parts of the kubelet that a worker uses."""

    settings: NodeSettings
    processes: NodeProcesses
    bundles: Bundles
    cgroups: Cgroups | None
    """None if the node's settings make none."""
    gpu_numbers: GpuNumbers

    async def before_start(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Call the device plugins; AllocationError if one refuses, UnmountedError for volumes."""
        ...

    def allocate_responses(
        self, pod: PodSpec, container: ContainerSpec
    ) -> list[api_pb2.ContainerAllocateResponse]:
        """Return the plugins' stored Allocate responses."""
        ...

    def runtime_edits(
        self, pod: PodSpec, container: ContainerSpec
    ) -> list[api_pb2.ContainerAllocateResponse]:
        """Return what the container runtime adds for CDI devices."""
        ...

    def gpus_of(
        self,
        pod: PodSpec,
        container: ContainerSpec,
        responses: Iterable[api_pb2.ContainerAllocateResponse],
        env: Mapping[str, str],
    ) -> list[str]:
        """Return the GPUs that the container runtime gives to a container."""
        ...

    def find_source(self, pod: PodSpec, resource: str, name: str) -> Json | None:
        """Return a ConfigMap or Secret in the pod's namespace."""
        ...

    def make_volumes(self, pod: PodSpec) -> dict[str, str]:
        """Return the path of each of the pod's volumes that has one."""
        ...

    def changed(self, worker: "PodWorker", *, started: bool) -> None:
        """Report a change of the pod's state, by the start of a container or otherwise."""
        ...

    def event(self, pod: PodSpec, kind: str, reason: str, message: str, container: str) -> None:
        """Write an event about the pod."""
        ...


class PodWorker:
    """Runs from admission until the pod is deleted; a restart of the kubelet cancels it.

    A worker with an earlier worker's state continues it: running containers keep running.
    """

    def __init__(self, host: WorkerHost, pod: PodSpec, state: PodState) -> None:
        self.pod = pod
        self.state = state
        self._host = host
        self._stop_requested = asyncio.Event()
        self._deleted = asyncio.Event()
        self._annotated = asyncio.Event()
        self._updated = asyncio.Event()
        self._starting = asyncio.Lock()
        self._sidecar_runs = {
            spec.name: asyncio.Event() for spec in pod.of_role(ContainerRole.SIDECAR)
        }
        self._grace_s = float(pod.grace_s)
        self.is_final = phase(pod, state) in FINAL
        """Whether the pod is in its final phase, so that its devices are free."""

    def update(self, pod: PodSpec) -> None:
        """Take over a change of the pod; one of its annotations ends a wait for its claims."""
        if pod.annotations != self.pod.annotations:
            self._annotated.set()
        self.pod = pod
        self._updated.set()

    def stop(self, grace_s: float) -> None:
        """Stop the containers within the grace period."""
        self._grace_s = grace_s
        self._stop_requested.set()

    def abort(self) -> None:
        """Stop at once: the pod object is deleted."""
        self._deleted.set()
        self.stop(0)

    async def run(self) -> None:
        """Run until `stop`, then return when all containers have ended."""
        async with asyncio.TaskGroup() as group:
            containers = group.create_task(self._run_containers())
            deadline = group.create_task(self._end_at_deadline(containers))
            await self._stop_requested.wait()
            containers.cancel()
            deadline.cancel()
        await self._stop_containers()

    async def _end_at_deadline(self, containers: asyncio.Task[None]) -> None:
        """End the pod once it was active for as long as its spec allows by then."""
        while (left_s := self._left_s()) is None or left_s > 0:
            self._updated.clear()
            await wait_for_event(self._updated, left_s)
        containers.cancel()
        await asyncio.wait([containers])
        if not self.is_final:
            self.state.past_deadline = True
            reason = PAST_DEADLINE["reason"]
            message = PAST_DEADLINE["message"]
            self._host.event(self.pod, "Normal", reason, message, "")
            await self._stop_containers()

    def _left_s(self) -> float | None:
        limit_s = self.pod.obj["spec"].get("activeDeadlineSeconds")
        return None if limit_s is None else self.state.started_at + limit_s - time.time()

    async def _run_containers(self) -> None:
        if self.state.past_deadline:
            return
        async with asyncio.TaskGroup() as group:
            sidecars: list[asyncio.Task[int]] = []
            if await self._initialize(group, sidecars):
                apps = [
                    group.create_task(self._supervise(s))
                    for s in self.pod.of_role(ContainerRole.APP)
                ]
                await asyncio.wait(apps)
            for task in sidecars:
                task.cancel()
        for spec in self.pod.of_role(ContainerRole.SIDECAR):
            await self._stop_container(spec)

    async def _initialize(
        self, group: asyncio.TaskGroup, sidecars: list[asyncio.Task[int]]
    ) -> bool:
        """Run init containers in order and start sidecars in between; False if one fails."""
        for spec in self.pod.of_role(ContainerRole.INIT, ContainerRole.SIDECAR):
            if spec.role is ContainerRole.SIDECAR:
                sidecars.append(group.create_task(self._supervise(spec)))
                await self._sidecar_runs[spec.name].wait()
            elif await self._supervise(spec) != 0:
                return False
        return True

    async def _supervise(self, spec: ContainerSpec) -> int:
        """Run one container and its restarts; return its final exit code."""
        state = self.state.containers[spec.name]
        ends = 0
        while True:
            if state.phase is ContainerPhase.TERMINATED and state.termination is not None:
                if not self._restarts(spec, state.termination.exit_code):
                    return state.termination.exit_code
                ran_s = state.termination.finished_at - state.termination.started_at
                ends = 1 if ran_s > FORGIVEN_S else ends + 1
                await self._back_off(spec, state, ends)
            if state.phase is ContainerPhase.WAITING:
                await self._start(spec, state)
            if spec.role is ContainerRole.SIDECAR:
                self._sidecar_runs[spec.name].set()
            if state.phase is ContainerPhase.RUNNING:
                self._set_terminated(spec, await self._exit_code(spec, state))

    async def _exit_code(self, spec: ContainerSpec, state: ContainerState) -> int:
        """Wait until a container ends by itself."""
        if state.is_process:
            return await self._host.processes.wait(state.container_id)
        await _wait_until(state.ends_at)
        return parse_behaviour(spec, self.pod.annotations).exit_code

    def _restarts(self, spec: ContainerSpec, exit_code: int) -> bool:
        if spec.role is ContainerRole.SIDECAR:
            return True
        if spec.role is ContainerRole.INIT:
            return exit_code != 0 and self.pod.restart_policy != "Never"
        if self.pod.restart_policy == "OnFailure":
            return exit_code != 0
        return self.pod.restart_policy == "Always"

    async def _back_off(self, spec: ContainerSpec, state: ContainerState, ends: int) -> None:
        """Wait before a restart; the first restart is immediate, as in a real kubelet."""
        if ends > 1:
            pause_s = min(self._host.settings.back_off_s * 2.0 ** (ends - 2), MAX_BACK_OFF_S)
            text = f"back-off {pause_s:g}s restarting failed container={spec.name}"
            state.set_waiting("CrashLoopBackOff", text)
            self._host.event(self.pod, "Warning", "BackOff", text, spec.name)
            self._changed()
            await asyncio.sleep(pause_s)
        state.restarts += 1
        state.phase = ContainerPhase.WAITING

    async def _start(self, spec: ContainerSpec, state: ContainerState) -> None:
        """Start a container when all plugins agree; retry until they do."""
        while True:
            self._annotated.clear()
            try:
                async with self._starting:
                    await self._host.before_start(self.pod, spec)
                    await self._create(spec, state)
            except ClaimError as error:
                text = str(error)
                self._host.event(self.pod, "Warning", "FailedPrepareDynamicResources", text, "")
                await wait_for_event(self._annotated, self._host.settings.claim_retry_s)
            except UnmountedError as error:
                self._host.event(self.pod, "Warning", "FailedMount", str(error), "")
                await asyncio.sleep(self._host.settings.retry_s)
            except (AllocationError, MissingSourceError, UnavailableError) as error:
                state.set_waiting("CreateContainerConfigError", str(error))
                self._host.event(self.pod, "Warning", "Failed", f"Error: {error}", spec.name)
                self._changed()
                await asyncio.sleep(self._host.settings.retry_s)
            else:
                return

    def _changed(self, *, started: bool = False) -> None:
        self.is_final = phase(self.pod, self.state) in FINAL
        self._host.changed(self, started=started)

    async def _create(self, spec: ContainerSpec, state: ContainerState) -> None:
        """Create a container and start its command, which is a process or simulated."""
        responses = self._host.allocate_responses(self.pod, spec)
        edits = self._host.runtime_edits(self.pod, spec)
        state.env = environment(
            self.pod,
            spec,
            responses,
            edits,
            find_source=partial(self._host.find_source, self.pod),
            pod_ip=self.state.pod_ip,
            host_ip=self._host.settings.host,
        )
        responses += edits
        volumes = self._host.make_volumes(self.pod)
        state.mounts = mount_points(spec, volumes, responses)
        state.directory = spec.directory
        state.device_nodes = [
            node.container_path for answer in responses for node in answer.devices
        ]
        state.gpus = self._host.gpus_of(self.pod, spec, responses, state.env)
        container_id = f"containerd://{secrets.token_hex(32)}"
        numbers = await asyncio.to_thread(self._host.gpu_numbers.of, state.gpus)
        cgroups = self._host.cgroups
        if cgroups is not None:
            state.env |= cgroups.environment(self.pod.uid, container_id)
        self._host.bundles.add(
            self.pod.uid, container_id, numbers, env=state.env, privileged=spec.privileged
        )
        state.previous_log, state.log = state.log, ContainerLog()
        self._event(spec, "Pulled", self._host.processes.programs.pulled(spec.image))
        self._event(spec, "Created", f"Container created: {spec.name}")
        try:
            if cgroups is not None:
                names = [device.name for answer in responses for device in answer.cdi_devices]
                await cgroups.create(self.pod.uid, container_id, names)
            run_for_s = await self._run(spec, state, container_id)
        except StartError as error:
            text = f"failed to create containerd task: {error}"
            self._host.event(self.pod, "Warning", "Failed", f"Error: {text}", spec.name)
            state.set_unstartable(container_id, time.time(), text)
            self._remove(container_id)
            self._changed()
            return
        except BaseException:
            self._remove(container_id)
            raise
        now = time.time()
        state.set_running(container_id, now, None if run_for_s is None else now + run_for_s)
        self._event(spec, "Started", f"Container started: {spec.name}")
        self._changed(started=True)

    async def _run(
        self, spec: ContainerSpec, state: ContainerState, container_id: str
    ) -> float | None:
        """Start the command; return how long it is simulated, or None until it ends or stops."""
        behaviour = parse_behaviour(spec, self.pod.annotations)
        command = [expand_references(word, state.env) for word in spec.command]
        processes = self._host.processes
        state.is_process = processes.programs.has(command, built_in=behaviour.known)
        if state.is_process:
            streams = {"stdin": spec.stdin, "tty": spec.tty}
            await processes.start(self.pod.uid, container_id, state, command, **streams)
            return None
        if prints(spec):
            for line in run_command(state, command).out.splitlines():
                state.log.add(time.time(), line)
        elif not behaviour.known:
            state.log.add(time.time(), processes.programs.not_run(spec.image, command))
        return behaviour.run_for_s

    def _event(self, spec: ContainerSpec, reason: str, text: str) -> None:
        self._host.event(self.pod, "Normal", reason, text, spec.name)

    def _set_terminated(self, spec: ContainerSpec, exit_code: int) -> None:
        state = self.state.containers[spec.name]
        if state.phase is ContainerPhase.RUNNING:
            state.set_terminated(exit_code, time.time())
            self._remove(state.container_id)
            self._changed()

    def _remove(self, container_id: str) -> None:
        self._host.bundles.remove(container_id)
        if self._host.cgroups is not None:
            self._host.cgroups.remove(self.pod.uid, container_id)

    async def _stop_containers(self) -> None:
        running = [
            spec
            for spec in self.pod.containers
            if self.state.containers[spec.name].phase is ContainerPhase.RUNNING
        ]
        for spec in running:
            self._event(spec, "Killing", f"Stopping container {spec.name}")
        async with asyncio.TaskGroup() as group:
            for spec in running:
                group.create_task(self._stop_container(spec))
        self.state.stopping = True
        self._changed()

    async def _stop_container(self, spec: ContainerSpec) -> None:
        """Stop one container within the grace period."""
        state = self.state.containers[spec.name]
        if state.phase is not ContainerPhase.RUNNING:
            return
        if state.is_process:
            stop = self._host.processes.stop(state.container_id, self._grace_s, self._deleted)
            self._set_terminated(spec, await stop)
            return
        wanted_s = stop_after_s(self.pod.annotations)
        killed = await _set_within(self._deleted, min(wanted_s, self._grace_s))
        self._set_terminated(spec, KILLED if killed or wanted_s > self._grace_s else 0)


async def _wait_until(at: float | None) -> None:
    """Wait until an instant; forever if None."""
    await asyncio.sleep(max(at - time.time(), 0)) if at is not None else await _wait_forever()


def _wait_forever() -> Awaitable[object]:
    return asyncio.get_running_loop().create_future()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event is set within a time."""
    if seconds <= 0:
        return event.is_set()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
