"""Pods as large as an API server accepts, each full of another field."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.webhook.admission_review import API_VERSION, KIND
from shared.dialects.reserved import LIBRARY_SEARCH, VISIBLE
from shared.kubernetes.full_pods import MAX_CONTAINERS, MAX_ENTRIES
from tests.support.webhook.replica import VGPU

MAX_REQUEST_BYTES = 3 * 1024 * 1024
"""An API server's limit on the body of a request."""
Obj = dict[str, Any]

_ITEMS: Mapping[str, Callable[[int], Obj]] = {
    "env": lambda n: {"name": f"A{n}"},
    "envFrom": lambda n: {"configMapRef": {"name": f"absent-{n}", "optional": True}},
    "volumeMounts": lambda n: {"name": "v", "mountPath": "/tmp"},
    "ports": lambda n: {"containerPort": n % 65535 + 1},
}
_MAPS: Mapping[str, Callable[[int], Obj]] = {
    "limits": lambda n: {f"example.com/r{n}": "1"},
    "requests": lambda n: {f"nvidia.com/gpu{n}": "1"},
}
_SPEC: Mapping[str, Callable[[int], Obj]] = {
    "containers": lambda n: {"name": f"c{n}", "image": "cuda", "envFrom": [{"prefix": "A"}]},
    "initContainers": lambda n: {"name": f"i{n}", "image": "app"},
    "volumes": lambda n: {"name": f"v{n}", "hostPath": {"path": "/data"}},
    "tolerations": lambda n: {"key": f"k{n}", "operator": "Exists"},
}
KINDS = (
    *(*_ITEMS, *_MAPS, *_SPEC, "annotations", "labels", "image", "mountPath", "everything"),
    "searched",
)


def worst_pod(kind: str, *, gpu: bool, size: int = MAX_REQUEST_BYTES) -> Obj:
    """Return a pod of about this size in JSON: all of it is in one field."""
    seeing = {"name": VISIBLE, "value": "all"}
    main: Obj = {"name": "main", "image": "app", "env": [seeing]}
    if gpu:
        main = {"name": "main", "image": "app", "resources": {"limits": dict(VGPU)}}
    pod: Obj = {
        "metadata": {"name": "worst"},
        "spec": {
            "containers": [main],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "schedulerName": "default-scheduler",
        },
    }
    if kind == "everything":
        return _at_every_bound(pod, main)
    if kind in _ITEMS:
        main[kind] = [*_filled(_ITEMS[kind], size), *main.get(kind, ())]
    elif kind in _MAPS:
        amounts = main.setdefault("resources", {}).setdefault(kind, {})
        for entries in _filled(_MAPS[kind], size):
            amounts |= entries
    elif kind in _SPEC:
        pod["spec"].setdefault(kind, []).extend(_filled(_SPEC[kind], size))
    elif kind in {"annotations", "labels"}:
        pod["metadata"][kind] = {f"cdi.k8s.io/{n}": "x" for n in range(size // 22)}
    elif kind == "searched":
        entry = {"name": LIBRARY_SEARCH, "value": ":/a/.." * (size // 6)}
        main["env"] = [*main.get("env", ()), entry]
    elif kind == "image":
        main["image"] = "x" * size
    else:
        main["volumeMounts"] = [{"name": "v", "mountPath": "/x" * (size // 2)}]
    return pod


def _at_every_bound(pod: Obj, main: Obj) -> Obj:
    """Return a pod that no bound denies, with as much of everything as they allow."""
    pod["metadata"]["annotations"] = {f"nvidia.com/gpumem-{n}": "x" for n in range(5_000)}
    pod["spec"]["volumes"] = [_SPEC["volumes"](n) for n in range(MAX_CONTAINERS)]
    count = MAX_ENTRIES // MAX_CONTAINERS - 1
    fields = {kind: [_ITEMS[kind](n) for n in range(count)] for kind in _ITEMS}
    path = "/" + "x/" * 40
    fields["volumeMounts"] = [{"name": "v", "mountPath": path} for _ in range(count)]
    pod["spec"]["containers"] = [
        main,
        *({"name": f"c{n}", "image": "app", **fields} for n in range(1, MAX_CONTAINERS)),
    ]
    return pod


def _filled(item: Callable[[int], Obj], size: int) -> list[Obj]:
    return [item(n) for n in range(size // (len(json.dumps(item(99999))) + 2))]


def review_of(pod: Obj, *, namespace: str = "team-a", old: Obj | None = None) -> bytes:
    """Return the body of the review of a pod that is created, or changed from `old`."""
    return msgspec.json.encode(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "request": {
                "uid": "u",
                "operation": "UPDATE" if old else "CREATE",
                "namespace": namespace,
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "object": pod,
                "oldObject": old,
            },
        }
    )
