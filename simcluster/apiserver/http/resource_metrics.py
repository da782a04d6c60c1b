"""The API metrics.k8s.io, which `kubectl top` shows: what containers use of CPU and memory.

https://github.com/kubernetes/metrics
"""

from collections.abc import Mapping, Sequence

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, labels_of, list_at, name_of, namespace_of
from simcluster.apimachinery.selectors import parse_selection
from simcluster.apiserver.requests.request_target import RequestTarget
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.ports import ContainerRuntime, Usage


def read_metrics(
    store: ObjectStore,
    runtime: ContainerRuntime | None,
    target: RequestTarget,
    query: Mapping[str, str],
) -> Json:
    """Return the metrics of one pod or node, or of those that are selected."""
    kind = target.kind
    fields = query.get("fieldSelector", "")
    if target.name:
        fields = f"metadata.name={target.name}"
    chosen = parse_selection(kind, target.namespace, query.get("labelSelector", ""), fields)
    usage = {} if runtime is None else runtime.usage()
    items = [
        _metrics(kind.kind, record.obj, usage, store.now())
        for record in store.page(kind.table, chosen).records
        if kind.table == "nodes" or at_path(record.obj, "status.phase") == "Running"
    ]
    head = {"apiVersion": kind.api_version, "kind": kind.kind}
    if not target.name:
        return {**head, "kind": kind.list_kind, "metadata": {}, "items": items}
    if not items:
        raise ApiError.not_found(kind.qualified, target.name)
    return {**head, **items[0]}


def _metrics(kind: str, obj: Json, usage: Mapping[str, Usage], now: str) -> Json:
    meta: Json = {"name": name_of(obj), "creationTimestamp": now, "labels": labels_of(obj)}
    head = {"metadata": meta, "timestamp": now, "window": "15s"}
    if kind == "NodeMetrics":
        own = [measured for measured in usage.values() if measured.node == name_of(obj)]
        return {**head, "usage": _amounts(own)}
    meta["namespace"] = namespace_of(obj)
    containers = [
        {"name": status["name"], "usage": _amounts([usage[key]] if key in usage else [])}
        for status in list_at(obj, "status.containerStatuses")
        for key in [str(status.get("containerID")).rpartition("/")[2]]
    ]
    return {**head, "containers": containers}


def _amounts(usage: Sequence[Usage]) -> Json:
    return {
        "cpu": f"{int(sum(measured.cores for measured in usage) * 1e9)}n",
        "memory": f"{sum(measured.memory_bytes for measured in usage) // 1024}Ki",
    }
