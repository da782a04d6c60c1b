"""Tables of rights, of service accounts and containers, from the manifests."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from services.auth.nats_users import all_users
from services.auth.redis_users import USERS as REDIS_USERS
from shared.model.names import SYSTEM_NAMESPACE, NodeName
from shared.pods.pod_policy import RULES
from tools.generate.pages import ROOT

NODE = "NODE"
RUNTIME_EVENTS = {"heartbeat.sent", "resync.requested"}
"""Events that the runtime publishes for every service."""


def manifests(folder: str = "base") -> Iterator[dict[str, Any]]:
    """Every object of a folder of k8s."""
    for path in sorted((ROOT / "k8s" / folder).glob("*.yaml")):
        yield from filter(None, yaml.safe_load_all(path.read_text()))


PARTITIONERS = ("mig", "memory-limits", "mps")
"""The components with the container `partitioner`."""


def components() -> list[str]:
    """Return the names of all components."""
    return sorted(folder.name for folder in (ROOT / "k8s" / "components").iterdir())


def all_rights() -> dict[str, list[str]]:
    """Describe the permissions of each service account, and those that components add."""
    folders = {"base": "", **{f"components/{name}": _with(name) for name in components()}}
    parts = {suffix: list(manifests(folder)) for folder, suffix in folders.items()}
    return {
        account + suffix: may for suffix in parts for account, may in _rights(suffix, parts).items()
    }


def _with(component: str) -> str:
    return f", with the component {component}"


def _rights(part: str, parts: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[str]]:
    """Describe the permissions of each service account in a part, some by roles of others."""
    objects = parts[part]
    roles = {
        (heading["kind"], heading["metadata"]["name"]): [
            _words(rule) + ("" if home == part else home) for rule in heading["rules"]
        ]
        for home in parts
        for heading in parts[home]
        if heading["kind"] in {"ClusterRole", "Role"}
    }
    may: dict[str, list[str]] = {
        obj["metadata"]["name"]: [] for obj in objects if obj["kind"] == "ServiceAccount"
    }
    for binding in objects:
        if binding["kind"] in {"ClusterRoleBinding", "RoleBinding"}:
            role = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            for subject in binding["subjects"]:
                where = _where(binding, subject)
                rights_of = may.setdefault(subject["name"], [])
                rights = [words + where for words in roles.get(role, ())]
                rights_of += rights or [
                    f"what the cluster's own {role[0]} `{role[1]}` allows{where}"
                ]
    return may


def _where(binding: dict[str, Any], subject: dict[str, Any]) -> str:
    """Return the namespace to which a binding restricts a service account, in words."""
    if binding["kind"] == "ClusterRoleBinding":
        return ""
    namespace = binding["metadata"].get("namespace", SYSTEM_NAMESPACE)
    if subject["kind"] == "Group":
        return f" in `{namespace}`"
    return " in its namespace" if namespace == subject["namespace"] else f" in `{namespace}`"


def _words(rule: dict[str, Any]) -> str:
    groups = [group for group in rule["apiGroups"] if group]
    resources = ", ".join(f"`{resource}`" for resource in rule["resources"])
    of = f" of {', '.join(groups)}" if groups else ""
    named = f" named {', '.join(rule['resourceNames'])}" if "resourceNames" in rule else ""
    return f"{', '.join(rule['verbs'])} {resources}{of}{named}"


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every container with its name and its pod, and the partitioner with all its components."""
    files = (ROOT / "k8s" / "components" / name / "kustomization.yaml" for name in PARTITIONERS)
    patches = [patch for file in files for patch in yaml.safe_load(file.read_text())["patches"]]
    patched = [yaml.safe_load(patch["patch"]) for patch in patches]
    pods: dict[str, dict[str, Any]] = {}
    for manifest in (*manifests(), *patched):
        if manifest["kind"] in {"Deployment", "DaemonSet"}:
            name = manifest["metadata"]["name"]
            pod = pods[name] = pods.get(name, {}) | manifest["spec"]["template"]["spec"]
            yield from (
                (container["name"], container, pod)
                for container in pod["containers"]
                if container.get("image", "").partition(":")[0] == "leasehold"
            )


def privileges() -> str:
    """Return a table of what containers may do on their node; equal ones share a row."""
    rows: dict[str, list[str]] = {}
    for name, container, pod in sorted(containers(), key=lambda row: row[0]):
        row = (
            f"{_user(container, pod)} | {capabilities(container)} | "
            f"{'the node' if pod.get('hostPID') else 'its own'} | {_host_paths(container, pod)}"
        )
        rows.setdefault(row, []).append(name)
    head = "| container | user | capabilities | process IDs | host paths |"
    lines = [f"| {', '.join(names)} | {row} |" for row, names in rows.items()]
    return "\n".join([head, "|---|---|---|---|---|", *lines])


def _user(container: dict[str, Any], pod: dict[str, Any]) -> str:
    context = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    return "root" if context.get("runAsUser") == 0 else str(context.get("runAsUser", "65532"))


def capabilities(container: dict[str, Any]) -> str:
    context = container.get("securityContext", {})
    added = context.get("capabilities", {}).get("add", [])
    return "all: it is privileged" if context.get("privileged") else ", ".join(added) or "none"


def _host_paths(container: dict[str, Any], pod: dict[str, Any]) -> str:
    volumes = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod.get("volumes", [])
        if "hostPath" in volume
    }
    mounts = [
        f"`{volumes[mount['name']]}`{' read-only' if mount.get('readOnly') else ''}"
        for mount in container.get("volumeMounts", [])
        if mount["name"] in volumes
    ]
    return ", ".join(mounts) or "nothing"


def nats_users() -> str:
    """Return a table of the events and requests that each user of NATS may publish."""
    rows = []
    for user in all_users([NodeName(NODE)]):
        names = {subject.removesuffix(".*") for subject in user.publish if subject[0] not in "$_"}
        events = sorted(
            {re.sub(r"^[^.]+\.[^.]+\.(.*)\.v\d+(\.[^.]+)?$", r"\1", name) for name in names}
            - RUNTIME_EVENTS
        )
        listed = ", ".join(f"`{event}`" for event in events) or "nothing"
        of_node = " of its node" if user.name.endswith(NODE) else ""
        rows.append(f"| {user.name} | {listed}{of_node} |")
    return "\n".join(["| user | may publish |", "|---|---|", *rows])


def redis_users() -> str:
    """Return a table of the keys that each user of Redis may access."""
    rows = [
        f"| {user.name} | {_code(user.writes)} | {_code(user.reads)} | "
        f"{'yes' if user.loads_functions else 'no'} | "
        f"{_code(user.commands)} |"
        for user in REDIS_USERS
    ]
    head = "| user | writes | reads | loads functions | commands besides those of the ledger |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|") or "nothing"


def rights() -> str:
    """Return a table of the permissions of each service account in the cluster."""
    rows = [
        f"| {name} | {'; '.join(may) or 'nothing: it has no token'} |"
        for name, may in sorted(all_rights().items())
    ]
    return "\n".join(["| service | may |", "|---|---|", *rows])


def pod_rules() -> str:
    """Return a table of the fields that a pod with GPUs must not set."""
    rows = [f"| {rule.fields} | {rule.denied} | {rule.held_by} |" for rule in RULES]
    return "\n".join(["| field | denied | held by |", "|---|---|---|", *rows])
