"""Writes the webhook configuration and the annotation policy into `k8s/base`."""

from pathlib import Path

import yaml

from services.webhook.annotation_policy import annotation_policy, writers_in
from services.webhook.registration import configuration, service_client

BASE = Path(__file__).parents[2] / "k8s" / "base"
HEAD = "# Generated: python -m tools.generate\n"
NAMESPACE = "leasehold-system"


def generated() -> dict[Path, str]:
    """Return the generated files."""
    found = {
        "webhook-configuration.yaml": [configuration(service_client(NAMESPACE))],
        "annotation-policy.yaml": annotation_policy(writers_in(NAMESPACE)),
    }
    return {
        BASE / name: HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=1000)
        for name, objects in found.items()
    }
