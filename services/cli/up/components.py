"""The components that `up` starts: commands, order, readiness checks, credentials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.cli.credentials import REDIS_PROBE_LOGIN, CredentialFiles
from services.cli.state_dir import StateDir
from services.cli.up import servers
from services.cli.up.installation import BINDER, agent_account
from services.cli.up.plan import AGGREGATED, Plan
from shared.model.names import GPU_LABEL
from shared.nats.subjects import user_of

SCHEDULER = "scheduler"
"""The process of several services: it takes of a directory the login of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpCheck:
    """A server on this machine replies with `expect` to `send` (empty: on connection)."""

    port: int
    send: bytes = b""
    expect: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """The component has written the file, which is removed before its first start."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFileCheck:
    """A JSON file holds the id of the component's current process, and its `http` address."""

    path: Path


ReadinessCheck = TcpCheck | FileCheck | RunFileCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One process under the supervisor."""

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Components that must be ready before it starts, and that stop only after it."""
    checks: tuple[ReadinessCheck, ...] = ()
    address: str = ""
    """Address to report when it is ready; empty: the address in its run file."""
    environment: Mapping[str, str] = field(default_factory=dict)


def components_of(plan: Plan, directory: StateDir) -> tuple[Component, ...]:
    """Return every component in the order of their start."""
    return (
        *_servers(plan, directory),
        _simcluster(plan, directory),
        *_services(plan, directory),
        *_agents(plan, directory),
    )


def _servers(plan: Plan, directory: StateDir) -> list[Component]:
    components: list[Component] = []
    if plan.nats_program:
        port = plan.ports["nats"]
        components.append(
            Component(
                name="nats",
                argv=servers.nats_command(plan.nats_program, port=port),
                checks=(TcpCheck(port=port, expect=b"INFO"),),
                address=plan.nats_url,
            )
        )
    if plan.redis_program:
        port, store = plan.ports["redis"], directory.root / "valkey"
        components.append(
            Component(
                name="valkey",
                argv=servers.valkey_command(plan.redis_program, port=port, store=store),
                checks=(TcpCheck(port=port, send=b"PING\r\n", expect=b"+PONG"),),
                address=plan.redis_url,
            )
        )
    return components


def _simcluster(plan: Plan, directory: StateDir) -> Component:
    port, configuration = plan.ports["api"], directory.scheduler_configuration
    scheduler = ("--scheduler-config", str(configuration)) if plan.settings.kube_scheduler else ()
    return Component(
        name="simcluster",
        argv=(
            *plan.python,
            "simcluster",
            *("--state", str(directory.root)),
            *("--port", str(port)),
            *("--nodes", str(len(plan.nodes))),
            *("--node-labels", f"{GPU_LABEL}=true"),
            *("--install", str(directory.installation)),
            *(("--host-pods",) if plan.local else ()),
            *_flag("--programs", ",".join(plan.settings.programs)),
            *scheduler,
        ),
        checks=(
            FileCheck(path=directory.kubeconfig),
            *(FileCheck(path=directory.node(node) / "kubelet.json") for node in plan.nodes),
            TcpCheck(port=port),
        ),
        address=f"https://{servers.HOST}:{port}",
    )


def _flag(name: str, value: object) -> tuple[str, ...]:
    return (name, str(value)) if value else ()


def _services(plan: Plan, directory: StateDir) -> list[Component]:
    settings = plan.settings
    redis = ("--redis-url", plan.redis_url)
    quotas = _flag("--quotas", settings.quotas)
    volcano = _flag("--volcano-conf", settings.volcano_conf)
    webhook = (
        *quotas,
        *("--tls-dir", str(directory.root / "webhook")),
        *("--url", f"https://{servers.HOST}"),
        *(("--kube-scheduler",) if settings.kube_scheduler else ()),
    )
    page = (
        *_as_account(directory, "api"),
        *("--listen", plan.page_url.removeprefix("http://")),
        *("--aggregated", f"{servers.HOST}:{plan.ports[AGGREGATED]}"),
        *("--state-dir", str(directory.root / "api")),
        *_flag("--scheduler-metrics", settings.scheduler_metrics),
        *_flag("--prices", settings.prices),
        *volcano,
    )
    binder = _as_account(directory, BINDER)
    pipeline = [
        _service(
            "watcher",
            "watcher",
            plan,
            directory,
            (*_as_account(directory, "watcher"), *quotas, *volcano),
        ),
        *(
            _service(f"placer-{number}", "placer", plan, directory, redis, after=("nats", "valkey"))
            for number in range(plan.settings.placers)
        ),
        _service("binder", "binder", plan, directory, (*binder, *redis)),
    ]
    together = (*binder, *quotas, *volcano, *redis)
    combined = [_service(SCHEDULER, SCHEDULER, plan, directory, together)]
    return [
        *(combined if plan.settings.combined else pipeline),
        _service(
            "timekeeper",
            "timekeeper",
            plan,
            directory,
            (*_as_account(directory, "timekeeper"), *redis, *_flag("--budgets", settings.budgets)),
        ),
        _service(
            "webhook", "webhook", plan, directory, (*_as_account(directory, "webhook"), *webhook)
        ),
        _service("api", "api", plan, directory, (*redis, *page), address=plan.page_url),
        *([_extender(plan, directory, redis)] if plan.settings.kube_scheduler else ()),
    ]


