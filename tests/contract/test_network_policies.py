"""Which pods reach which ports of ours, by the policies that kubectl builds of the manifests."""

from collections.abc import Mapping

from services.topology import SERVICES
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.contract.test_pods_start import ours
from tests.support.packaging import WORKLOADS, Json, built, needs_kubectl, part
from tests.support.simcluster.installed import namespace_of
from tools.generate.network_policies import (
    METRICS,
    NAMESPACE_NAME,
    PART_OF,
)

Labels = Mapping[str, str]

SYSTEM, AGENTS = ({NAMESPACE_NAME: name} for name in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE))
TENANT = {NAMESPACE_NAME: "team-a"}
NATS = {("nats", "client")}
RAFT = {("nats", "client"), ("nats", "cluster")}
REDIS = {("redis", "redis")}
FOR_ANY_ADDRESS = {("webhook", "https"), ("api", "page"), ("api", "aggregated")}
FOR_ALL_PODS = FOR_ANY_ADDRESS | {("timekeeper", "api"), ("timekeeper", "reports")}

pytestmark = needs_kubectl


def workloads(found: list[Json]) -> dict[str, Json]:
    return {
        it["metadata"]["name"]: it["spec"]["template"] for it in found if it["kind"] in WORKLOADS
    }


def home_of(workload: str) -> Labels:
    return {NAMESPACE_NAME: namespace_of(workload)}


def matches(selector: Json, labels: Labels) -> bool:
    """Whether a label selector matches; only what our policies use of selectors."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    among = selector.get("matchExpressions", ())
    assert all(it["operator"] == "In" for it in among)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(it["key"]) in it["values"] for it in among
    )


def peer_matches(peer: Json, home: Labels, pod: Labels | None, namespace: Labels) -> bool:
    """Whether a peer of a policy at home has a pod with these labels; None: no pod."""
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if pod is None:
        return False
    selector = peer.get("namespaceSelector")
    in_namespace = namespace == home if selector is None else matches(selector, namespace)
    return in_namespace and matches(peer.get("podSelector", {}), pod)


def reached(found: list[Json], pod: Labels | None, namespace: Labels) -> set[tuple[str, str]]:
    """Workloads with names of ports to which a source may open connections."""
    policies = [it for it in found if it["kind"] == "NetworkPolicy"]
    opened = set()
    for name, template in workloads(found).items():
        labels = template["metadata"]["labels"]
        home = home_of(name)
        mine = [
            it["spec"]
            for it in policies
            if {NAMESPACE_NAME: it["metadata"]["namespace"]} == home
            and matches(it["spec"]["podSelector"], labels)
        ]
        assert mine, f"no policy selects {name}: all its ports are open"
        rules = [rule for it in mine for rule in it["ingress"]]
        for port in template["spec"]["containers"][0].get("ports", ()):
            named = {port["name"], port["containerPort"]}
            opened |= {
                (name, port["name"])
                for rule in rules
                if named & {it["port"] for it in rule["ports"]}
                and (
                    "from" not in rule
                    or any(peer_matches(it, home, pod, namespace) for it in rule["from"])
                )
            }
    return opened


def test_a_tenants_pod_reaches_only_what_is_for_all_pods() -> None:
    found = built("overlays/ha")
    tenants = {"app": "train"}
    claims = {PART_OF: "leasehold", "app.kubernetes.io/name": "binder"}

    for pod, namespaces in ((tenants, (TENANT, SYSTEM, AGENTS)), (claims, (TENANT, AGENTS))):
        for namespace in namespaces:
            assert reached(found, pod, namespace) == FOR_ALL_PODS
    assert reached(found, None, {}) == FOR_ANY_ADDRESS


def test_each_service_reaches_nats_and_only_those_with_a_user_reach_redis() -> None:
    found = built("overlays/ha")
    labels = {name: it["metadata"]["labels"] for name, it in workloads(found).items()}
    with_redis = {
        container["name"] for pod, container in ours(found) if "'redis-" in str(pod["volumes"])
    } | {"auth"}

    opened = {name: reached(found, its, home_of(name)) for name, its in labels.items()}

    installed = {service.name for service in SERVICES}
    assert installed | {"operator", "nats", "redis", "kube-scheduler"} == opened.keys()
    assert opened.pop("kube-scheduler") == FOR_ALL_PODS | {("extender", "https")}
    assert opened.pop("redis") == FOR_ALL_PODS
    assert opened.pop("nats") == FOR_ALL_PODS | RAFT
    for name, ports in opened.items():
        assert ports == FOR_ALL_PODS | NATS | (REDIS if name in with_redis else set()), name


def test_prometheus_needs_a_label_and_keda_reaches_only_watchers() -> None:
    found = part("kube-scheduler")
    with_keda = part("keda")

    metrics = {(service.name, "http") for service in SERVICES}
    metrics |= {("api", "old-metrics"), ("node-agent", "usage")}
    assert reached(found, {}, {METRICS: "true"}) - FOR_ALL_PODS == metrics
    assert reached(with_keda, {}, {NAMESPACE_NAME: "keda"}) - FOR_ALL_PODS == {("watcher", "http")}


def test_only_its_kube_scheduler_reaches_the_extender() -> None:
    found = part("kube-scheduler")

    def reaches(name: str) -> bool:
        labels = {"app.kubernetes.io/name": name, PART_OF: "leasehold"}
        return ("extender", "https") in reached(found, labels, home_of(name))

    assert (reaches("kube-scheduler"), reaches("placer")) == (True, False)


def test_the_servers_open_no_connections_of_their_own() -> None:
    policies = {
        it["metadata"]["name"]: it["spec"]
        for it in built("base")
        if it["kind"] == "NetworkPolicy" and "Egress" in it["spec"]["policyTypes"]
    }

    assert policies.keys() == {"nats", "redis"}
    assert policies["redis"]["egress"] == []
    assert [rule["ports"][0]["port"] for rule in policies["nats"]["egress"]] == [6222, 53]
