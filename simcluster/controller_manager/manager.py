"""Carries out the plans of workloads whenever they, their pods or nodes change."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    at_path,
    name_of,
    namespace_of,
    parse_time,
)
from simcluster.controller_manager.cron_jobs import plan_cron_job
from simcluster.controller_manager.daemon_sets import plan_daemon_set
from simcluster.controller_manager.deployments import plan_deployment
from simcluster.controller_manager.jobs import plan_job
from simcluster.controller_manager.plans import (
    WorkloadPlan,
    controller_of,
    is_deleted,
    is_owned,
    record_revision,
)
from simcluster.controller_manager.replica_sets import plan_replica_set
from simcluster.controller_manager.stateful_sets import plan_stateful_set
from simcluster.events import EventRecorder
from simcluster.ports import ClusterStore

K = TypeVar("K", bound=Hashable)


class KeyQueue(Generic[K]):
    """Keys in the order in which they were added; one that is added again in between waits once."""

    def __init__(self, *, first_retry_s: float, max_retry_s: float) -> None:
        self.first_retry_s = first_retry_s
        self.max_retry_s = max_retry_s
        self._waiting: OrderedDict[K, None] = OrderedDict()
        self._in_progress: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Hand out the key as soon as it is not being handled."""
        if key in self._in_progress:
            self._again.add(key)
            return
        self._waiting[key] = None
        self._changed.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add the key after a delay; of several delays the earliest counts."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        due = loop.time() + delay_s
        if timer is not None and not timer.cancelled() and loop.time() < timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self.add, key)

    async def get(self) -> K:
        """Wait for a key, and return it; `done` or `retry` must follow."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        key, _ = self._waiting.popitem(last=False)
        self._in_progress.add(key)
        return key

    def done(self, key: K) -> None:
        """End the handling of a key."""
        self._failures.pop(key, None)
        self._finish(key)

    def retry(self, key: K) -> None:
        """End the handling of a key that failed, and add it again after a growing delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._finish(key)
        self.add_after(key, min(self.first_retry_s * 2 ** (failures - 1), self.max_retry_s))

    def close(self) -> None:
        """Cancel all delays."""
        for timer in self._timers.values():
            timer.cancel()

    def _finish(self, key: K) -> None:
        self._in_progress.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)


log = logging.getLogger(__name__)

CreateObject = Callable[[str, Json, Json], Awaitable[Json]]
"""Creates an object of a table, with admission, as a user; `ApiError` if it is refused."""

TABLES = {
    "Deployment": "deployments",
    "ReplicaSet": "replicasets",
    "StatefulSet": "statefulsets",
    "DaemonSet": "daemonsets",
    "Job": "jobs",
    "CronJob": "cronjobs",
}
WORKERS = 8
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 30.0


class WorkloadKey(NamedTuple):
    """The name of one workload."""

    kind: str
    namespace: str
    name: str


