"""The volumes of pods: directories of this machine, and claims, which only have to be bound."""

from collections.abc import Mapping
from pathlib import Path

from simcluster.apimachinery.objects import Json, at_path, metadata
from simcluster.apimachinery.volumes import CLAIMS, VOLUMES, admits_node, is_bound, pod_claims
from simcluster.kubelet.containers.container_env import FindSource, MissingSourceError, source_data
from simcluster.kubelet.containers.container_spec import PodSpec
from simcluster.ports import ClusterStore

_KINDS = {"configMap": ("configmaps", "name"), "secret": ("secrets", "secretName")}


class UnmountedError(Exception):
    """A volume of the pod cannot be mounted yet."""


def check_claims(pod: PodSpec, node_name: str, store: ClusterStore) -> None:
    """Raise UnmountedError for a claim that is not bound to a volume in reach of the node."""
    for claim in pod_claims(pod.obj):
        record = store.find(CLAIMS, pod.namespace, claim.name)
        node = store.read("nodes", None, node_name)
        reason = _unmounted_reason(record.obj if record else None, node, store)
        if reason:
            raise UnmountedError(
                f"Unable to attach or mount volumes: error processing PVC "
                f"{pod.namespace}/{claim.name}: {reason}"
            )


def _unmounted_reason(claim: Json | None, node: Json, store: ClusterStore) -> str:
    """Return why a claim cannot be mounted on a node, or an empty text."""
    if claim is None:
        return "failed to fetch PVC from API server: not found"
    if "deletionTimestamp" in metadata(claim):
        return "PVC is being deleted"
    if not is_bound(claim):
        return "PVC is not bound"
    volume = store.find(VOLUMES, None, str(at_path(claim, "spec.volumeName")))
    if volume is None or not admits_node(volume.obj, node):
        return "the node does not match the node affinity of its volume"
    return ""


def make_volumes(pod: PodSpec, directory: Path, find_source: FindSource) -> dict[str, str]:
    """Return the path of each volume by name, made in a directory of the pod if it needs one.

    Other kinds of volumes have none. Raises MissingSourceError for an absent ConfigMap or Secret.
    """
    made: dict[str, str] = {}
    for volume in pod.obj["spec"].get("volumes") or ():
        if volume.get("hostPath"):
            made[volume["name"]] = volume["hostPath"].get("path", "")
            continue
        folder = directory / volume["name"]
        files = {} if "emptyDir" in volume else _files(volume, find_source)
        if files is not None:
            folder.mkdir(parents=True, exist_ok=True)
            made[volume["name"]] = str(folder)
            for path, text in files.items():
                _write(folder, path, text)
    return made


def _files(volume: Json, find_source: FindSource) -> Mapping[str, str] | None:
    """Return the files of a ConfigMap's or Secret's volume by path; None for other volumes."""
    for kind, (resource, name) in _KINDS.items():
        source = volume.get(kind)
        if source:
            data = source_data(source | {"name": source.get(name)}, resource, find_source) or {}
            items = source.get("items")
            if not items:
                return data
            return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
    return None


def _write(folder: Path, path: str, text: str) -> None:
    file = folder / path
    if not file.resolve().is_relative_to(folder.resolve()):
        raise MissingSourceError(f"path {path} of a volume leaves the volume")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
