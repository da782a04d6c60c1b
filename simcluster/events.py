"""Events about objects, as kubelets and controllers write them; a repeated one raises a count."""

import secrets

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, name_of, namespace_of
from simcluster.ports import ClusterStore

_REMEMBERED = 4096


class EventRecorder:
    """Writes events; drops one that the store refuses, as a kubelet does."""

    def __init__(self, store: ClusterStore, *, host: str = "") -> None:
        self._store = store
        self._host = host
        self._written: dict[tuple[str, str, str, str], str] = {}

    def write(
        self, about: Json, kind: str, level: str, reason: str, message: str, *, container: str = ""
    ) -> None:
        """Write an event about an object of a kind, or raise the count of an equal one."""
        key = (about["metadata"]["uid"], container, reason, message)
        written = self._written.get(key)
        namespace = namespace_of(about)
        try:
            if written is not None and self._store.find("events", namespace, written):
                self._store.patch("events", namespace, written, self._counted)
                return
            event = self._event(about, kind, container)
            event |= {"type": level, "reason": reason, "message": message}
            created = self._store.create("events", event)
        except ApiError:
            return
        self._written[key] = name_of(created)
        if len(self._written) > _REMEMBERED:
            del self._written[next(iter(self._written))]

    def _counted(self, event: Json) -> Json:
        return event | {"count": int(event["count"]) + 1, "lastTimestamp": self._store.now()}

    def _event(self, about: Json, kind: str, container: str) -> Json:
        now = self._store.now()
        component = "kubelet" if self._host else f"{kind.lower()}-controller"
        involved = {
            "apiVersion": about.get("apiVersion", "v1"),
            "kind": kind,
            "namespace": namespace_of(about),
            "name": name_of(about),
            "uid": about["metadata"]["uid"],
            "resourceVersion": about["metadata"].get("resourceVersion", ""),
        }
        if container:
            involved["fieldPath"] = f"spec.containers{{{container}}}"
        return {
            "metadata": {
                "name": f"{name_of(about)}.{secrets.token_hex(8)}",
                "namespace": namespace_of(about),
            },
            "involvedObject": involved,
            "source": {"component": component} | ({"host": self._host} if self._host else {}),
            "reportingComponent": component,
            "reportingInstance": self._host,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
