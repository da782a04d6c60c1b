"""A real API server as `scenarios` uses it: nodes and pods are created, and deleted at the end.

No kubelet runs on the nodes. This process keeps them ready, ends pods that are being deleted, and
watches its namespace: nothing here depends on how a scheduler works.
"""

import asyncio
import contextlib
import time
import uuid
from datetime import UTC, datetime

import msgspec

from shared.kubernetes.client import MERGE_PATCH, KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.kubeconfig import read_kubeconfig
from tests.support.waiting import until

NODES = "/api/v1/nodes"
NAMESPACES = "/api/v1/namespaces"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
PRIORITY = (
    "/apis/scheduling.k8s.io/v1/priorityclasses",
    {"metadata": {"name": "scenarios"}, "value": 1000},
)
LABEL = "benchmark-scenarios"
END = {"Impersonate-User": "system:kube-controller-manager", "Impersonate-Group": "system:masters"}
"""Kubelets and the control plane say that a pod has ended, and Leasehold's policies deny others."""
AT_ONCE = 64
RENEW_S = 25
"""A node without a lease of the last 40 s is not ready."""
ROOM = {"cpu": "128", "memory": "1024Gi", "ephemeral-storage": "1000Gi", "pods": "250"}
SMALL = {"cpu": "10m", "memory": "16Mi"}


