"""Events about pods, as a kubelet writes them; a repeated event raises a count."""

import secrets

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.container_spec import PodSpec
from simcluster.ports import ClusterStore

_REMEMBERED = 4096


class KubeletEventRecorder:
    """Writes one node's events; drops an event that the store refuses, as a kubelet does."""

    def __init__(self, store: ClusterStore, node: str) -> None:
        self._store = store
        self._node = node
        self._written: dict[tuple[str, str, str, str], str] = {}

    def write(
        self, pod: PodSpec, kind: str, reason: str, message: str, container: str = ""
    ) -> None:
        """Write an event, or raise the count of an equal one."""
        key = (pod.uid, container, reason, message)
        known = self._written.get(key)
        try:
            if known is not None and self._store.find("events", pod.namespace, known):
                self._store.patch("events", pod.namespace, known, self._counted)
                return
            created = self._store.create(
                "events", self._event(pod, kind, reason, message, container)
            )
        except ApiError:
            return
        self._written[key] = created["metadata"]["name"]
        if len(self._written) > _REMEMBERED:
            del self._written[next(iter(self._written))]

    def _counted(self, event: Json) -> Json:
        return event | {"count": int(event["count"]) + 1, "lastTimestamp": self._store.now()}

    def _event(self, pod: PodSpec, kind: str, reason: str, message: str, container: str) -> Json:
        involved = {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "resourceVersion": pod.obj["metadata"].get("resourceVersion", ""),
        }
        if container:
            involved["fieldPath"] = f"spec.containers{{{container}}}"
        now = self._store.now()
        return {
            "metadata": {
                "name": f"{pod.name}.{secrets.token_hex(8)}",
                "namespace": pod.namespace,
            },
            "involvedObject": involved,
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self._node},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
