"""The arguments that several commands have, and how a command is declared."""

import argparse
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from services.cli.terminal import CUSTOM_COLUMNS, program
from shared.model.quantity import MINUTE_S
from shared.runtime.settings import RedisLogin, argument

FORMS = ("json", "yaml")
MAX_NODES = 1000
MAX_PLACERS = 64
MAX_PORT = 65535
SORTS = ("memory", "cores", "idle", "pod", "node")
FREE = "(default: free)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    name: str
    declared: type[Any]
    function: str
    """`module:name` below services.cli, imported when the command runs."""
    examples: tuple[str, ...]

    @property
    def arguments(self) -> type[Any]:
        return completed(self.declared)

    @property
    def about(self) -> str:
        return inspect.getdoc(self.declared) or ""

    def run(self, arguments: Any) -> int:
        module, _, name = self.function.partition(":")
        return int(getattr(importlib.import_module(f"services.cli.{module}"), name)(arguments))


COMMANDS: dict[str, CommandEntry] = {}
C = TypeVar("C")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(name: str, function: str, *examples: str) -> Callable[[type[C]], type[C]]:
    """Declare the arguments of a command; its docstring is the help.

    It becomes a dataclass when it is needed first: a process uses one command of all.
    """

    def declared(kind: type[C]) -> type[C]:
        def init(self: C, **values: Any) -> None:
            completed(kind).__init__(self, **values)

        kind.__init__ = init  # type: ignore[assignment]
        entry = CommandEntry(name=name, declared=kind, function=function, examples=examples)
        COMMANDS[name] = entry
        return kind

    return declared


def completed(kind: type[C]) -> type[C]:
    if "__dataclass_fields__" in kind.__dict__:
        return kind
    del kind.__init__
    return dataclass(frozen=True, kw_only=True)(kind)


WORKLOADS = {
    alias: kind
    for kind, aliases in (
        ("Deployment", ("deploy", "deployment", "deployments")),
        ("ReplicaSet", ("rs", "replicaset", "replicasets")),
        ("StatefulSet", ("sts", "statefulset", "statefulsets")),
        ("DaemonSet", ("ds", "daemonset", "daemonsets")),
        ("Job", ("job", "jobs")),
        ("CronJob", ("cj", "cronjob", "cronjobs")),
    )
    for alias in aliases
}
"""They may precede a slash as in kubectl's arguments: these are no namespaces."""
PODS = ("", "pod", "pods", "po")


def not_empty(text: str) -> str:
    """Raises ValueError: the text may be a variable that is not set."""
    if not text:
        raise ValueError("must not be empty")
    return text


def pod_name(text: str) -> str:
    """Parse a pod's name, also as `kubectl get -o name` writes it.

    >>> pod_name("pod/train-0")
    'train-0'
    """
    before, _, name = text.rpartition("/")
    if before.partition(".")[0] in WORKLOADS:
        raise argparse.ArgumentTypeError(
            f"{text} is not a pod: `{program()} explain {text}` explains one of its pods"
        )
    if before not in PODS:
        raise argparse.ArgumentTypeError(
            f"{text} is not a pod name; set the namespace with -n: {name} -n {before}"
        )
    return name


def pod_or_workload(text: str) -> str:
    """Parse a pod's name, or a workload as kubectl names it.

    >>> pod_or_workload("pod/train-0"), pod_or_workload("deploy/web")
    ('train-0', 'deploy/web')
    """
    before = text.rpartition("/")[0]
    return text if before.partition(".")[0] in WORKLOADS else pod_name(text)


SCOPES = ("node", "cluster")


def scope(text: str) -> str:
    if text not in {"", *SCOPES}:
        raise ValueError(f"must be {' or '.join(SCOPES)}")
    return text


def ledger_url(text: str) -> str:
    """Raises ValueError unless the text is empty or the URL of a ledger."""
    if text and not re.match(r"rediss?(\+sentinel)?://.", text):
        raise ValueError("must be redis://HOST:PORT, rediss://, or redis+sentinel://HOST,HOST/NAME")
    return text


