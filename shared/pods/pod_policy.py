"""What a pod with GPUs must not set; pure.

`docs/reference.md` shows `RULES`. A check applies the rules that it can: watcher and update see
less than admission does of a new pod.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto

from shared.dialects.gpu_names import annotations_with_gpus
from shared.dialects.protected_paths import (
    HARMLESS_PATHS,
    HOST_PATHS,
    host_path_advice,
    is_data_path,
    is_driver_path,
    is_mps_path,
    lease_conflict,
    normalized,
)
from shared.dialects.reserved import (
    CAPABILITIES,
    DEVICE_ORDER,
    LIBRARY_DIRECTORY,
    LIBRARY_SEARCH,
    NAMES,
    NO_DEVICE_VALUES,
    NOTHING_VISIBLE,
    PREFIXES,
    VISIBLE,
    is_device_name_mount,
    may_set_reserved,
    sets_reserved,
)
from shared.dialects.strict_values import shown
from shared.dialects.vocabulary import request_one
from shared.model.bounds import LONGEST_FIELD, cut
from shared.model.change import Change, Hint, Place, field_removed, words
from shared.model.requests.request import PodRequest
from shared.pods.pod_view import ContainerMount, PodContainer, PodView

SANDBOXES = ("gvisor", "runsc")
"""Their containers have a kernel of their own."""
TEMPORARY = "/tmp"  # noqa: S108 - inside the container
HOSTNAME = "kubernetes.io/hostname"
"""Label of nodes. https://kubernetes.io/docs/reference/labels-annotations-taints/"""
FREE_PREFIX = "APP_"
"""No reserved variable begins with it."""


class Check(Flag):
    """Where rules are applied."""

    CREATION = auto()
    """Admission of a new pod."""
    EXEMPTED = auto()
    """Admission of a new pod in a namespace that administrators have exempted."""
    UPDATE = auto()
    """Admission of a changed pod."""
    WATCH = auto()
    """For pods that were created while the webhook was not running."""
    DEMAND = auto()
    """For the sake of other pods: at admission in every namespace, and at the watcher."""


ADMISSION = Check.CREATION | Check.UPDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySubject:
    check: Check
    pod: PodView
    containers: Sequence[PodContainer]
    """All of a new pod, or those that an update adds."""
    gpu_containers: Sequence[PodContainer] = ()
    gpu_containers_of_pod: Sequence[PodContainer] = ()
    """All of the pod that request GPUs."""
    allow_privileged: bool = False
    allow_env_from: bool = False
    host_paths: Sequence[str] = HOST_PATHS
    """Directories of nodes that contain only data."""


Broken = Iterator[Hint]


@dataclass(frozen=True, slots=True)
class PodRule:
    """Which fields of which containers it forbids, and what to do instead."""

    fields: str
    denied: str
    find: Callable[[PolicySubject], Broken]
    """Yields container, field, value, and what to do."""
    held_by: str = "admission"
    """What holds pods to it."""
    checks: Check = ADMISSION


def violations(subject: PolicySubject) -> Iterator[Hint]:
    for rule in RULES:
        if subject.check in rule.checks:
            yield from rule.find(subject)


def demand_violations(pod: PodView, request: PodRequest) -> Iterator[Hint]:
    shared = {
        part.container
        for part in request.containers
        if part.held_by.by_shared_server and not part.whole
    }
    containers = [container for container in pod.containers if container.name in shared]
    return violations(
        PolicySubject(check=Check.DEMAND, pod=pod, containers=containers, gpu_containers=containers)
    )


def device_names(pod: PodView, containers: Iterable[PodContainer]) -> Iterator[Hint]:
    for key, name in annotations_with_gpus(pod.annotations).items():
        yield Hint(
            f"annotation {key} would select devices in the container runtime ({cut(name)}): remove "
            "it, as Leasehold provides the devices",
            (Change(Place.ANNOTATION, key),),
        )
    yield from device_mounts(containers)


def hidden_devices(container: PodContainer, *, beside_gpus: bool) -> Iterator[Hint]:
    """`beside_gpus` is whether other containers of the pod request GPUs."""
    value = container.variables.get(VISIBLE, "")
    if value in NO_DEVICE_VALUES or container.requests_gpu:
        return
    fault = (
        f"container {container.name}: {VISIBLE} is {shown(value)} and shows it no GPU, as it "
        f"requests none: remove it"
    )
    removed = field_removed(f"env[{VISIBLE}]", container.name)
    if beside_gpus or container.ephemeral:
        yield Hint(fault, (removed,))
        return
    request = request_one(container.zeros, container.name)
    text = f"{fault}, and if the container needs a GPU, {request.text}"
    yield Hint(text, (removed, *request.changes))


