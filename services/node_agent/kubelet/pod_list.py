"""The kubelet's own list of pods, GET /pods."""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from services.node_agent.kubelet.pods import Deletion, KubeletContainer, KubeletPod
from shared.dialects.reserved import may_set_reserved, sets_reserved
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnreachableError
from shared.kubernetes.full_pods import DeletedPod, FullContainer, FullPod
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.kubernetes.types import ApiObject, PodStatus
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
        return await self._retried(lambda: self.kubelet.list_whole("/pods", FullPod, keep=_pod))

    async def list_ending(self) -> dict[PodUid, Deletion]:
        """Return when the kubelet kills what is left of each deleted pod.

        Raises as `list_pods` does.
        """
        listed = await self._retried(
            lambda: self.kubelet.list_whole("/pods", DeletedPod, keep=_deletion)
        )
        return {pod: deletion for pod, deletion in listed if deletion is not None}

    async def topology_policy(self) -> str:
        """Raises as `list_pods` does."""
        configuration = await self._retried(lambda: self.kubelet.read("/configz", _Configuration))
        return configuration.kubeletconfig.topology_manager_policy

    async def _retried(self, read: Callable[[], Awaitable[T]]) -> T:
        """Retry once: a restarted kubelet has another address or certificate."""
        try:
            return await read()
        except (UnreachableError, KubeconfigError):
            self.kubelet.use(self._read_credentials())
            return await read()

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods of which the runtime had a container in the last 3 s, deleted or not.

        A simulated kubelet, without this endpoint, names none.
        """
        try:
            running = await self._retried(
                lambda: self.kubelet.list_whole("/runningpods/", ApiObject, keep=_uid)
            )
        except NotFoundError:
            return frozenset()
        return frozenset(running)


def _uid(pod: ApiObject) -> PodUid:
    return PodUid(pod.metadata.uid)


def _deletion(pod: DeletedPod) -> tuple[PodUid, Deletion | None]:
    meta = pod.metadata
    uid = PodUid(meta.uid)
    if meta.deletion_timestamp is None:
        return uid, None
    grace_s = meta.deletion_grace_period_seconds
    killed_at = meta.deletion_timestamp.timestamp()
    return uid, Deletion(killed_at, math.inf if grace_s is None else grace_s)


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
    """Little is kept: a pod may have a hundred thousand variables."""
    limits = _limits(container)
    if not limits:
        return KubeletContainer(name=container.name, init=init)
    variables = (var.name for var in container.env if sets_reserved(var.name, var.value))
    prefixes = (source.prefix for source in container.env_from)
    return KubeletContainer(
        name=container.name,
        limits=limits,
        init=init,
        reserved_variable=next(variables, ""),
        reserved_prefix=next(filter(may_set_reserved, prefixes), None),
    )
