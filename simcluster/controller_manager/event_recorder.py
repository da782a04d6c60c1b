"""Events about workloads, as controllers write them; a repeated event raises a count."""

import secrets

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, name_of, namespace_of
from simcluster.ports import ClusterStore

_REMEMBERED = 1024


class ControllerEvents:
    """Writes events; drops one that the store refuses."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self._written: dict[tuple[str, str, str], str] = {}

    def write(self, workload: Json, kind: str, level: str, reason: str, message: str) -> None:
        """Write an event about a workload, or raise the count of an equal one."""
        key = (workload["metadata"]["uid"], reason, message)
        known, namespace = self._written.get(key), namespace_of(workload)
        try:
            if known is not None and self._store.find("events", namespace, known):
                self._store.patch("events", namespace, known, self._counted)
                return
            created = self._store.create(
                "events", self._event(workload, kind, level, reason, message)
            )
        except ApiError:
            return
        self._written[key] = name_of(created)
        if len(self._written) > _REMEMBERED:
            del self._written[next(iter(self._written))]

    def _counted(self, event: Json) -> Json:
        return event | {"count": int(event["count"]) + 1, "lastTimestamp": self._store.now()}

    def _event(self, workload: Json, kind: str, level: str, reason: str, message: str) -> Json:
        now, component = self._store.now(), f"{kind.lower()}-controller"
        return {
            "metadata": {
                "name": f"{name_of(workload)}.{secrets.token_hex(8)}",
                "namespace": namespace_of(workload),
            },
            "involvedObject": {
                "apiVersion": workload["apiVersion"],
                "kind": kind,
                "namespace": namespace_of(workload),
                "name": name_of(workload),
                "uid": workload["metadata"]["uid"],
                "resourceVersion": workload["metadata"].get("resourceVersion", ""),
            },
            "type": level,
            "reason": reason,
            "message": message,
            "source": {"component": component},
            "reportingComponent": component,
            "reportingInstance": "",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
