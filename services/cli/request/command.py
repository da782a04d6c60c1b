"""`leasehold explain --request FILE`: what the pods of a manifest would be granted."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import TextIO

from msgspec import UNSET, UnsetType, convert, field, json, structs
from rich.console import Group
from rich.text import Text

from services.cli import terminal
from services.cli.arguments import own_schedulers
from services.cli.commands import Explain
from services.cli.request.claims import ClaimReport, claim_lines, report_of_claim
from services.cli.request.unread_places import find_unread_places
from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from shared.dialects import DIALECTS
from shared.dialects.dialect import Mount, Paths, Rules
from shared.dialects.hami_core import LIBRARY
from shared.dialects.nvidia.sharing_selectors import find_sharing_selectors
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.vocabulary import (
    did_you_mean,
    find_misplaced,
    find_unread,
    meant,
    unknown_gpus,
)
from shared.kubernetes.manifest_claims import claims_in
from shared.kubernetes.manifests import ManifestPod, pods_in
from shared.kubernetes.types import ApiPod
from shared.model.bounds import BILLION
from shared.model.change import Hint
from shared.model.devices.device import Device, DeviceMode, DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.devices.replicas import Replicas
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.leases.ledger import LedgerNode
from shared.model.names import (
    DEFAULT_SCHEDULER,
    OWN_SCHEDULER,
    DeviceUuid,
    Namespace,
    NodeName,
    PodUid,
)
from shared.model.requests.placement import Refusal
from shared.model.requests.request import (
    ALL_PERCENT,
    GpuRequest,
    NodeRequirements,
    PodRequest,
    SharingPolicy,
)
from shared.model.views.view import View
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.pods.manifest_patches import PatchOperation, json_patch
from shared.pods.pod_parser import admitted, parse_manifest
from shared.pods.pod_policy import hidden_devices
from shared.pods.pod_view import PodView, decode_view, view_of
from shared.runtime.request_settings import RequestSettings, load_rules

EXAMPLE_GPUS = 8
EXAMPLE_SLOTS = 10
EXAMPLE_REPLICAS = Replicas(number=4, strategy="time-slicing", resource="")
MOST_WARNINGS = 10
_READ_FOR = frozenset(dialect.read_for for dialect in DIALECTS.values()) - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleNode:
    model: str
    """Key of `GPU_MODELS`."""
    paths: Paths
    now_s: float
    mig: bool = False
    replicas: Replicas | None = None

    @property
    def description(self) -> str:
        profile = GPU_MODELS[self.model]
        mode = ", in MIG mode" if self.mig else ""
        if self.replicas is not None:
            mode = f", as {self.replicas.number} replicas each by {self.replicas.strategy}"
        return f"{EXAMPLE_GPUS} idle {profile.product} of {profile.memory_mib} MiB{mode}"

    def for_request(self, request: PodRequest) -> "ExampleNode":
        required = request.selection.mode == DeviceMode.MIG or any(
            container.strict and container.sharing is not SharingPolicy.EXCLUSIVE
            for container in request.containers
        )
        by_name = [part.number_of for part in request.containers if part.replica_only]
        return replace(
            self,
            mig=self.mig or (required and bool(GPU_MODELS[self.model].mig)),
            replicas=structs.replace(EXAMPLE_REPLICAS, resource=by_name[0]) if by_name else None,
        )


def parse_example_node(text: str, *, now_s: float) -> ExampleNode:
    """Raises RequestError."""
    model, _, mode = text.partition(":")
    if model not in GPU_MODELS:
        raise RequestError(f"there is no GPU model {model!r}; there are {', '.join(GPU_MODELS)}")
    if mode and (mode != DeviceMode.MIG or not GPU_MODELS[model].mig):
        able = ", ".join(f"{name}:mig" for name, profile in GPU_MODELS.items() if profile.mig)
        raise RequestError(f"{model} has no mode {mode!r}; there are {able}")
    paths = Paths.below(PurePosixPath("/var/lib/leasehold"), PurePosixPath(LIBRARY))
    return ExampleNode(model=model, paths=paths, now_s=now_s, mig=bool(mode))


def ledger_node(request: PodRequest, example: ExampleNode) -> LedgerNode:
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
            slots=EXAMPLE_SLOTS if example.replicas is None else example.replicas.number,
            mode=_mode_of(example),
            replicas=example.replicas,
            layouts=layouts,
        )
        for index in range(EXAMPLE_GPUS)
    )
    return LedgerNode(
        facts=NodeFacts(name=NodeName("the-node")),
        devices=tuple((device, DeviceUse()) for device in devices),
        served=request.triggers,
    )


def _mode_of(example: ExampleNode) -> DeviceMode:
    if example.replicas is not None:
        return DeviceMode.REPLICAS
    return DeviceMode.MIG if example.mig else DeviceMode.HAMI_CORE


class GrantedShare(View, frozen=True, kw_only=True):
    device: DeviceUuid
    index: int
    memory_mib: int
    limit_bytes: int
    cores_percent: int


class ContainerReport(View, frozen=True, kw_only=True):
    container: str
    request: str
    devices: tuple[GrantedShare, ...] | UnsetType = UNSET
    environment: dict[str, str] | UnsetType = UNSET
    mounts: tuple[Mount, ...] | UnsetType = UNSET


class PodReport(View, frozen=True, kw_only=True):
    origin: str
    scheduler: str
    ours: bool
    fault: str = ""
    """Why the request is invalid."""
    refusal: str = ""
    """Why a valid request does not fit the example node."""
    patch: tuple[PatchOperation, ...] = ()
    """The change that `fault` names, of the pod or of the template."""
    dialect: str = field(name="system", default="")
    example_node: str = ""
    containers: tuple[ContainerReport, ...] = ()
    warnings: tuple[str, ...] = ()
    binding: dict[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()


class ManifestReport(View, frozen=True, kw_only=True):
    pods: tuple[PodReport, ...]
    claims: tuple[ClaimReport, ...] = ()

    @property
    def is_granted(self) -> bool:
        return not any(report.fault or report.refusal for report in self.pods) and not any(
            report.fault or report.changes for report in self.claims
        )


def load(path: str, standard_input: TextIO) -> tuple[str, str]:
    """`-` is standard input. Raises RequestError."""
    source = "standard input" if path == "-" else path
    try:
        text = standard_input.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{source} cannot be read: {reason}") from error
    return source, text


def load_watcher_rules(volcano_conf: Path | None) -> Rules:
    return load_rules(RequestSettings(volcano_conf=volcano_conf))


def report_of(
    written: ManifestPod, rules: Rules, schedulers: frozenset[str], example: ExampleNode
) -> PodReport:
    scheduler = written.pod.spec.scheduler_name or DEFAULT_SCHEDULER
    parsed = parse_manifest(written.pod, rules)
    report = PodReport(
        origin=written.origin,
        scheduler=scheduler,
        ours=scheduler in schedulers,
        claims=tuple(claim.name for claim in written.pod.spec.resource_claims),
    )
    unread = tuple(find_unread_places(written))
    if parsed.request is not None:
        warnings = chain(
            (hint.text for hint in _hidden_devices(written)),
            _warnings(view_of(written.pod), parsed.request),
        )
        if parsed.request.containers:
            warnings = chain((hint.text for hint in unread), warnings)
        report = structs.replace(report, warnings=tuple(islice(warnings, MOST_WARNINGS)))
    if parsed.request_error or parsed.request is None:
        wrong = _fault_of(written.pod, rules) or Hint(parsed.request_error)
        patch = json_patch(written.template, wrong.changes)
        return structs.replace(report, fault=wrong.text, patch=patch)
    containers = tuple(
        ContainerReport(container=container.container, request=request_text(container))
        for container in parsed.request.containers
    )
    report = structs.replace(report, dialect=parsed.request.dialect, containers=containers)
    if not containers:
        view = view_of(written.pod)
        unknown = tuple(_unknown_resources(view))
        unused = chain(find_misplaced(view), find_unread(view, ""), _hidden_devices(written))
        words = chain(unread, unknown, unused)
        changes = dict.fromkeys(change for word in words for change in word.changes)
        fault = "; ".join(hint.text for hint in (*unread, *unknown))
        patch = json_patch(written.template, changes)
        return structs.replace(report, fault=fault, patch=patch)
    return _place_and_grant(report, parsed.request, parsed.namespace, parsed.name, example)


def _fault_of(pod: ApiPod, rules: Rules) -> Hint | None:
    try:
        view = view_of(pod)
        amount = next((word for word in find_misplaced(view) if word.is_resource), None)
    except RequestError as error:
        return Hint(str(error), error.changes)
    try:
        parse_pod_request(view_of(admitted(pod, rules)), rules)
    except RequestError as error:
        # What is missing is probably what was written wrongly.
        return amount or Hint(str(error), error.changes)
    return None


def _unknown_resources(pod: PodView) -> Iterator[Hint]:
    for container in pod.containers:
        for name in unknown_gpus(container.amounts):
            amount = container.amounts[name]
            instead = meant(name, amount, container.name)
            text = f"requests {name}: {did_you_mean(name, amount)}".removesuffix(": ")
            yield Hint(text, instead.changes if instead else ())


def _hidden_devices(written: ManifestPod) -> Iterator[Hint]:
    try:
        pod = decode_view(json.encode(written.template), None)
    except (RequestError, TypeError):
        return
    beside_gpus = any(container.requests_gpu for container in pod.containers)
    for container in pod.containers:
        if not container.has_claims:
            yield from hidden_devices(container, beside_gpus=beside_gpus)


def _warnings(pod: PodView, request: PodRequest) -> Iterator[str]:
    yield from (word.text for word in find_misplaced(pod))
    yield from (word.text for word in find_unread(pod, request.dialect))
    for name in unknown_gpus(request.resources) if request.containers else ():
        text = did_you_mean(name, request.resources[name], request.triggers)
        yield f"only a node that has {name} beside its GPUs fits: {text}".removesuffix(": ")
    if request.dialect:
        yield from find_sharing_selectors(pod.spec.node_selector, request)


def _place_and_grant(
    report: PodReport, request: PodRequest, namespace: Namespace, name: str, example: ExampleNode
) -> PodReport:
    example = example.for_request(request)
    report = structs.replace(report, example_node=example.description)
    request = structs.replace(request, node_requirements=NodeRequirements(), resources={})
    node = ledger_node(request, example)
    placed = _place(request, node)
    if isinstance(placed, Refusal):
        return structs.replace(report, refusal=placed.text)
    lease = Lease(
        pod=PodUid("the-uid-of-the-pod"),
        namespace=namespace,
        name=name,
        node=node.facts.name,
        shares=placed,
        dialect=request.dialect,
        memo=request.memo,
        created_at=example.now_s,
    )
    try:
        return structs.replace(
            report,
            binding=dict(DIALECTS[lease.dialect].binding_annotations(lease, example.now_s)),
            containers=tuple(
                _granted(container, lease, node, example) for container in report.containers
            ),
        )
    except RequestError as error:
        return structs.replace(report, fault=str(error))


def _place(request: PodRequest, node: LedgerNode) -> tuple[Share, ...] | Refusal:
    mirror = ClusterMirror()
    mirror.put_node(node)
    result = place_explained(request, NodeIndex(mirror), lambda: 0.0)
    if isinstance(result, Refusal):
        return result
    return tuple(
        structs.replace(share, slot=_first_slot(share), fence=1) for share in result[0].shares
    )


def _first_slot(share: Share) -> int | None:
    if share.mig:
        return share.mig.position
    return 0 if share.slotted else None


def _granted(
    report: ContainerReport, lease: Lease, node: LedgerNode, example: ExampleNode
) -> ContainerReport:
    shares = lease.shares_of(report.container)
    if not shares:
        return report
    snapshot = NodeSnapshot(
        name=node.facts.name,
        devices={device.uuid: device for device, _ in node.devices},
        served={},
        paths=example.paths,
        instances={
            (share.device, share.mig.position): f"MIG-(the UUID of this {share.mig.profile})"
            for share in lease.shares
            if share.mig
        },
    )
    setup = container_setup(lease, report.container, snapshot)
    return structs.replace(
        report,
        devices=tuple(convert(share, GrantedShare, from_attributes=True) for share in shares),
        environment=dict(setup.environment),
        mounts=tuple(setup.mounts),
    )


def request_text(container: GpuRequest) -> str:
    count = f"{container.gpus} GPU{'s' if container.gpus > 1 else ''}"
    if container.replica_only:
        return f"{container.gpus} replica{'s' if container.gpus > 1 else ''} of a node's GPUs"
    if container.whole:
        replica = ", or a replica of each where a node offers these" if container.number_of else ""
        return f"{count}, whole and not shared{replica}"
    if container.strict and container.sharing is not SharingPolicy.EXCLUSIVE:
        count = f"{count} as a MIG instance (isolation is strict)"
    if container.memory_billionths:
        percent = Decimal(container.memory_billionths) / (BILLION // ALL_PERCENT)
        memory = f"{percent.normalize():f} % of the memory"
    elif container.memory_percent is not None:
        memory = f"{container.memory_percent} % of the memory"
    elif container.memory_bytes is not None:
        mib, rest = divmod(container.memory_bytes, MIB)
        memory = f"{container.memory_bytes} bytes of memory" if rest else f"{mib} MiB of memory"
    elif container.memory_units is not None:
        memory = f"{container.memory_units} units of memory (MiB, unless the node's factor differs)"
    else:
        memory = "all of the memory"
    cores = f"{container.cores_percent} % of the cores" if container.cores_percent else "any cores"
    exclusivity = {
        SharingPolicy.EXCLUSIVE: ", exclusively",
        SharingPolicy.IDLE_DEVICE: ", on an idle GPU",
    }.get(container.sharing, "")
    return f"{count}, of {'each' if container.gpus > 1 else 'it'} {memory}, {cores}{exclusivity}"


def _lines(report: PodReport) -> Iterable[Text]:
    yield Text(report.origin, style="bold")
    if report.fault:
        yield Text(f"  invalid request: {report.fault}", style="red")
        return
    for warning in report.warnings:
        yield Text(f"  warning     {warning}", style="yellow")
    if not report.containers:
        yield Text("  requests no GPU by a resource name that Leasehold knows")
        for name in report.claims:
            yield Text(f"  claim       {name}: kube-scheduler allocates it, see docs/claims.md")
        return
    yield from _scheduler_lines(report)
    yield Text(f"  requested   in the words of {report.dialect}")
    for container in report.containers:
        yield Text(f"  container   {container.container}: {container.request}")
    yield Text(f"  tried on    {report.example_node}")
    if report.refusal:
        yield Text(f"  refused     {report.refusal}", style="red")
        return
    if report.binding:
        yield Text("  Binding carries")
    for key, value in report.binding.items():
        yield Text(f"    {key}: {value}")
    for container in report.containers:
        yield from _grant_lines(container)


def _scheduler_lines(report: PodReport) -> Iterable[Text]:
    if report.ours:
        return
    if report.scheduler == DEFAULT_SCHEDULER:
        yield Text(f"  scheduler   {OWN_SCHEDULER}: the webhook sets it")
    elif report.scheduler in _READ_FOR:
        yield Text(
            f"  schedulerName is {report.scheduler!r}: Leasehold schedules the pod where an "
            "administrator adds this name to --schedulers, see docs/migrate.md",
            style="yellow",
        )
    else:
        yield Text(
            f"  schedulerName is {report.scheduler!r}: remove it for Leasehold to schedule the pod",
            style="yellow",
        )


def _grant_lines(granted: ContainerReport) -> Iterable[Text]:
    if not granted.devices:
        return
    yield Text(f"  container {granted.container} gets")
    for share in granted.devices:
        yield Text(f"    {share.memory_mib} MiB of GPU {share.index}")
    for name, value in (granted.environment or {}).items():
        yield Text(f"    {name}={value}")
    for mount in granted.mounts or ():
        mode = "read-only" if mount.read_only else "read-write"
        yield Text(f"    mount {mount.host_path} at {mount.container_path}, {mode}")


def explain_manifest(flags: Explain) -> int:
    """Return 1 if a pod of the manifest would not be granted as written."""
    source, text = load(flags.request, sys.stdin)
    example = parse_example_node(flags.gpu, now_s=time.time())
    rules = load_watcher_rules(flags.volcano_conf)
    schedulers = own_schedulers(flags.schedulers)
    claims = claims_in(text, source)
    pods = pods_in(text, source, needs_some=not claims)
    manifest_report = ManifestReport(
        pods=tuple(report_of(pod, rules, schedulers, example) for pod in pods),
        claims=tuple(map(report_of_claim, claims)),
    )
    terminal.show(flags.output, manifest_report, _shown)
    return 0 if manifest_report.is_granted else 1


def _shown(report: ManifestReport) -> Group:
    of_pods = (line for pod in report.pods for line in _lines(pod))
    of_claims = (line for claim in report.claims for line in claim_lines(claim))
    return Group(*of_pods, *of_claims)
