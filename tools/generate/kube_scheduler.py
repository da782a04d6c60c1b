"""The ConfigMap of the kube-scheduler with Leasehold's extender."""

import yaml

from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from shared.model.names import SYSTEM_NAMESPACE

TLS = "/run/tls"


def manifest() -> str:
    """Return the ConfigMap as the manifest of the component."""
    tls = SchedulerTls(ca=f"{TLS}/ca.crt", certificate=f"{TLS}/tls.crt", key=f"{TLS}/tls.key")
    configuration = scheduler_configuration(f"https://extender.{SYSTEM_NAMESPACE}.svc", tls)
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "kube-scheduler",
            "namespace": SYSTEM_NAMESPACE,
            "labels": {"app.kubernetes.io/part-of": "leasehold"},
        },
        "data": {"config.yaml": yaml.safe_dump(configuration, sort_keys=False)},
    }
    head = "# Generated from the dialects' resources: python -m tools.generate\n"
    return head + yaml.dump(made, Dumper=_WithBlocks, sort_keys=False, width=1000)


class _WithBlocks(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_WithBlocks.add_representer(str, _text)
