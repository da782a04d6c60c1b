"""Which nodes kube-scheduler leaves for a pod, by its documented rules: a table of cases.

Labels, taints and room of nodes, and ports and anti-affinity of pods that run there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
AFFINITY = "node(s) didn't match Pod's node affinity/selector"
TAINTED = "node(s) had untolerated taint(s)"
PORTS = "node(s) didn't have free ports for the requested pod ports"
REPELLED = "node(s) didn't satisfy existing pods anti-affinity rules"


@dataclass(frozen=True, kw_only=True)
class NodeCase:
    spec: Manifest = field(default_factory=dict)
    """Of the pod, whose label is `app: train`."""
    fits: str = ""
    """Of the nodes n1 and n2 in zone a, and n3 in zone b, those that the pod fits."""
    nodes: Mapping[str, Manifest] = field(default_factory=dict)
    """What nodes have besides: `labels`, `taints`, `unschedulable` and `allocatable`."""
    running: tuple[Manifest, ...] = ()
    """Pods that run: `node`, and if it has them `labels`, `namespace` and `spec`."""


LABELS: Mapping[str, Mapping[str, str]] = {
    "n1": {ZONE: "a", HOST: "n1", "gpus": "4"},
    "n2": {ZONE: "a", HOST: "n2", "gpus": "8", "disk": "ssd"},
    "n3": {ZONE: "b", HOST: "n3", "disk": "hdd"},
}
ROOM = {"cpu": "4", "memory": "16Gi", "pods": "10"}
ALL = "n1 n2 n3"


def need(key: str, operator: str, *values: str) -> Manifest:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


def on(*terms: Any, fields: bool = False) -> Manifest:
    """Return a spec with required node affinity: terms, each with one need or a list of them."""
    kind = "matchFields" if fields else "matchExpressions"
    listed = [{kind: term if isinstance(term, list) else [term]} for term in terms]
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": listed}}}}


def taint(effect: str = "NoSchedule", key: str = "level", value: str = "5") -> Manifest:
    return {"taints": [{"key": key, "value": value, "effect": effect}]}


def tolerates(**toleration: Any) -> Manifest:
    return {"tolerations": [toleration]}


def ports(*wanted: str) -> Manifest:
    """Return a spec with host ports such as `TCP/127.0.0.1/8080`."""
    listed = []
    for port in wanted:
        protocol, address, number = port.split("/")
        where = {"hostIP": address} if address else {}
        listed.append({"protocol": protocol, "hostPort": int(number), **where})
        listed[-1]["containerPort"] = int(number)
    return {"containers": [{"name": "ports", "image": "pause", "ports": listed}]}


def requesting(**amounts: str) -> Manifest:
    return {"containers": [{"name": "c", "image": "pause", "resources": {"requests": amounts}}]}


def repelling(
    node: str, key: str = HOST, *, namespace: str = "", labels: Any = None, **term: Any
) -> Manifest:
    """Return a pod with required anti-affinity to `app: train`, or what its term selects."""
    selector = {} if "labelSelector" in term else {"labelSelector": {"matchLabels": TRAIN}}
    listed = [{"topologyKey": key, **selector, **term}]
    spec = {"affinity": {"podAntiAffinity": {REQUIRED: listed}}}
    return {"node": node, "spec": spec, "namespace": namespace, "labels": labels or {}}


TRAIN = {"app": "train"}
SELECTION: dict[str, NodeCase] = {
    "nothing is required": NodeCase(fits=ALL),
    "a selector": NodeCase(spec={"nodeSelector": {ZONE: "a"}}, fits="n1 n2"),
    "a selector with two labels": NodeCase(
        spec={"nodeSelector": {ZONE: "a", "disk": "ssd"}}, fits="n2"
    ),
    "a selector of a label that no node has": NodeCase(spec={"nodeSelector": {"x": "y"}}),
    "a selector of an empty value": NodeCase(spec={"nodeSelector": {"disk": ""}}),
    "one of two values": NodeCase(spec=on(need("disk", "In", "ssd", "hdd")), fits="n2 n3"),
    "not one value": NodeCase(spec=on(need("disk", "NotIn", "ssd")), fits="n1 n3"),
    "a label exists": NodeCase(spec=on(need("disk", "Exists")), fits="n2 n3"),
    "a label does not exist": NodeCase(spec=on(need("disk", "DoesNotExist")), fits="n1"),
    "more than": NodeCase(spec=on(need("gpus", "Gt", "4")), fits="n2"),
    "less than": NodeCase(spec=on(need("gpus", "Lt", "8")), fits="n1"),
    "more than, of a text": NodeCase(spec=on(need("disk", "Gt", "4"))),
    "either of two terms": NodeCase(
        spec=on(need(ZONE, "In", "b"), need("gpus", "In", "4")), fits="n1 n3"
    ),
    "both needs of a term": NodeCase(
        spec=on([need(ZONE, "In", "a"), need("disk", "Exists")]), fits="n2"
    ),
    "an empty term matches nothing": NodeCase(spec=on([])),
    "an empty term beside another": NodeCase(spec=on([], need(ZONE, "In", "b")), fits="n3"),
    "a selector and affinity": NodeCase(
        spec={"nodeSelector": {ZONE: "a"}, **on(need("gpus", "Gt", "4"))}, fits="n2"
    ),
    "the name of a node": NodeCase(
        spec=on(need("metadata.name", "In", "n2"), fields=True), fits="n2"
    ),
    "any but a node of that name": NodeCase(
        spec=on(need("metadata.name", "NotIn", "n2"), fields=True), fits="n1 n3"
    ),
    "a preference excludes nothing": NodeCase(
        spec={"affinity": {"nodeAffinity": {PREFERRED: [
            {"weight": 1, "preference": {"matchExpressions": [need(ZONE, "In", "c")]}}]}}},
        fits=ALL,
    ),
}  # fmt: skip
TAINTS: dict[str, NodeCase] = {
    "a taint": NodeCase(nodes={"n1": taint()}, fits="n2 n3"),
    "a taint that evicts": NodeCase(nodes={"n1": taint("NoExecute")}, fits="n2 n3"),
    "a taint that is only a preference": NodeCase(nodes={"n1": taint("PreferNoSchedule")},
                                              fits=ALL),
    "a taint of the same value is tolerated": NodeCase(
        nodes={"n1": taint()}, spec=tolerates(key="level", value="5"), fits=ALL
    ),
    "a taint of another value is not": NodeCase(
        nodes={"n1": taint()}, spec=tolerates(key="level", value="6"), fits="n2 n3"
    ),
    "a taint of another effect is not": NodeCase(
        nodes={"n1": taint()}, spec=tolerates(key="level", value="5", effect="NoExecute"),
        fits="n2 n3",
    ),
    "any value is tolerated": NodeCase(
        nodes={"n1": taint()}, spec=tolerates(key="level", operator="Exists"), fits=ALL
    ),
    "any key is tolerated": NodeCase(
        nodes={"n1": taint(), "n2": taint("NoExecute", "other")},
        spec=tolerates(operator="Exists"), fits=ALL,
    ),
    "any key is tolerated, of one effect": NodeCase(
        nodes={"n1": taint(), "n2": taint("NoExecute", "other")},
        spec=tolerates(operator="Exists", effect="NoSchedule"), fits="n1 n3",
    ),
    "eviction is tolerated for a time": NodeCase(
        nodes={"n1": taint("NoExecute")},
        spec=tolerates(key="level", operator="Exists", effect="NoExecute", tolerationSeconds=9),
        fits=ALL,
    ),
    "one of two taints is tolerated": NodeCase(
        nodes={"n1": {"taints": [*taint()["taints"], *taint(key="other")["taints"]]}},
        spec=tolerates(key="level", operator="Exists"), fits="n2 n3",
    ),
    "a cordoned node": NodeCase(nodes={"n3": {"unschedulable": True}}, fits="n1 n2"),
    "a cordoned node is tolerated": NodeCase(
        nodes={"n3": {"unschedulable": True}},
        spec=tolerates(key="node.kubernetes.io/unschedulable", operator="Exists"), fits=ALL,
    ),
}  # fmt: skip
ROOM_CASES: dict[str, NodeCase] = {
    "more cpu than any node has": NodeCase(spec=requesting(cpu="5")),
    "all cpu": NodeCase(spec=requesting(cpu="4"), fits=ALL),
    "cpu beside a pod that runs": NodeCase(
        spec=requesting(cpu="3"), running=({"node": "n1", "spec": requesting(cpu="1500m")},),
        fits="n2 n3",
    ),
    "memory beside a pod that runs": NodeCase(
        spec=requesting(memory="10Gi"),
        running=({"node": "n2", "spec": requesting(memory="6Gi")},
                 {"node": "n3", "spec": requesting(memory="7Gi")}),
        fits="n1 n2",
    ),
    "the last pod of a node": NodeCase(
        nodes={"n1": {"allocatable": {"pods": "1"}}, "n2": {"allocatable": {"pods": "2"}}},
        running=({"node": "n1"}, {"node": "n2"}), fits="n2 n3",
    ),
    "a resource that one node has": NodeCase(
        nodes={"n2": {"allocatable": {"example.com/nic": "2"}}},
        spec={"containers": [{"name": "c", "image": "pause",
                              "resources": {"limits": {"example.com/nic": "2"}}}]},
        fits="n2",
    ),
    "a resource that is in use": NodeCase(
        nodes={"n2": {"allocatable": {"example.com/nic": "2"}}},
        running=({"node": "n2", "spec": {"containers": [
            {"name": "c", "image": "pause", "resources": {"limits": {"example.com/nic": "1"}}}]}},),
        spec={"containers": [{"name": "c", "image": "pause",
                              "resources": {"limits": {"example.com/nic": "2"}}}]},
    ),
    "the largest of init containers counts": NodeCase(
        spec={"initContainers": [{"name": name, "image": "pause",
                                  "resources": {"requests": {"cpu": "3"}}} for name in "ab"]},
        fits=ALL,
    ),
    "sidecars count together": NodeCase(
        spec={"initContainers": [{"name": name, "image": "pause", "restartPolicy": "Always",
                                  "resources": {"requests": {"cpu": "3"}}} for name in "ab"]},
    ),
}  # fmt: skip
_PORTS = [
    ("another port", "UDP/127.0.0.1/8080", "UDP/127.0.0.1/9090", ALL),
    ("the same port", "UDP/127.0.0.1/8080", "UDP/127.0.0.1/8080", "n2 n3"),
    ("the same port of TCP", "TCP/127.0.0.1/8080", "TCP/127.0.0.1/8080", "n2 n3"),
    ("another address", "TCP/127.0.0.1/8080", "TCP/127.0.0.2/8080", ALL),
    ("another protocol", "UDP/127.0.0.1/8080", "TCP/127.0.0.1/8080", ALL),
    ("all addresses beside one", "TCP/127.0.0.1/8001", "TCP/0.0.0.0/8001", "n2 n3"),
    ("one address beside all", "TCP/0.0.0.0/8001", "TCP/127.0.0.1/8001", "n2 n3"),
    ("all addresses twice", "TCP/0.0.0.0/8001", "TCP/0.0.0.0/8001", "n2 n3"),
    ("no address is all addresses", "TCP//8001", "TCP/0.0.0.0/8001", "n2 n3"),
    ("all addresses of another protocol", "TCP/127.0.0.1/8001", "UDP/0.0.0.0/8001", ALL),
    ("all addresses of another port", "TCP/0.0.0.0/8002", "TCP/127.0.0.1/8001", ALL),
    ("the same port of SCTP", "SCTP//80", "SCTP//80", "n2 n3"),
]
PORT_CASES = {
    name: NodeCase(running=({"node": "n1", "spec": ports(running)},), spec=ports(wanted), fits=fits)
    for name, running, wanted, fits in _PORTS
} | {
    "one of two ports": NodeCase(
        running=({"node": "n2", "spec": ports("TCP//8001", "UDP//8080")},),
        spec=ports("TCP//8001", "UDP//8081"),
        fits="n1 n3",
    ),
    "ports of two pods": NodeCase(
        running=(
            {"node": "n1", "spec": ports("TCP//8001")},
            {"node": "n3", "spec": ports("TCP//8002")},
        ),
        spec=ports("TCP//8001", "TCP//8002"),
        fits="n2",
    ),
}
REPELLING: dict[str, NodeCase] = {
    "a pod that repels on its node": NodeCase(running=(repelling("n1"),), fits="n2 n3"),
    "a pod that repels in its zone": NodeCase(running=(repelling("n1", ZONE),), fits="n3"),
    "a pod that repels others": NodeCase(
        running=(repelling("n1", labelSelector={"matchLabels": {"app": "web"}}),), fits=ALL
    ),
    "a pod that repels all": NodeCase(running=(repelling("n1", labelSelector={}),), fits="n2 n3"),
    "a term without selector": NodeCase(running=(repelling("n1", labelSelector=None),), fits=ALL),
    "one of several values": NodeCase(
        running=(repelling("n1", labelSelector={"matchExpressions": [
            need("app", "In", "web", "train")]}),),
        fits="n2 n3",
    ),
    "any but a value": NodeCase(
        running=(repelling("n2", labelSelector={"matchExpressions": [
            need("app", "NotIn", "web")]}),),
        fits="n1 n3",
    ),
    "pods without a label": NodeCase(
        running=(repelling("n2", labelSelector={"matchExpressions": [
            need("tier", "DoesNotExist")]}),),
        fits="n1 n3",
    ),
    "a pod of another namespace repels its own": NodeCase(
        running=(repelling("n1", namespace="other"),), fits=ALL
    ),
    "a pod that repels all namespaces": NodeCase(
        running=(repelling("n1", namespace="other", namespaceSelector={}),), fits="n2 n3"
    ),
    "a pod that repels namespaces with a label": NodeCase(
        running=(repelling("n1", namespace="other",
                           namespaceSelector={"matchLabels": {"team": "ml"}}),),
        fits="n2 n3",
    ),
    "a pod that repels namespaces with another label": NodeCase(
        running=(repelling("n1", namespace="other",
                           namespaceSelector={"matchLabels": {"team": "web"}}),),
        fits=ALL,
    ),
    "two pods that repel in their zones": NodeCase(
        running=(repelling("n1", ZONE), repelling("n3", ZONE)), fits=""
    ),
    "a label that the node of the pod does not have": NodeCase(
        running=(repelling("n1", "rack"),), fits=ALL
    ),
}  # fmt: skip
NODE_CASES: dict[str, NodeCase] = {**SELECTION, **TAINTS, **ROOM_CASES, **PORT_CASES, **REPELLING}
"""Namespaces of the cases have the label `team: ml`, those of `other` none."""
