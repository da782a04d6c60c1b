"""The configuration of the simulated cluster's scheduler, which asks the extender."""

import yaml

from services.cli.credentials import CredentialFiles
from services.cli.state_dir import StateDir
from services.cli.up.plan import Plan
from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration


def write_scheduler_configuration(plan: Plan, directory: StateDir, files: CredentialFiles) -> None:
    """Write the KubeSchedulerConfiguration."""
    tls = SchedulerTls(
        ca=str(files.authority),
        certificate=str(files.scheduler_certificate),
        key=str(files.scheduler_key),
    )
    configuration = scheduler_configuration(f"https://{plan.extender_address}", tls)
    directory.scheduler_configuration.write_text(yaml.safe_dump(configuration, sort_keys=False))
