"""What a pod with GPUs must not set, since it could see other devices or lift its limits; pure.

`RULES` is the table; `docs/security.md` shows it. In namespaces with the label `EXEMPT_LABEL`, set
by administrators, only the rules on variables apply: the node agent enforces those, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.webhook.reviewed_pod import (
    EnvFromSource,
    ReviewedContainer,
    ReviewedMount,
    ReviewedPod,
)
from shared.dialects.protected_paths import lease_conflict, node_conflict, normalized
from shared.dialects.reserved import (
    CAPABILITIES,
    CDI_ANNOTATIONS,
    CDI_VENDORS,
    DEVICE_ORDER,
    LIBRARY_DIRECTORY,
    LIBRARY_SEARCH,
    NOTHING_VISIBLE,
    VISIBLE,
    is_device_name_mount,
    is_reserved,
    is_reserved_prefix,
    sets_reserved,
)

TEMPORARY = "/tmp"  # noqa: S108 - inside the container
EnvFromKeys = Callable[[EnvFromSource], frozenset[str] | None]
"""The keys of a ConfigMap or Secret in the pod's namespace; None if they cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySubject:
    """What the rules are applied to."""

    pod: ReviewedPod
    containers: Sequence[ReviewedContainer]
    """Those under review: all of a new pod, or those that an update adds."""
    gpu_containers: Sequence[ReviewedContainer]
    """Those of them that request GPUs."""
    gpu_containers_of_pod: Sequence[ReviewedContainer]
    """All of the pod that request GPUs."""
    env_from_keys: EnvFromKeys
    allow_privileged: bool = False
    allow_unread_secrets: bool = False


Broken = Iterator[str]


@dataclass(frozen=True, slots=True)
class PodRule:
    """One rule: which fields of which containers it forbids, and what to do instead."""

    fields: str
    denied: str
    find: Callable[[PolicySubject], Broken]
    """Yields container, field, value, and what to do."""
    variables: bool = False
    """It is about variables, and holds in exempt namespaces, too."""


def violations(subject: PolicySubject, *, exempt: bool = False) -> Iterator[str]:
    """Yield every field that breaks a rule, with its container and what to do."""
    for rule in RULES:
        if rule.variables or not exempt:
            yield from rule.find(subject)


def device_names(pod: ReviewedPod, containers: Iterable[ReviewedContainer]) -> Iterator[str]:
    """Yield fields that select devices in the container runtime; no pod may have them."""
    for key, value in pod.annotations.items():
        if key.startswith(CDI_ANNOTATIONS) and any(vendor in value for vendor in CDI_VENDORS):
            yield (
                f"annotation {key} would select devices in the container runtime: remove it, the "
                "lease provides the devices"
            )
    for container in containers:
        paths = (normalized(mount.path) for mount in container.mounts)
        for path in filter(is_device_name_mount, paths):
            yield (
                f"container {container.name}: a mount at {path} would select devices in the "
                "container runtime: remove it, the lease provides the devices"
            )


def _node_name(subject: PolicySubject) -> Broken:
    if subject.pod.node:
        yield (
            f"nodeName is set to {subject.pod.node}, which bypasses every scheduler: use a node "
            "selector or affinity"
        )


def _host_namespaces(subject: PolicySubject) -> Broken:
    for name in subject.pod.host_namespaces:
        yield f"{name} gives access to processes of other pods: remove it"


def _host_paths(subject: PolicySubject) -> Broken:
    for volume, path in subject.pod.host_paths.items():
        conflict = node_conflict(path)
        if conflict:
            yield (
                f"volume {volume}: hostPath {path} gives access to {conflict} of the node: remove "
                "it, or mount a directory that contains only the data"
            )


def _privileged(subject: PolicySubject) -> Broken:
    for container in subject.containers:
        if container.privileged and not subject.allow_privileged:
            yield (
                f"container {container.name} is privileged and would see every device: add only "
                "the capabilities that it needs"
            )


def _capabilities(subject: PolicySubject) -> Broken:
    for container in subject.containers:
        for name in container.capabilities:
            if name.upper().removeprefix("CAP_") in CAPABILITIES:
                yield (
                    f"container {container.name}: capability {name} could lift the limits of "
                    "devices: remove it from securityContext.capabilities.add"
                )


def _shared_processes(subject: PolicySubject) -> Broken:
    """Yield what lets a process enter the root directory of a container with GPUs.

    It may remove the directories there on which the lease is mounted, and the kernel then removes
    the mounts.
    """
    if subject.pod.shares_processes:
        yield (
            "shareProcessNamespace lets other containers remove what the lease mounts: remove it"
        )
    with_gpus = {container.name for container in subject.gpu_containers_of_pod}
    for container in subject.containers:
        if container.target in with_gpus:
            yield (
                f"container {container.name}: targetContainerName {container.target} has GPUs, and "
                "what its lease mounts could be removed: debug the pod without a target"
            )


