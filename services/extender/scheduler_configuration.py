"""The configuration of the kube-scheduler that asks the extender; pure.

https://kubernetes.io/docs/reference/config-api/kube-scheduler-config.v1/
"""

from dataclasses import dataclass
from typing import Any

from shared.dialects import GPU_RESOURCES, KUBE_SCHEDULER, LEDGER_RESOURCES
from shared.model.names import SYSTEM_NAMESPACE

NATIVE = "kubernetes.io/"
"""Names of this domain are no extended resources: kube-scheduler refuses them here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTls:
    """`ca` is the authority of the extender's certificate."""

    ca: str
    certificate: str
    key: str


def scheduler_configuration(url: str, tls: SchedulerTls) -> dict[str, Any]:
    """All nodes are scored, as others may be the only ones with a fitting device.

    Without `nodeCacheCapable` each request would carry all Node objects.
    """
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {
            "leaderElect": True,
            "resourceName": KUBE_SCHEDULER,
            "resourceNamespace": SYSTEM_NAMESPACE,
        },
        "profiles": [{"schedulerName": KUBE_SCHEDULER, "percentageOfNodesToScore": 100}],
        "extenders": [
            {
                "urlPrefix": url,
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "weight": 10,
                "httpTimeout": "5s",
                "nodeCacheCapable": True,
                "ignorable": False,
                "enableHTTPS": True,
                "tlsConfig": {"caFile": tls.ca, "certFile": tls.certificate, "keyFile": tls.key},
                "managedResources": [
                    {"name": name, "ignoredByScheduler": name in LEDGER_RESOURCES}
                    for name in sorted(GPU_RESOURCES)
                    if not name.startswith(NATIVE)
                ],
            }
        ],
    }
