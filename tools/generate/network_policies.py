"""NetworkPolicies from the topology: which pods reach which ports.

All traffic to our pods is denied, apart from what these policies allow. What leaves our pods is not
restricted, except for the two servers: the addresses of API server, tracing backend and an external
Redis are not known here.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from services.auth.redis_users import password_users
from services.topology import OPERATOR, SERVICES
from shared.model.names import AGENTS_NAMESPACE

Json = dict[str, Any]
Peers = Sequence[Json]

METRICS = "leasehold.dev/allow-metrics"
"""Label of namespaces whose pods may read metrics: that of Prometheus."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label with a namespace's name, which the API server sets."""
NAME = "app.kubernetes.io/name"
PART_OF = "app.kubernetes.io/part-of"
OURS = {PART_OF: "leasehold"}
ANY_POD: Peers = ({"namespaceSelector": {}},)
"""Any pod of the cluster, and no other address."""
ANY_ADDRESS: Peers = ()
DNS = ({"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"})


def nats_clients(*, per_node: bool) -> list[str]:
    """Return the components that connect to NATS, of each node or of the cluster."""
    clients = (*SERVICES, OPERATOR)
    return sorted(service.name for service in clients if service.per_node == per_node)


def redis_clients() -> list[str]:
    """Return the components that connect to Redis: its users, and auth as administrator."""
    users = set(password_users()) & {service.name for service in (*SERVICES, OPERATOR)}
    return sorted(users | {"auth"})


def policies() -> list[Json]:
    """Return all policies."""
    of_namespace = [{"namespaceSelector": {"matchLabels": {METRICS: "true"}}}]
    metrics = {"matchLabels": OURS}, [_rule(of_namespace, "http")]
    clients = [*_pods(nats_clients(per_node=False)), *_agents(nats_clients(per_node=True))]
    usage = _rule(of_namespace, "usage")
    return [
        _policy("default-deny", {}, []),
        _policy("metrics", *metrics),
        _policy(
            "nats",
            _named("nats"),
            [_rule(clients, "client"), _rule(_pods(["nats"]), 4222, 6222)],
            egress=[{"to": [*_pods(["nats"])], "ports": [{"port": 6222}]}, {"ports": [*DNS]}],
        ),
        _policy("redis", _named("redis"), [_rule(_pods(redis_clients()), "redis")], egress=[]),
        # API servers are not pods, and their addresses are not known here.
        _policy("webhook", _named("webhook"), [_rule(ANY_ADDRESS, "https")]),
        _policy("extender", _named("extender"), [_rule(_pods(["kube-scheduler"]), "https")]),
        # The API server authenticates each client of `api`; GPUSharing's sidecars use `reports`.
        _policy("timekeeper", _named("timekeeper"), [_rule(ANY_POD, "api", "reports")]),
        _policy(
            "api",
            _named("api"),
            # API servers and an ingress controller; each client is authenticated.
            [_rule(ANY_ADDRESS, "page", "aggregated"), _rule(of_namespace, "old-metrics")],
        ),
        _in_agents_namespace(_policy("agents-default-deny", {}, [])),
        _in_agents_namespace(_policy("agents-metrics", *metrics)),
        _in_agents_namespace(_policy("node-agent", _named("node-agent"), [usage])),
    ]


def _policy(name: str, pods: Json, ingress: list[Json], egress: list[Json] | None = None) -> Json:
    spec: Json = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def _in_agents_namespace(policy: Json) -> Json:
    return policy | {"metadata": {**policy["metadata"], "namespace": AGENTS_NAMESPACE}}


def _rule(peers: Peers, *ports: str | int) -> Json:
    rule: Json = {"ports": [{"port": port} for port in ports]}
    return {"from": list(peers), **rule} if peers else rule


def _named(name: str) -> Json:
    return {"matchLabels": {NAME: name}}


def _pods(names: Iterable[str]) -> Peers:
    """Our pods of these components, in our namespace."""
    among = {"key": NAME, "operator": "In", "values": list(names)}
    return ({"podSelector": {"matchLabels": OURS, "matchExpressions": [among]}},)


def _agents(names: Iterable[str]) -> Peers:
    """Our pods of these components, in the namespace of the agents."""
    home = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: AGENTS_NAMESPACE}}}
    return tuple(home | peer for peer in _pods(names))


def table() -> str:
    """Return a table of the connections that the policies allow."""
    rows = ["| pods | ports | from |", "|---|---|---|"]
    for policy in policies():
        selector = policy["spec"]["podSelector"].get("matchLabels", {})
        for rule in policy["spec"]["ingress"]:
            ports = ", ".join(str(port["port"]) for port in rule["ports"])
            peers = "; ".join(map(_shown, rule.get("from", ()))) or "any address"
            rows.append(f"| {selector.get(NAME, 'all of Leasehold')} | {ports} | {peers} |")
    return "\n".join(dict.fromkeys(rows))


def _shown(peer: Json) -> str:
    labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
    names = [
        ", ".join(expression["values"])
        for expression in peer.get("podSelector", {}).get("matchExpressions", ())
    ]
    where = [f"namespaces with `{key}={value}`" for key, value in labels.items()]
    return " in ".join([*names, *where]) or "any pod"


def manifest() -> str:
    """Return the policies as the manifest of `k8s/base`."""
    head = "# Generated from the topology: python -m tools.generate\n"
    return head + yaml.dump_all(policies(), Dumper=_WithoutAnchors, sort_keys=False, width=1000)


class _WithoutAnchors(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True
