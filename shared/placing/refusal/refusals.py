"""Reasons why no node fits, counted over all nodes, with details and a hint; pure."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import inf
from operator import itemgetter

from msgspec import structs

from shared.dialects import DIALECTS, GPU_RESOURCES
from shared.dialects.advertised import TRIGGER
from shared.dialects.vocabulary import no_node_has, unknown_gpus
from shared.model.leases.lease import will_end_by
from shared.model.quantity import HUGE_PAGES, timestamp
from shared.model.requests.placement import DeviceVerdict, NodeVerdict, Refusal
from shared.model.requests.pod_rules import DomainRule
from shared.model.requests.request import PodRequest, TopologyScope, VolumeRule
from shared.placing.advice import RECOVERS, Advice, changes_between
from shared.placing.choice.device_choice import choose_devices, fits
from shared.placing.choice.device_refusals import (
    DeviceRefusals,
    device_refusals,
    explain_no_devices,
)
from shared.placing.index.device_stages import Excluded
from shared.placing.index.no_fit import Explanation, NearNode, NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.threshold_column import NodeSet, positions_in, store
from shared.placing.mirror.node_mirror import MirroredNode, idle_copy
from shared.placing.node_filters import (
    OTHER_MANAGER,
    RESTARTING,
    UNHEALTHY,
    WAITS,
    NodeFilterFailure,
    check_all,
)
from shared.placing.refusal.changes import changed_to_fit, is_tiny
from shared.placing.refusal.offered_isolation import demands_isolation, with_offered_isolation
from shared.placing.refusal.served_words import in_served_words

BlockedNodes = Sequence[tuple[MirroredNode, NodeFilterFailure]]
NEAREST = 3
COMPARED_NODES = 32
CACHED_REFUSALS = 8192
CACHED_COPIES = 64

_STAGES = (
    "UnsupportedConstraint",
    "OutsideGangTopology",
    OTHER_MANAGER,
    "NodeAffinity",
    *VolumeRule,
    "NodeUnschedulable",
    "UntoleratedTaint",
    *DomainRule,
    "ExistingAntiAffinity",
)
"""The farthest from fitting come first; codes of devices follow."""

NodeDetails = Mapping[NearNode, tuple[NodeFilterFailure, NodeVerdict]]


def explain(request: PodRequest, index: NodeIndex, no_fit: NoFit) -> Refusal:
    """Return in words why no node fits a request, in the mirror's state of the decision.

    For example, `explain(request, index, no_fit).text` is "0/2 nodes are available: 2 Insufficient
    GPU memory. ..." with what to try next.
    """
    last = no_fit.last
    if last is not None and last.position == no_fit.position:
        return last.refusal
    index.explanations.pop(no_fit.key, None)
    mirror = index.mirror
    inventory = mirror.inventory_changes.end
    if last is not None and last.inventory_position != inventory:
        last = None
    possible = possible_nodes(request, index) if last is None else last.possible
    excluded = no_fit.excluded
    counts = sorted(
        ((nodes.bit_count(), code, text) for (code, text), nodes in excluded.items()),
        key=lambda entry: (-entry[0], entry[2]),
    )
    details, advice = _details(request, index, excluded, possible, last)
    listed = ", ".join(f"{count} {text}" for count, _, text in counts) or "there is no node"
    refusal = Refusal(
        reason=f"0/{len(mirror.nodes)} nodes are available: {listed}.",
        counts=_by_code(counts),
        nearest_nodes=tuple([verdict for _, verdict in details.values()]),
        hint=advice.text,
        permanent=bool(mirror.nodes) and not possible,
    )
    explanation = Explanation(no_fit.position, inventory, possible, details, advice, refusal)
    return store(index.explanations, no_fit.key, explanation, CACHED_REFUSALS).refusal


def _by_code(counts: Iterable[tuple[int, str, str]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for count, code, _ in counts:
        sums[code] = sums.get(code, 0) + count
    return tuple(sorted(sums.items(), key=lambda entry: (-entry[1], entry[0])))


def _details(
    request: PodRequest,
    index: NodeIndex,
    excluded: Excluded,
    possible: NodeSet,
    last: Explanation | None,
) -> tuple[NodeDetails, Advice]:
    nearest = tuple(_nearest(index, excluded, possible))
    last_details = last.details if last else {}
    names = {"", *(node.name for _, node, _ in nearest)}
    if last is not None and tuple(last_details) == nearest and last.advice.node in names:
        return last_details, last.advice
    details = {near: last_details.get(near) or _explain(request, near[1]) for near in nearest}
    blocked = [(near[1], failure) for near, (failure, _) in details.items()]
    return details, _advice(request, index, excluded, blocked, possible)


def _advice(
    request: PodRequest,
    index: NodeIndex,
    excluded: Excluded,
    blocked: BlockedNodes,
    possible: NodeSet,
) -> Advice:
    if not blocked:
        return Advice(administrator=NO_NODE)
    rule_hint = RULE_HINTS.get(blocked[0][1].code)
    if rule_hint is not None:
        return Advice(soon=_for_label(request, index) or rule_hint)
    nearest = [node for node, _ in blocked]
    advice = None
    if not possible and demands_isolation(request):
        others = _others(index, excluded, possible, nearest)
        nodes = [(node, idle(node, index)) for node in chain(nearest, others)]
        advice = with_offered_isolation(request, nodes, index.mirror.nodes.values())
    advice = (
        advice
        or advise(request, nearest, index)
        or advise(request, list(_others(index, excluded, possible, nearest)), index)
    )
    if advice is None:
        advice = _by_other_names(request, nearest, index) or _remedy(
            request, blocked, index.mirror.nodes.values()
        )
    elif advice.changes and not advice.waiting:
        passing = _passing(request, index, excluded, blocked, possible)
        if passing:
            remedy = _remedy(request, passing, index.mirror.nodes.values())
            advice = replace(advice, unchanged=remedy.text)
    return replace(
        advice,
        leftovers=_leftovers(nearest),
        reserved_until=_reserved_until(request, nearest, index),
    )


def _by_other_names(
    request: PodRequest, nodes: Iterable[MirroredNode], index: NodeIndex
) -> Advice | None:
    """Request the same by resources that a node serves."""
    for node in nodes:
        translated = in_served_words(request, idle(node, index))
        if translated is not None:
            changed, changes = translated
            ends = not fits(changed, node)
            models = _models_of(node)
            return Advice(changes=changes, node=node.name, models=models, ends=ends)
    return None


def _passing(
    request: PodRequest,
    index: NodeIndex,
    excluded: Excluded,
    blocked: BlockedNodes,
    possible: NodeSet,
) -> BlockedNodes:
    """Return nodes that fit the unchanged pod but for a passing state: the nearest, or another.

    A pod that names a GPU may have nearer nodes than that of the GPU.
    """
    if blocked[0][1].code in _PASSING:
        return blocked
    nodes = index.sets.positions.nodes
    for (code, _), members in excluded.items():
        for position in positions_in(members & possible, 1) if code in _PASSING else ():
            node = nodes[position]
            if node is not None:
                return [(node, _explain(request, node)[0])]
    return ()


def _leftovers(nodes: Iterable[MirroredNode]) -> str:
    for node in nodes:
        for device in node.devices:
            if text := device.device.leftover_text:
                return text.replace(" of it ", f" of GPU {device.index} of node {node.name} ")
    return ""


def _others(
    index: NodeIndex, excluded: Excluded, possible: NodeSet, nearest: Collection[MirroredNode]
) -> Iterator[MirroredNode]:
    for members in excluded.values():
        for alike in (members & possible, members & ~possible):
            for position in positions_in(alike, COMPARED_NODES):
                node = index.sets.positions.nodes[position]
                if node is not None and node not in nearest:
                    yield node


def advise(request: PodRequest, nodes: Sequence[MirroredNode], index: NodeIndex) -> Advice | None:
    """Return None if only an administrator can help.

    The fewest changes come first, and of as many those with which the pod runs at once.
    """
    eventually = _without_rules(request)
    for node in nodes:
        if fits(eventually, idle(node, index)):
            first = nodes[0]
            changed = changed_to_fit(request, first)
            if changed is None or is_tiny(changed, request, first):
                return Advice(waiting=node.name)
            changes = changes_between(request, changed)
            return Advice(
                changes=changes, node=first.name, models=_models_of(first), waiting=node.name
            )
    best: Advice | None = None
    absent = _absent(request, index)
    for node in nodes:
        changed = changed_to_fit(eventually, idle(node, index), absent)
        changes = changes_between(eventually, changed) if changed else ()
        if changed is None or (best is not None and len(changes) > len(best.changes)):
            continue
        ends = not fits(_with_rules_of(changed, request), node)
        if best is None or (len(changes), ends) < (len(best.changes), best.ends):
            best = Advice(changes=changes, node=node.name, models=_models_of(node), ends=ends)
    return best


def _absent(request: PodRequest, index: NodeIndex) -> tuple[str, ...]:
    """Accelerators are left out."""
    others = {
        name for name in request.resources if "/" in name or name.startswith(HUGE_PAGES)
    } - GPU_RESOURCES
    extended = sorted(others.difference(unknown_gpus(request.resources)))
    nodes = index.mirror.nodes.values()
    return tuple(
        name for name in extended if not any(name in node.facts.allocatable for node in nodes)
    )


def _without_rules(request: PodRequest) -> PodRequest:
    """Leave out what other pods forbid, which ends with them."""
    requirements = request.node_requirements
    if not (requirements.repelled_from or requirements.domains):
        return request
    free = structs.replace(requirements, repelled_from=(), domains=())
    return structs.replace(request, node_requirements=free)


def _with_rules_of(changed: PodRequest, request: PodRequest) -> PodRequest:
    rules = request.node_requirements
    requirements = structs.replace(
        changed.node_requirements, repelled_from=rules.repelled_from, domains=rules.domains
    )
    return structs.replace(changed, node_requirements=requirements)


def _models_of(node: MirroredNode) -> str:
    return ", ".join(sorted({device.device.model for device in node.devices}))


def _nearest(index: NodeIndex, excluded: Excluded, possible: NodeSet) -> Iterator[NearNode]:
    """Yield nodes at the last stage that excludes any, the freest first.

    At each stage, `possible` nodes come first.
    """
    nodes = index.sets.positions.nodes
    free_mib = index.sets.largest_free_mib()
    missing = NEAREST
    by_stage = sorted(
        (-_stage(code), at, code, members)
        for (code, _), same_reason in excluded.items()
        for at, members in enumerate((same_reason & possible, same_reason & ~possible))
        if members
    )
    for _, same_stage in groupby(by_stage, key=itemgetter(0, 1)):
        compared = [
            (-free_mib[position], node.name, code, node)
            for _, _, code, members in same_stage
            for position in positions_in(members, COMPARED_NODES)
            if (node := nodes[position]) is not None
        ]
        compared.sort()
        for _, _, code, node in compared[:missing]:
            yield code, node, node.changes
        missing -= len(compared)
        if missing <= 0:
            return


def _explain(request: PodRequest, node: MirroredNode) -> tuple[NodeFilterFailure, NodeVerdict]:
    failure = check_all(
        request,
        node.facts,
        node.free_resources,
        node.serving,
        node.paused,
        all_sick=node.all_sick,
    )
    if failure is not None:
        of_devices = device_refusals(request, node) if failure.code == UNHEALTHY[0] else {}
        return failure, _node_verdict(node, failure, of_devices)
    refusals = device_refusals(request, node)
    failure = explain_no_devices(request, node, refusals)
    return failure, _node_verdict(node, failure, refusals)


def _stage(code: str) -> int:
    if code in _STAGES:
        return _STAGES.index(code)
    return len(_STAGES) + ("Gpu" in code and code not in {"NoGpus", "GpuModeMismatch"})


def _node_verdict(
    node: MirroredNode, blocked: NodeFilterFailure, refusals: DeviceRefusals
) -> NodeVerdict:
    text = blocked.message.replace("node(s) were ", "it was ").replace("node(s) ", "it ")
    reason = f"{text} ({blocked.numbers})" if blocked.numbers else text
    devices = tuple(
        [
            DeviceVerdict(device=device.uuid, index=device.index, reason=refusal.text)
            for device, refusal in refusals.items()
        ]
    )
    return NodeVerdict(node=node.name, reason=reason, devices=devices)


def possible_nodes(request: PodRequest, index: NodeIndex) -> NodeSet:
    if request.node_requirements.unsupported:
        return 0
    selection = request.selection
    kinds = index.sets.kinds_of_hardware(
        request.resources,
        uuids=bool(selection.uuids or selection.not_uuids),
        locations=request.topology_scope is not TopologyScope.NODE,
    )
    possible: NodeSet = 0
    for example, alike in kinds:
        if choose_devices(request, idle(example, index, healthy=True)) is not None:
            possible |= alike
    return possible


def idle(node: MirroredNode, index: NodeIndex, *, healthy: bool = False) -> MirroredNode:
    key = node, index.mirror.inventory_changes.end, healthy
    copy = index.idle_copies.get(key)
    return copy or store(index.idle_copies, key, idle_copy(node, healthy=healthy), CACHED_COPIES)


def _reserved_until(request: PodRequest, nodes: Iterable[MirroredNode], index: NodeIndex) -> int:
    """Return the latest time of a claim on devices that fit, or 0."""
    latest = 0
    for node in nodes:
        for until in sorted({device.ledger_use.claimed_until for device in node.devices}):
            if until > latest and fits(request, index.without_claims(node, until)):
                latest = until
    return latest


def with_run_time(refusal: Refusal, request: PodRequest, index: NodeIndex, now: float) -> Refusal:
    """Advise a maximum run time for reserved GPUs, rounded down to stay true."""
    explanation = index.explanations.get(placement_key(request))
    term = request.term
    until = explanation.advice.reserved_until if explanation else 0
    spare_s = until - (will_end_by(structs.replace(term, max_run_s=0), now) or inf)
    if spare_s < 60 or request.gang or term.runs_on:
        return refusal
    most = 60 << (int(spare_s // 60).bit_length() - 1)
    if term.max_run_s is not None and term.max_run_s <= most:
        return refusal
    hint = (
        f"{refusal.hint}; or set spec.activeDeadlineSeconds to {most} or less, which ends the pod "
        f"before GPUs that fit it are needed for a planned start at {timestamp(until)}"
    )
    return structs.replace(refusal, hint=hint)


RULE_HINTS: Mapping[str, str] = {
    DomainRule.SPREAD_LABEL: (
        "label nodes with the topologyKey of the pod's topologySpreadConstraints, or name a label "
        "that they have"
    ),
    DomainRule.SPREAD: (
        "wait until there is room in the domains with the fewest of the pods that its "
        "topologySpreadConstraints select, or pods elsewhere have ended; or raise maxSkew, or set "
        "whenUnsatisfiable: ScheduleAnyway"
    ),
    DomainRule.AFFINITY: (
        "start a pod that its required podAffinity selects where nodes have room, or make the "
        "affinity preferred"
    ),
    DomainRule.ANTI_AFFINITY: (
        "wait until pods that its required podAntiAffinity selects have ended, add a node in "
        "another domain, or make the anti-affinity preferred"
    ),
}
"""For pods that their own rules about other pods exclude."""


def _for_label(request: PodRequest, index: NodeIndex) -> str:
    nodes = index.mirror.nodes.values()
    for domains in request.node_requirements.domains:
        if domains.rule is DomainRule.AFFINITY and not any(
            domains.key in node.facts.labels for node in nodes
        ):
            return (
                f"label nodes with {domains.key}, the topologyKey of the pod's podAffinity, or "
                "name a label that they have"
            )
    return ""


NAMED_FAULTS = 4
NAMED_CLAIMS = 4
_SOON = frozenset({"NodeAgentStarting", RESTARTING[0], WAITS})
"""They end within seconds, or by the pod's author."""
_BY_AUTHOR = frozenset(
    {"GpuEnforcerMissing", "GpuSharingMode", "GpuReplicasOnly", "GpuReplicasTogether"}
)
"""The pod's author can mend it."""
_PASSING = _SOON | {UNHEALTHY[0], "GpuExcluded", "NodeAgentNotReady", "NodeUnschedulable"}
"""They end without a change of the pod, or by an administrator's command."""
NO_NODE = "no node is known: check that a watcher runs and reaches the API server"


