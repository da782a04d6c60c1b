"""The pod manager: watches the pods of its node and admits them one by one."""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.events import EventRecorder
from simcluster.kubelet.api_link import ApiLink
from simcluster.kubelet.claims.claim_manager import ClaimManager
from simcluster.kubelet.containers.bundles import Bundles
from simcluster.kubelet.containers.container_spec import (
    ContainerSpec,
    PodSpec,
    annotation_error,
    parse_pod,
)
from simcluster.kubelet.containers.container_state import (
    ContainerPhase,
    ContainerState,
    PodState,
)
from simcluster.kubelet.containers.container_status import (
    pod_status,
    rejected_status,
    with_foreign_conditions,
)
from simcluster.kubelet.containers.runtime_devices import (
    ALL,
    OPEN_RUNTIME,
    given_gpus,
    named_gpus,
)
from simcluster.kubelet.containers.volumes import check_claims, make_volumes
from simcluster.kubelet.devices.device_manager import DeviceManager
from simcluster.kubelet.devices.kubelet_devices import AllocationError
from simcluster.kubelet.pods.pod_worker import FINAL, PodWorker
from simcluster.kubelet.pods.predicates import KubeletNodeFacts, PodRejection, check_predicates
from simcluster.kubelet.pods.resizes import allocate_first, needs_resize, resize
from simcluster.kubelet.programs.cgroups import Cgroups
from simcluster.kubelet.programs.gpu_numbers import GpuNumbers
from simcluster.kubelet.programs.processes import NodeProcesses
from simcluster.kubelet.settings import NodeFiles, NodeSettings, replace_file
from simcluster.ports import ClusterEvent, ClusterStore, ObjectWatch

COALESCE_S = 0.02


class StatusManager:
    """Stores the latest status of each pod and writes those that have changed.

    `save` runs before each write, so the saved state of a pod is never older than its written
    status.
    """

    def __init__(self, store: ClusterStore, save: Callable[[str], None], api: ApiLink) -> None:
        self._store = store
        self._api = api
        self._save = save
        self._statuses: dict[str, Json] = {}
        self._previous: dict[str, tuple[Json, float]] = {}
        self._dirty: dict[str, PodSpec] = {}
        self._wake = asyncio.Event()

    def get(self, uid: str) -> Json | None:
        """Return a pod's latest status."""
        return self._statuses.get(uid)

    def get_delayed(self, uid: str, lag_s: float) -> Json | None:
        """Return the status that `/pods` shows: the previous one for the first `lag_s` seconds."""
        before, at = self._previous.get(uid, ({}, 0.0))
        return before if time.monotonic() - at < lag_s else self._statuses.get(uid)

    def set(self, pod: PodSpec, status: Json) -> None:
        """Set a new status; it is written soon."""
        before = self._statuses.get(pod.uid) or pod.obj.get("status") or {}
        self._previous[pod.uid] = (before, time.monotonic())
        self._statuses[pod.uid] = status
        self._dirty[pod.uid] = pod
        self._wake.set()

    def forget(self, uid: str) -> None:
        """Drop a deleted pod."""
        self._statuses.pop(uid, None)
        self._previous.pop(uid, None)
        self._dirty.pop(uid, None)

    async def run(self) -> None:
        """Write changes until cancelled, and once more at the end."""
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(COALESCE_S)
                await self._api.there.wait()
                self.flush()
        finally:
            self.flush()

    def flush(self) -> None:
        """Write all changes now, or as soon as the API server is back."""
        if not self._api.there.is_set():
            return
        dirty, self._dirty = self._dirty, {}
        self._wake.clear()
        for uid, pod in dirty.items():
            self._save(uid)
            self._write(pod, self._statuses[uid])

    def _write(self, pod: PodSpec, status: Json) -> None:
        record = self._store.find("pods", pod.namespace, pod.name)
        if record is None or record.obj["metadata"]["uid"] != pod.uid:
            return

        def with_new_status(obj: Json) -> Json:
            return obj | {"status": with_foreign_conditions(status, obj.get("status") or {})}

        try:
            self._store.patch(
                "pods", pod.namespace, pod.name, with_new_status, subresource="status"
            )
        except ApiError as error:
            if error.code not in {404, 409}:
                raise


_BEING_INITIALIZED = "PodInitializing"
_BEING_CREATED = "ContainerCreating"


class PodStateFiles:
    """Persists the state of admitted pods, one file per pod."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> Iterator[PodState]:
        """Load the states of an earlier process."""
        for path in sorted(self._directory.glob("*.json")):
            yield msgspec.json.decode(path.read_bytes(), type=PodState)

    def save(self, state: PodState) -> None:
        """Replace a pod's file atomically."""
        replace_file(self._directory / f"{state.uid}.json", msgspec.json.encode(state))

    def remove(self, uid: str) -> None:
        """Remove a pod's file."""
        (self._directory / f"{uid}.json").unlink(missing_ok=True)


