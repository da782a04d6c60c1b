"""The commands of the stack that `leasehold up` runs on this machine."""

from pathlib import Path

from services.cli.arguments import (
    FREE,
    MAX_NODES,
    MAX_PLACERS,
    MAX_PORT,
    StateArguments,
    absolute,
    command,
    ledger_url,
    output,
)
from shared.model.errors import RequestError
from shared.runtime.settings import LOG_LEVELS, NATS_SCHEMES, OTLP_SCHEMES, argument


@command(
    "up",
    "up.up:up",
    "",
    "--nodes 4 --gpus 8xA100-80GB --placers 4",
    "--gpus local --library-source libvgpu.so",
    "--combined",
    "--headless --state /tmp/demo",
    "--budgets budgets.yaml",
    "--volcano-conf volcano.conf --usage-port 9394 --scheduler-metrics 127.0.0.1:8080",
    "--nats-url nats://10.0.0.5:4222 --redis-url redis://10.0.0.6:6379/0",
)
class Up(StateArguments):
    """Start a simulated cluster and all services on this machine, and restart what exits."""

    nodes: int | None = argument(
        None, "simulated nodes (default: as in the last run, else 2)", at_most=MAX_NODES
    )
    gpus: str = argument(
        "",
        "devices of every node, such as 4xT4+2xA100-40GB:mig (in MIG mode); with commas: one "
        "layout per node; local: this machine's own GPUs, for pods that are processes of it",
        metavar="LAYOUT",
    )
    placers: int = argument(2, "placer replicas (default: 2)", at_least=1, at_most=MAX_PLACERS)
    combined: bool = argument(
        False,
        "watcher, placer, planner and binder as one process, the component `scheduler`, whatever "
        "--placers is",
    )
    budgets: Path | None = argument(None, "YAML of GPUBudget objects to apply", read=absolute)
    quotas: Path | None = argument(None, "YAML of GPUQuota objects to apply", read=absolute)
    prices: Path | None = argument(None, "YAML of GPUs' prices for `report --cost`", read=absolute)
    volcano_conf: Path | None = argument(
        None,
        "a volcano-scheduler.conf, or the ConfigMap with it, whose deviceshare arguments apply",
        read=absolute,
    )
    library_source: Path | None = argument(
        None,
        "HAMi-core's libvgpu.so, which then limits programs instead of the simulated driver "
        "(default: as in the last run on the same nodes, else none)",
        metavar="PATH",
        read=absolute,
    )
    programs: tuple[str, ...] = argument(
        (),
        "further programs of this machine, such as python3, that pods may run as processes of "
        "this user (default: gpu-load, nvidia-smi, sh, bash, tar)",
        metavar="NAME,..",
    )
    kube_scheduler: bool = argument(
        True,
        "start the extender, once the rest is ready: the simulated cluster's scheduler, which "
        "stands for kube-scheduler in a few steps, places pods with fields that the placer does "
        "not obey; without it they are denied",
    )
    headless: bool = argument(False, "return when ready; `leasehold down` stops it")
    fresh: bool = argument(False, "empty the state directory first")
    nats_url: str = argument("", "use this NATS instead of starting one", schemes=NATS_SCHEMES)
    redis_url: str = argument(
        "", "use this Valkey or Redis instead of starting one", read=ledger_url
    )
    api_port: int = argument(0, f"port of the simulated API server {FREE}", at_most=MAX_PORT)
    page_port: int = argument(0, f"port of the page and the API {FREE}", at_most=MAX_PORT)
    scheduler_metrics: str = argument(
        "",
        "also serve metrics with the names of Volcano's and HAMi's schedulers there",
        metavar="HOST:PORT",
        address=True,
    )
    usage_port: int = argument(
        0,
        "port of the first node's usage metrics, 9394 on a real node; other nodes use the next "
        f"ports {FREE}",
        at_most=MAX_PORT,
    )
    nats_port: int = argument(0, f"port of the NATS that it starts {FREE}", at_most=MAX_PORT)
    redis_port: int = argument(0, f"port of the Valkey that it starts {FREE}", at_most=MAX_PORT)
    log_level: str = argument("info", "default: info", one_of=LOG_LEVELS)
    otlp_endpoint: str = argument("", "also send spans to http://HOST:4317", schemes=OTLP_SCHEMES)
    without: tuple[str, ...] = argument(
        (),
        "components that you start yourself; without webhook, no admission policies",
        metavar="NAME,..",
    )


@command("down", "up.down:down", "")
class Down(StateArguments):
    """Stop what `up` started, and wait for it."""


@command("status", "up.status:status", "", "-o json", "--state /tmp/demo")
class Status(StateArguments):
    """Show what `up` runs here: the page, the kubeconfig, nodes, and what is not ready.

    The exit code is 0 if everything runs and is ready. For a real cluster, see `doctor`.
    """

    output: str = output()


FAULTS = ("unhealthy", "vanish", "hang", "mode-flip", "busy", "stuck", "hot")


@command("sim", "admin.simulation:sim", "break node-0/1 --xid 79", "heal node-0/1")
class Sim(StateArguments):
    """Make a simulated GPU sick, or heal it, on the stack of `leasehold up`.

    unhealthy   its memory has a row that could not be remapped
    vanish      the driver does not list it
    hang        the driver does not respond
    mode-flip   its MIG mode is changed manually
    busy        processes use all its MIG instances
    hot         its temperature slows it down
    stuck       its processes outlive their pods, in uninterruptible sleep, until it is healed
    """

    action: str = argument(..., "what to do", positional=True, one_of=("break", "heal"))
    device: str = argument(
        ..., "a node, and the GPU's number as `leasehold gpus` shows it", positional=True,
        metavar="NODE/GPU",
    )  # fmt: skip
    fault: str = argument(FAULTS[0], f"default: {FAULTS[0]}", one_of=FAULTS)
    xid: int | None = argument(
        None,
        "instead, report this XID: 79 has fallen off the bus, 48 has an ECC error; a program's "
        "errors, such as 31, do not make a GPU unhealthy",
        at_least=1,
        at_most=999,
    )

    def check(self) -> None:
        if self.action == "heal" and (self.xid is not None or self.fault != FAULTS[0]):
            raise RequestError("heal ends any fault: omit --xid and --fault")
