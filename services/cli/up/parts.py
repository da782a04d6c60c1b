"""What `up` starts: each part's command, what it waits for, and how one sees that it is ready."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.state_dir import StateDir
from services.cli.up import servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A server on this machine that answers `says` (nothing: greets) with `expects`."""

    port: int
    says: bytes = b""
    expects: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exists:
    """A file that the part writes; it is removed before the part's first start."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Announces:
    """A JSON file with the process id of the part's present process, and its `http` address."""

    path: Path


Check = Answers | Exists | Announces


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process under the supervisor."""

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Parts that must be ready before it starts, and that stop only after it."""
    checks: tuple[Check, ...] = ()
    address: str = ""
    """Shown when ready; empty: the address it announces."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to run. A server whose program is empty runs elsewhere, at its URL."""

    nodes: Mapping[str, str]
    """Name of each node and its layout."""
    placers: int
    ports: Mapping[str, int]
    """Of `nats`, `redis`, `api` and `page`."""
    nats_program: str
    redis_program: str
    nats_url: str
    redis_url: str
    python: tuple[str, ...]
    """Starts one of our modules when its name is added."""
    log_level: str = "info"
    otlp_endpoint: str = ""
    budgets: Path | None = None
    """A file of GPUBudget objects."""
    quotas: Path | None = None
    """A file of GPUQuota objects."""
    scheduler_metrics: str = ""
    """HOST:PORT of the old schedulers' metrics; empty: nowhere."""

    @property
    def page_url(self) -> str:
        """Where the dashboard's page is."""
        return f"http://{servers.HOST}:{self.ports['page']}"


def parts_of(plan: Plan, directory: StateDir) -> tuple[Part, ...]:
    """Return every part in the order in which they start."""
    return (
        *_servers(plan, directory),
        _simcluster(plan, directory),
        *_services(plan, directory),
        *_agents(plan, directory),
    )


def _servers(plan: Plan, directory: StateDir) -> list[Part]:
    parts: list[Part] = []
    if plan.nats_program:
        port, store = plan.ports["nats"], directory.root / "nats"
        parts.append(
            Part(
                name="nats",
                argv=servers.nats_command(plan.nats_program, port=port, store=store),
                checks=(Answers(port=port, expects=b"INFO"),),
                address=plan.nats_url,
            )
        )
    if plan.redis_program:
        port, store = plan.ports["redis"], directory.root / "valkey"
        parts.append(
            Part(
                name="valkey",
                argv=servers.valkey_command(plan.redis_program, port=port, store=store),
                checks=(Answers(port=port, says=b"PING\r\n", expects=b"+PONG"),),
                address=plan.redis_url,
            )
        )
    return parts


def _simcluster(plan: Plan, directory: StateDir) -> Part:
    port = plan.ports["api"]
    return Part(
        name="simcluster",
        argv=(
            *plan.python,
            "simcluster",
            *("--state", str(directory.root)),
            *("--port", str(port)),
            *("--nodes", str(len(plan.nodes))),
        ),
        checks=(
            Exists(path=directory.kubeconfig),
            *(Exists(path=directory.node(node) / "kubelet.json") for node in plan.nodes),
            Answers(port=port),
        ),
        address=f"https://{servers.HOST}:{port}",
    )


def _services(plan: Plan, directory: StateDir) -> list[Part]:
    kube = ("--kubeconfig", str(directory.kubeconfig))
    redis = ("--redis-url", plan.redis_url)
    budgets = ("--budgets", str(plan.budgets)) if plan.budgets else ()
    quotas = ("--quotas", str(plan.quotas)) if plan.quotas else ()
    webhook = ("--tls-dir", str(directory.root / "webhook"), "--url", f"https://{servers.HOST}")
    page: tuple[str, ...] = ("--listen", plan.page_url.removeprefix("http://"))
    if plan.scheduler_metrics:
        page += ("--scheduler-metrics", plan.scheduler_metrics)
    return [
        _service("watcher", "watcher", plan, directory, (*kube, *quotas)),
        *(
            _service(f"placer-{number}", "placer", plan, directory, redis, after=("nats", "valkey"))
            for number in range(plan.placers)
        ),
        _service("binder", "binder", plan, directory, (*kube, *redis)),
        _service("timekeeper", "timekeeper", plan, directory, (*kube, *redis, *budgets)),
        _service("webhook", "webhook", plan, directory, (*kube, *webhook)),
        _service("dashboard", "dashboard", plan, directory, (*redis, *page), address=plan.page_url),
    ]


def _agents(plan: Plan, directory: StateDir) -> list[Part]:
    return [
        _service(
            f"agent-{node}",
            "node_agent",
            plan,
            directory,
            (
                *("--kubeconfig", str(directory.kubeconfig)),
                *("--node", node),
                *("--kubelet-dir", str(directory.node(node))),
                *("--gpus", layout),
                *("--state-dir", str(directory.agent(node))),
            ),
        )
        for node, layout in plan.nodes.items()
    ]


def _service(
    name: str,
    module: str,
    plan: Plan,
    directory: StateDir,
    flags: tuple[str, ...],
    *,
    after: tuple[str, ...] = ("nats", "valkey", "simcluster"),
    address: str = "",
) -> Part:
    run_file = directory.run_file(name)
    traced = ("--otlp-endpoint", plan.otlp_endpoint) if plan.otlp_endpoint else ()
    return Part(
        name=name,
        argv=(
            *plan.python,
            f"services.{module}",
            *("--nats-url", plan.nats_url),
            *("--run-file", str(run_file)),
            *("--trace-dir", str(directory.traces)),
            *("--instance", name),
            *("--log-level", plan.log_level),
            *traced,
            *flags,
        ),
        after=after,
        checks=(Announces(path=run_file),),
        address=address,
    )


def stages_of(parts: Sequence[Part]) -> list[list[Part]]:
    """Group parts so that each comes in a later group than everything it starts after.

    Names that are not among the parts count as ready: they run elsewhere.
    """
    names = {part.name for part in parts}
    stages: list[list[Part]] = []
    placed: set[str] = set()
    rest = list(parts)
    while rest:
        stage = [part for part in rest if names.intersection(part.after) <= placed]
        if not stage:
            raise ValueError(f"{', '.join(part.name for part in rest)} wait for each other")
        stages.append(stage)
        placed.update(part.name for part in stage)
        rest = [part for part in rest if part.name not in placed]
    return stages
