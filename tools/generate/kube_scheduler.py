"""The configuration of the kube-scheduler with Leasehold's extender."""

import yaml

from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from shared.model.names import SYSTEM_NAMESPACE

TLS = "/run/tls"


def manifest() -> str:
    """Return the configuration as the component has it."""
    tls = SchedulerTls(ca=f"{TLS}/ca.crt", certificate=f"{TLS}/tls.crt", key=f"{TLS}/tls.key")
    configuration = scheduler_configuration(f"https://extender.{SYSTEM_NAMESPACE}.svc", tls)
    head = "# Generated from the dialects' resources: python -m tools.generate\n"
    return head + yaml.safe_dump(configuration, sort_keys=False)
