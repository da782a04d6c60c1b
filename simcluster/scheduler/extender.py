"""Asks a scheduler extender as kube-scheduler does: which nodes fit a pod, which is best, bind it.

https://github.com/kubernetes/kube-scheduler/blob/master/extender/v1/types.go. Only names of nodes
are sent (`nodeCacheCapable`), and nothing is kept between requests.
"""

import ssl
from collections import Counter
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from simcluster.apimachinery.objects import Json, metadata
from simcluster.scheduler.node_choice import FittingNodes, requested_resources

TIMEOUT = aiohttp.ClientTimeout(total=5)
"""kube-scheduler's default `httpTimeout`."""


class ExtenderError(Exception):
    """The extender did not reply, or replied with an error."""


class SchedulerExtender:
    """The one extender of a KubeSchedulerConfiguration with one profile.

    https://kubernetes.io/docs/reference/config-api/kube-scheduler-config.v1/#kubescheduler-config-k8s-io-v1-Extender
    """

    def __init__(self, scheduler: str, configuration: Json) -> None:
        self.scheduler = scheduler
        """`schedulerName` of the profile."""
        self._url = configuration["urlPrefix"]
        self._resources = {resource["name"] for resource in configuration["managedResources"]}
        files = configuration["tlsConfig"]
        self._tls = ssl.create_default_context(cafile=files["caFile"])
        self._tls.load_cert_chain(files["certFile"], files["keyFile"])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a KubeSchedulerConfiguration."""
        configuration = yaml.safe_load(path.read_text(encoding="utf-8"))
        [profile] = configuration["profiles"]
        [extender] = configuration["extenders"]
        return cls(profile["schedulerName"], extender)

    def is_interested(self, pod: Json) -> bool:
        """Return whether the pod requests one of the extender's resources."""
        return not self._resources.isdisjoint(requested_resources(pod))

    async def narrow(self, pod: Json, fitting: FittingNodes) -> FittingNodes:
        """Return those of the nodes that fit, the best first. Raises ExtenderError."""
        if not fitting.nodes:
            return fitting
        reply = await self._post("filter", {"Pod": pod, "NodeNames": fitting.nodes})
        if reply["Error"]:
            raise ExtenderError(reply["Error"])
        left = set(reply["NodeNames"] or ())
        nodes = [name for name in fitting.nodes if name in left]
        if len(nodes) > 1:
            scored = await self._post("prioritize", {"Pod": pod, "NodeNames": nodes})
            scores = {priority["Host"]: priority["Score"] for priority in scored}
            nodes.sort(key=lambda name: -scores.get(name, 0))
        refusals = Counter(reply["FailedAndUnresolvableNodes"].values())
        return FittingNodes(nodes=tuple(nodes), refusals=fitting.refusals + refusals)

    async def bind(self, pod: Json, node: str) -> None:
        """Have the pod bound. Raises ExtenderError."""
        meta = metadata(pod)
        args = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"]}
        reply = await self._post("bind", {**args, "Node": node})
        if reply["Error"]:
            raise ExtenderError(reply["Error"])

    async def _post(self, verb: str, body: Json) -> Any:
        try:
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as session,
                session.post(f"{self._url}/{verb}", json=body, ssl=self._tls) as reply,
            ):
                if reply.status != 200:
                    raise ExtenderError(f"{verb}: the extender replied {reply.status}")
                return await reply.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            text = str(error) or "no reply in time"
            raise ExtenderError(f"{verb}: the extender did not reply: {text}") from error
