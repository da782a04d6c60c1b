"""The PrometheusRule of the Prometheus Operator component, from `k8s/monitoring/alerts.yaml`."""

import yaml

from tools.generate.pages import ROOT

PAGE = ROOT / "k8s" / "components" / "prometheus-operator" / "alerts.yaml"


def generated() -> str:
    """Return the object as YAML."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "leasehold",
            "namespace": "leasehold-system",
            "labels": {"app.kubernetes.io/part-of": "leasehold"},
        },
        "spec": yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text()),
    }
    head = "# Generated from monitoring/alerts.yaml: python -m tools.generate\n"
    return head + yaml.safe_dump(rule, sort_keys=False, width=1000)
