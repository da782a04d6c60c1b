"""An extender on a filled mirror, with binders and an API server as a test chooses."""

from typing import Any

import msgspec

from services.extender.pod_requests import PodRequests
from services.extender.scheduler_api import ExtenderArgs, ExtenderBindingArgs
from services.extender.service import Extender
from shared.kubernetes.types import ApiPod
from shared.model.devices.device import DeviceUse
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import PodBindingReply, PodBindingRequest
from shared.model.leases.ledger import LedgerNode
from shared.runtime.request_settings import RequestSettings
from shared.runtime.telemetry import Tracing
from tests.support.build import TRIGGER, devices, facts
from tests.support.clock import FakeClock

Json = dict[str, Any]


class ScriptedBinders:
    """Binders that reply as a test chooses, and bind the pod otherwise."""

    def __init__(self) -> None:
        self.requests: list[PodBindingRequest] = []
        self.replies: list[PodBindingReply | UnavailableError] = []

    async def bind(self, request: PodBindingRequest) -> PodBindingReply:
        self.requests.append(request)
        reply = self.replies.pop(0) if self.replies else PodBindingReply(bound=True)
        if isinstance(reply, UnavailableError):
            raise reply
        return reply


class PodsByName:
    """The API server's pods."""

    def __init__(self) -> None:
        self.pods: dict[str, ApiPod] = {}

    async def get(self, namespace: str, name: str) -> ApiPod | None:
        return self.pods.get(name)


class ExtenderWorld:
    """Nodes n0, n1 and n2, each with one GPU of 32,768 MiB, and what is behind the extender."""

    def __init__(self, capacity: int = 1) -> None:
        self.binders = ScriptedBinders()
        self.pods = PodsByName()
        self.clock = FakeClock()
        self.extender = Extender(
            ledger=None,  # type: ignore[arg-type]  # the mirror is filled here
            pods=PodRequests(RequestSettings().pod_parser(), self.pods.get),
            bind_pod=self.binders.bind,
            clock=self.clock,
            tracing=Tracing("extender", None),
        )
        self.mirror = self.extender.mirror
        self.mirror.capacity = capacity
        for name in ("n0", "n1", "n2"):
            given = tuple((device, DeviceUse()) for device in devices(1, name))
            self.mirror.put_node(
                LedgerNode(facts=facts(name), version=1, devices=given, served=(TRIGGER,))
            )

    def filter(self, name: str, mib: int, nodes: str = "n0 n1 n2", **spec: Any) -> Any:
        return self.extender.filter(args(name, mib, nodes, **spec))

    async def bind(self, name: str, node: str) -> str:
        uid = f"uid-{name}"
        given = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node}
        result = await self.extender.bind(msgspec.convert(given, ExtenderBindingArgs))
        return result.error


def args(name: str, mib: int, nodes: str = "n0 n1 n2", **spec: Any) -> ExtenderArgs:
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": str(mib)}
    metadata: Json = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    metadata["annotations"] = spec.pop("annotations", {})
    metadata["resourceVersion"] = spec.pop("resource_version", "")
    body = {
        "metadata": metadata,
        "spec": {
            "schedulerName": "leasehold-full",
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            **spec,
        },
    }
    return msgspec.convert({"Pod": body, "NodeNames": nodes.split()}, ExtenderArgs)