class ControllerManager:
    """Runs the controllers of all workloads."""

    def __init__(self, store: ClusterStore, create: CreateObject) -> None:
        self._store = store
        self._create = create
        self._events = EventRecorder(store)
        self._queue: KeyQueue[WorkloadKey] = KeyQueue(
            first_retry_s=FIRST_RETRY_S, max_retry_s=MAX_RETRY_S
        )

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for table in (*TABLES.values(), "pods", "nodes"):
                    tasks.create_task(self._follow(table))
                for _ in range(WORKERS):
                    tasks.create_task(self._work())
        finally:
            self._queue.close()

    async def _follow(self, table: str) -> None:
        while True:
            watch = self._store.watch(table)
            try:
                while True:
                    for event in watch.poll():
                        for key in self._affected(table, event.object):
                            self._queue.add(key)
                    await watch.wait()
            except ApiError as error:
                log.info("watching %s from the start: %s", table, error)

    def _affected(self, table: str, obj: Json) -> Iterable[WorkloadKey]:
        if table == "nodes":
            for daemon_set in self._store.list("daemonsets"):
                yield WorkloadKey("DaemonSet", namespace_of(daemon_set), name_of(daemon_set))
            return
        if table != "pods":
            kind = next(kind for kind, own in TABLES.items() if own == table)
            yield WorkloadKey(kind, namespace_of(obj), name_of(obj))
        controller = controller_of(obj)
        if controller and controller.get("kind") in TABLES:
            yield WorkloadKey(controller["kind"], namespace_of(obj), str(controller["name"]))
            if table == "pods" and controller["kind"] == "ReplicaSet":
                yield from self._recreating(namespace_of(obj), str(controller["name"]))

    def _recreating(self, namespace: str, replica_set: str) -> Iterable[WorkloadKey]:
        """Yield the Deployment of a ReplicaSet if its new pods wait until the old ones are gone."""
        record = self._store.find("replicasets", namespace, replica_set)
        controller = controller_of(record.obj) if record else None
        if not controller or controller.get("kind") != "Deployment":
            return
        deployment = self._store.find("deployments", namespace, str(controller["name"]))
        if deployment and deployment.obj["spec"]["strategy"]["type"] == "Recreate":
            yield WorkloadKey("Deployment", namespace, str(controller["name"]))

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self._reconcile(key)
            except ApiError as error:
                log.info("%s %s/%s: %s", *key, error)
                self._queue.retry(key)
            except Exception:
                log.exception("%s %s/%s could not be brought to its desired state", *key)
                self._queue.retry(key)
            else:
                self._queue.done(key)

    async def _reconcile(self, key: WorkloadKey) -> None:
        table = TABLES[key.kind]
        record = self._store.find(table, key.namespace, key.name)
        if record is None:
            return
        workload = record.obj
        plan = self._plan(key.kind, workload)
        if key.kind in {"StatefulSet", "DaemonSet"} and not is_deleted(workload):
            revisions = self._owned("controllerrevisions", workload)
            record_revision(plan, workload, key.kind, revisions)
        if plan.status != workload.get("status"):
            self._store.patch(
                table, key.namespace, key.name, _with_status(plan.status), subresource="status"
            )
        if plan.annotations:
            annotated = {"metadata": {"annotations": plan.annotations}}
            self._store.patch(table, key.namespace, key.name, annotated)
        if plan.again_in_s is not None:
            self._queue.add_after(key, max(plan.again_in_s, 0.0))
        for changed_table, obj in plan.update:
            self._update(changed_table, obj, workload, key.kind)
        for deleted_table, obj in plan.delete:
            self._delete(deleted_table, obj, workload, key.kind)
        for created_table, obj in plan.create:
            await self._create_for(created_table, obj, workload, key)
        if plan.delete_itself:
            self._store.delete(table, key.namespace, key.name, uid=workload["metadata"]["uid"])

    def _plan(self, kind: str, workload: Json) -> WorkloadPlan:
        now = parse_time(self._store.now())
        namespace = namespace_of(workload)
        if kind == "Deployment":
            replica_sets = self._owned("replicasets", workload)
            pods = [pod for replica_set in replica_sets for pod in self._owned("pods", replica_set)]
            return plan_deployment(workload, replica_sets, pods, now)
        if kind == "CronJob":
            return plan_cron_job(workload, self._owned("jobs", workload), now)
        pods = self._owned("pods", workload)
        if kind == "ReplicaSet":
            return plan_replica_set(workload, pods, now)
        if kind == "StatefulSet":
            claims = self._store.list("persistentvolumeclaims")
            own_claims = [claim for claim in claims if namespace_of(claim) == namespace]
            return plan_stateful_set(workload, pods, own_claims, now)
        if kind == "DaemonSet":
            return plan_daemon_set(workload, pods, self._store.list("nodes"), now)
        return plan_job(workload, pods, now)

    def _owned(self, table: str, owner: Json) -> Objects:
        namespace = namespace_of(owner)
        return [
            obj
            for obj in self._store.list(table)
            if namespace_of(obj) == namespace and is_owned(obj, owner)
        ]

    def _update(self, table: str, obj: Json, owner: Json, kind: str) -> None:
        before = self._store.read(table, namespace_of(obj), name_of(obj))
        self._store.patch(table, namespace_of(obj), name_of(obj), lambda _old: obj)
        replicas = at_path(obj, "spec.replicas")
        if replicas != at_path(before, "spec.replicas"):
            text = f"Scaled replica set {name_of(obj)} to {replicas}"
            self._events.write(owner, kind, "Normal", "ScalingReplicaSet", text)

    def _delete(self, table: str, obj: Json, owner: Json, kind: str) -> None:
        """Delete an object, unless it is marked for deletion already."""
        if is_deleted(obj):
            return
        try:
            self._store.delete(table, namespace_of(obj), name_of(obj), uid=obj["metadata"]["uid"])
        except ApiError as error:
            if error.code not in {404, 409}:
                raise
            return
        self._events.write(
            owner, kind, "Normal", "SuccessfulDelete", f"Deleted {_noun(table)}: {name_of(obj)}"
        )

    async def _create_for(self, table: str, obj: Json, owner: Json, key: WorkloadKey) -> None:
        """Create an object; 409 means that an earlier one of this name is not gone yet."""
        try:
            created = await self._create(table, obj, _controller_user(key.kind))
        except ApiError as error:
            if error.code == 409:
                raise
            text = f"Error creating: {error.message}"
            self._events.write(owner, key.kind, "Warning", "FailedCreate", text)
            raise
        self._events.write(
            owner,
            key.kind,
            "Normal",
            "SuccessfulCreate",
            f"Created {_noun(table)}: {name_of(created)}",
        )


def _noun(table: str) -> str:
    nouns = {"pods": "pod", "replicasets": "replica set", "jobs": "job",
             "controllerrevisions": "revision", "persistentvolumeclaims": "claim"}  # fmt: skip
    return nouns[table]


def _with_status(status: Json) -> Callable[[Json], Json]:
    return lambda obj: {**obj, "status": status}


def _controller_user(kind: str) -> Json:
    """Return the service account of a controller, as kube-controller-manager names it."""
    names = {
        "Deployment": "deployment",
        "ReplicaSet": "replicaset",
        "StatefulSet": "statefulset",
        "DaemonSet": "daemon-set",
        "Job": "job",
        "CronJob": "cronjob",
    }
    return {
        "username": f"system:serviceaccount:kube-system:{names[kind]}-controller",
        "groups": [
            "system:serviceaccounts",
            "system:serviceaccounts:kube-system",
            "system:authenticated",
        ],
    }
