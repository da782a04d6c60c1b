"""The environment and the mounts of a container, of its plugins, its pod and its runtime; pure.

As in a kubelet, the pod's variables take precedence over those of device plugins, and these over
those of the image, its `env` over its `envFrom`, and what comes later over what comes before. What
CDI devices set is added by the container runtime, after all of them.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.apimachinery.objects import Json, at_path
from simcluster.kubelet.containers.container_spec import (
    ContainerSpec,
    PodSpec,
    image_variables,
)
from simcluster.kubelet.containers.container_state import MountPoint

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


class MissingSourceError(Exception):
    """A ConfigMap, a Secret or a key that the container needs is absent."""


FindSource = Callable[[str, str], Json | None]
"""Returns a ConfigMap or a Secret of the pod's namespace, by resource and name; None: absent."""
_SOURCES = {"configMap": "configmaps", "secret": "secrets"}


def environment(
    pod: PodSpec,
    container: ContainerSpec,
    responses: Iterable[api_pb2.ContainerAllocateResponse],
    edits: Iterable[api_pb2.ContainerAllocateResponse],
    *,
    find_source: FindSource,
    pod_ip: str,
    host_ip: str,
) -> dict[str, str]:
    """Return the environment; if two plugins set a variable, the first one counts.

    Raises MissingSourceError for a ConfigMap, a Secret or a key that is absent and not optional.
    """
    own = {
        "PATH": PATH,
        "HOSTNAME": str(at_path(pod.obj, "spec.hostname") or pod.name),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_SERVICE_PORT_HTTPS": "443",
    }
    for source in container.env_from:
        prefix = source.get("prefix") or ""
        own |= {f"{prefix}{key}": text for key, text in _all_keys(source, find_source).items()}
    facts = {"status.podIP": pod_ip, "status.hostIP": host_ip}
    for entry in container.env:
        value: object = entry.get("value")
        if value is None:
            value = _from_source(pod, entry.get("valueFrom") or {}, facts, find_source)
        if value is not None:
            own[entry["name"]] = expand_references(str(value), own)
    runtime = {name: text for answer in edits for name, text in answer.envs.items()}
    return image_variables(pod.annotations) | _plugin_variables(responses) | own | runtime


def _plugin_variables(
    responses: Iterable[api_pb2.ContainerAllocateResponse],
) -> dict[str, str]:
    variables: dict[str, str] = {}
    for answer in responses:
        for name, text in answer.envs.items():
            variables.setdefault(name, text)
    return variables


def _all_keys(source: Json, find_source: FindSource) -> Mapping[str, str]:
    for kind, resource in _SOURCES.items():
        reference = source.get(f"{kind}Ref")
        if reference:
            return source_data(reference, resource, find_source) or {}
    return {}


def source_data(
    reference: Json, resource: str, find_source: FindSource
) -> Mapping[str, str] | None:
    """Return the entries of a ConfigMap or Secret; None if it is absent and optional."""
    source = find_source(resource, reference.get("name") or "")
    if source is None:
        if reference.get("optional"):
            return None
        raise MissingSourceError(
            f'{resource.removesuffix("s")} "{reference.get("name")}" not found'
        )
    data = source.get("data") or {}
    if resource == "secrets":
        return {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {key: str(value) for key, value in data.items()}


def _from_source(
    pod: PodSpec, source: Json, facts: Mapping[str, str], find_source: FindSource
) -> str | None:
    """Return the value of a variable; None if its source is absent and optional."""
    for kind, resource in _SOURCES.items():
        reference = source.get(f"{kind}KeyRef")
        if reference:
            data = source_data(reference, resource, find_source)
            key = reference.get("key") or ""
            if data is not None and key not in data and not reference.get("optional"):
                raise MissingSourceError(
                    f"couldn't find key {key} in {resource.removesuffix('s')} "
                    f"{pod.namespace}/{reference.get('name')}"
                )
            return None if data is None else data.get(key)
    return _from_field(pod, source, facts)


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
    value = at_path(pod.obj, path) if path else None
    return "" if value is None else str(value)


def mount_points(
    container: ContainerSpec,
    volumes: Mapping[str, str],
    responses: Iterable[api_pb2.ContainerAllocateResponse],
) -> list[MountPoint]:
    """Return the mounts: the pod's volumes that have a path, and those of plugins elsewhere."""
    mounts = {
        mount.path: MountPoint(
            mount.path,
            str(PurePosixPath(volumes[mount.volume], mount.sub_path)),
            read_only=mount.read_only,
        )
        for mount in container.volume_mounts
        if mount.volume in volumes
    }
    for answer in responses:
        for mount in answer.mounts:
            mounts.setdefault(
                mount.container_path,
                MountPoint(mount.container_path, mount.host_path, mount.read_only),
            )
    return list(mounts.values())
