"""Objects and views without secrets, and with other names in place of their own; pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"
SECRET_FIELDS = frozenset({"env", "envFrom", "args", "command", "data", "stringData", "binaryData"})
"""What may hold secrets, and no decision about GPUs depends on."""
SERVERS_ONLY = frozenset({"managedFields", "selfLink"})
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
KINDS: Mapping[str, str] = {
    "namespace": "namespace",
    "beneficiary": "pod",
    "container": "container",
    "owner": "owner",
    "node": "node",
    "nodeName": "node",
    "host": "node",
    "hostIP": "address",
    "podIP": "address",
    "ip": "address",
    "address": "address",
    "user": "user",
    "actor": "user",
    "username": "user",
    "image": "image",
    "imageID": "image",
    "gang": "gang",
    "instance": "instance",
    "generateName": "name",
    "hostname": "node",
    "serviceAccountName": "user",
    "serviceAccount": "user",
}
NAMED_BY = frozenset({"namespace", "uid", "image"})
"""Beside them, `name` is that of an object or a container."""
_NAME = re.compile(r"[A-Za-z0-9][\w.:@-]*")
OWN_LABELS = re.compile(
    r"([a-z0-9.-]*\.)?(kubernetes\.io|k8s\.io|leasehold\.dev|nvidia\.com|volcano\.sh|koordinator\.sh"
    r"|tencent\.com|hami\.io)/.+"
)
"""Other keys may name a user of the cluster."""
NAMING_LABELS = ("kubernetes.io/hostname", "node.kubernetes.io/instance-name")
KEPT = frozenset(
    {
        *("", "default", "kube-system", "leasehold-system", "leasehold-agents", "leasehold"),
        *("default-scheduler", "kube-scheduler", "main"),
    }
)
LEAST = 3
"""Shorter names are no words that one finds in texts."""


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if key in SECRET_FIELDS or key == LAST_APPLIED else without_secrets(inner)
            for key, inner in value.items()
            if key not in SERVERS_ONLY
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


class Pseudonyms:
    """Other names for those of a cluster: the same name has the same one in all documents.

    For example::

        pseudonyms = Pseudonyms()
        pseudonyms.learn(document)
        shared = pseudonyms.of(document)
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._words: re.Pattern[str] | None = None

    def learn(self, value: Any) -> None:
        for kind, name in _names_in(value):
            for part in name.split("/"):
                if part in KEPT or part in self._names or not _NAME.fullmatch(part):
                    continue
                self._counts[kind] = self._counts.get(kind, 0) + 1
                self._names[part] = f"{kind}-{self._counts[kind]}"
                self._words = None

    def of(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                self._text(key): self._labels(inner)
                if key in {"labels", "annotations", "nodeSelector"} and isinstance(inner, dict)
                else self.of(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.of(inner) for inner in value]
        return self._text(value) if isinstance(value, str) else value

    def _labels(self, labels: Mapping[str, str]) -> dict[str, Any]:
        return {key: self.of(value) for key, value in labels.items() if OWN_LABELS.fullmatch(key)}

    def _text(self, text: str) -> str:
        if text in self._names:
            return self._names[text]
        if self._words is None:
            names = sorted((name for name in self._names if len(name) >= LEAST), key=len)
            words = "|".join(map(re.escape, reversed(names)))
            self._words = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-]|\.\w)" if words else r"(?!)")
        return self._words.sub(lambda match: self._names[match[0]], text)


def _names_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and NAMED_BY & value.keys():
            yield "name", value["name"]
        for inner_key, inner in value.items():
            if inner_key in NAMING_LABELS:
                yield "node", str(inner)
            yield from _names_in(inner, inner_key)
    elif isinstance(value, list):
        for inner in value:
            yield from _names_in(inner, key)
    elif isinstance(value, str) and value and key in KINDS:
        yield KINDS[key], value


def layouts(nodes: Iterable[Mapping[str, Any]], models: Mapping[str, int]) -> list[str]:
    """Return a layout for each node of `gpus`, such as `4xT4+2xA100-80GB:mig`.

    A GPU stands for the simulated model that its own names, else for that of the nearest size.
    """
    return ["+".join(_counted(node["devices"], models)) for node in nodes if node["devices"]]


def _counted(devices: Iterable[Mapping[str, Any]], models: Mapping[str, int]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for device in devices:
        mig = ":mig" if device["mode"] == "mig" else ""
        name = f"{_model_of(device, models)}{mig}"
        counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        yield f"{count}x{name}"


def _model_of(device: Mapping[str, Any], models: Mapping[str, int]) -> str:
    words = set(re.split(r"[\s-]+", device["model"]))
    named = [name for name in models if set(name.split("-")) <= words]
    size = device["memory_mib"]
    return min(named or models, key=lambda name: (abs(models[name] - size), name))


POD_FIELDS = (
    *("schedulerName", "priorityClassName", "nodeSelector", "tolerations", "affinity"),
    "activeDeadlineSeconds",
)


def cluster_of(pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    spaces = {pod["metadata"].get("namespace", "default") for pod in pods} - {"default"}
    classes = {
        spec["priorityClassName"]: spec.get("priority", 0)
        for pod in pods
        if "priorityClassName" in (spec := pod["spec"])
        and not spec["priorityClassName"].startswith("system-")
    }
    made: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        for name in sorted(spaces)
    ]
    for name, value in sorted(classes.items()):
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        made.append({**kind, "metadata": {"name": name}, "value": value})
    return made


def loadable_pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The pod requests the same in a simulated cluster, and sleeps."""
    metadata = pod["metadata"]
    spec = pod.get("spec") or {}
    kept = {name: spec[name] for name in POD_FIELDS if name in spec}
    selector = kept.get("nodeSelector") or {}
    kept["nodeSelector"] = {k: v for k, v in selector.items() if k not in NAMING_LABELS}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            name: metadata[name]
            for name in ("name", "namespace", "labels", "annotations")
            if name in metadata
        },
        "spec": {
            **{name: value for name, value in kept.items() if value},
            "containers": [
                {
                    "name": container["name"],
                    "image": "busybox",
                    "command": ["sleep", "infinity"],
                    "resources": {"limits": (container.get("resources") or {}).get("limits", {})},
                }
                for container in spec.get("containers") or ()
            ],
        },
    }
