"""The arguments of the commands up and down."""

import argparse
from pathlib import Path

from services.cli.flags import AddCommand, add_state
from shared.runtime.variables import number_argument, port_argument


def add_up_commands(add: AddCommand) -> None:
    """Add up and down."""
    up = add(
        "up",
        "start everything on this machine, and restart what exits",
        _up,
        "",
        "--nodes 4 --gpus 8xA100-80GB --placers 4",
        "--combined",
        "--headless --state /tmp/demo",
        "--budgets budgets.yaml",
        "--volcano-conf volcano.conf --usage-port 9394 --scheduler-metrics 127.0.0.1:8080",
        "--nats-url nats://10.0.0.5:4222 --redis-url redis://10.0.0.6:6379/0",
    )
    add_state(up)
    _add_size(up)
    option = up.add_argument
    option(
        "--combined",
        action="store_true",
        help="watcher, placer and binder as one process, the component `scheduler`, whatever "
        "--placers is",
    )
    option("--budgets", type=_absolute, metavar="FILE", help="YAML of GPUBudget objects to apply")
    option("--quotas", type=_absolute, metavar="FILE", help="YAML of GPUQuota objects to apply")
    option(
        "--volcano-conf",
        type=_absolute,
        metavar="FILE",
        help="a volcano-scheduler.conf, or the ConfigMap with it, whose deviceshare arguments "
        "apply",
    )
    option(
        "--library-source",
        type=_absolute,
        metavar="PATH",
        help="HAMi-core's libvgpu.so, which then limits programs instead of the simulated driver",
    )
    option(
        "--kube-scheduler",
        action="store_true",
        help="also start the extender; the simulated cluster's scheduler, which stands for "
        "kube-scheduler in a few steps, places pods with schedulerName leasehold-full",
    )
    option("--headless", action="store_true", help="return when ready; `leasehold down` stops it")
    option("--fresh", action="store_true", help="empty the state directory first")
    _add_servers(up)
    option("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    option("--otlp-endpoint", default="", help="also send spans there: http://HOST:4317")
    option(
        "--without",
        default="",
        metavar="NAME,..",
        help="components that you start yourself; without webhook, no admission policies",
    )
    add_state(add("down", "stop what `up` started, and wait for it", _down, ""))


def _add_size(up: argparse.ArgumentParser) -> None:
    """Add how many nodes, devices and placers there are."""
    option = up.add_argument
    option(
        "--nodes",
        type=number_argument(int),
        help="simulated nodes (default: as in the last run, else 2)",
    )
    option(
        "--gpus",
        default="",
        metavar="LAYOUT",
        help="devices of every node, such as 4xT4+2xA100-40GB:mig (in MIG mode); with commas: one "
        "layout per node",
    )
    option(
        "--placers", type=number_argument(int, 1), default=2, help="placer replicas (default: 2)"
    )


def _add_servers(up: argparse.ArgumentParser) -> None:
    """Add the URLs and the ports of servers."""
    option = up.add_argument
    option("--nats-url", default="", help="use this NATS instead of starting one")
    option("--redis-url", default="", help="use this Valkey or Redis instead of starting one")
    option(
        "--api-port",
        type=port_argument,
        default=0,
        help="of the simulated API server (default: free)",
    )
    option(
        "--page-port", type=port_argument, default=0, help="of the dashboard's page (default: free)"
    )
    option(
        "--scheduler-metrics",
        default="",
        metavar="HOST:PORT",
        help="also serve the old schedulers' metric names there (default: not served)",
    )
    option(
        "--usage-port",
        type=port_argument,
        default=0,
        help="of the first node's usage metrics, 9394 on a real node; the other nodes take the "
        "ports after it (default: free)",
    )
    option(
        "--nats-port", type=port_argument, default=0, help="of the NATS we start (default: free)"
    )
    option(
        "--redis-port", type=port_argument, default=0, help="of the Valkey we start (default: free)"
    )


def _absolute(text: str) -> Path:
    """Parse a path, which processes with another working directory read."""
    return Path(text).absolute()


def _up(flags: argparse.Namespace) -> int:
    from services.cli.up.plan import settings_of
    from services.cli.up.up import up

    return up(settings_of(flags))


def _down(flags: argparse.Namespace) -> int:
    from services.cli.state_dir import StateDir
    from services.cli.up.down import down

    return down(StateDir.at(flags.state))