def _remedy(request: PodRequest, nearest: BlockedNodes, nodes: Iterable[MirroredNode]) -> Advice:
    node, blocked = nearest[0]
    for name in unknown_gpus(request.resources):
        if not any(name in node.facts.allocatable for node in nodes):
            meant = no_node_has(name, request.resources[name], request.triggers)
            return Advice(meant=meant, administrator="add a node that has it")
    text = REMEDIES.get(blocked.code, "")
    if not isinstance(text, str):
        text = text(request, nearest)
    text = text.format(node=node.name) if text else "add a node that fits the pod"
    return Advice(soon=text) if blocked.code in _SOON | _BY_AUTHOR else Advice(administrator=text)


def _for_health(_request: PodRequest, nearest: BlockedNodes) -> str:
    for node, _ in nearest:
        faults = [
            f"device {device.index}: {device.device.public_fault or 'it is unhealthy'}"
            for device in node.devices
            if not device.healthy
        ]
        if faults:
            more = f"; and {len(faults) - NAMED_FAULTS} more" if len(faults) > NAMED_FAULTS else ""
            return (
                f"check node {node.name}: {'; '.join(faults[:NAMED_FAULTS])}{more}. Its agent "
                f"probes them again, and {RECOVERS}"
            )
    return ""


def _for_trigger(request: PodRequest, nearest: BlockedNodes) -> str:
    node = nearest[0][0]
    name = next((name for name in request.triggers if name not in node.serving), "the resource")
    dialect = DIALECTS.get(request.dialect)
    if name == TRIGGER and dialect is not None and dialect.served & node.serving:
        return (
            f"start the node agent of node {node.name} with --gpu-strategy auto: it serves other "
            f"resources than {TRIGGER}, for clusters without the webhook"
        )
    if name in node.facts.unserved_resources:
        return (
            f"check the node agent of node {node.name}: the node shows no allocatable {name}, "
            "which a kubelet updates within 10 s after the agent has registered"
        )
    return (
        f"run a node agent whose --systems and --gpu-strategy serve {name}; if one should, its "
        "log names what its kubelet cannot allocate"
    )


