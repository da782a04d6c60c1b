"""The environment and the mounts of a container, of its plugins and its pod; pure.

The pod's values take precedence over those of device plugins.
"""

import re
from collections.abc import Iterable, Mapping

from proto.deviceplugin import api_pb2
from simcluster.apimachinery.objects import Json, at_path
from simcluster.kubelet.containers.container_spec import ContainerSpec, PodSpec
from simcluster.kubelet.containers.container_state import MountPoint

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


def environment(
    pod: PodSpec,
    container: ContainerSpec,
    responses: Iterable[api_pb2.ContainerAllocateResponse],
    *,
    pod_ip: str,
    host_ip: str,
) -> dict[str, str]:
    """Return the environment; if two plugins set a variable, the first one counts."""
    env = {
        "PATH": PATH,
        "HOSTNAME": str(at_path(pod.obj, "spec.hostname") or pod.name),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_SERVICE_PORT_HTTPS": "443",
    }
    plugin_env: dict[str, str] = {}
    for answer in responses:
        for name, text in answer.envs.items():
            plugin_env.setdefault(name, text)
    env |= plugin_env
    facts = {"status.podIP": pod_ip, "status.hostIP": host_ip}
    for entry in container.env:
        value: object = entry.get("value")
        if value is None:
            value = _from_field(pod, entry.get("valueFrom") or {}, facts)
        env[entry["name"]] = expand_references(str(value), env)
    return env


def expand_references(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` for known names; unknown references stay, and `$$` is one dollar."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(replaced, text)


def _from_field(pod: PodSpec, source: Json, facts: Mapping[str, str]) -> str:
    path = at_path(source, "fieldRef.fieldPath") or ""
    if path in facts:
        return facts[path]
    keyed = _KEYED.fullmatch(path)
    if keyed is not None:
        values = pod.obj["metadata"].get(keyed[1]) or {}
        return str(values.get(keyed[2], ""))
    found = at_path(pod.obj, path) if path else None
    return "" if found is None else str(found)


def mount_points(
    container: ContainerSpec, responses: Iterable[api_pb2.ContainerAllocateResponse]
) -> list[MountPoint]:
    """Return the mounts: the pod's host paths, and those of plugins at other paths."""
    mounts = {
        path: MountPoint(path, host, read_only=False) for path, host in container.host_paths.items()
    }
    for answer in responses:
        for mount in answer.mounts:
            mounts.setdefault(
                mount.container_path,
                MountPoint(mount.container_path, mount.host_path, mount.read_only),
            )
    return list(mounts.values())
