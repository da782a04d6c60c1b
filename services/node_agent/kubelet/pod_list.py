"""The kubelet's own pod list, GET /pods, decoded into what pod resolution needs."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod
from shared.dialects.reserved import DEVICE_ORDER
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnreachableError
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.model.names import Namespace, PodUid
from shared.model.quantity import parse_count

T = TypeVar("T")


class _KubeletPodMetadata(msgspec.Struct):
    uid: str
    name: str
    namespace: str


class _EnvVariable(msgspec.Struct):
    name: str = ""
    value: str = ""


class _EnvFromSource(msgspec.Struct):
    prefix: str = ""


class _KubeletResources(msgspec.Struct):
    limits: dict[str, str | int] | None = None


class _KubeletContainerSpec(msgspec.Struct, rename="camel"):
    name: str
    resources: _KubeletResources | None = None
    env: list[_EnvVariable] | None = None
    env_from: list[_EnvFromSource] | None = None
    restart_policy: str = ""


class _KubeletPodSpec(msgspec.Struct, rename="camel"):
    containers: list[_KubeletContainerSpec]
    init_containers: list[_KubeletContainerSpec] | None = None


class _CreatedContainer(msgspec.Struct):
    name: str
    container_id: str = msgspec.field(name="containerID", default="")


class _KubeletPodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    container_statuses: list[_CreatedContainer] | None = None
    init_container_statuses: list[_CreatedContainer] | None = None
    ephemeral_container_statuses: list[_CreatedContainer] | None = None


class _KubeletPodEntry(msgspec.Struct):
    metadata: _KubeletPodMetadata
    spec: _KubeletPodSpec
    status: _KubeletPodStatus = msgspec.field(default_factory=_KubeletPodStatus)


class _KubeletPodList(msgspec.Struct):
    items: list[_KubeletPodEntry] | None = None


class _RunningPod(msgspec.Struct):
    metadata: _KubeletPodMetadata


class _RunningPodList(msgspec.Struct):
    items: list[_RunningPod] | None = None


class KubeletPods:
    """One kubelet's HTTPS endpoint, over persistent connections."""

    def __init__(
        self, kubelet: KubernetesClient, read_credentials: Callable[[], ClusterCredentials]
    ) -> None:
        self.kubelet = kubelet
        self._read_credentials = read_credentials

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Return every pod the kubelet knows, the one under admission included.

        Raises UnavailableError if there is no response, RequestError if access is denied.
        """
        listed = await self._read("/pods", _KubeletPodList)
        return tuple(_pod(pod) for pod in listed.items or ())

    async def _read(self, path: str, kind: type[T]) -> T:
        """Read, and retry once if the connection broke.

        The kubelet may have restarted at another address, or with a certificate of a new CA.
        """
        try:
            return await self.kubelet.read(path, kind)
        except (UnreachableError, KubeconfigError):
            self.kubelet.use(self._read_credentials())
            return await self.kubelet.read(path, kind)

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods of which the runtime had a container in the last 3 s, deleted or not.

        A kubelet without this endpoint (an old or a simulated one) names none.
        """
        try:
            listed = await self._read("/runningpods/", _RunningPodList)
        except NotFoundError:
            return frozenset()
        return frozenset(PodUid(pod.metadata.uid) for pod in listed.items or ())


def _pod(pod: _KubeletPodEntry) -> KubeletPod:
    init = [_container(one, init=one.restart_policy != "Always") for one in _init(pod)]
    return KubeletPod(
        uid=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        phase=pod.status.phase or "Pending",
        containers=(*init, *(_container(one, init=False) for one in pod.spec.containers)),
        container_ids={
            created.container_id.rpartition("/")[2]: created.name for created in _created(pod)
        },
    )


def _created(pod: _KubeletPodEntry) -> list[_CreatedContainer]:
    """Return the containers that the runtime has created, with ids like `containerd://0123...`."""
    status = pod.status
    lists = (
        status.container_statuses,
        status.init_container_statuses,
        status.ephemeral_container_statuses,
    )
    return [created for listed in lists for created in listed or () if created.container_id]


def _init(pod: _KubeletPodEntry) -> list[_KubeletContainerSpec]:
    return pod.spec.init_containers or []


def _limits(container: _KubeletContainerSpec) -> dict[str, int]:
    """Return the limits of extended resources; an amount of 0 is none."""
    limits = (container.resources.limits if container.resources else None) or {}
    counts = {name: parse_count(amount) for name, amount in limits.items() if "/" in name}
    return {name: count for name, count in counts.items() if count}


def _container(container: _KubeletContainerSpec, *, init: bool) -> KubeletContainer:
    return KubeletContainer(
        name=container.name,
        limits=_limits(container),
        init=init,
        variables=tuple(
            variable.name
            for variable in container.env or ()
            if DEVICE_ORDER.get(variable.name) != variable.value
        ),
        prefixes=tuple(source.prefix for source in container.env_from or ()),
    )
