"""One pod as its author wrote it, with whole numbers for amounts; pure.

None of its fields is trusted: the API server validates a pod after its mutating webhooks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice

import msgspec

from shared.dialects import GPU_RESOURCES
from shared.dialects.dialect import ContainerManifest, PodManifest
from shared.dialects.meant_resources import meant_part
from shared.dialects.nvidia.dialect import PRIORITY
from shared.kubernetes.full_pods import FullContainer, FullPodSpec, FullVolume, decode_pod
from shared.kubernetes.types import (
    ApiPod,
    ApiPodSpec,
    Container,
    ObjectMeta,
    PodSecurityContext,
    SecurityContext,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.quantity import parse_quantity, parse_resources
from shared.placing.pod_fields import FoundField, handed_over

LEVELS = frozenset({PRIORITY})
"""Resources whose 0 is a value. They request nothing by themselves."""


def parse_requested(resources: Mapping[str, str | int | float]) -> dict[str, int]:
    """Parse amounts into integers, without those that are 0.

    Raises RequestError for a quantity that is malformed or too large to count, and for GPUs that
    are no whole number.
    """
    for name in sorted(resources.keys() & GPU_RESOURCES):
        _check_whole(name, str(resources[name]), resources.keys() - {name})
    amounts = parse_resources(resources)
    return {name: amount for name, amount in amounts.items() if amount or name in LEVELS}


def _check_whole(name: str, text: str, others: Collection[str]) -> None:
    try:
        exact = parse_quantity(text)
        fault = f"{name} must be a whole number of 0 or more, got {text}"
    except RequestError as error:
        exact = Fraction(-1)
        fault = f"{name}: {error}"
    if exact < 0 or exact.denominator != 1:
        meant = meant_part(name, text.strip(), others)
        if meant is None:
            raise RequestError(fault)
        raise RequestError(f"{fault}: {meant.text}", *meant.changes)


def requests_gpu(amounts: Mapping[str, int]) -> bool:
    return any(amount and name in GPU_RESOURCES for name, amount in amounts.items())


SIDECAR = "Always"
"""`restartPolicy` of an init container that keeps running beside those that follow."""
NODE_OWNERS = frozenset({"DaemonSet", "Node"})
MOST_HANDED_OVER = 10
"""More fields are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMount:
    """A file system or a block device in a container, or the file of its message."""

    path: str
    volume: str = ""
    """Empty for the file at `terminationMessagePath`, which the kubelet mounts last."""
    whole: bool = True
    """It is writable, and no part of the volume (`subPath`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContainer(ContainerManifest):
    """Of pods of a watch, only names, amounts, paths and users are known."""

    path: str
    """Its JSON pointer, such as `/spec/containers/0`."""
    ephemeral: bool = False
    zeros: frozenset[str] = frozenset()
    """Resources that it names with an amount of 0."""
    has_claims: bool = False
    """Of whatever driver."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """In order. Of several with one name, the last takes effect; with `valueFrom`, the value is
    empty.
    """
    places: Mapping[str, int] = field(default_factory=dict)
    """In the container's list."""
    value_from: frozenset[str] = frozenset()
    """Variables with `valueFrom`."""
    prefixes: tuple[str, ...] = ()
    """The prefix of each source of `envFrom`, which may be empty."""
    privileged: bool = False
    capabilities: tuple[str, ...] = ()
    """Those that it adds."""
    user: int | None = None
    """The user of its programs, or None if its image decides."""
    non_root: bool = False
    """The kubelet does not start it as user 0."""
    may_escalate: bool = True
    """By a setuid file, a program may get more privileges."""
    image: str = ""
    mounts: tuple[ContainerMount, ...] = ()
    target: str = ""
    """The container whose processes an ephemeral one sees."""

    @property
    def requests_gpu(self) -> bool:
        return requests_gpu(self.amounts)


@dataclass(frozen=True, kw_only=True)
class PodView(PodManifest):
    name: str
    runs_on: bool = False
    """A DaemonSet, or its node's kubelet, runs it for ever."""
    has_run: bool = False
    """Its status says that it runs or has ended; a new pod is then a copy of one that did."""
    containers: tuple[PodContainer, ...]
    spec: ApiPodSpec

    @cached_property
    def handed_over(self) -> tuple[FoundField, ...]:
        """The first fields that only kube-scheduler supports."""
        fields = handed_over({"spec": msgspec.to_builtins(self.spec)})
        return tuple(islice(fields, MOST_HANDED_OVER))

    @property
    def host_paths(self) -> Mapping[str, str]:
        """Paths by volume name."""
        return {
            volume.name: volume.host_path.path for volume in self.spec.volumes if volume.host_path
        }

    @property
    def empty_dirs(self) -> frozenset[str]:
        return frozenset(
            volume.name
            for volume in self.spec.volumes
            if isinstance(volume, FullVolume) and volume.empty_dir is not None
        )


