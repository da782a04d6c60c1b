"""The configuration of the kube-scheduler with Leasehold's extender, from the dialects' resources.

https://kubernetes.io/docs/reference/config-api/kube-scheduler-config.v1/
"""

from typing import Any

import yaml

from shared.dialects import GPU_RESOURCES, KUBE_SCHEDULER, LEDGER_RESOURCES
from shared.model.names import SYSTEM_NAMESPACE

TLS = "/run/tls"
NATIVE = "kubernetes.io/"
"""Names of this domain are no extended resources: kube-scheduler refuses them here."""


def configuration() -> dict[str, Any]:
    """Return the KubeSchedulerConfiguration.

    Nodes that are not scored may be the only ones with a fitting device, so all are. Without
    `nodeCacheCapable` each request would carry all Node objects. What leases take of the resources
    is not kube-scheduler's to count.
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
                "urlPrefix": f"https://extender.{SYSTEM_NAMESPACE}.svc",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "weight": 10,
                "httpTimeout": "5s",
                "nodeCacheCapable": True,
                "ignorable": False,
                "enableHTTPS": True,
                "tlsConfig": {
                    "caFile": f"{TLS}/ca.crt",
                    "certFile": f"{TLS}/tls.crt",
                    "keyFile": f"{TLS}/tls.key",
                },
                "managedResources": [
                    {"name": name, "ignoredByScheduler": name in LEDGER_RESOURCES}
                    for name in sorted(GPU_RESOURCES)
                    if not name.startswith(NATIVE)
                ],
            }
        ],
    }


def manifest() -> str:
    """Return the ConfigMap as the manifest of the component."""
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "kube-scheduler",
            "namespace": SYSTEM_NAMESPACE,
            "labels": {"app.kubernetes.io/part-of": "leasehold"},
        },
        "data": {"config.yaml": yaml.safe_dump(configuration(), sort_keys=False)},
    }
    head = "# Generated from the dialects' resources: python -m tools.generate\n"
    return head + yaml.dump(made, Dumper=_WithBlocks, sort_keys=False, width=1000)


class _WithBlocks(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_WithBlocks.add_representer(str, _text)