def absolute(text: str) -> Path | None:
    """Processes with another working directory read the path."""
    return Path(text).absolute() if text else None


def connection(default: Any, text: str, **form: Any) -> Any:
    """Declare a flag that locates a server."""
    return argument(default, text, group="connection", **form)


def output(*more: str) -> Any:
    short = {f"--{form}": form for form in ("json", *more) if form in {"json", "csv"}}
    return argument("", "format (default: text)", "-o", one_of=(*FORMS, *more), constants=short)


class Forms(tuple[str, ...]):
    """Custom columns have any value."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or str(value).startswith(CUSTOM_COLUMNS)


def listed(*more: str) -> Any:
    text = "format (default: text); custom-columns=POD:.name,NODE:.node shows fields of -o json"
    return argument("", text, "-o", one_of=Forms((*FORMS, *more)), constants={"--json": "json"})


def sort_by() -> Any:
    text = "order the objects by this field of -o json, such as .created_at"
    return argument("", text, metavar="PATH")


def no_headers() -> Any:
    return argument(False, "leave out the titles of columns")


def namespace(default: str | None = None, *, all_: bool = False) -> Any:
    """Without a default, commands get the namespace of the context."""
    constants = {"-A --all-namespaces": ""} if all_ else {}
    text = f"namespace (default: {default or 'that of the context'})"
    return argument(default, text, "-n", constants=constants, read=not_empty)


def any_namespace() -> Any:
    constants = {"-A --all-namespaces": ""}
    return argument("", "namespace (default: all)", "-n", constants=constants)


def selector(of: str) -> Any:
    return argument("", f"only {of} with these labels, such as a=b,c!=d", "-l", metavar="LABELS")


def pod(nargs: str | None = None, *, workloads: bool = False) -> Any:
    default, read = ("", pod_name) if nargs else (..., lambda text: pod_name(not_empty(text)))
    text = "the pod's name"
    if workloads:
        read = pod_or_workload
        text += ", or a workload, such as deploy/web or job/train"
    return argument(default, text, positional=True, metavar="POD", nargs=nargs, read=read)


def watch() -> Any:
    return argument(False, "keep running, and show changes", "-w")


def volcano_conf() -> Any:
    return argument(None, "the volcano-scheduler.conf that the watcher reads")


def min_runtime() -> Any:
    variable = "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S"
    return argument(600.0, "as the planner's setting", variable=variable, env="600")


def schedulers() -> Any:
    text = "schedulerName values of Leasehold's pods, also of those that kube-scheduler places"
    return argument((), text, env="those of the manifests")


def own_schedulers(names: tuple[str, ...]) -> frozenset[str]:
    from shared.dialects import KUBE_SCHEDULER, SCHEDULERS

    return frozenset(names or (*SCHEDULERS, KUBE_SCHEDULER))


@dataclass(frozen=True, kw_only=True)
class StateArguments:
    state: Path = connection(
        Path(".leasehold"),
        "state directory of `leasehold up`",
        metavar="DIR",
        env=".leasehold, else that of KUBECONFIG",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterArguments(StateArguments):
    kubeconfig: Path | None = connection(
        None,
        "kubeconfig of the API server",
        env="the one in DIR/state.json, else as kubectl finds it",
    )
    context: str = connection("", "use this context of the kubeconfig, also if `leasehold up` runs")
    output: str = output()


@dataclass(frozen=True, kw_only=True)
class UsageArguments(ClusterArguments):
    idle_after: float | None = argument(
        None,
        "mark a share as idle after this time without a kernel or a change of its memory",
        metavar="MINUTES",
        env="as the API is set, 10",
    )

    @property
    def idle_after_s(self) -> str:
        return "" if self.idle_after is None else f"{self.idle_after * MINUTE_S:g}"


@dataclass(frozen=True, kw_only=True)
class WatchedArguments(UsageArguments):
    watch: bool = watch()


@dataclass(frozen=True, kw_only=True)
class LedgerArguments(RedisLogin, ClusterArguments):
    redis_url: str = connection("", "the ledger", env="the one in DIR/state.json", read=ledger_url)