def decode_view(document: bytes | msgspec.Raw, namespace: str | None) -> PodView:
    """Decode a pod under review. Raises RequestError for what is no pod, or no valid one."""
    return view_of(decode_pod(document), namespace or "default")


def view_of(pod: ApiPod, namespace: str = "") -> PodView:
    """Return a pod, by default in the namespace that it names.

    Raises RequestError for an invalid quantity.
    """
    meta = pod.metadata
    spec = pod.spec
    kinds: dict[str, tuple[Container, ...]] = {
        "initContainers": spec.init_containers,
        "containers": spec.containers,
        "ephemeralContainers": spec.ephemeral_containers if isinstance(spec, FullPodSpec) else (),
    }
    sized = {
        "metadata.labels": meta.labels,
        "spec.nodeSelector": spec.node_selector,
        "spec.affinity": spec.affinity,
        "spec.tolerations": spec.tolerations,
    }
    return PodView(
        namespace=Namespace(namespace or meta.namespace),
        name=meta.name or f"{meta.generate_name}…",
        runs_on=runs_on(meta),
        has_run=pod.status.phase not in {"", "Pending"},
        containers=tuple(
            _container(container, f"/spec/{kind}/{number}", kind, spec.security_context)
            for kind, containers in kinds.items()
            for number, container in enumerate(containers)
        ),
        annotations=meta.annotations,
        labels=meta.labels,
        scheduler=spec.scheduler_name,
        field_bytes={path: len(msgspec.json.encode(it)) for path, it in sized.items() if it},
        spec=spec,
    )


def runs_on(meta: ObjectMeta) -> bool:
    """Return whether a DaemonSet, or a node's kubelet, runs the pod for ever."""
    return any(owner.controller and owner.kind in NODE_OWNERS for owner in meta.owner_references)


def _container(
    container: Container, path: str, kind: str, of_pod: PodSecurityContext | None
) -> PodContainer:
    resources = container.resources
    init = kind == "initContainers"
    try:
        limits, requests = parse_requested(resources.limits), parse_requested(resources.requests)
    except RequestError as error:
        changes = (replace(change, container=container.name) for change in error.changes)
        raise RequestError(f"container {container.name}: {error}", *changes) from error
    full = container if isinstance(container, FullContainer) else FullContainer()
    variables = {variable.name: variable for variable in full.env}
    security = container.security_context or SecurityContext()
    of_pod = of_pod or PodSecurityContext()
    non_root = security.run_as_non_root
    return PodContainer(
        path=path,
        name=container.name,
        init=init,
        sidecar=init and container.restart_policy == SIDECAR,
        ephemeral=kind == "ephemeralContainers",
        limits=limits,
        requests=requests,
        zeros=frozenset({*resources.limits, *resources.requests}.difference(limits, requests)),
        has_claims=bool(resources.claims),
        variables={name: variable.value for name, variable in variables.items()},
        places={variable.name: place for place, variable in enumerate(full.env)},
        value_from=frozenset(name for name, variable in variables.items() if variable.value_from),
        prefixes=tuple(source.prefix for source in full.env_from),
        image=full.image,
        mounts=tuple(_mounts(container)),
        target=full.target_container_name,
        privileged=bool(security.privileged),
        capabilities=security.capabilities.add if security.capabilities else (),
        user=of_pod.run_as_user if security.run_as_user is None else security.run_as_user,
        non_root=bool(of_pod.run_as_non_root if non_root is None else non_root),
        may_escalate=security.allow_privilege_escalation is not False,
    )


def _mounts(container: Container) -> Iterator[ContainerMount]:
    if not isinstance(container, FullContainer):
        yield from (ContainerMount(path=mount.mount_path) for mount in container.volume_mounts)
        return
    for mount in container.volume_mounts:
        partial = mount.sub_path or mount.sub_path_expr or mount.read_only
        yield ContainerMount(path=mount.mount_path, volume=mount.name, whole=not partial)
    for block in container.volume_devices:
        yield ContainerMount(path=block.device_path, volume=block.name)
    if container.termination_message_path:
        yield ContainerMount(path=container.termination_message_path)
