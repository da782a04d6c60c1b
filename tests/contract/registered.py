"""Writes `k8s/base/webhook-configuration.yaml` anew: `python -m tests.contract.registered`."""

from pathlib import Path

import yaml

from services.webhook.registration import configuration, service_client

PAGE = Path(__file__).parents[2] / "k8s" / "base" / "webhook-configuration.yaml"
HEAD = """\
# Generated: python -m tests.contract.registered. The webhook fills in caBundle by itself.
"""


def text() -> str:
    made = configuration(service_client("leasehold-system"))
    return HEAD + yaml.safe_dump(made, sort_keys=False, width=1000)


if __name__ == "__main__":
    PAGE.write_text(text())
