"""A pod under admission review: decodes its JSON into frozen values; pure.

Only the fields that the decision needs are decoded, and none of them is trusted: the API server
validates a pod after its mutating webhooks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import msgspec

from services.webhook.raw_pod import (
    MAX_SHOWN,
    RawContainer,
    RawMetadata,
    RawPodSpec,
    RawResources,
    RawSecurityContext,
    RawVolume,
    decode_pod,
    decoded,
)
from shared.dialects.requested import parse_requested, requests_gpu
from shared.model.errors import RequestError
from shared.placing.pod_fields import FoundField, handed_over


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedMount:
    """One volume in a container: a file system, or a block device; or its message's file."""

    path: str
    volume: str = ""
    """Empty: it is the file at `terminationMessagePath`, which the kubelet mounts last."""
    whole: bool = True
    """It is writable, and no part of the volume (`subPath`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedContainer:
    """One container of any kind."""

    path: str
    """Its JSON pointer, such as `/spec/containers/0`."""
    name: str
    init: bool
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    zeros: frozenset[str] = frozenset()
    """Resources that it names with an amount of 0."""
    has_claims: bool = False
    """It uses ResourceClaims, of whatever driver."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in order, of several with one name the last, which takes effect; the
    value of one with `valueFrom` is empty."""
    value_from: frozenset[str] = frozenset()
    """Variables with `valueFrom`."""
    env_from: tuple[str, ...] = ()
    """The prefix of each source of `envFrom`, of whatever kind; empty: it has none."""
    privileged: bool = False
    capabilities: tuple[str, ...] = ()
    """Those that it adds."""
    image: str = ""
    mounts: tuple[ReviewedMount, ...] = ()
    ephemeral: bool = False
    target: str = ""
    """The container whose processes an ephemeral one sees."""

    @property
    def requests_gpu(self) -> bool:
        """Whether it requests a resource of a dialect."""
        return requests_gpu({**self.requests, **self.limits})


@dataclass(frozen=True, kw_only=True)
class ReviewedPod:
    """One pod that is being created."""

    namespace: str
    name: str
    containers: tuple[ReviewedContainer, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    node: str = ""
    priority_class: str = ""
    set_fields: frozenset[str] = frozenset()
    """Which of `priority`, `preemptionPolicy` and `runtimeClassName` the spec sets."""
    scheduling_gates: tuple[str, ...] = ()
    host_paths: Mapping[str, str] = field(default_factory=dict)
    """Path by volume name."""
    empty_dirs: frozenset[str] = frozenset()
    """Names of volumes of the kind `emptyDir`."""
    host_namespaces: tuple[str, ...] = ()
    """`hostPID` and `hostIPC`, where they are set."""
    shares_processes: bool = False
    """Its containers see each other's processes."""
    runtime_class: str = ""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    """See `PodManifest.field_bytes`."""
    document: bytes | msgspec.Raw = b"{}"
    """The pod's JSON."""

    @cached_property
    def handed_over(self) -> tuple[FoundField, ...]:
        """The first fields that only kube-scheduler supports. Raises RequestError as `parse_pod`.

        The whole pod is decoded for it, which few pods without GPUs need.
        """
        return tuple(islice(handed_over(decoded(self.document, dict[str, object])), MAX_SHOWN))


def parse_pod(raw: bytes | msgspec.Raw, namespace: str) -> ReviewedPod:
    """Decode a pod.

    Raises RequestError for anything else, for an invalid quantity, and for a pod beyond the bounds.
    """
    pod = decode_pod(raw)
    return _reviewed(pod.metadata or RawMetadata(), pod.spec, namespace, raw)


