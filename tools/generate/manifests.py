"""The manifests that code or another file determines: the webhook's, and the alerts."""

from pathlib import Path

import yaml

from services.webhook.annotation_policy import annotation_policy, writers
from services.webhook.registration import claims_configuration, configuration, service_client
from services.webhook.service_policies import service_policies
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tools.generate.pages import ROOT

BASE = ROOT / "k8s" / "base"
CLAIMS_WEBHOOK = ROOT / "k8s" / "components" / "dra" / "webhook-configuration.yaml"
HEAD = "# Generated: python -m tools.generate\n"


def webhook_manifests() -> dict[Path, str]:
    """Return the webhook configuration and the admission policies, by path."""
    found = {
        "webhook-configuration.yaml": [configuration(service_client(SYSTEM_NAMESPACE))],
        "annotation-policy.yaml": annotation_policy(writers(SYSTEM_NAMESPACE, AGENTS_NAMESPACE)),
        "service-policies.yaml": service_policies(SYSTEM_NAMESPACE, AGENTS_NAMESPACE),
    }
    by_path = {BASE / name: objects for name, objects in found.items()}
    by_path[CLAIMS_WEBHOOK] = [claims_configuration(service_client(SYSTEM_NAMESPACE))]
    return {
        path: HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=1000)
        for path, objects in by_path.items()
    }


KUBE_SCHEDULER = (
    ROOT / "k8s" / "components" / "kube-scheduler" / "kube-scheduler-configuration.yaml"
)
ALERTS = ROOT / "k8s" / "components" / "prometheus-operator" / "alerts.yaml"


def alerts() -> str:
    """Return the PrometheusRule of the Prometheus Operator component."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "leasehold",
            "namespace": SYSTEM_NAMESPACE,
            "labels": {"app.kubernetes.io/part-of": "leasehold"},
        },
        "spec": yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text()),
    }
    head = "# Generated from monitoring/alerts.yaml: python -m tools.generate\n"
    return head + yaml.safe_dump(rule, sort_keys=False, width=1000)