def _mounts(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        for mount in container.mounts:
            conflict = lease_conflict(mount.path)
            if conflict and not _is_temporary(mount, subject.pod):
                yield (
                    f"container {container.name}: a volume mounted at {mount.path} could replace "
                    f"{conflict}, which the lease mounts: mount it at another path"
                )
    for holder in subject.gpu_containers_of_pod:
        for volume in (each.volume for each in holder.mounts if _is_temporary(each, subject.pod)):
            yield from (
                f"container {container.name}: volume {volume} is {TEMPORARY} of container "
                f"{holder.name}, whose lease is mounted below it: mount a volume of its own"
                for container in subject.containers
                if _mounts_again(container, volume, holder)
            )


def _is_temporary(mount: ReviewedMount, pod: ReviewedPod) -> bool:
    """Return whether a mount hides nothing of the lease, which is mounted after it, below it.

    No link can lead the lease's mounts elsewhere: the directory is empty when the pod starts, and
    in the container's own mount namespace nothing can be removed on which something is mounted.
    """
    is_all = mount.whole and mount.volume in pod.empty_dirs
    return is_all and normalized(mount.path) == TEMPORARY


def _mounts_again(container: ReviewedContainer, volume: str, holder: ReviewedContainer) -> bool:
    """Return whether a container has the holder's volume: the holder itself, a second time."""
    times = sum(mount.volume == volume for mount in container.mounts)
    return times > (1 if container.name == holder.name else 0)


def _variables(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        place = f"container {container.name}"
        for name, value in container.variables.items():
            if (name, value) == (VISIBLE, NOTHING_VISIBLE) and not container.requests_gpu:
                continue  # the webhook has set it, and a claim's devices replace it
            if sets_reserved(name, value):
                yield f"{place}: variable {name} is set by the lease only: remove it"
            elif name == LIBRARY_SEARCH and name in container.value_from:
                yield f"{place}: {name} uses valueFrom, which cannot be checked: write its value"
            elif name == LIBRARY_SEARCH and "$(" in value:
                yield (
                    f"{place}: {name} refers to another variable, which cannot be checked: write "
                    "its value"
                )
            elif name == LIBRARY_SEARCH and _searches_library(value):
                yield (
                    f"{place}: {name} contains {LIBRARY_DIRECTORY}: remove that directory from it"
                )


def _searches_library(value: str) -> bool:
    return any(
        f"{normalized(each)}/".startswith(f"{LIBRARY_DIRECTORY}/") for each in value.split(":")
    )


def _env_from(subject: PolicySubject) -> Broken:
    for container in subject.gpu_containers:
        for source in container.env_from:
            text = _env_from_violation(source, subject)
            if text:
                yield f"container {container.name}: {text}"


def _env_from_violation(source: EnvFromSource, subject: PolicySubject) -> str:
    """Return why a source may not set variables; empty: it may."""
    if is_reserved_prefix(source.prefix):
        return (
            f"envFrom with prefix {source.prefix} sets variables that the lease sets: use another "
            "prefix"
        )
    keys = subject.env_from_keys(source)
    if keys is None:
        if subject.allow_unread_secrets:
            return ""
        return (
            f"envFrom sets every key of {source.kind} {source.name}, which cannot be checked: list "
            "the variables one by one with valueFrom"
        )
    names = sorted(source.prefix + key for key in keys)
    reserved = [name for name in names if is_reserved(name) or name == LIBRARY_SEARCH]
    if not reserved:
        return ""
    return (
        f"envFrom {source.kind} {source.name} sets {reserved[0]}, which the lease sets: remove "
        "that key"
    )


RULES = (
    PodRule("`nodeName`", "any value", _node_name),
    PodRule("`hostPID`, `hostIPC`", "true", _host_namespaces),
    PodRule(
        "`shareProcessNamespace`; `targetContainerName` of ephemeral containers",
        "true; a container with GPUs",
        _shared_processes,
    ),
    PodRule(
        "`volumes[].hostPath`",
        "paths of devices, the library, the container runtime, the kubelet and the node agent; "
        "those above and below them",
        _host_paths,
    ),
    PodRule(
        "`securityContext.privileged` of any container",
        "true, unless the webhook runs with `--allow-privileged`",
        _privileged,
    ),
    PodRule(
        "`securityContext.capabilities.add` of any container",
        ", ".join(f"`{name}`" for name in sorted(CAPABILITIES)),
        _capabilities,
    ),
    PodRule(
        "`volumeMounts`, `volumeDevices` of containers with GPUs",
        f"paths that the lease mounts, those above and below them; not an `emptyDir` at "
        f"`{TEMPORARY}` that nothing else mounts",
        _mounts,
    ),
    PodRule(
        "`env` of containers with GPUs",
        "variables of the devices and of the library (except "
        f"{', '.join(f'`{name}={value}`' for name, value in DEVICE_ORDER.items())}), "
        "`LD_PRELOAD`, `LD_AUDIT`; `LD_LIBRARY_PATH` with the library's directory, `valueFrom` or "
        "`$(…)`",
        _variables,
        variables=True,
    ),
    PodRule(
        "`envFrom` of containers with GPUs",
        "ConfigMaps with such variables, and sources that cannot be read, unless the webhook runs "
        "with `--allow-unread-secrets`",
        _env_from,
        variables=True,
    ),
)