def device_mounts(containers: Iterable[PodContainer]) -> Iterator[Hint]:
    for container in containers:
        for mount in container.mounts:
            path = normalized(mount.path)
            if is_device_name_mount(path):
                yield Hint(
                    f"container {container.name}: a mount at {path} would select devices in the "
                    "container runtime: remove it, as Leasehold provides the devices",
                    (field_removed(f"volumeMounts[{mount.path}]", container.name),),
                )


def _node_name(subject: PolicySubject) -> Broken:
    node = subject.pod.spec.node_name
    if node:
        yield Hint(
            f"nodeName is set to {node}, which bypasses every scheduler: use the node selector "
            f"{HOSTNAME}: {node}, or affinity",
            (field_removed("spec.nodeName"), Change(Place.SELECTOR, HOSTNAME, node)),
        )


def _host_namespaces(subject: PolicySubject) -> Broken:
    spec = subject.pod.spec
    for name, is_set in (("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)):
        if is_set:
            yield Hint(
                f"{name} gives access to processes of other pods: remove it",
                (field_removed(f"spec.{name}"),),
            )


def _runtime_class(subject: PolicySubject) -> Broken:
    name = subject.pod.spec.runtime_class_name or ""
    if any(word in name.lower() for word in SANDBOXES):
        yield Hint(
            f"runtimeClassName {name}: gVisor hides processes from the node, so that shares could "
            "be neither limited nor measured: remove it",
            (field_removed("spec.runtimeClassName"),),
        )


def _host_paths(subject: PolicySubject) -> Broken:
    for volume, path in subject.pod.host_paths.items():
        if is_mps_path(path):
            yield Hint(
                f"volume {volume}: hostPath {path} leads to a server of MPS, which no pod mounts "
                "here: remove the volume, its part of a GPU is held without it"
            )
        elif is_driver_path(path):
            mounts = [
                field_removed(f"volumeMounts[{mount.path}]", container.name)
                for container in subject.pod.containers
                for mount in container.mounts
                if mount.volume == volume
            ]
            yield Hint(
                f"volume {volume}: hostPath {path} has the driver or its devices: remove it from "
                "spec.volumes and volumeMounts, as a container with a GPU gets both without it",
                (field_removed(f"spec.volumes[{volume}]"), *mounts),
            )
        elif not is_data_path(path, subject.host_paths):
            yield Hint(
                f"volume {volume}: hostPath {path} gives access to the node or its devices: "
                f"{host_path_advice(subject.host_paths)}"
            )


def _privileged(subject: PolicySubject) -> Broken:
    for container in subject.containers:
        if container.privileged and not subject.allow_privileged:
            yield Hint(
                f"container {container.name} is privileged and would see every GPU: remove "
                "securityContext.privileged, and add only the capabilities that it needs",
                (field_removed("securityContext.privileged", container.name),),
            )


def _capabilities(subject: PolicySubject) -> Broken:
    for container in subject.containers:
        for name in container.capabilities:
            if name.upper().removeprefix("CAP_") in CAPABILITIES:
                yield Hint(
                    f"container {container.name}: capability {name} could lift the GPU limits: "
                    "remove it from securityContext.capabilities.add",
                    (field_removed(f"securityContext.capabilities.add[{name}]", container.name),),
                )


def _shared_processes(subject: PolicySubject) -> Broken:
    """A process that enters another root directory may remove directories of the lease's mounts.

    The kernel removes the mounts with them.
    """
    if subject.pod.spec.share_process_namespace:
        yield Hint(
            "shareProcessNamespace lets other containers remove the files that limit the GPU: "
            "remove it",
            (field_removed("spec.shareProcessNamespace"),),
        )
    with_gpus = {container.name for container in subject.gpu_containers_of_pod}
    for container in subject.containers:
        if container.target in with_gpus:
            yield Hint(
                f"container {container.name}: targetContainerName {container.target} has GPUs, and "
                "the files that limit them could be removed: debug the pod without a target",
                (field_removed("targetContainerName", container.name),),
            )


def _mounts(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        for mount in container.mounts:
            conflict = lease_conflict(mount.path)
            if conflict and not _is_temporary(mount, subject.pod):
                what = "a volume mounted at" if mount.volume else "terminationMessagePath"
                fault = (
                    f"container {container.name}: {what} {mount.path} could replace {conflict}, "
                    "which Leasehold mounts"
                )
                instead = _other_path(mount, container, subject.pod)
                yield Hint(f"{fault}: {instead.text}", instead.changes)
    yield from _shared_temporaries(subject)


def _other_path(mount: ContainerMount, container: PodContainer, pod: PodView) -> Hint:
    """Return what to write instead of a mount or a path that conflicts with the lease."""
    of_mount = f"volumeMounts[{mount.path}]"
    if not mount.volume:
        removed = field_removed("terminationMessagePath", container.name)
        return Hint("leave it out, or use another path", (removed,))
    if normalized(mount.path) == TEMPORARY and mount.volume in pod.empty_dirs:
        fields = ("subPath", "subPathExpr", "readOnly")
        changes = tuple(field_removed(f"{of_mount}.{name}", container.name) for name in fields)
        return Hint("mount all of the emptyDir, without subPath and readOnly", changes)
    other = f"/volumes/{mount.volume}"
    return Hint(
        f"use another path, such as {other}",
        (Change(Place.FIELD, f"{of_mount}.mountPath", other, container.name),),
    )


def _shared_temporaries(subject: PolicySubject) -> Broken:
    holders = {
        mount.volume: holder.name
        for holder in subject.gpu_containers_of_pod
        for mount in holder.mounts
        if _is_temporary(mount, subject.pod)
    }
    for container in subject.containers:
        times = Counter(mount.volume for mount in container.mounts if mount.volume in holders)
        for volume, count in times.items():
            if count > (1 if container.name == holders[volume] else 0):
                yield Hint(
                    f"container {container.name}: volume {volume} is {TEMPORARY} of container "
                    f"{holders[volume]}, and the files that limit its GPU are mounted below it: "
                    "mount a volume of its own"
                )


def _is_temporary(mount: ContainerMount, pod: PodView) -> bool:
    """The lease is mounted after the volume, below it.

    No link can lead its mounts elsewhere: the directory is empty when the pod starts, and in the
    container's mount namespace nothing can be removed on which something is mounted.
    """
    is_all = mount.whole and mount.volume in pod.empty_dirs
    return is_all and normalized(mount.path) == TEMPORARY


def _variables(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        place = f"container {container.name}"
        for name, value in container.variables.items():
            if (name, value) == (VISIBLE, NOTHING_VISIBLE) and not container.requests_gpu:
                continue  # the webhook has set it, and a claim's devices replace it
            if sets_reserved(name, value):
                yield Hint(
                    f"{place}: variable {name} may be set by Leasehold only: remove it",
                    (field_removed(f"env[{name}]", container.name),),
                )
            elif name == LIBRARY_SEARCH:
                fault = _search_fault(value, has_source=name in container.value_from)
                if fault:
                    yield Hint(f"{place}: {name} {fault}")


def _search_fault(value: str, *, has_source: bool) -> str:
    """Return why a container must not search libraries there, or ""."""
    if has_source:
        return "uses valueFrom, which cannot be checked: write its value"
    if len(value) > LONGEST_FIELD:
        return f"has {len(value)} characters; at most {LONGEST_FIELD} are allowed"
    if "$(" in value:
        return "refers to another variable, which cannot be checked: write its value"
    if _searches_library(value):
        return f"contains {LIBRARY_DIRECTORY}: remove that directory from it"
    return ""


def _searches_library(value: str) -> bool:
    return any(
        f"{normalized(directory)}/".startswith(f"{LIBRARY_DIRECTORY}/")
        for directory in value.split(":")
    )


def _env_from(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        for number, prefix in enumerate(container.prefixes):
            if may_set_reserved(prefix) and not subject.allow_env_from:
                source = f"envFrom with prefix {prefix}" if prefix else "envFrom without a prefix"
                yield Hint(
                    f"container {container.name}: {source} could set variables that select devices "
                    "or lift limits, now or when its source changes: give it a prefix such as "
                    f"{FREE_PREFIX}, or list the variables in env with valueFrom",
                    (
                        Change(
                            Place.FIELD, f"envFrom[{number}].prefix", FREE_PREFIX, container.name
                        ),
                    ),
                )


def _user_zero(subject: PolicySubject) -> Broken:
    """A user namespace makes user 0 another one on the node.

    A user that only the image knows may be 0.
    """
    spec = subject.pod.spec
    if spec.host_users is False:
        return
    for container in subject.gpu_containers:
        name = container.name
        fault = (
            f"container {name} could run programs of user 0, which can lift the limits of all "
            "containers at its GPU's server of MPS"
        )
        if container.user == 0:
            in_namespace = Change(Place.FIELD, "spec.hostUsers", "false")
            yield Hint(
                f"{fault}: set hostUsers: false of the pod, or another runAsUser of the container "
                "and allowPrivilegeEscalation: false",
                () if spec.host_network else (in_namespace,),
            )
            continue
        not_zero = Change(Place.FIELD, "securityContext.runAsNonRoot", "true", name)
        no_setuid = Change(Place.FIELD, "securityContext.allowPrivilegeEscalation", "false", name)
        needs_user = container.user is None and not container.non_root
        changes = (not_zero,) * needs_user + (no_setuid,) * container.may_escalate
        if changes:
            yield Hint(f"{fault}: {words(changes)}, or set hostUsers: false of the pod", changes)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _free_variables() -> Iterator[str]:
    for names in PREFIXES.values():
        yield from (f"{name}…" if name.endswith("_") else name for name in names)


RULES = (
    PodRule(
        "`nodeName`",
        "any value",
        _node_name,
        "admission; the node agent, without a lease",
        Check.CREATION,
    ),
    PodRule("`hostPID`, `hostIPC`", "true", _host_namespaces),
    PodRule("`runtimeClassName`", f"names with {_listed(SANDBOXES)}", _runtime_class),
    PodRule(
        "`shareProcessNamespace`; `targetContainerName` of ephemeral containers",
        "true; a container with GPUs",
        _shared_processes,
    ),
    PodRule(
        "`volumes[].hostPath`",
        f"all but {_listed(HARMLESS_PATHS)}, and what is below the directories of "
        f"`--host-paths`, by default {_listed(HOST_PATHS)}",
        _host_paths,
        "admission; the watcher rejects the pod",
        ADMISSION | Check.WATCH,
    ),
    PodRule(
        "`securityContext.privileged` of any container",
        "true, unless the webhook runs with `--allow-privileged`",
        _privileged,
        "admission; the watcher rejects the pod",
        ADMISSION | Check.WATCH,
    ),
    PodRule(
        "`securityContext.capabilities.add` of any container",
        ", ".join(f"`{name}`" for name in sorted(CAPABILITIES)),
        _capabilities,
    ),
    PodRule(
        "`volumeMounts`, `volumeDevices`, `terminationMessagePath` of containers with GPUs",
        f"paths that the lease mounts, those above and below them, those that end like them (such "
        f"as `x/ld.so.preload`); not an `emptyDir` at `{TEMPORARY}` that nothing else mounts",
        _mounts,
        "admission; the node agent reports what a link in the image leads there",
    ),
    PodRule(
        "`env` of containers with GPUs",
        f"{_listed(f'{prefix}…' for prefix in PREFIXES)}, but "
        f"{_listed(f'{name}={value}' for name, value in DEVICE_ORDER.items())} and "
        f"{_listed(_free_variables())}; {_listed(sorted(NAMES))}; `{LIBRARY_SEARCH}` with the "
        "library's directory, `valueFrom` or `$(…)`",
        _variables,
        "admission; the node agent refuses the container",
        ADMISSION | Check.EXEMPTED,
    ),
    PodRule(
        "`envFrom` of containers with GPUs",
        "sources whose prefix does not keep them from setting such variables, unless the webhook "
        "runs with `--allow-env-from`",
        _env_from,
        "admission; the node agent, where a variable passes the devices",
        ADMISSION | Check.EXEMPTED,
    ),
    PodRule(
        "`securityContext` of containers with shares of a GPU by `mps-shared`, unless the pod has "
        "`hostUsers: false`",
        "`runAsUser` 0, or neither another one nor `runAsNonRoot: true`; "
        "`allowPrivilegeEscalation` but false",
        _user_zero,
        "admission, also in exempt namespaces; the watcher rejects the pod",
        Check.DEMAND,
    ),
)
