"""Writes what the simulated cluster of `compose.yaml` installs.

    python -m services.cli.up.compose --out FILE --accounts DIRECTORY --nodes a,b --aggregated api:1

Each container has an account with the roles of the manifests, as the services of `leasehold up`.
"""

import argparse
import json
from pathlib import Path

from services.cli.up.installation import ACCOUNTS, OPERATOR, installation


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m services.cli.up.compose", description=__doc__)
    add = made.add_argument
    add("--out", type=Path, required=True, help="the file to write")
    add("--accounts", required=True, help="directory of the accounts' kubeconfigs")
    add("--nodes", required=True, help="names of the nodes, with commas between them")
    add("--aggregated", required=True, help="HOST:PORT of the API for the API server")
    options = made.parse_args()
    installed = installation(
        options.accounts,
        options.nodes.split(","),
        policies=True,
        aggregated=options.aggregated,
        accounts=(*ACCOUNTS, OPERATOR),
    )
    options.out.write_text(json.dumps(installed))


if __name__ == "__main__":
    main()