def _reviewed(
    metadata: RawMetadata, spec: RawPodSpec, namespace: str, document: bytes | msgspec.Raw
) -> ReviewedPod:
    volumes = spec.volumes or ()
    return ReviewedPod(
        namespace=namespace,
        name=metadata.name or f"{metadata.generate_name}…",
        containers=tuple(_containers(spec)),
        annotations=metadata.annotations or {},
        labels=metadata.labels or {},
        scheduler=spec.scheduler_name or "",
        node=spec.node_name or "",
        priority_class=spec.priority_class_name or "",
        set_fields=_set_fields(spec),
        scheduling_gates=tuple(gate.name for gate in spec.scheduling_gates or ()),
        host_paths=_host_paths(volumes),
        empty_dirs=_empty_dirs(volumes),
        host_namespaces=tuple(_host_namespaces(spec)),
        shares_processes=bool(spec.share_process_namespace),
        runtime_class=spec.runtime_class_name or "",
        document=document,
        field_bytes={
            "metadata.labels": metadata.labels_bytes,
            "spec.nodeSelector": len(bytes(spec.node_selector)),
            "spec.affinity": len(bytes(spec.affinity)),
            "spec.tolerations": len(bytes(spec.tolerations)),
        },
    )


def _host_namespaces(spec: RawPodSpec) -> Iterator[str]:
    if spec.host_pid:
        yield "hostPID"
    if spec.host_ipc:
        yield "hostIPC"


def _host_paths(volumes: Iterable[RawVolume]) -> Mapping[str, str]:
    return {each.name: each.host_path.path for each in volumes if each.host_path is not None}


def _empty_dirs(volumes: Iterable[RawVolume]) -> frozenset[str]:
    return frozenset(each.name for each in volumes if each.empty_dir is not None)


def _set_fields(spec: RawPodSpec) -> frozenset[str]:
    fields = {
        "priority": spec.priority,
        "preemptionPolicy": spec.preemption_policy,
        "runtimeClassName": spec.runtime_class_name,
    }
    return frozenset(name for name, value in fields.items() if value is not None)


def _containers(spec: RawPodSpec) -> Iterator[ReviewedContainer]:
    kinds = {
        "initContainers": spec.init_containers,
        "containers": spec.containers,
        "ephemeralContainers": spec.ephemeral_containers,
    }
    for kind, containers in kinds.items():
        for number, container in enumerate(containers or ()):
            yield _container(container, f"/spec/{kind}/{number}", kind)


def _container(container: RawContainer, path: str, kind: str) -> ReviewedContainer:
    resources = container.resources or RawResources()
    limits, requests = _amounts(container.name, resources)
    security = container.security_context or RawSecurityContext()
    env = {variable.name: variable for variable in container.env or ()}
    return ReviewedContainer(
        path=path,
        name=container.name,
        init=kind == "initContainers",
        ephemeral=kind == "ephemeralContainers",
        limits=limits,
        requests=requests,
        zeros=resources.named - {*limits, *requests},
        has_claims=bool(resources.claims),
        variables={name: variable.text for name, variable in env.items()},
        value_from=frozenset(name for name, variable in env.items() if variable.value_from),
        env_from=tuple(_prefixes(container)),
        image=container.image or "",
        mounts=tuple(_mounts(container)),
        target=container.target_container_name or "",
        privileged=bool(security.privileged),
        capabilities=tuple(_added_capabilities(security)),
    )


def _prefixes(container: RawContainer) -> Iterator[str]:
    for source in container.env_from or ():
        yield source.prefix or ""


def _mounts(container: RawContainer) -> Iterator[ReviewedMount]:
    for mount in container.volume_mounts or ():
        partial = mount.sub_path or mount.sub_path_expr or mount.read_only
        yield ReviewedMount(path=mount.mount_path, volume=mount.name, whole=not partial)
    for block in container.volume_devices or ():
        yield ReviewedMount(path=block.device_path, volume=block.name)
    if container.termination_message_path:
        yield ReviewedMount(path=container.termination_message_path)


def _added_capabilities(security: RawSecurityContext) -> Iterator[str]:
    if security.capabilities is not None:
        yield from security.capabilities.add or ()


def _amounts(
    container: str, resources: RawResources
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return limits and requests."""
    try:
        return parse_requested(resources.limits or {}), parse_requested(resources.requests or {})
    except RequestError as error:
        raise RequestError(f"container {container}: {error}") from error
