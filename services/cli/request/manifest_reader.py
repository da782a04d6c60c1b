"""How a manifest's pod is read: its request, what its Binding would carry, what containers get.

Nothing is asked of a cluster: the pod is placed on an idle example node, with the code that places,
binds and allocates in earnest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from msgspec import structs

from services.cli.request.manifests import Written
from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.gpus.simulated.models import GPU_MODELS
from services.node_agent.isolation.host_paths import HostLayout
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from services.placer.choice.placement import place
from services.placer.index.node_index import Index
from services.placer.mirror.cluster_mirror import Mirror
from services.watcher.pod_parser import PodParser
from services.watcher.settings import WatcherSettings, load_rules
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Rules
from shared.dialects.hami_core import LIBRARY
from shared.model.device import Device, DeviceMode, DeviceUse
from shared.model.errors import RequestError
from shared.model.lease import Lease, Share
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Refusal
from shared.model.request import GpuRequest, NodeRequirements, PodRequest, SharingPolicy

EXAMPLE_GPUS = 8
EXAMPLE_SLOTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one container would be given on the example node."""

    container: str
    shares: tuple[Share, ...]
    setup: ContainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One pod of a manifest, read."""

    origin: str
    scheduler: str
    ours: bool
    fault: str = ""
    """Why the request cannot be granted as it is written, with container, field, value and rule."""
    request: PodRequest | None = None
    node: str = ""
    """The example node, in words."""
    refusal: Refusal | None = None
    """The request is well written, and the example node cannot take it."""
    annotations: Mapping[str, str] | None = None
    """What the Binding would carry."""
    given: tuple[Given, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The idle node on which requests are tried."""

    model: str
    """Key of `services.node_agent.gpus.simulated.models.PROFILES`."""
    layout: HostLayout
    now_s: float
    mig: bool = False
    """Its devices are in MIG mode."""

    @property
    def text(self) -> str:
        """The node in words."""
        profile = GPU_MODELS[self.model]
        mode = ", in MIG mode" if self.mig else ""
        return f"{EXAMPLE_GPUS} idle {profile.product} of {profile.memory_mib} MiB{mode}"

    def for_request(self, request: PodRequest) -> "Example":
        """Return the same node in MIG mode if that is what the pod demands, and it can be."""
        demanded = request.selection.mode == DeviceMode.MIG or any(
            one.strict and one.sharing is not SharingPolicy.EXCLUSIVE for one in request.containers
        )
        return replace(self, mig=self.mig or (demanded and bool(GPU_MODELS[self.model].mig)))


def example_of(model: str, *, now_s: float) -> Example:
    """Return the example node with these GPUs, `MODEL` or `MODEL:mig`.

    Raises RequestError for a model that nobody knows, and for one that has no MIG.
    """
    model, _, mode = model.partition(":")
    if model not in GPU_MODELS:
        raise RequestError(f"there is no GPU model {model!r}; there are {', '.join(GPU_MODELS)}")
    if mode and (mode != DeviceMode.MIG or not GPU_MODELS[model].mig):
        able = ", ".join(f"{name}:mig" for name, profile in GPU_MODELS.items() if profile.mig)
        raise RequestError(f"{model}:{mode} cannot be; there are {able}")
    layout = HostLayout(
        state_dir=PurePosixPath("/var/lib/leasehold"),
        library=PurePosixPath(LIBRARY),
    )
    return Example(model=model, layout=layout, now_s=now_s, mig=bool(mode))


def rules_of(volcano_conf: str) -> Rules:
    """Return the rules that a watcher with this configuration reads by."""
    path = Path(volcano_conf) if volcano_conf else None
    return load_rules(WatcherSettings(volcano_conf=path))


def read_written(
    written: Written, rules: Rules, schedulers: frozenset[str], example: Example
) -> Reading:
    """Read one pod, and try it on the example node."""
    scheduler = written.pod.spec.scheduler_name or "default-scheduler"
    seen = PodParser(frozenset({written.pod.spec.scheduler_name}), rules).parse(written.pod)
    known = Reading(origin=written.origin, scheduler=scheduler, ours=scheduler in schedulers)
    if seen.request_error or seen.request is None:
        return replace(known, fault=seen.request_error)
    if not seen.request.containers:
        return replace(known, request=seen.request)
    example = example.for_request(seen.request)
    read = replace(known, request=seen.request, node=example.text)
    wanted = replace(seen.request, node_requirements=NodeRequirements(), resources={})
    node = _node(wanted, example)
    answer = _placed(wanted, node)
    if isinstance(answer, Refusal):
        return replace(read, refusal=answer)
    lease = Lease(
        pod=PodUid("the-uid-of-the-pod"),
        namespace=seen.namespace,
        name=seen.name,
        node=node.facts.name,
        shares=answer,
        dialect=wanted.dialect,
        memo=wanted.memo,
        created_at=example.now_s,
    )
    host = NodeSnapshot(
        name=node.facts.name,
        devices={device.uuid: device for device, _ in node.devices},
        served={},
        paths=example.layout.paths,
    )
    instances = {
        (share.device, share.mig.position): f"MIG-(the UUID of this {share.mig.profile})"
        for share in lease.shares
        if share.mig
    }
    try:
        return replace(
            read,
            annotations=DIALECTS[lease.dialect].binding_annotations(lease, example.now_s),
            given=tuple(
                Given(
                    container=name,
                    shares=lease.shares_of(name),
                    setup=container_setup(lease, name, host, instances),
                )
                for name in dict.fromkeys(share.container for share in lease.shares)
            ),
        )
    except RequestError as error:
        return replace(read, fault=str(error))


def _placed(request: PodRequest, node: LedgerNode) -> tuple[Share, ...] | Refusal:
    """Place the pod as a placer would; each share gets the first slot, as on an idle device."""
    mirror = Mirror()
    mirror.put_node(node)
    answer = place(request, Index(mirror), lambda: 0.0)
    if isinstance(answer, Refusal):
        return answer
    return tuple(
        structs.replace(share, slot=_first_slot(share), fence=1) for share in answer[0].shares
    )


def _first_slot(share: Share) -> int | None:
    if share.mig:
        return share.mig.position
    return 0 if share.slotted else None


def _node(request: PodRequest, example: Example) -> LedgerNode:
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


def request_text(container: GpuRequest) -> str:
    """Say in words what one container asks for."""
    count = f"{container.gpus} GPU{'s' if container.gpus > 1 else ''}"
    if container.whole:
        return f"{count}, whole: idle before, closed to others after"
    if container.strict and container.sharing is not SharingPolicy.EXCLUSIVE:
        count = f"{count} as a MIG instance (isolation is strict)"
    if container.memory_percent is not None:
        memory = f"{container.memory_percent} % of the memory"
    elif container.memory_bytes is not None:
        memory = f"{container.memory_bytes} bytes"
    elif container.memory_units is not None:
        memory = f"{container.memory_units} units of memory (MiB, unless the node's factor differs)"
    else:
        memory = "all of the memory"
    cores = f"{container.cores_percent} % of the cores" if container.cores_percent else "any cores"
    manner = {
        SharingPolicy.EXCLUSIVE: ", alone on it",
        SharingPolicy.IDLE_DEVICE: ", idle before",
    }.get(container.sharing, "")
    return f"{count}, of {'each' if container.gpus > 1 else 'it'} {memory}, {cores}{manner}"
