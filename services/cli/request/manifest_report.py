"""The requests of a manifest's pods, and the Bindings and containers that would result.

No cluster is needed: each pod is placed on an idle example node, by the code that places, binds
and allocates in production.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from services.cli.request.example_node import ExampleNode, ledger_node
from services.cli.request.manifests import ManifestPod
from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Rules
from shared.model.errors import RequestError
from shared.model.lease import Lease, Share
from shared.model.ledger import LedgerNode
from shared.model.names import Namespace, PodUid
from shared.model.placement import Refusal
from shared.model.request import NodeRequirements, PodRequest
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.placement import place
from shared.pods.pod_parser import PodParser
from shared.runtime.request_settings import RequestSettings, load_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerGrant:
    """The shares and the setup of one container on the example node."""

    container: str
    shares: tuple[Share, ...]
    setup: ContainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReport:
    """One pod of a manifest: its request and its result on the example node."""

    origin: str
    scheduler: str
    is_ours: bool
    """Its schedulerName is one of Leasehold's."""
    fault: str = ""
    """Why the request is invalid, with container, field, value and rule."""
    request: PodRequest | None = None
    node: str = ""
    """The example node, as text."""
    refusal: Refusal | None = None
    """Why a valid request does not fit the example node."""
    annotations: Mapping[str, str] | None = None
    """The annotations of the Binding."""
    grants: tuple[ContainerGrant, ...] = ()


def load_watcher_rules(volcano_conf: Path | None) -> Rules:
    """Return the rules of a watcher with this configuration."""
    return load_rules(RequestSettings(volcano_conf=volcano_conf))


def report_of(
    written: ManifestPod, rules: Rules, schedulers: frozenset[str], example: ExampleNode
) -> PodReport:
    """Parse one pod's request, and place it on the example node."""
    scheduler = written.pod.spec.scheduler_name or "default-scheduler"
    parsed = PodParser(frozenset({written.pod.spec.scheduler_name}), rules).parse(written.pod)
    report = PodReport(origin=written.origin, scheduler=scheduler, is_ours=scheduler in schedulers)
    if parsed.request_error or parsed.request is None:
        return replace(report, fault=parsed.request_error)
    report = replace(report, request=parsed.request)
    if not parsed.request.containers:
        return report
    return _place_and_grant(report, parsed.request, parsed.namespace, parsed.name, example)


def _place_and_grant(
    report: PodReport, request: PodRequest, namespace: Namespace, name: str, example: ExampleNode
) -> PodReport:
    example = example.for_request(request)
    report = replace(report, node=example.description)
    request = structs.replace(request, node_requirements=NodeRequirements(), resources={})
    node = ledger_node(request, example)
    placed = _place(request, node)
    if isinstance(placed, Refusal):
        return replace(report, refusal=placed)
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
        return replace(
            report,
            annotations=DIALECTS[lease.dialect].binding_annotations(lease, example.now_s),
            grants=_grants(lease, node, example),
        )
    except RequestError as error:
        return replace(report, fault=str(error))


def _place(request: PodRequest, node: LedgerNode) -> tuple[Share, ...] | Refusal:
    """Place the pod as a placer would; each share gets the first slot, as on an idle device."""
    mirror = ClusterMirror()
    mirror.put_node(node)
    result = place(request, NodeIndex(mirror), lambda: 0.0)
    if isinstance(result, Refusal):
        return result
    return tuple(
        structs.replace(share, slot=_first_slot(share), fence=1) for share in result[0].shares
    )


def _first_slot(share: Share) -> int | None:
    if share.mig:
        return share.mig.position
    return 0 if share.slotted else None


def _grants(lease: Lease, node: LedgerNode, example: ExampleNode) -> tuple[ContainerGrant, ...]:
    snapshot = NodeSnapshot(
        name=node.facts.name,
        devices={device.uuid: device for device, _ in node.devices},
        served={},
        paths=example.paths,
    )
    instances = {
        (share.device, share.mig.position): f"MIG-(the UUID of this {share.mig.profile})"
        for share in lease.shares
        if share.mig
    }
    return tuple(
        ContainerGrant(
            container=name,
            shares=lease.shares_of(name),
            setup=container_setup(lease, name, snapshot, instances),
        )
        for name in lease.containers
    )
