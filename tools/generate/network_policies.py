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

Json = dict[str, Any]
Peers = Sequence[Json]

METRICS = "leasehold.dev/allow-metrics"
"""Label of namespaces whose pods may read metrics: that of Prometheus."""
DASHBOARD = "leasehold.dev/allow-dashboard"
"""Label of namespaces whose pods may open the dashboard: that of an ingress controller."""
NAME, PART_OF = "app.kubernetes.io/name", "app.kubernetes.io/part-of"
OURS = {PART_OF: "leasehold"}
ANY_POD: Peers = ({"namespaceSelector": {}},)
"""Any pod of the cluster, and no other address."""
ANY_ADDRESS: Peers = ()
DNS = ({"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"})


def nats_clients() -> list[str]:
    """Return the components that connect to NATS."""
    return sorted(service.name for service in (*SERVICES, OPERATOR))


def redis_clients() -> list[str]:
    """Return the components that connect to Redis: its users, and auth as administrator."""
    users = set(password_users()) & {service.name for service in (*SERVICES, OPERATOR)}
    return sorted(users | {"auth"})


def policies() -> list[Json]:
    """Return all policies."""
    of_namespace = [{"namespaceSelector": {"matchLabels": {METRICS: "true"}}}]
    page = [{"namespaceSelector": {"matchLabels": {DASHBOARD: "true"}}}]
    return [
        _policy("default-deny", {}, []),
        _policy("metrics", {"matchLabels": OURS}, [_rule(of_namespace, "http")]),
        _policy(
            "nats",
            _named("nats"),
            [_rule(_pods(nats_clients()), "client"), _rule(_pods(["nats"]), 4222, 6222)],
            egress=[{"to": [*_pods(["nats"])], "ports": [{"port": 6222}]}, {"ports": [*DNS]}],
        ),
        _policy("redis", _named("redis"), [_rule(_pods(redis_clients()), "redis")], egress=[]),
        # API servers are not pods, and their addresses are not known here.
        _policy("webhook", _named("webhook"), [_rule(ANY_ADDRESS, "https")]),
        # The API server authenticates each client of `api`; GPUSharing's sidecars use `reports`.
        _policy("timekeeper", _named("timekeeper"), [_rule(ANY_POD, "api", "reports")]),
        _policy(
            "dashboard",
            _named("dashboard"),
            [_rule(page, "page"), _rule(of_namespace, "old-metrics")],
        ),
        _policy("node-agent", _named("node-agent"), [_rule(of_namespace, "usage")]),
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


def _rule(peers: Peers, *ports: str | int) -> Json:
    rule: Json = {"ports": [{"port": port} for port in ports]}
    return {"from": list(peers), **rule} if peers else rule


def _named(name: str) -> Json:
    return {"matchLabels": {NAME: name}}


def _pods(names: Iterable[str]) -> Peers:
    """Our pods of these components, in our namespace."""
    among = {"key": NAME, "operator": "In", "values": list(names)}
    return ({"podSelector": {"matchLabels": OURS, "matchExpressions": [among]}},)


def manifest() -> str:
    """Return the policies as the manifest of `k8s/base`."""
    head = "# Generated from the topology: python -m tools.generate\n"
    return head + yaml.dump_all(policies(), Dumper=_WithoutAnchors, sort_keys=False, width=1000)


class _WithoutAnchors(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True