def _as_account(directory: StateDir, account: str) -> tuple[str, str]:
    return "--kubeconfig", str(directory.accounts / account)


def _extender(plan: Plan, directory: StateDir, flags: tuple[str, ...]) -> Component:
    files = CredentialFiles(directory.credentials)
    tls = (
        *("--certificate-file", str(files.certificate)),
        *("--key-file", str(files.key)),
        *("--client-ca-file", str(files.authority)),
    )
    given = (*_as_account(directory, "extender"), *flags, "--listen", plan.extender_address, *tls)
    address = f"https://{plan.extender_address}"
    return _service("extender", "extender", plan, directory, given, address=address)


def _agents(plan: Plan, directory: StateDir) -> list[Component]:
    library = _flag("--library-source", plan.settings.library_source)
    return [
        _service(
            f"agent-{node}",
            "node_agent",
            plan,
            directory,
            (
                *_as_account(directory, agent_account(node)),
                *("--node", node),
                *("--kubelet-dir", str(directory.node(node))),
                *("--cdi-dir", str(directory.node(node) / "cdi")),
                *("--gpus", layout),
                *("--state-dir", str(directory.agent(node))),
                *("--gpu-driver-dir", str(directory.gpus(node))),
                *("--proc-dir", str(directory.node(node) / "proc")),
                *("--monitor-http", plan.usage_address(node)),
                *library,
            ),
            package="simcluster",
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
    package: str = "services",
    after: tuple[str, ...] = ("nats", "valkey", "simcluster"),
    address: str = "",
) -> Component:
    run_file = directory.run_file(name)
    tracing = _flag("--otlp-endpoint", plan.settings.otlp_endpoint)
    return Component(
        name=name,
        argv=(
            *plan.python,
            f"{package}.{module}",
            *("--nats-url", plan.nats_url),
            *("--run-file", str(run_file)),
            *("--trace-dir", str(directory.traces)),
            *("--instance", name),
            *("--log-level", plan.settings.log_level),
            *tracing,
            *flags,
        ),
        after=after,
        checks=(RunFileCheck(path=run_file),),
        address=address,
    )


def stages_of(components: Sequence[Component]) -> list[list[Component]]:
    """Group components so that each is in a later group than everything it starts after.

    Names that are not among the components count as ready: they run elsewhere.
    """
    names = {component.name for component in components}
    stages: list[list[Component]] = []
    placed: set[str] = set()
    remaining = list(components)
    while remaining:
        stage = [
            component for component in remaining if names.intersection(component.after) <= placed
        ]
        if not stage:
            raise ValueError(
                f"{', '.join(component.name for component in remaining)} start after each other"
            )
        stages.append(stage)
        placed.update(component.name for component in stage)
        remaining = [component for component in remaining if component.name not in placed]
    return stages


def with_credentials(
    components: Sequence[Component],
    files: CredentialFiles,
    *,
    nats: bool = True,
    redis: bool = True,
) -> list[Component]:
    """Add users to the servers, and a login to each other component.

    `nats` and `redis`: that server requires a login.
    """
    return [_with_credentials(each, files, nats=nats, redis=redis) for each in components]


def _with_credentials(
    component: Component, files: CredentialFiles, *, nats: bool, redis: bool
) -> Component:
    added: list[str] = []
    checks = component.checks
    if component.name == "nats":
        added += ["--config", str(files.nats_configuration)]
    elif component.name == "valkey":
        added += ["--aclfile", str(files.acl)]
        checks = tuple(
            replace(check, send=REDIS_PROBE_LOGIN + b"PING\r\n", expect=b"+OK\r\n+PONG")
            if isinstance(check, TcpCheck)
            else check
            for check in checks
        )
    if nats and "--nats-url" in component.argv:
        user = user_of(_service_name(component), _node_of(component))
        added += ["--nats-credentials", _login(component, files.nats(user))]
        added += ["--nats-ca-file", str(files.authority)]
    if redis and "--redis-url" in component.argv:
        added += ["--redis-credentials", _login(component, files.redis(_service_name(component)))]
    return replace(component, argv=(*component.argv, *added), checks=checks)


def _login(component: Component, file: Path) -> str:
    return str(file.parent if _service_name(component) == SCHEDULER else file)


def _service_name(component: Component) -> str:
    module = next(word for word in component.argv if word.startswith(("services.", "simcluster.")))
    return module.rpartition(".")[2].replace("_", "-")


def _node_of(component: Component) -> str:
    argv = component.argv
    return argv[argv.index("--node") + 1] if "--node" in argv else ""
