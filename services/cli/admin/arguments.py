"""The arguments of the commands budget, report, preemptions, resize, credentials, node-keys."""

import argparse
import platform

from services.cli import flags
from services.cli.flags import AddCommand
from shared.model.names import AGENTS_NAMESPACE
from shared.runtime.variables import argument_of, number_argument

RESIZE_ABOUT = """\
The container keeps running. Additional memory is available to its next allocation. Memory can
shrink to the amount that the container uses. Each of several GPUs gets the new size. Cores apply to
processes that start after the resize: running processes keep their limit. The size of MIG instances
and whole devices is fixed. Requesting the same size again changes nothing."""
NODE_KEYS_ABOUT = """\
For a node agent that runs as a systemd unit of its node instead of in a pod, and so has no
projected tokens. The command requests two tokens of the agent's service account that are bound to
the Node: one for the API server and the kubelet, one for NATS. They are valid for this node only,
until they expire or the Node is deleted. The command also writes the certificate authority of NATS
and, unless one exists, a kubeconfig with the first token and the server of the kubeconfig in use.

An administrator runs it the first time and copies the directory to the node. Afterwards the node
renews its own tokens with that kubeconfig, if the component node-unit is installed."""


def add_admin_commands(add: AddCommand) -> None:
    """Add budget, report, preemptions, resize, credentials and node-keys."""
    _add_budget(add)
    _add_report(add)
    _add_preemptions(add)
    _add_resize(add)
    _add_credentials(add)
    _add_node_keys(add)


def _add_budget(add: AddCommand) -> None:
    budget = add(
        "budget",
        "show GPU-time budgets, or grant GPU time to one",
        _budget,
        "",
        "team-a --json",
        'grant team-a 120 --reason "deadline on Friday"',
    )
    budget.add_argument(
        "words",
        nargs="*",
        metavar="NAMESPACE",
        help="a namespace; or: grant NAMESPACE MINUTES",
    )
    budget.add_argument("--reason", default="", help="reason for the grant, stored in the ledger")
    flags.add_view(budget)
    flags.add_dashboard(budget)


def _add_report(add: AddCommand) -> None:
    report = add(
        "report",
        "sum up GPU time by namespace, model and class, or what is held without being used",
        _report,
        "--window 2031-05 --csv",
        "--from 2031-05-01T00:00:00Z --to 2031-05-08T00:00:00Z --group-by namespace",
        "--idle                   what is held now without being used, by namespace and owner",
        "--idle --idle-after 60 --json",
    )
    report.add_argument("--window", default="", help="id of one window; default: all windows")
    report.add_argument("--from", dest="begin", default="", metavar="TIME", help="RFC 3339")
    report.add_argument("--to", dest="end", default="", metavar="TIME", help="RFC 3339, exclusive")
    report.add_argument(
        "--group-by", default="", metavar="NAME,..", help="of namespace, model, class; default: all"
    )
    report.add_argument("--csv", action="store_true", help="with a header, exact units last")
    report.add_argument(
        "--idle",
        action="store_true",
        help="instead: GPU-hours and MiB-hours since the last use of the shares that are idle now",
    )
    flags.add_usage(report)


def _add_preemptions(add: AddCommand) -> None:
    preemptions = add(
        "preemptions",
        "show preemptions and evictions, or the pods that would be evicted for a pod",
        _preemptions,
        "",
        "--dry-run my-pod -n team-a",
        "--json",
    )
    preemptions.add_argument(
        "--dry-run",
        type=flags.pod_name,
        default="",
        metavar="POD",
        help="show which pods would be evicted for this pod",
    )
    flags.add_namespace(preemptions, "default")
    flags.add_min_runtime(preemptions)
    flags.add_view(preemptions)


def _add_resize(add: AddCommand) -> None:
    resize = add(
        "resize",
        "change the share of a running container",
        _resize,
        "my-pod --memory 6Gi",
        "my-pod -n team-a -c trainer --memory 12Gi --cores 40",
        "my-pod --cores 20 --json",
    )
    resize.description = f"{resize.description}\n\n{RESIZE_ABOUT}"
    option = resize.add_argument
    flags.add_pod(resize)
    option(
        "-c",
        "--container",
        default="",
        metavar="NAME",
        help="required where several containers have shares",
    )
    option("--memory", default="", metavar="SIZE", help="of each of its GPUs: 6Gi, 6144Mi")
    option(
        "--cores",
        type=number_argument(int, 1),
        metavar="PERCENT",
        help="of each of its GPUs: 1 to 99",
    )
    flags.add_state(resize)
    flags.add_nats(resize, "the NATS of a binder")
    flags.add_api_server(resize)
    flags.add_output(resize)


def _add_credentials(add: AddCommand) -> None:
    credentials = add(
        "credentials",
        "show the users of NATS and Redis and their permissions, or write them with secrets",
        _credentials,
        "--nats",
        "--redis",
        "--out credentials --nodes gpu-1,gpu-2 --names nats,redis",
    )
    option = credentials.add_argument
    option("--nats", action="store_true", help="only nats-server's configuration")
    option("--redis", action="store_true", help="only the ACL file of Valkey or Redis")
    option("--nodes", default="", metavar="NAME,..", help="nodes whose agents have a NATS user")
    option(
        "--out",
        default="",
        metavar="DIR",
        help="write them to this directory, with a secret and a file for each user; keeps secrets",
    )
    option(
        "--names",
        default="",
        metavar="NAME,..",
        help="with --out: also make certificates for servers of these names and addresses",
    )
    option("--shared", action="store_true", help="with --out: the files' group can read them, too")


def _add_node_keys(add: AddCommand) -> None:
    node_keys = add(
        "node-keys",
        "write, or renew, the tokens of a node agent that runs without a pod",
        _node_keys,
        "--node gpu-1 --out gpu-1",
        "--out /etc/leasehold/keys --kubeconfig /etc/leasehold/keys/kubeconfig",
        "--node gpu-1 --out gpu-1 --days 7",
    )
    node_keys.description = f"{node_keys.description}\n\n{NODE_KEYS_ABOUT}"
    option = node_keys.add_argument
    option("--out", required=True, metavar="DIR", help="directory to write, for its owner only")
    option(
        "--node",
        **argument_of("LEASEHOLD_NODE", "", lambda text: text or platform.node().lower()),
        help="the node [LEASEHOLD_NODE; default: this machine]",
    )
    option(
        "--days",
        type=number_argument(int, 1),
        default=30,
        help="how long the tokens are valid (default: 30)",
    )
    flags.add_namespace(node_keys, AGENTS_NAMESPACE)
    option(
        "--kubeconfig",
        **argument_of("LEASEHOLD_KUBECONFIG"),
        help="the API server [LEASEHOLD_KUBECONFIG; default: as kubectl finds it]",
    )


def _budget(namespace: argparse.Namespace) -> int:
    from services.cli.admin.budget import budget

    return budget(namespace)


def _report(namespace: argparse.Namespace) -> int:
    from services.cli.admin.budget import report
    from services.cli.admin.idle import report_idle

    return report_idle(namespace) if namespace.idle else report(namespace)


def _preemptions(namespace: argparse.Namespace) -> int:
    from services.cli.admin.preemptions import preemptions

    return preemptions(namespace)


def _resize(namespace: argparse.Namespace) -> int:
    from services.cli.admin.resize import resize

    return resize(namespace)


def _credentials(namespace: argparse.Namespace) -> int:
    from services.cli.credentials import show

    return show(namespace)


def _node_keys(namespace: argparse.Namespace) -> int:
    from services.cli.admin.node_keys import node_keys

    return node_keys(namespace)
