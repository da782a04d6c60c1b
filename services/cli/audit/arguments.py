"""The arguments of the command audit."""

import argparse

from services.cli.flags import AddCommand, add_schedulers, add_view
from shared.runtime.variables import argument_of


def add_audit_command(add: AddCommand) -> None:
    """Add audit."""
    audit = add(
        "audit",
        "recompute every invariant from leases, pods and agents",
        _audit,
        "",
        "--json",
        "--redis-url redis://10.0.0.6:6379/0 --kubeconfig ~/.kube/config",
    )
    add_view(audit)
    add_schedulers(audit)
    audit.add_argument(
        "--agents",
        **argument_of("LEASEHOLD_AGENTS"),
        metavar="DIR",
        help="DIR/*/checkpoint.json are the checkpoints of agents on this machine "
        "[LEASEHOLD_AGENTS; default: those of the state directory]",
    )
    audit.add_argument(
        "--now",
        action="store_true",
        help="also report differences that may still settle, instead of waiting up to 30 s",
    )


def _audit(flags: argparse.Namespace) -> int:
    from services.cli.audit.audit import audit

    return audit(flags)
