"""The idle example node on which the pods of a manifest are tried; pure."""

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from shared.dialects.dialect import Paths
from shared.dialects.hami_core import LIBRARY
from shared.model.device import Device, DeviceMode, DeviceUse
from shared.model.errors import RequestError
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName
from shared.model.node import NodeFacts
from shared.model.request import PodRequest, SharingPolicy

EXAMPLE_GPUS = 8
EXAMPLE_SLOTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleNode:
    """The idle node on which requests are tried."""

    model: str
    """Key of `services.node_agent.mig.gpu_models.GPU_MODELS`."""
    paths: Paths
    now_s: float
    mig: bool = False
    """Its devices are in MIG mode."""

    @property
    def description(self) -> str:
        """The node as text."""
        profile = GPU_MODELS[self.model]
        mode = ", in MIG mode" if self.mig else ""
        return f"{EXAMPLE_GPUS} idle {profile.product} of {profile.memory_mib} MiB{mode}"

    def for_request(self, request: PodRequest) -> "ExampleNode":
        """Return the same node, in MIG mode if the pod requires it and the model has it."""
        required = request.selection.mode == DeviceMode.MIG or any(
            one.strict and one.sharing is not SharingPolicy.EXCLUSIVE for one in request.containers
        )
        return replace(self, mig=self.mig or (required and bool(GPU_MODELS[self.model].mig)))


def parse_example_node(text: str, *, now_s: float) -> ExampleNode:
    """Parse `MODEL` or `MODEL:mig`.

    Raises RequestError for an unknown model, and for MIG mode of one that has no MIG.
    """
    model, _, mode = text.partition(":")
    if model not in GPU_MODELS:
        raise RequestError(f"there is no GPU model {model!r}; there are {', '.join(GPU_MODELS)}")
    if mode and (mode != DeviceMode.MIG or not GPU_MODELS[model].mig):
        able = ", ".join(f"{name}:mig" for name, profile in GPU_MODELS.items() if profile.mig)
        raise RequestError(f"{model} has no mode {mode!r}; there are {able}")
    paths = Paths.below(PurePosixPath("/var/lib/leasehold"), PurePosixPath(LIBRARY))
    return ExampleNode(model=model, paths=paths, now_s=now_s, mig=bool(mode))


def ledger_node(request: PodRequest, example: ExampleNode) -> LedgerNode:
    """Return the example node as the ledger would have it, serving what the pod requests."""
    profile = GPU_MODELS[example.model]
    layouts, _ = (
        layouts_for(profile.product, profile.mig, KNOWN_GEOMETRIES) if example.mig else ((), ())
    )
    devices = tuple(
        Device(
            uuid=DeviceUuid(f"GPU-{'abcdefgh'[index] * 8}-0000-0000-0000-000000000000"),
            index=index,
            model=profile.product,
            memory_mib=profile.memory_mib,
            slots=EXAMPLE_SLOTS,
            mode=DeviceMode.MIG if example.mig else DeviceMode.HAMI_CORE,
            layouts=layouts,
        )
        for index in range(EXAMPLE_GPUS)
    )
    return LedgerNode(
        facts=NodeFacts(name=NodeName("the-node")),
        devices=tuple((device, DeviceUse()) for device in devices),
        served=request.triggers,
    )
