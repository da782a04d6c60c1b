"""The kubelet's own list of pods, GET /pods, decoded into what identity needs."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from services.node_agent.allocate.pod_resolution import KubeletContainer, KubeletPod
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnreachableError
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.model.names import Namespace, PodUid
from shared.model.quantity import parse_count

T = TypeVar("T")


class _Metadata(msgspec.Struct):
    uid: str
    name: str
    namespace: str


class _Variable(msgspec.Struct):
    name: str = ""


class _VariablesFrom(msgspec.Struct):
    prefix: str = ""


class _Resources(msgspec.Struct):
    limits: dict[str, str | int] | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str
    resources: _Resources | None = None
    env: list[_Variable] | None = None
    env_from: list[_VariablesFrom] | None = None
    restart_policy: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container]
    init_containers: list[_Container] | None = None


class _Made(msgspec.Struct):
    name: str
    container_id: str = msgspec.field(name="containerID", default="")


class _Status(msgspec.Struct, rename="camel"):
    phase: str = ""
    container_statuses: list[_Made] | None = None
    init_container_statuses: list[_Made] | None = None
    ephemeral_container_statuses: list[_Made] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status = msgspec.field(default_factory=_Status)


class _PodList(msgspec.Struct):
    items: list[_Pod] | None = None


class _Named(msgspec.Struct):
    metadata: _Metadata


class _NamedList(msgspec.Struct):
    items: list[_Named] | None = None


class KubeletPods:
    """One kubelet's HTTPS endpoint, over kept connections."""

    def __init__(
        self, kubelet: KubernetesClient, described: Callable[[], ClusterCredentials]
    ) -> None:
        self.kubelet = kubelet
        self._described = described

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Return every pod the kubelet knows, the one under admission included.

        Raises UnavailableError if there is no answer, RequestError if it is not for us.
        """
        listed = await self._read("/pods", _PodList)
        return tuple(_pod(pod) for pod in listed.items or ())

    async def _read(self, path: str, kind: type[T]) -> T:
        """Read, and once more if the connection broke: the kubelet may be back, elsewhere even.

        It may show a certificate of an authority that was not there when we began.
        """
        try:
            return await self.kubelet.read(path, kind)
        except (UnreachableError, KubeconfigError):
            self.kubelet.use(self._described())
            return await self.kubelet.read(path, kind)

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods of which the runtime still has a container, deleted ones included.

        A kubelet that does not tell (an old or a simulated one) has none to name.
        """
        try:
            listed = await self._read("/runningpods/", _NamedList)
        except NotFoundError:
            return frozenset()
        return frozenset(PodUid(pod.metadata.uid) for pod in listed.items or ())


def _pod(pod: _Pod) -> KubeletPod:
    init = [_container(one, init=one.restart_policy != "Always") for one in _init(pod)]
    return KubeletPod(
        uid=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        phase=pod.status.phase or "Pending",
        containers=(*init, *(_container(one, init=False) for one in pod.spec.containers)),
        container_ids={made.container_id.rpartition("/")[2]: made.name for made in _made(pod)},
    )


def _made(pod: _Pod) -> list[_Made]:
    """Return the containers that the runtime has made; ids look like `containerd://0123...`."""
    status = pod.status
    lists = (
        status.container_statuses,
        status.init_container_statuses,
        status.ephemeral_container_statuses,
    )
    return [made for told in lists for made in told or () if made.container_id]


def _init(pod: _Pod) -> list[_Container]:
    return pod.spec.init_containers or []


def _container(container: _Container, *, init: bool) -> KubeletContainer:
    limits = (container.resources.limits if container.resources else None) or {}
    return KubeletContainer(
        name=container.name,
        limits={name: parse_count(amount) for name, amount in limits.items() if "/" in name},
        init=init,
        variables=tuple(variable.name for variable in container.env or ()),
        prefixes=tuple(source.prefix for source in container.env_from or () if source.prefix),
    )
