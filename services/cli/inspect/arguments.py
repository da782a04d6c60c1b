"""The arguments of the commands gpus, ps, top, explain, trace and topology."""

import argparse

from services.cli import flags
from services.cli.flags import AddCommand, Run
from shared.runtime.variables import number_argument

SORTS = ("memory", "cores", "idle", "pod", "node")


def add_inspect_commands(add: AddCommand) -> None:
    """Add gpus, ps, top, explain, trace and topology."""
    gpus = add("gpus", "show every device and its leases", _run("gpus"), "", "--json")
    flags.add_watch(gpus)
    flags.add_usage(gpus)
    ps = add(
        "ps",
        "show leases, and waiting pods with the reason",
        _run("ps"),
        "",
        "-n team-a -o wide",
        "my-pod -n team-a -o yaml",
    )
    ps.add_argument("pod", metavar="POD", type=flags.pod_name, nargs="?", default="", help="one")
    flags.add_namespace(ps, "")
    flags.add_watch(ps)
    flags.add_usage(ps, "wide", "name")
    _add_top(add)
    _add_explain(add)
    trace = add(
        "trace",
        "show how long each step of a pod took, as a waterfall",
        _run("trace"),
        "my-pod",
        "6f1e0f5a-8d0e-4a55-b3a0-0f6f5f0a7c11      or the pod's uid",
    )
    flags.add_state(trace)
    flags.add_api_server(trace)
    flags.add_dashboard(trace)
    flags.add_pod(trace)
    trace.add_argument("--trace-dir", default="", help="where services write spans")
    flags.add_output(trace)
    topology = add(
        "topology",
        "show which service publishes which event to which other",
        _run("topology"),
        "",
        "--mermaid",
    )
    topology.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")
    flags.add_output(topology)


def _add_top(add: AddCommand) -> None:
    top = add(
        "top",
        "show the measured usage of every share beside its lease, and refresh it",
        _run("top"),
        "",
        "--sort idle -n team-a",
        "--once --node gpu-1",
        "--json",
    )
    option = top.add_argument
    option("--sort", choices=SORTS, default=SORTS[0], help=f"default: {SORTS[0]}")
    flags.add_namespace(top, "")
    option("--node", default="", help="default: all")
    option(
        "--interval",
        type=number_argument(float, 0.1),
        default=2.0,
        metavar="SECONDS",
        help="default: 2",
    )
    option("--once", action="store_true", help="print it once, as without a terminal")
    flags.add_usage(top)


def _add_explain(add: AddCommand) -> None:
    explain = add(
        "explain",
        "explain why a pod waits, or why it runs on its node",
        _run("explain"),
        "my-pod",
        "my-pod -n team-a --json",
        "--request pod.yaml                 how a manifest is parsed; needs no cluster",
        "--request - --gpu H100-80GB < deployment.yaml",
    )
    flags.add_usage(explain)
    flags.add_pod(explain, required=False)
    flags.add_watch(explain)
    explain.add_argument(
        "--request",
        default="",
        metavar="FILE",
        help="parse this manifest (- for standard input) instead: show the requests of its pods, "
        "and the Bindings and the containers that would result",
    )
    explain.add_argument(
        "--gpu",
        default="A100-80GB",
        metavar="MODEL",
        help="with --request: the GPUs of the example node, MODEL or MODEL:mig (default: "
        "A100-80GB, in MIG mode where the pod requires it)",
    )
    explain.add_argument(
        "--volcano-conf",
        default="",
        metavar="FILE",
        help="with --request: the volcano-scheduler.conf that the watcher reads",
    )
    flags.add_schedulers(explain)


def _run(name: str) -> Run:
    def run(namespace: argparse.Namespace) -> int:
        from services.cli.inspect import views

        code: int = getattr(views, name)(namespace)
        return code

    return run
