"""The command line: every subcommand, its flags, its help; what it does is imported when called."""

import argparse
import os
from collections.abc import Callable

from services.cli import flags
from services.cli.admin import node_keys_arguments as node_keys
from services.cli.admin import resize_arguments as resizing
from shared.dialects import SCHEDULERS

EXIT_CODES = """\
exit codes:
  0  done; for audit: no difference
  1  it did not work; for audit: there are differences; for doctor: something is wrong; for
     explain and trace: nothing found
  2  the command line or the request cannot be right
  3  something we need (Valkey, the API server) cannot be reached
  70 a bug of ours; LEASEHOLD_DEBUG=1 shows where
"""
EXAMPLES = """\
examples:
  leasehold up                                  two simulated nodes, four T4 each
  leasehold up --nodes 3 --gpus 8xA100-80GB --headless
  leasehold up --gpus 4xT4,2xA10                a layout for each node
  leasehold up --gpus 4xA100-40GB:mig+2xT4      four GPUs in MIG mode and two that are not
  leasehold gpus                                every device and its leases
  leasehold explain my-pod -n team-a            why it waits, or why it runs where it runs
  leasehold resize my-pod --memory 6Gi          give a running pod's container more, or less
  leasehold audit --json
  leasehold down
"""

Run = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    whole = argparse.ArgumentParser(
        prog="leasehold",
        description="GPU sharing for Kubernetes: every share is a lease.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Run, *examples: str) -> argparse.ArgumentParser:
        lines = "".join(f"  leasehold {name} {example}".rstrip() + "\n" for example in examples)
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{lines}\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    _flags_of_up(
        command(
            "up",
            "start everything on this machine, and keep it alive",
            _up,
            "",
            "--nodes 4 --gpus 8xA100-80GB --placers 4",
            "--headless --state /tmp/demo",
            "--budgets budgets.yaml",
            "--nats-url nats://10.0.0.5:4222 --redis-url redis://10.0.0.6:6379/0",
        )
    )
    flags.of_state(command("down", "end what `up` started, and wait for it", _down, ""))
    _views(command)
    _about_health(command)
    _about_time(command)
    _doors(command)
    resizing.add(command)
    node_keys.add(command)
    return whole


def _about_health(command: Callable[..., argparse.ArgumentParser]) -> None:
    doctor = command(
        "doctor",
        "look for what is wrong on a node and around it, and say how to put it right",
        _doctor,
        "",
        "--json",
        "--node gpu-7 --kubelet-dir /var/lib/kubelet --redis-url redis://10.0.0.6:6379/0",
        "                                   on a real node",
        "--only node                        in a node agent's pod, where it is the default",
    )
    flags.of_view(doctor)
    add = doctor.add_argument
    add(
        "--only",
        choices=("node", "cluster"),
        default=os.environ.get("LEASEHOLD_DOCTOR_ONLY"),
        help="look at the node, or at what is around it [LEASEHOLD_DOCTOR_ONLY; default: both]",
    )
    add("--node", default="", help="only this node (default: all of `up`; else this machine)")
    add("--kubelet-dir", default="", metavar="DIR", help="of a real node: /var/lib/kubelet")
    add("--agent-dir", default="", metavar="DIR", help="the agent's --state-dir")
    add("--gpus", default="", metavar="LAYOUT", help="as the agent's (default: nvml)")
    add("--library-dir", default="", metavar="DIR", help="as the agent's")
    add("--nats-url", default="", help="NATS (default: as the agent's environment says)")


def _doors(command: Callable[..., argparse.ArgumentParser]) -> None:
    doors = command(
        "doors",
        "show, or write with secrets, who may what on NATS and Redis",
        _show_doors,
        "--nats",
        "--redis",
        "--out doors --nodes gpu-1,gpu-2 --names nats,redis",
    )
    doors.add_argument("--nats", action="store_true", help="only nats-server's configuration")
    doors.add_argument("--redis", action="store_true", help="only Valkey's or Redis' ACL file")
    doors.add_argument(
        "--nodes", default="", metavar="NAME,..", help="nodes whose agents have a user at NATS"
    )
    doors.add_argument(
        "--out",
        default="",
        metavar="DIR",
        help="write there, with a secret and a file for each user; secrets there are kept",
    )
    doors.add_argument(
        "--names",
        default="",
        metavar="NAME,..",
        help="with --out: make certificates for servers of these names and addresses, too",
    )
    doors.add_argument(
        "--shared", action="store_true", help="with --out: let the files' group read them as well"
    )


def _about_time(command: Callable[..., argparse.ArgumentParser]) -> None:
    budget = command(
        "budget",
        "show GPU-time budgets, or grant to one",
        _budget("budget"),
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
    budget.add_argument("--reason", default="", help="why it is granted; stays in the ledger")
    flags.of_view(budget)
    report = command(
        "report",
        "add up who used how much GPU time",
        _budget("report"),
        "--window 2031-05 --csv",
        "--from 2031-05-01T00:00:00Z --to 2031-05-08T00:00:00Z --group-by namespace",
    )
    report.add_argument("--window", default="", help="one window's id; default: all that there is")
    report.add_argument("--from", dest="begin", default="", metavar="TIME", help="RFC 3339")
    report.add_argument("--to", dest="end", default="", metavar="TIME", help="RFC 3339, exclusive")
    report.add_argument(
        "--group-by", default="", metavar="NAME,..", help="of namespace, model, class; default: all"
    )
    report.add_argument("--csv", action="store_true", help="with a header, exact units last")
    flags.of_view(report)
    taking = command(
        "reclaim",
        "show what is taken back for whom, or what would be for a pod",
        _reclaim,
        "",
        "--dry-run my-pod -n team-a",
        "--json",
    )
    taking.add_argument(
        "--dry-run",
        type=flags.pod_name,
        default="",
        metavar="POD",
        help="say who would be evicted for this pod",
    )
    taking.add_argument("-n", "--namespace", default="default", help="default: default")
    taking.add_argument(
        "--min-runtime-s",
        type=float,
        default=float(os.environ.get("LEASEHOLD_PREEMPTION_MIN_RUNTIME_S", "600")),
        help="as the binder was told [LEASEHOLD_PREEMPTION_MIN_RUNTIME_S; default: 600]",
    )
    flags.of_view(taking)


def _doctor(given: argparse.Namespace) -> int:
    from services.cli.doctor.doctor import doctor

    return doctor(given)


def _budget(name: str) -> Run:
    def run(given: argparse.Namespace) -> int:
        from services.cli.admin import budget

        code: int = getattr(budget, name)(given)
        return code

    return run


def _reclaim(given: argparse.Namespace) -> int:
    from services.cli.admin.preemptions import reclaim

    return reclaim(given)


def _views(command: Callable[..., argparse.ArgumentParser]) -> None:
    flags.of_view(command("gpus", "show every device and its leases", _view("gpus"), "", "--json"))
    flags.of_view(
        command("ps", "show leases, and pods that wait with the reason", _view("ps"), "", "--json")
    )
    explain = command(
        "explain",
        "say why a pod waits, or why it runs where it runs",
        _view("explain"),
        "my-pod",
        "my-pod -n team-a --json",
        "--request pod.yaml                 how it is read; needs no cluster",
        "--request - --gpu H100-80GB < deployment.yaml",
    )
    flags.of_view(explain)
    flags.of_pod(explain, needed=False)
    _flags_of_request(explain)
    _flag_of_schedulers(explain)
    trace = command(
        "trace",
        "show how long each step of a pod took, as a waterfall",
        _view("trace"),
        "my-pod",
        "6f1e0f5a-8d0e-4a55-b3a0-0f6f5f0a7c11      a pod's uid does, too",
    )
    flags.of_state(trace)
    flags.of_pod(trace)
    trace.add_argument("--trace-dir", default="", help="where services write spans")
    flags.for_programs(trace)
    audit = command(
        "audit",
        "recompute every invariant from leases, pods and agents",
        _view("audit"),
        "",
        "--json",
        "--redis-url redis://10.0.0.6:6379/0 --kubeconfig ~/.kube/config",
    )
    flags.of_view(audit)
    _flag_of_schedulers(audit)
    audit.add_argument(
        "--agents",
        default=os.environ.get("LEASEHOLD_AGENTS", ""),
        metavar="DIR",
        help="DIR/*/checkpoint.json are what agents of this machine told their kubelets "
        "[LEASEHOLD_AGENTS; default: as DIR/state.json says]",
    )
    audit.add_argument(
        "--now",
        action="store_true",
        help="report what would settle by itself, too, instead of waiting up to 30 s for it",
    )
    topology = command(
        "topology", "draw which service says what to whom", _view("topology"), "", "--mermaid"
    )
    topology.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")
    topology.add_argument("--json", action="store_true", help="for programs")


def _show_doors(given: argparse.Namespace) -> int:
    from services.cli.admin.credentials import show

    return show(given)


def _flags_of_request(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--request",
        default="",
        metavar="FILE",
        help="read this manifest (- for standard input) instead: what it asks for, what its "
        "Binding would carry, what its containers would get",
    )
    command.add_argument(
        "--gpu",
        default="A100-80GB",
        metavar="MODEL",
        help="with --request: the GPUs of the example node, MODEL or MODEL:mig (default: "
        "A100-80GB, in MIG mode where the pod demands it)",
    )
    command.add_argument(
        "--volcano-conf",
        default="",
        metavar="FILE",
        help="with --request: the volcano-scheduler.conf that the watcher obeys",
    )


def _flag_of_schedulers(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--schedulers",
        default=os.environ.get("LEASEHOLD_SCHEDULERS", ",".join(SCHEDULERS)),
        help=f"our schedulerName values [LEASEHOLD_SCHEDULERS; default: {','.join(SCHEDULERS)}]",
    )


def _view(name: str) -> Run:
    def run(given: argparse.Namespace) -> int:
        from services.cli.inspect import commands as views

        code: int = getattr(views, name)(given)
        return code

    return run


def _flags_of_up(command: argparse.ArgumentParser) -> None:
    flags.of_state(command)
    add = command.add_argument
    add("--nodes", type=int, help="simulated nodes (default: as before, else 2)")
    add(
        "--gpus",
        default="",
        metavar="LAYOUT",
        help="devices of every node, e.g. 4xT4+2xA100-40GB:mig (in MIG mode); commas: of each",
    )
    add("--placers", type=int, default=2, help="placer replicas (default: 2)")
    add("--budgets", default="", metavar="FILE", help="YAML of GPUBudget objects to obey")
    add("--quotas", default="", metavar="FILE", help="YAML of GPUQuota objects to obey")
    add("--headless", action="store_true", help="return when ready; `leasehold down` ends it")
    add("--fresh", action="store_true", help="forget what the state directory holds")
    add("--nats-url", default="", help="use this NATS (with JetStream) instead of starting one")
    add("--redis-url", default="", help="use this Valkey or Redis instead of starting one")
    add("--api-port", type=int, default=0, help="of the simulated API server (default: a free one)")
    add("--page-port", type=int, default=0, help="of the page (default: a free one)")
    add(
        "--scheduler-metrics",
        default="",
        metavar="HOST:PORT",
        help="serve the old schedulers' metric names there, too (default: not)",
    )
    add("--nats-port", type=int, default=0, help="of the NATS we start (default: a free one)")
    add("--redis-port", type=int, default=0, help="of the Valkey we start (default: a free one)")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--otlp-endpoint", default="", help="send spans there, too: http://HOST:4317")
    add("--without", default="", metavar="PART,..", help="parts that you start yourself")


def _up(given: argparse.Namespace) -> int:
    from services.cli.up.up import settings_of, up

    return up(settings_of(given))


def _down(given: argparse.Namespace) -> int:
    from services.cli.state_dir import StateDir
    from services.cli.up.down import down

    return down(StateDir.at(given.state))
