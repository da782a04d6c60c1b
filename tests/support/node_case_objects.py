"""Cases about nodes as objects of the Kubernetes API, and the placer's answers."""

from collections.abc import Mapping, Sequence

from services.placer.rounds.decisions import DecisionContext
from services.watcher.node_sources import parse_node
from services.watcher.pod_tracker import PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.devices.device import DeviceUse
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace
from shared.model.requests.placement import Refusal
from shared.pods.pod_parser import PodParser
from tests.support.build import TRIGGER, devices, dice
from tests.support.node_cases import LABELS, ROOM, TRAIN, Manifest, NodeCase
from tests.support.placer.placing import index_of

SCHEDULER = "default-scheduler"
PARSER = PodParser(frozenset({SCHEDULER}), Rules())
GPU = {"name": "gpu", "image": "pause", "resources": {"limits": {TRIGGER: "1"}}}
NAMESPACE = "team"


def node_manifests(case: NodeCase) -> list[Manifest]:
    listed: list[Manifest] = []
    for name, labels in LABELS.items():
        more = case.nodes.get(name, {})
        amounts = {**ROOM, TRIGGER: "100", **more.get("allocatable", {})}
        spec = {key: more[key] for key in ("taints", "unschedulable") if key in more}
        listed.append(
            {
                "metadata": {"name": name, "labels": {**labels, **more.get("labels", {})}},
                "spec": spec,
                "status": {"allocatable": amounts, "capacity": amounts},
            }
        )
    return listed


def pod_manifests(case: NodeCase) -> list[Manifest]:
    """Return the pods that run, and last the one to be placed."""
    listed: list[Manifest] = []
    for number, pod in enumerate(case.running):
        namespace = pod.get("namespace") or NAMESPACE
        metadata = {"name": f"running-{number}", "namespace": namespace}
        spec = {"containers": [{"name": "c", "image": "pause"}], **pod.get("spec", {})}
        listed.append(
            {
                "metadata": {**metadata, "labels": pod.get("labels", {})},
                "spec": {**spec, "nodeName": pod["node"], "schedulerName": SCHEDULER},
            }
        )
    spec = {**case.spec, "schedulerName": SCHEDULER}
    spec["containers"] = [*case.spec.get("containers", ()), GPU]
    metadata = {"name": "train", "namespace": NAMESPACE, "labels": TRAIN}
    return [*listed, {"metadata": metadata, "spec": spec}]


def fitting(
    pods: Sequence[ApiPod],
    nodes: Sequence[ApiNode],
    namespaces: Mapping[Namespace, Mapping[str, str]],
) -> str:
    """Return the nodes that the placer leaves for the only pod that waits.

    Each node in turn is the only one with GPUs: so the others count for rules about topology.
    """
    tracker = PodTracker()
    tracker.update_namespaces(namespaces)
    events = [event for pod in pods for event in tracker.update(PARSER.parse(pod), None)]
    [queued] = (event for event in events if isinstance(event, PodQueued))
    facts = [tracker.with_usage(parse_node(node)) for node in nodes]
    fits: list[str] = []
    for candidate in facts:
        listed = [
            LedgerNode(
                facts=node,
                version=1,
                used={},
                devices=tuple((gpu, DeviceUse()) for gpu in devices(2, node.name))
                if node.name == candidate.name
                else (),
                served=(TRIGGER,),
            )
            for node in facts
        ]
        answer = DecisionContext(index_of(*listed), dice(1)).choose(queued)
        if not isinstance(answer, Refusal):
            fits.append(candidate.name)
    return " ".join(sorted(fits))
