"""Reads one pod and its Events from the API server, for a viewer who may get that pod."""

from urllib.parse import urlencode

import msgspec
from aiohttp import web

from services.api.api_call import ApiCall
from services.api.projection.pod_object import PodObjectView, pod_object
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ForbiddenError, NotFoundError
from shared.kubernetes.paths import objects_path, pod_path
from shared.kubernetes.pod_status import PodEvent
from shared.kubernetes.types import ApiObject, ObjectList
from shared.model.errors import UnavailableError
from shared.model.names import Namespace

MOST_READ = 500
"""The API server lists a pod's Events by name, so that the latest need all of them."""


class PodObjects:
    def __init__(self, kube: KubernetesClient | None) -> None:
        self.kube = kube

    @property
    def is_available(self) -> bool:
        return self.kube is not None

    async def read(self, call: ApiCall, namespace: Namespace, name: str) -> PodObjectView:
        """Raises HTTPNotFound for a pod that is gone, or that the viewer may not see."""
        if not call.visible(namespace):
            raise web.HTTPNotFound(reason="no such pod that you may see")
        if self.kube is None:
            raise UnavailableError(
                "this API does not read pods: it runs without --auth kube and --kubeconfig; use "
                f"`kubectl describe pod {name} -n {namespace}`"
            )
        try:
            body = await self.kube.read(pod_path(namespace, name))
        except NotFoundError as error:
            raise web.HTTPNotFound(reason="the API server has no such pod any more") from error
        if not await call.viewer.may_list_events(namespace):
            return pod_object(body, events_hidden=f"you may not list Events in {namespace}")
        uid = msgspec.json.decode(body, type=ApiObject).metadata.uid
        query = urlencode({"fieldSelector": f"involvedObject.uid={uid}", "limit": MOST_READ})
        try:
            listed = await self.kube.read(
                f"{objects_path(namespace, 'events')}?{query}", ObjectList[PodEvent]
            )
        except ForbiddenError as error:
            return pod_object(body, events_hidden=str(error))
        return pod_object(body, listed.items or ())