class RealApi:
    """Nodes and pods of one run. `bound`, `refused` and `gone` have the instant by pod."""

    def __init__(self, kube, system):
        self.kube = kube
        self.system = system
        self.namespace = f"scenarios-{uuid.uuid4().hex[:6]}"
        self.pods = {}
        self.bound = {}
        self.refused = {}
        self.gone = {}
        self.nodes = {}
        """Number of GPUs by name."""
        self.tasks = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, kubeconfig, system):
        """Create the namespace; delete it, and nodes, also those that a broken run left."""
        async with KubernetesClient(read_kubeconfig(kubeconfig), timeout_s=60) as kube:
            api = cls(kube, system)
            await kube.delete(f"{NODES}?labelSelector={LABEL}")
            await kube.create(NAMESPACES, {"metadata": {"name": api.namespace}})
            accounts = f"{NAMESPACES}/{api.namespace}/serviceaccounts"
            with contextlib.suppress(KubernetesConflictError):  # its controller was faster
                await kube.create(accounts, {"metadata": {"name": "default"}})
            for path, made in (PRIORITY, *system.objects):
                with contextlib.suppress(KubernetesConflictError):
                    await kube.create(path, made)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(api.watch(api.namespace, api._note)),
                    tasks.create_task(api.renew()),
                ]
                if system.reserving:
                    watching = api.watch(system.reserving[0], api._reserve)
                    background.append(tasks.create_task(watching))
                try:
                    yield api
                finally:
                    await api.clear()
                    for task in background:
                        task.cancel()
                    await kube.delete(f"{NAMESPACES}/{api.namespace}")
                    for path, made in (PRIORITY, *system.objects):
                        await kube.delete(f"{path}/{made['metadata']['name']}")

    async def create_nodes(self, count, gpus):
        """Create ready nodes with so many GPUs each; return their names."""
        first = len(self.nodes)
        names = [f"{self.namespace}-{number}" for number in range(first, first + count)]
        self.nodes |= dict.fromkeys(names, gpus)
        await each(names, self._create_node)
        return names

    async def _create_node(self, name):
        labels, annotations, amounts = self.system.node(name, self.nodes[name])
        labels |= {"kubernetes.io/hostname": name, "type": "kwok", LABEL: ""}
        annotations |= {"kwok.x-k8s.io/node": "fake"}
        node = {"metadata": {"name": name, "labels": labels, "annotations": annotations}}
        await self.kube.create(NODES, node)
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"allocatable": ROOM | amounts, "capacity": ROOM | amounts}
        await self.kube.patch_merge(
            f"{NODES}/{name}/status", {"status": status | {"conditions": conditions}}
        )
        await self._renew(name)

    async def _renew(self, name):
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        lease |= {"metadata": {"name": name}, "spec": spec}
        await self.kube.apply(f"{LEASES}/{name}", lease, manager="scenarios")

    async def renew(self):
        """Keep the nodes ready, evenly over time, and repeat what else is said of them."""
        while True:
            names = list(self.nodes)
            for name in names:
                with contextlib.suppress(NotFoundError):
                    await self._renew(name)
                    if self.system.heartbeat:
                        notes = {"metadata": {"annotations": self.system.heartbeat()}}
                        await self.kube.patch_merge(f"{NODES}/{name}", notes)
                await asyncio.sleep(RENEW_S / len(names))
            await asyncio.sleep(0.1 if not names else 0)

    def live(self):
        """Return the names of pods that are there and have not succeeded."""
        ended = {n for n, pod in self.pods.items() if pod["status"].get("phase") == "Succeeded"}
        return self.pods.keys() - self.gone.keys() - ended

    async def clear(self):
        """Delete all pods and nodes."""
        await self.delete(self.pods.keys() - self.gone.keys())
        await self.delete_nodes(self.nodes)

    async def delete_nodes(self, names):
        """Delete nodes and their leases."""

        async def delete(name):
            for path in (f"{NODES}/{name}", f"{LEASES}/{name}"):
                with contextlib.suppress(NotFoundError):
                    await self.kube.delete(path)

        doomed = list(names)
        await each(doomed, delete)
        for name in doomed:
            del self.nodes[name]

    def pod(self, name, gpus, more):
        """Return a pod that requests so many GPUs, or a share of one."""
        resources, notes = self.system.share if gpus < 1 else self.system.whole(gpus)
        labels, annotations = self.system.pod
        metadata = {"labels": labels | {"gpus": str(gpus)}, "annotations": annotations | notes}
        for field, value in more.get("metadata", {}).items():
            metadata[field] |= value
        metadata["name"] = name
        container = {"name": "c", "image": "registry.k8s.io/pause", "resources": {}}
        container["resources"] = {"limits": SMALL | resources, "requests": SMALL | resources}
        spec = {"schedulerName": self.system.scheduler, "containers": [container]}
        spec |= {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
        spec |= {"tolerations": [{"operator": "Exists"}]} | more.get("spec", {})
        return {"metadata": metadata, "spec": spec}

    async def create_pods(self, names, gpus, more=None):
        """Create pods side by side; return the instants before their creation by name."""
        sent = {}

        async def create(name):
            sent[name] = time.perf_counter()
            path = f"{NAMESPACES}/{self.namespace}/pods"
            await self.kube.create(path, self.pod(name, gpus, more or {}))

        await each(names, create)
        return sent

    async def wait_bound(self, names, limit_s):
        """Wait until all pods are bound, or so long; return those that are."""
        with contextlib.suppress(AssertionError):
            await until(lambda: self.bound.keys() >= set(names), limit_s=limit_s)
        return self.bound.keys() & set(names)

    async def finish(self, name):
        """Let a pod that is bound succeed; return the instant before that."""
        began = time.perf_counter()
        status = msgspec.json.encode({"status": {"phase": "Succeeded"}})
        await self.kube._send("PATCH", f"{self._path(name)}/status", status, MERGE_PATCH, END)
        return began

    async def delete(self, names):
        """Let pods terminate and delete them; return once they are gone."""

        async def delete(name):
            with contextlib.suppress(NotFoundError):
                if name in self.bound:
                    await self.finish(name)
                await self.kube.delete(self._path(name), grace_s=0)

        names = set(names)
        await each(names, delete)
        await until(lambda: names <= self.gone.keys(), limit_s=120)

    async def events(self, reason):
        """Return the names of pods that have an Event with this reason."""
        names = set()
        path = f"{NAMESPACES}/{self.namespace}/events"
        async for page in self.kube.pages(path, query={"fieldSelector": f"reason={reason}"}):
            names |= {event["involvedObject"]["name"] for event in page.read(dict)}
        return names

    def _path(self, name):
        return f"{NAMESPACES}/{self.namespace}/pods/{name}"

    async def watch(self, namespace, note):
        """Call `note` for each change of a pod, with its kind and the instant."""
        path = f"{NAMESPACES}/{namespace}/pods"
        version = "0"  # whatever the API server's cache has: the namespace is new
        while True:
            rest = b""
            query = {"resourceVersion": version}
            async with self.kube.watch(path, query=query, silence_s=3600) as chunks:
                async for data in chunks:
                    *lines, rest = (rest + data).split(b"\n")
                    now = time.perf_counter()
                    for event in map(msgspec.json.decode, lines):
                        if event["type"] == "ERROR":  # the version is too old, for example
                            version = ""
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        note(event["type"], event["object"], now)

    def _reserve(self, kind, pod, _now):
        """Do what a pod does that reserves a GPU for the system."""
        about = pod["metadata"]
        (namespace, annotation) = self.system.reserving
        path = f"{NAMESPACES}/{namespace}/pods/{about['name']}"
        if about.get("deletionTimestamp") and kind != "DELETED":
            self._soon(self.kube.delete(path, grace_s=0))
        elif kind == "ADDED":
            notes = {annotation: f"GPU-{about['uid']}"}
            self._soon(self.kube.patch_merge(path, {"metadata": {"annotations": notes}}))

    def _note(self, kind, pod, now):
        """Note when a pod has a node, is refused and is gone; end it if it is being deleted."""
        name = pod["metadata"]["name"]
        self.pods[name] = pod
        if kind == "DELETED":
            self.gone[name] = now
        elif pod["metadata"].get("deletionTimestamp"):
            self._soon(self.delete([name]))
        if (node := pod["spec"].get("nodeName")) and name not in self.bound:
            self.bound[name] = now
            paths = {"node": f"{NODES}/{node}", "pod": self._path(name)}
            for which, notes in self.system.started.items():
                body = {"metadata": {"annotations": notes}}
                self._soon(self.kube.patch_merge(paths[which], body))
        for condition in pod["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                self.refused.setdefault(name, now)

    def _soon(self, action):
        async def act():
            with contextlib.suppress(NotFoundError):
                await action

        task = asyncio.create_task(act())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def each(names, act):
    """Do something for every name, `AT_ONCE` at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name):
        async with slots:
            await act(name)

    await asyncio.gather(*(one(name) for name in names))