def _for_claims(request: PodRequest, _: BlockedNodes) -> str:
    return request.node_requirements.waits_for.partition(": ")[2] or "wait"


def _for_volumes(text: str) -> Callable[[PodRequest, BlockedNodes], str]:
    """`{claims}` stands for the pod's claims."""

    def remedy(request: PodRequest, _: BlockedNodes) -> str:
        names = [claim.name for claim in request.claims]
        more = f" and {len(names) - NAMED_CLAIMS} more" if len(names) > NAMED_CLAIMS else ""
        plural = "s" if len(names) > 1 else ""
        claims = f"PersistentVolumeClaim{plural} {', '.join(names[:NAMED_CLAIMS])}{more}"
        return text.replace("{claims}", claims)

    return remedy


REMEDIES: Mapping[str, str | Callable[[PodRequest, BlockedNodes], str]] = {
    "ResourceNotServed": _for_trigger,
    "NodeAgentNotReady": "check the node agent of node {node}, and its kubelet",
    "NodeAgentStarting": (
        "wait until the kubelet of node {node} has listed its pods, at most 15 s after it started"
    ),
    RESTARTING[0]: (
        "wait until the agent of node {node} has registered with its kubelet, which takes seconds; "
        "if it lasts, have an administrator check that agent"
    ),
    "NoGpus": "check that a node agent runs on node {node}: it reports no GPU",
    "GpuExcluded": "uncordon a GPU of node {node} (`leasehold gpus` shows why it is cordoned)",
    "GpuUnhealthy": _for_health,
    "GpuSlotsTaken": "raise --device-split-count of the agent of node {node}",
    "GpuReplicasTaken": "have more replicas in the configuration of node {node}, or more nodes",
    "GpuReplicasOnly": (
        "request a number of GPUs and no amounts (docs/devices.md#replicas), or use a node whose "
        "GPUs are not offered as replicas"
    ),
    "GpuReplicasTogether": (
        "request one replica in a container, or set failRequestsGreaterThanOne of the "
        "configuration of node {node} to false"
    ),
    "NoGpuInstances": "configure MIG layouts for this GPU model in the agent of node {node}",
    "GpuPlaceUnknown": "check why the agent of node {node} does not know where its GPUs are",
    "GpuModeMismatch": "add a GPU in the mode that the pod requires",
    "GpuIsolationStrict": (
        "add a GPU in MIG mode; or remove the pod's annotation leasehold.dev/isolation, if its "
        "namespace is not strict itself"
    ),
    "GpuNotShared": "start the agent of node {node} without --isolation",
    "GpuEnforcerMissing": (
        "remove the annotation leasehold.dev/isolation, or demand in it what a node offers "
        "(`leasehold gpus` lists that); or have an administrator offer what it demands"
    ),
    "GpuSharingMode": (
        "wait until the leases of a GPU have ended, or leave out the annotation "
        "leasehold.dev/isolation"
    ),
    "GpuNotIsolated": (
        "run `leasehold doctor` on node {node}: its checks of the library report what to do"
    ),
    OTHER_MANAGER: (
        "remove KAI and its node agents from node {node}: it reads the same annotations, see "
        "docs/migrate.md"
    ),
    "UntoleratedTaint": "remove the taint of node {node}",
    "NodeUnschedulable": "kubectl uncordon {node}",
    WAITS: _for_claims,
    VolumeRule.NODE_AFFINITY: _for_volumes(
        "add a node that reaches the volume of {claims}: `kubectl describe pv` shows its node "
        "affinity"
    ),
    VolumeRule.ZONE: _for_volumes(
        "add a node in the zone of the volume of {claims}: `kubectl get pv --show-labels`"
    ),
    VolumeRule.NO_VOLUME: _for_volumes(
        "create a PersistentVolume for {claims} that a node with room reaches, or allow the "
        "topology of such a node in its StorageClass"
    ),
    VolumeRule.STORAGE: _for_volumes(
        "add storage for {claims} where nodes have room: `kubectl get csistoragecapacities -A` "
        "shows what is free"
    ),
    VolumeRule.IN_USE: _for_volumes(
        "make room on the node where the volume of {claims} is in use, end the pods that use it, "
        "or create a claim with the access mode ReadWriteMany"
    ),
}
"""`{node}` is the nearest node."""
