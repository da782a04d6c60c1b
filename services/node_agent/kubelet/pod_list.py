"""The kubelet's own list of pods, GET /pods."""

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod
from shared.dialects.reserved import DEVICE_ORDER
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnreachableError
from shared.kubernetes.full_pods import FullContainer, FullPod
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.kubernetes.types import ApiObject, ObjectList, PodOutline, PodStatus
from shared.model.leases.lease_copy import ANNOTATION, lease_outline
from shared.model.names import Namespace, PodUid
from shared.model.quantity import parse_count

T = TypeVar("T")


class _Settings(Struct, rename="camel"):
    topology_manager_policy: str = ""


class _Configuration(Struct):
    kubeletconfig: _Settings


class KubeletPods:
    def __init__(
        self, kubelet: KubernetesClient, read_credentials: Callable[[], ClusterCredentials]
    ) -> None:
        self.kubelet = kubelet
        self._read_credentials = read_credentials

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Include pods under admission.

        Raises UnavailableError without a response, RequestError if access is denied.
        """
        listed = await self._read("/pods", ObjectList[FullPod])
        return tuple(_pod(pod) for pod in listed.items or ())

    async def list_ending(self) -> dict[PodUid, float]:
        """Return, in Unix seconds, when the kubelet kills what is left of each deleted pod.

        Raises as `list_pods` does.
        """
        listed = await self._read("/pods", ObjectList[ApiObject])
        return {
            PodUid(pod.metadata.uid): deleted.timestamp()
            for pod in listed.items or ()
            if (deleted := pod.metadata.deletion_timestamp) is not None
        }

    async def topology_policy(self) -> str:
        """Raises as `list_pods` does."""
        configuration = await self._read("/configz", _Configuration)
        return configuration.kubeletconfig.topology_manager_policy

    async def _read(self, path: str, kind: type[T]) -> T:
        """Retry once: a restarted kubelet has another address or certificate."""
        try:
            return await self.kubelet.read(path, kind)
        except (UnreachableError, KubeconfigError):
            self.kubelet.use(self._read_credentials())
            return await self.kubelet.read(path, kind)

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods of which the runtime had a container in the last 3 s, deleted or not.

        A simulated kubelet, without this endpoint, names none.
        """
        try:
            listed = await self._read("/runningpods/", ObjectList[PodOutline])
        except NotFoundError:
            return frozenset()
        return frozenset(PodUid(pod.metadata.uid) for pod in listed.items or ())


def _pod(pod: FullPod) -> KubeletPod:
    init = (
        _container(container, init=container.restart_policy != "Always")
        for container in pod.spec.init_containers
    )
    return KubeletPod(
        uid=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        phase=pod.status.phase or "Pending",
        containers=(
            *init,
            *(_container(container, init=False) for container in pod.spec.containers),
        ),
        container_ids=_container_ids(pod.status),
        leased_at=lease_outline(pod.metadata.annotations.get(ANNOTATION, "")).created_at,
    )


def _container_ids(status: PodStatus) -> dict[str, str]:
    return {
        created.container_id.rpartition("/")[2]: created.name
        for created in (
            *status.container_statuses,
            *status.init_container_statuses,
            *status.ephemeral_container_statuses,
        )
        if created.container_id
    }


def _limits(container: FullContainer) -> dict[str, int]:
    limits = container.resources.limits
    counts = {name: parse_count(amount) for name, amount in limits.items() if "/" in name}
    return {name: count for name, count in counts.items() if count}


def _container(container: FullContainer, *, init: bool) -> KubeletContainer:
    return KubeletContainer(
        name=container.name,
        limits=_limits(container),
        init=init,
        variables=tuple(
            variable.name
            for variable in container.env
            if DEVICE_ORDER.get(variable.name) != variable.value
        ),
        prefixes=tuple(source.prefix for source in container.env_from),
    )
