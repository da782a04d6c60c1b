"""The components that `up` starts: commands, order, readiness checks, credentials."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.credentials import REDIS_PROBE_LOGIN, CredentialFiles
from services.cli.state_dir import StateDir
from services.cli.up import servers
from services.cli.up.installation import BINDER, WEBHOOK_CLIENT_CA, agent_account
from services.cli.up.plan import AGGREGATED, Plan
from shared.model.names import GPU_LABEL
from shared.nats.subjects import user_of

SCHEDULER = "scheduler"
"""The process of several services: it takes each one's login from a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpCheck:
    """A server on this machine replies with `expect` to `send`, or on connection without it."""

    port: int
    send: bytes = b""
    expect: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """The file is removed before the component's first start."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFileCheck:
    """A JSON file holds the id of the current process, and its `http` address."""

    path: Path


ReadinessCheck = TcpCheck | FileCheck | RunFileCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    """They are ready before it starts, and stop only after it."""
    checks: tuple[ReadinessCheck, ...] = ()
    address: str = ""
    """Empty for the one in its run file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    awaited: bool = True
    """`up` is ready once it is; the others start then."""


def components_of(plan: Plan, directory: StateDir) -> tuple[Component, ...]:
    made = _Components(plan, directory)
    return (*made.servers(), made.simcluster(), *made.services(), *made.agents())


class _Components:
    def __init__(self, plan: Plan, directory: StateDir) -> None:
        self.plan = plan
        self.directory = directory
        self.files = CredentialFiles(directory.credentials)

    def servers(self) -> Iterator[Component]:
        plan = self.plan
        files = self.files
        if plan.nats_program:
            port = plan.ports["nats"]
            yield Component(
                name="nats",
                argv=servers.nats_command(plan.nats_program, port, files.nats_configuration),
                checks=(TcpCheck(port=port, expect=b"INFO"),),
                address=plan.nats_url,
            )
        if plan.redis_program:
            port = plan.ports["redis"]
            store = self.directory.root / "valkey"
            ping = REDIS_PROBE_LOGIN + b"PING\r\n"
            yield Component(
                name="valkey",
                argv=servers.valkey_command(plan.redis_program, port, store, files.acl),
                checks=(TcpCheck(port=port, send=ping, expect=b"+OK\r\n+PONG"),),
                address=plan.redis_url,
            )

    def simcluster(self) -> Component:
        plan = self.plan
        directory = self.directory
        port = plan.ports["api"]
        settings = plan.settings
        configuration = directory.scheduler_configuration if settings.kube_scheduler else None
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
                *_flag("--programs", ",".join(settings.programs)),
                *_flag("--scheduler-config", configuration),
            ),
            checks=(
                FileCheck(path=directory.kubeconfig),
                *(FileCheck(path=directory.node(node) / "kubelet.json") for node in plan.nodes),
                TcpCheck(port=port),
            ),
            address=f"https://{servers.HOST}:{port}",
        )

    def services(self) -> Iterator[Component]:
        plan = self.plan
        settings = self.plan.settings
        root = self.directory.root
        quotas = _flag("--quotas", settings.quotas)
        volcano = _flag("--volcano-conf", settings.volcano_conf)
        if settings.combined:
            yield self._service(SCHEDULER, *quotas, *volcano, account=BINDER, ledger=True)
        else:
            yield self._service("watcher", *quotas, *volcano)
            for number in range(settings.placers):
                name = f"placer-{number}"
                yield self._service("placer", name=name, uses_api=False, ledger=True)
            yield self._service("planner", ledger=True)
            yield self._service("binder", ledger=True)
        budgets = _flag("--budgets", settings.budgets)
        prices = _flag("--prices", settings.prices)
        yield self._service("timekeeper", *budgets, *prices, ledger=True)
        yield self._service(
            "webhook",
            *quotas,
            *("--tls-dir", str(root / "webhook")),
            *("--client-ca-file", str(self.directory.accounts / WEBHOOK_CLIENT_CA)),
            *("--url", f"https://{servers.HOST}"),
            *(("--kube-scheduler",) if settings.kube_scheduler else ()),
        )
        yield self._service(
            "api",
            *("--listen", plan.page_url.removeprefix("http://")),
            *("--aggregated", f"{servers.HOST}:{plan.ports[AGGREGATED]}"),
            *("--state-dir", str(root / "api")),
            *_flag("--scheduler-metrics", settings.scheduler_metrics),
            *prices,
            *volcano,
            ledger=True,
            address=plan.page_url,
        )
        if settings.kube_scheduler:
            yield self._service(
                "extender",
                *("--listen", plan.extender_address),
                *("--certificate-file", str(self.files.certificate)),
                *("--key-file", str(self.files.key)),
                *("--client-ca-file", str(self.files.authority)),
                ledger=True,
                address=f"https://{plan.extender_address}",
                awaited=False,
            )

    def agents(self) -> Iterator[Component]:
        directory = self.directory
        for node, layout in self.plan.nodes.items():
            yield self._service(
                "node-agent",
                *("--node", node),
                *("--kubelet-dir", str(directory.node(node))),
                *("--cdi-dir", str(directory.node(node) / "cdi")),
                *("--gpus", layout),
                *("--state-dir", str(directory.agent(node))),
                *("--fault-file", str(directory.faults(node))),
                *("--gpu-driver-dir", str(directory.gpus(node))),
                *("--proc-dir", str(directory.node(node) / "proc")),
                *("--monitor-http", self.plan.usage_address(node)),
                *_flag("--library-source", self.plan.settings.library_source),
                name=f"agent-{node}",
                account=agent_account(node),
                node=node,
                package="simcluster",
            )

    def _service(
        self,
        service: str,
        *flags: str,
        name: str = "",
        account: str = "",
        node: str = "",
        uses_api: bool = True,
        ledger: bool = False,
        package: str = "services",
        address: str = "",
        awaited: bool = True,
    ) -> Component:
        plan, directory, name = self.plan, self.directory, name or service
        run_file = directory.run_file(name)
        kubeconfig = directory.accounts / (account or service) if uses_api else None
        return Component(
            name=name,
            argv=(
                *plan.python,
                f"{package}.{service.replace('-', '_')}",
                *("--nats-url", plan.nats_url),
                *("--run-file", str(run_file)),
                *("--trace-dir", str(directory.traces)),
                *("--instance", name),
                *("--log-level", plan.settings.log_level),
                *_flag("--otlp-endpoint", plan.settings.otlp_endpoint),
                *_flag("--kubeconfig", kubeconfig),
                *(("--redis-url", plan.redis_url) if ledger else ()),
                *flags,
                *self._logins(service, node, ledger=ledger),
            ),
            after=("nats", "valkey", *(("simcluster",) if uses_api else ())),
            checks=(RunFileCheck(path=run_file),),
            address=address,
            awaited=awaited,
        )

    def _logins(self, service: str, node: str, *, ledger: bool) -> Iterator[str]:
        nats = self.files.nats(user_of(service, node))
        redis = self.files.redis(service)
        if service == SCHEDULER:
            nats, redis = nats.parent, redis.parent
        if self.plan.nats_program:
            yield from ("--nats-credentials", str(nats))
            yield from ("--nats-ca-file", str(self.files.authority))
        if self.plan.redis_program and ledger:
            yield from ("--redis-credentials", str(redis))


def _flag(name: str, value: object) -> tuple[str, ...]:
    return (name, str(value)) if value else ()


def stages_of(components: Sequence[Component]) -> list[list[Component]]:
    """Each component is in a later group than everything it starts after.

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