class PodManager:
    """The pods of one kubelet, from one restart to the next.

    `pods` is what `/pods` serves. A pod enters it just before its admission, never earlier: during
    a device plugin's Allocate, pods that wait for admission are not visible. After an outage of the
    API server, new pods are admitted before the statuses of the others are read again.
    """

    def __init__(
        self,
        node: str,
        settings: NodeSettings,
        store: ClusterStore,
        *,
        devices: DeviceManager,
        claims: ClaimManager,
        processes: NodeProcesses,
        files: NodeFiles,
        api: ApiLink,
        node_facts: Callable[[], KubeletNodeFacts],
        free_pod_ip: Callable[[set[str]], str],
    ) -> None:
        self.settings = settings
        self.processes = processes
        self.pods: dict[str, PodSpec] = {}
        self.workers: dict[str, PodWorker] = {}
        self.statuses = StatusManager(store, self._save, api)
        self._api = api
        api.on_lost = self._keep_statuses
        self._node = node
        self._store = store
        self._devices = devices
        self._claims = claims
        self._files = PodStateFiles(files.pods)
        self._volumes = files.volumes
        self._node_facts = node_facts
        self._free_pod_ip = free_pod_ip
        self._events = EventRecorder(store, host=node)
        self._waiting: dict[str, PodSpec] = {}
        self._admitting: str | None = None
        self._unsaved: set[str] = set()
        self._unresized: set[str] = set()
        """Pods whose spec has changed, and may have other resources."""
        self._all_admitted = False
        """Whether all pods of the first list have been admitted or rejected."""
        self._old_statuses: dict[str, Json] = {}
        """What `/pods` shows since the API server is away."""
        self._restored = {state.uid: state for state in self._files.load()}
        self.cgroups = Cgroups(files) if self.settings.cgroups else None
        self.bundles = Bundles(files.bundles)
        self.bundles.retain(
            [
                container.container_id
                for state in self._restored.values()
                for container in state.containers.values()
                if container.phase is ContainerPhase.RUNNING
            ]
        )
        self.gpu_numbers = GpuNumbers(files.gpu_state)

    async def run(self) -> None:
        """Watch the pods of the node until cancelled."""
        await asyncio.sleep(self.settings.admits_after_s)
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self.statuses.run())
            group.create_task(self._release_deleted())
            while True:
                await self._api.watched.wait()
                watch = self._store.watch("pods", fields=f"spec.nodeName={self._node}")
                self._drop_deleted()
                try:
                    while self._api.watched.is_set() or self._waiting:
                        if self._api.watched.is_set():
                            for event in watch.poll():
                                self._handle_event(event, group)
                        if self._waiting:
                            await self._admit_next(group)
                        else:
                            self._all_admitted = True
                            self._old_statuses.clear()
                            await self._wait(watch)
                except ApiError as error:
                    if error.code != 410:
                        raise

    async def _wait(self, watch: ObjectWatch) -> None:
        """Wait for an event, or for the end of the watch."""
        waiting = [
            asyncio.create_task(awaited) for awaited in (watch.wait(), self._api.lost.wait())
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        for task in waiting:
            if task.done() and not task.cancelled():
                task.result()

    def _keep_statuses(self) -> None:
        """Show the statuses of this moment until the pods have been listed again."""
        self._old_statuses = {
            uid: self._served_pod(pod).get("status") or {} for uid, pod in self.pods.items()
        }

    def _drop_deleted(self) -> None:
        """Stop the pods that were deleted while there was no watch."""
        fields = f"spec.nodeName={self._node}"
        present = {obj["metadata"]["uid"] for obj in self._store.list("pods", fields=fields)}
        for uid in (self.pods.keys() | self._waiting.keys()) - present:
            self._handle_deleted(uid)
        for uid in self._restored.keys() - present:
            del self._restored[uid]
            self._files.remove(uid)

    def _handle_event(self, event: ClusterEvent, group: asyncio.TaskGroup) -> None:
        uid = event.object["metadata"]["uid"]
        if event.type == "DELETED":
            self._handle_deleted(uid)
            self._resize()
            return
        pod = parse_pod(event.object)
        final = (pod.obj.get("status") or {}).get("phase") in FINAL
        if uid in self.pods or uid in self._restored or final:
            self.pods[uid] = pod
        else:
            self._waiting[uid] = pod
        if uid in self._restored:
            self._start_worker(PodWorker(self, pod, self._restored.pop(uid)), group)
        elif uid in self.workers:
            self.workers[uid].update(pod)
            self._unresized.add(uid)
        if "deletionTimestamp" in pod.obj["metadata"]:
            self._stop(pod)
        self._resize()

    def _resize(self) -> None:
        """Give changed pods their resources, as far as the node has them now."""
        for uid in tuple(self._unresized):
            worker = self.workers.get(uid)
            if worker is None or worker.is_final or not needs_resize(worker.pod, worker.state):
                self._unresized.discard(uid)
                continue
            before = worker.state.waiting_resize
            others = [pod for pod in self.active() if pod.uid != uid]
            resize(worker.pod, worker.state, others, self._node_facts())
            if worker.state.waiting_resize is None or worker.state.waiting_resize != before:
                self.changed(worker, started=False)

    def _stop(self, pod: PodSpec) -> None:
        grace_s = float(pod.obj["metadata"].get("deletionGracePeriodSeconds") or 0)
        worker = self.workers.get(pod.uid)
        if worker is not None:
            worker.stop(grace_s)
        elif pod.uid != self._admitting:
            self._waiting.pop(pod.uid, None)
            self._remove(pod)

    def _handle_deleted(self, uid: str) -> None:
        self._waiting.pop(uid, None)
        self.pods.pop(uid, None)
        self.statuses.forget(uid)
        self._files.remove(uid)
        worker = self.workers.get(uid)
        if worker is not None:
            worker.abort()

    # Admission

    def active(self) -> Iterator[PodSpec]:
        """Iterate over the pods that may hold devices: admitted and not final, or in admission."""
        for uid, pod in self.pods.items():
            worker = self.workers.get(uid)
            if uid == self._admitting or (worker is not None and not worker.is_final):
                yield pod

    async def _admit_next(self, group: asyncio.TaskGroup) -> None:
        pod = min(self._waiting.values(), key=lambda waiting_pod: waiting_pod.created_at)
        del self._waiting[pod.uid]
        others = list(self.active())
        self.pods[pod.uid] = pod
        self._admitting = pod.uid
        try:
            rejection = await self._check_admission(pod, others)
        finally:
            self._admitting = None
        pod = self.pods.get(pod.uid, pod)
        if rejection is not None:
            self._reject(pod, rejection)
        elif self.pods.get(pod.uid) is not None:
            self._start_worker(PodWorker(self, pod, self._new_state(pod)), group)
        if "deletionTimestamp" in pod.obj["metadata"]:
            self._stop(pod)

    async def _check_admission(self, pod: PodSpec, others: list[PodSpec]) -> PodRejection | None:
        """Allocate devices, then check the predicates, in the order of a real kubelet."""
        error_text = annotation_error(pod.annotations)
        if error_text is not None:
            return PodRejection("InvalidSimulation", error_text)
        try:
            active = {other.uid for other in others} if self._all_admitted else None
            await self._devices.allocate(pod, set(), active)
        except AllocationError as error:
            text = f"Allocate failed due to {error}, which is unexpected"
            return PodRejection("UnexpectedAdmissionError", text)
        return check_predicates(pod, others, self._node_facts())

    def _reject(self, pod: PodSpec, rejection: PodRejection) -> None:
        self._events.write(pod.obj, "Pod", "Warning", rejection.reason, rejection.message)
        status = rejected_status(
            pod, pod.obj.get("status") or {}, rejection.reason, rejection.message, time.time()
        )
        self.statuses.set(pod, status)
        self.statuses.flush()

    def _new_state(self, pod: PodSpec) -> PodState:
        taken = {worker.state.pod_ip for worker in self.workers.values()}
        begins_with_init = any(container.role != "app" for container in pod.containers)
        reason = _BEING_INITIALIZED if begins_with_init else _BEING_CREATED
        containers = {c.name: ContainerState(reason=reason) for c in pod.containers}
        address = self._free_pod_ip(taken)
        return PodState(pod.uid, pod.namespace, pod.name, address, time.time(), containers)

    # Workers

    def _start_worker(self, worker: PodWorker, group: asyncio.TaskGroup) -> None:
        self.workers[worker.pod.uid] = worker
        allocate_first(worker.pod, worker.state)
        self.changed(worker, started=False)
        group.create_task(self._run_worker(worker))

    async def _release_deleted(self) -> None:
        """Release the claims of pods that were deleted while the kubelet was away."""
        fields = f"spec.nodeName={self._node}"
        present = {obj["metadata"]["uid"] for obj in self._store.list("pods", fields=fields)}
        for uid in {uid for claim in self._claims.claims.values() for uid in claim.pods} - present:
            await self._claims.release(uid)

    async def _run_worker(self, worker: PodWorker) -> None:
        """Run a pod to its end, write its last status, free its devices, delete it."""
        await worker.run()
        uid = worker.pod.uid
        await self._claims.release(uid)
        await self._api.there.wait()
        await asyncio.to_thread(shutil.rmtree, self._volumes / uid, ignore_errors=True)
        if self.cgroups is not None:
            await asyncio.to_thread(self.cgroups.remove_pod, uid)
        self.statuses.flush()
        self._remove(worker.pod)
        self.workers.pop(uid, None)
        self._files.remove(uid)
        self._devices.retain({pod.uid for pod in self.active()})

    def _save(self, uid: str) -> None:
        worker = self.workers.get(uid)
        if (
            worker is not None
            and uid in self._unsaved
            and (not worker.state.stopping or worker.state.past_deadline)
        ):
            self._files.save(worker.state)
        self._unsaved.discard(uid)

    def _remove(self, pod: PodSpec) -> None:
        try:
            self._store.delete("pods", pod.namespace, pod.name, grace_s=0, uid=pod.uid)
        except ApiError as error:
            if error.code not in {404, 409}:
                raise

    def changed(self, worker: PodWorker, *, started: bool) -> None:
        """Report a pod's new state; the start of a container is saved at once."""
        pod = self.pods.get(worker.pod.uid)
        if pod is None:
            return
        if started:
            self._files.save(worker.state)
            self._unsaved.discard(pod.uid)
        else:
            self._unsaved.add(pod.uid)
        if worker.is_final and self._claims.has_claims(pod.uid):
            self._group.create_task(self._claims.release(pod.uid))
        previous = self.statuses.get(pod.uid) or pod.obj.get("status") or {}
        self.statuses.set(
            pod, pod_status(worker.pod, worker.state, previous, self.settings.host, time.time())
        )

    async def before_start(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Prepare claims and call the device plugins; AllocationError if one refuses.

        Raises UnmountedError while a volume of the pod cannot be mounted.
        """
        check_claims(pod, self._node, self._store)
        if self.cgroups is not None:
            await asyncio.to_thread(self.cgroups.make_pod, pod.uid)
        await self._claims.prepare(pod)
        await self._devices.pre_start(pod, container)

    def allocate_responses(
        self, pod: PodSpec, container: ContainerSpec
    ) -> list[api_pb2.ContainerAllocateResponse]:
        """Return the plugins' stored Allocate responses."""
        return self._devices.allocate_responses(pod.uid, container.name)

    def runtime_edits(
        self, pod: PodSpec, container: ContainerSpec
    ) -> list[api_pb2.ContainerAllocateResponse]:
        """Return what CDI devices add, of claims and of plugins."""
        responses = self.allocate_responses(pod, container)
        named = [device.name for answer in responses for device in answer.cdi_devices]
        edits = self._claims.response(pod, container, named)
        return [] if edits is None else [edits]

    def gpus_of(
        self,
        pod: PodSpec,
        container: ContainerSpec,
        responses: Iterable[api_pb2.ContainerAllocateResponse],
        env: Mapping[str, str],
    ) -> list[str]:
        """Return what the node's container runtime gives to a container with these variables."""
        node = self._store.find("nodes", None, self._node)
        labels = (node.obj["metadata"].get("labels") or {}) if node else {}
        if container.privileged:
            return [ALL]
        given = given_gpus(responses)
        if labels.get(OPEN_RUNTIME) != "true":
            return given
        return [*given, *named_gpus(env, pod.annotations)]

    def find_source(self, pod: PodSpec, resource: str, name: str) -> Json | None:
        """Return a ConfigMap or Secret in the pod's namespace; None: absent."""
        record = self._store.find(resource, pod.namespace, name)
        return None if record is None else record.obj

    def make_volumes(self, pod: PodSpec) -> dict[str, str]:
        """Return the path of each of the pod's volumes that has one."""
        return make_volumes(pod, self._volumes / pod.uid, partial(self.find_source, pod))

    def event(self, pod: PodSpec, kind: str, reason: str, message: str, container: str) -> None:
        """Write an event about the pod."""
        self._events.write(pod.obj, "Pod", kind, reason, message, container=container)

    # Reads

    def list_pods(self) -> list[Json]:
        """Return the pods as `/pods` shows them."""
        return [self._served_pod(pod) for pod in self.pods.values()]

    def _served_pod(self, pod: PodSpec) -> Json:
        own = self._old_statuses.get(pod.uid) or self.statuses.get_delayed(
            pod.uid, self.settings.pods_lag_s
        )
        return pod.obj if own is None else pod.obj | {"status": own}

    def state_of(self, namespace: str, name: str) -> PodState | None:
        """Return the state of an admitted pod; None for other pods."""
        for worker in reversed(self.workers.values()):
            if (worker.pod.namespace, worker.pod.name) == (namespace, name):
                return worker.state
        return None
