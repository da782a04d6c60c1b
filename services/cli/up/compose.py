"""Writes what the simulated cluster of `compose.yaml` installs.

    python -m services.cli.up.compose --out FILE --accounts DIRECTORY --nodes a,b --aggregated api:1

Each container has an account with the roles of the manifests, as the services of `leasehold up`.
Beside it is the configuration of the scheduler that asks the extender.
"""

import argparse
import json
from pathlib import Path

import yaml

from services.cli.credentials import CredentialFiles
from services.cli.up.installation import ACCOUNTS, KUBE_SCHEDULER, OPERATOR, installation
from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m services.cli.up.compose", description=__doc__)
    add = made.add_argument
    add("--out", type=Path, required=True, help="the file to write")
    add("--accounts", required=True, help="directory of the accounts' kubeconfigs")
    add("--nodes", required=True, help="names of the nodes, with commas between them")
    add("--aggregated", required=True, help="HOST:PORT of the API for the API server")
    add("--extender", required=True, help="HOST:PORT of the extender")
    add("--credentials", type=Path, required=True, help="directory of the certificates")
    add("--scheduler-config", type=Path, required=True, help="the scheduler's file to write")
    options = made.parse_args()
    installed = installation(
        options.accounts,
        options.nodes.split(","),
        policies=True,
        aggregated=options.aggregated,
        components=(KUBE_SCHEDULER,),
        accounts=(*ACCOUNTS, OPERATOR),
    )
    options.out.write_text(json.dumps(installed))
    files = CredentialFiles(options.credentials)
    tls = SchedulerTls(
        ca=str(files.authority),
        certificate=str(files.scheduler_certificate),
        key=str(files.scheduler_key),
    )
    configuration = scheduler_configuration(f"https://{options.extender}", tls)
    options.scheduler_config.write_text(yaml.safe_dump(configuration, sort_keys=False))


if __name__ == "__main__":
    main()
