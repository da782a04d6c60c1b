"""The arguments of the command doctor."""

import argparse

from services.cli.flags import AddCommand, add_view
from shared.runtime.variables import argument_of

SCOPES = ("node", "cluster")


def add_doctor_command(add: AddCommand) -> None:
    """Add doctor."""
    doctor = add(
        "doctor",
        "check a node and the cluster's components, and show what to do about each problem",
        _doctor,
        "",
        "--json",
        "--node gpu-7 --kubelet-dir /var/lib/kubelet --redis-url redis://10.0.0.6:6379/0",
        "                                   on a real node",
        "--only node                        in a node agent's pod, where it is the default",
    )
    add_view(doctor)
    option = doctor.add_argument
    option(
        "--only",
        choices=SCOPES,
        **argument_of("LEASEHOLD_DOCTOR_ONLY", "", _scope),
        help="check only the node, or only the cluster [LEASEHOLD_DOCTOR_ONLY; default: both]",
    )
    option("--node", default="", help="only this node (default: all of `up`; else this machine)")
    option("--kubelet-dir", default="", metavar="DIR", help="of a real node: /var/lib/kubelet")
    option("--agent-dir", default="", metavar="DIR", help="the agent's --state-dir")
    option("--library-source", default="", metavar="PATH", help="the agent's --library-source")
    option("--nats-url", default="", help="NATS (default: from the agent's environment)")


def _scope(text: str) -> str | None:
    if text not in {"", *SCOPES}:
        raise ValueError(f"must be {' or '.join(SCOPES)}")
    return text or None


def _doctor(flags: argparse.Namespace) -> int:
    from services.cli.doctor.doctor import doctor

    return doctor(flags)
