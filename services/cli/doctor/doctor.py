"""The command `doctor`: checks nodes and the cluster's components, and reports what to fix.

`--json` prints {"healthy", "findings": [{"check", "subject", "outcome": "ok" | "warn" | "fail" |
"skipped", "text", "fix"}]}; a subject is a node's name, or empty.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.api_client import APISERVICE
from services.cli.commands import Doctor
from services.cli.doctor.cluster_probes import ClusterProbes, ClusterServers
from services.cli.simulated_nodes import load_simulated_nodes
from services.cli.state_dir import State, StateDir, optional_path, stack_of
from services.node_agent.diagnosis.node_probes import NodeProbes, visible_host
from services.node_agent.gpu_access import NodeGpus, open_gpus
from services.node_agent.instance_lock import running_instance
from services.node_agent.settings import AgentSettings
from services.topology import OPERATOR
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import NO_KUBECONFIG, KubeconfigError, load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.devices.device import END_LEFTOVERS
from shared.model.devices.node import cordon_reason
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.findings import Finding, Outcome, SkipError
from shared.model.leases.ledger import NodeTotals
from shared.model.names import (
    AGENTS_NAMESPACE,
    REQUIRED_SERVICES,
    SYSTEM_NAMESPACE,
    NodeName,
)
from shared.runtime.settings import load

P = TypeVar("P")
STARTED_SERVICES = frozenset({"api", "extender", "planner", "timekeeper"})
CHECK_TIMEOUT_S = 30.0
"""A check that takes longer fails, so that the others are shown."""
COLOURS = {
    Outcome.OK: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.SKIPPED: "dim",
}

_KUBECTL = f"kubectl -n {SYSTEM_NAMESPACE}"
_LOGS = f"kubectl -n {AGENTS_NAMESPACE} logs daemonset/node-agent"
_NATS = f"{_KUBECTL} get pods | grep nats; --nats-url and its credentials name another"
_REDIS = f"{_KUBECTL} get pods | grep redis; --redis-url and --redis-credentials name another"
_API = "kubectl get --raw /readyz; --kubeconfig names another, or an account with the rights"
_DRIVER = "nvidia-smi; dmesg | grep -i -E 'nvrm|xid'"
_KUBELET = (
    "journalctl -u kubelet | grep -i checkpoint; it rewrites the file with the next pod that it "
    "gives devices to"
)
_RECORD = f"{_LOGS} | grep -i checkpoint; the agent rebuilds what it cannot read when it starts"


class Check(NamedTuple, Generic[P]):
    """`remedy` is the fix if it fails without naming one."""

    run: Callable[[P], Awaitable[Finding]]
    remedy: str


NODE_CHECKS: Mapping[str, Check[NodeProbes]] = {
    "agent": Check(
        NodeProbes.agent,
        "ls -l the --state-dir (--agent-dir here): it contains the agent's agent.lock",
    ),
    "kubelet-socket": Check(NodeProbes.kubelet_socket, "systemctl status kubelet"),
    "other-plugins": Check(NodeProbes.other_plugins, _KUBELET),
    "registration": Check(NodeProbes.registration, _KUBELET),
    "node-resources": Check(NodeProbes.node_resources, _API),
    "list-size": Check(
        NodeProbes.list_sizes,
        "set --redis-url to the ledger's URL, and the other flags as for the agent",
    ),
    "driver": Check(NodeProbes.driver, _DRIVER),
    "device-health": Check(NodeProbes.device_health, _REDIS),
    "temperature": Check(NodeProbes.temperature, _DRIVER),
    "mig-mode": Check(NodeProbes.mig_modes, _DRIVER),
    "container-toolkit": Check(
        NodeProbes.runtime, "read /etc/containerd, /etc/docker and /etc/crio as root"
    ),
    "device-variable": Check(
        NodeProbes.device_variable,
        "read /etc/nvidia-container-runtime as root; its file must be TOML",
    ),
    "open-runtime": Check(
        NodeProbes.open_runtime, "read /etc/containerd and /etc/crio as root; files must be TOML"
    ),
    "cdi": Check(NodeProbes.cdi, "read /etc/cdi and /var/run/cdi as root"),
    "cdi-devices": Check(
        NodeProbes.cdi_devices,
        f"{_LOGS} | grep -i cdi; the agent rewrites its specification when it starts",
    ),
    "library": Check(
        NodeProbes.library, "ls -l the --library-source and STATE_DIR/library, as root"
    ),
    "library-loads": Check(NodeProbes.library_loads, "ldd FILE lists what is missing"),
    "checkpoint": Check(NodeProbes.checkpoint, _RECORD),
    "pod-resources": Check(
        NodeProbes.pod_resources,
        "systemctl status kubelet; its socket is pod-resources/kubelet.sock below its "
        f"--root-dir; {_RECORD}",
    ),
    "kubelet-checkpoint": Check(NodeProbes.kubelet_checkpoint, f"{_KUBELET}; {_RECORD}"),
    "processes": Check(NodeProbes.processes, _DRIVER),
    "visible-gpus": Check(
        NodeProbes.visible_gpus,
        f"{_LOGS} | grep -i containers; it reads the kubelet's pods, and namespaces' labels",
    ),
}
CLUSTER_CHECKS: Mapping[str, Check[ClusterProbes]] = {
    "nats": Check(ClusterProbes.nats, _NATS),
    "redis": Check(ClusterProbes.redis, _REDIS),
    "redis-clock": Check(ClusterProbes.redis_clock, _REDIS),
    "api-clock": Check(ClusterProbes.api_clock, _API),
    "webhook": Check(ClusterProbes.webhook, _API),
    "apiservice": Check(
        ClusterProbes.apiservice,
        f"kubectl get apiservices {APISERVICE}; {_KUBECTL} logs deployment/api; "
        'docs/troubleshooting.md, "kubectl reports errors of visibility.leasehold.dev"',
    ),
    "endpoints": Check(ClusterProbes.endpoints, _API),
    "workloads": Check(ClusterProbes.workloads, _API),
    "rights": Check(ClusterProbes.rights, _API),
    "storage-rights": Check(ClusterProbes.storage_rights, _API),
    "runtime-class": Check(ClusterProbes.runtime_class, _API),
    "resource-quotas": Check(ClusterProbes.resource_quotas, _API),
    "device-classes": Check(ClusterProbes.device_classes, _API),
    "extender": Check(ClusterProbes.extender, _API),
    "components": Check(ClusterProbes.components, _NATS),
    "ended-pods": Check(ClusterProbes.leftovers, END_LEFTOVERS),
    "clocks": Check(ClusterProbes.clocks, _NATS),
    "versions": Check(ClusterProbes.versions, _NATS),
    "settings": Check(ClusterProbes.settings, _API),
}
REMEDIES = {name: check.remedy for name, check in NODE_CHECKS.items()}
REMEDIES |= {name: check.remedy for name, check in CLUSTER_CHECKS.items()}
NODE_ACCOUNT_CHECKS = frozenset({"api-clock", "rights"})
"""They also run with the account of a node's agent."""
AGENT_ONLY_CHECKS = frozenset({"rights"})


@dataclass(frozen=True, kw_only=True)
class DoctorTarget(ClusterServers):
    nodes: tuple[tuple[AgentSettings, NodeGpus], ...]
    kubeconfig: Path | None = None
    only: str = ""
    """`node`, `cluster`, or empty for both."""

    @property
    def cluster_checks(self) -> Sequence[str]:
        if self.only == "node":
            return [name for name in CLUSTER_CHECKS if name in NODE_ACCOUNT_CHECKS]
        skipped = AGENT_ONLY_CHECKS if self.only == "cluster" else ()
        return [name for name in CLUSTER_CHECKS if name not in skipped]


def doctor(flags: Doctor) -> int:
    findings = asyncio.run(run_checks(target_of(flags)))
    failed = any(finding.outcome is Outcome.FAIL for finding in findings)
    document = {"healthy": not failed, "findings": findings}
    terminal.show(flags.output, document, lambda _: render(findings), kind="Diagnosis")
    return 1 if failed else 0


def target_of(flags: Doctor) -> DoctorTarget:
    """Raises RequestError for a node that `leasehold up` does not run."""
    directory, stack = stack_of(flags)
    saved = None if flags.kubelet_dir or flags.redis_url else stack
    if saved is None:
        arguments = {
            "--node": flags.node,
            "--kubelet-dir": flags.kubelet_dir,
            "--state-dir": flags.agent_dir,
            "--library-source": flags.library_source,
            "--nats-url": flags.nats_url,
        }
        settings = _agent_settings(AgentSettings, arguments)
        return DoctorTarget(
            nodes=((settings, open_gpus(settings)),),
            redis_url=flags.redis_url,
            redis_credentials=flags.redis_client_credentials,
            nats_url=settings.nats_url,
            nats_credentials=settings.nats_client_credentials(OPERATOR.name),
            kubeconfig=flags.kubeconfig,
            only=flags.only,
        )
    if flags.node and flags.node not in saved.nodes:
        node_names = ", ".join(saved.nodes)
        raise RequestError(f"{directory.root} runs no node {flags.node!r}; it runs {node_names}")
    library = flags.library_source or saved.library_source
    return DoctorTarget(
        nodes=tuple(
            _simulated_node(directory, name, layout, library)
            for name, layout in saved.nodes.items()
            if flags.node in {"", name}
        ),
        redis_url=saved.redis_url,
        redis_credentials=ClientCredentials(login_file=optional_path(saved.redis_credentials)),
        nats_url=flags.nats_url or saved.nats_url,
        nats_credentials=NO_CREDENTIALS if flags.nats_url else _nats_credentials(saved),
        kubeconfig=flags.kubeconfig or Path(saved.kubeconfig),
        simulated=True,
        services=_services_of(saved),
        only=flags.only,
    )


def _services_of(saved: State) -> tuple[str, ...]:
    parts = {part.name.partition("-")[0] for part in saved.components}
    beside = sorted(parts & STARTED_SERVICES - set(REQUIRED_SERVICES))
    return (*REQUIRED_SERVICES, *beside)


def _nats_credentials(saved: State) -> ClientCredentials:
    return ClientCredentials(
        login_file=optional_path(saved.nats_credentials),
        tls=TlsFiles(ca=optional_path(saved.nats_ca)),
    )


def _simulated_node(
    directory: StateDir, name: str, layout: str, library: str
) -> tuple[AgentSettings, NodeGpus]:
    simulated = load_simulated_nodes()
    arguments = {
        "--node": name,
        "--kubelet-dir": str(directory.node(name)),
        "--state-dir": str(directory.agent(name)),
        "--gpus": layout,
        "--proc-dir": str(directory.node(name) / "proc"),
        "--fault-file": str(directory.faults(name)),
        "--library-source": library,
    }
    settings = _agent_settings(simulated.SimulatedAgentSettings, arguments)
    return settings, simulated.simulated_gpus(settings)


def _agent_settings(kind: type[AgentSettings], arguments: Mapping[str, str]) -> AgentSettings:
    argv = [word for flag, text in arguments.items() if text for word in (flag, text)]
    return load(kind, "leasehold doctor", about="", argv=argv)


async def run_checks(target: DoctorTarget) -> list[Finding]:
    """A check that cannot run is a finding, too."""
    async with AsyncExitStack() as stack:
        kubernetes = await _open_api_server(stack, target)
        read_at = time.time()
        node_totals = await _read_ledger(target)
        cordons = {
            name: cordon_reason(totals.node.served)
            for name, totals in (node_totals or {}).items()
            if totals.node.devices
        }
        devices = {
            name: [device for device, _ in totals.node.devices]
            for name, totals in (node_totals or {}).items()
        }
        checked = target.nodes if target.only != "cluster" else ()
        cluster = ClusterProbes(
            target,
            kubernetes,
            cordons,
            devices if node_totals is not None else None,
            without_agents=frozenset(
                settings.node_name
                for settings, _ in checked
                if running_instance(settings.state_dir) is None
            ),
        )
        running = {
            ("", name): run_check(CLUSTER_CHECKS[name].run(cluster))
            for name in target.cluster_checks
        }
        for settings, gpus in checked:
            node = NodeProbes(
                settings,
                gpus,
                kubernetes=kubernetes,
                totals=(node_totals or {}).get(settings.node_name),
                ledger_is_readable=node_totals is not None,
                read_at=read_at,
                host=visible_host(os.environ),
            )
            for name, check in NODE_CHECKS.items():
                running[settings.node_name, name] = run_check(check.run(node))
        results = await asyncio.gather(*running.values(), return_exceptions=True)
    return [
        complete(result, check=name, subject=subject)
        for (subject, name), result in zip(running, results, strict=True)
    ]


def complete(result: Finding | BaseException, *, check: str, subject: str) -> Finding:
    if isinstance(result, BaseException):
        text = f"a bug, or data of another version: {type(result).__name__}: {result}"
        result = Finding(outcome=Outcome.FAIL, text=text)
    needs_fix = result.outcome is Outcome.FAIL and not result.fix
    fix = REMEDIES[check] if needs_fix else result.fix
    return replace(result, check=check, subject=subject, fix=fix)


async def run_check(check: Awaitable[Finding]) -> Finding:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check
    except SkipError as error:
        return Finding(outcome=Outcome.SKIPPED, text=str(error))
    except PermissionError as error:
        text = f"this user may not read {error.filename}"
        return Finding(outcome=Outcome.SKIPPED, text=text, fix="run it as root, or in the agent")
    except TimeoutError:
        return Finding(outcome=Outcome.FAIL, text=f"no reply within {CHECK_TIMEOUT_S:g} s")
    except (LeaseholdError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        return Finding(outcome=Outcome.FAIL, text=text or type(error).__name__)


async def _open_api_server(
    stack: AsyncExitStack, target: DoctorTarget
) -> KubernetesClient | LeaseholdError:
    try:
        credentials = load_credentials(target.kubeconfig, environ=os.environ)
        return await stack.enter_async_context(KubernetesClient(credentials))
    except KubeconfigError as error:
        return SkipError(str(error)) if error.where == NO_KUBECONFIG else error


async def _read_ledger(target: DoctorTarget) -> dict[NodeName, NodeTotals] | None:
    """The check `redis` reports why it fails."""
    if not target.redis_url:
        return None
    with contextlib.suppress(UnavailableError, RequestError, TimeoutError):
        opening = RedisLeases.connect(target.redis_url, credentials=target.redis_credentials)
        async with asyncio.timeout(CHECK_TIMEOUT_S), opening as ledger:
            pages = [page async for page in ledger.totals.pages()]
            return {totals.node.facts.name: totals for page in pages for totals in page}
    return None


def render(findings: Sequence[Finding]) -> RenderableType:
    lines: list[Text] = []
    for subject in dict.fromkeys(finding.subject for finding in findings):
        lines.append(Text(f"node {subject}" if subject else "cluster", style="bold"))
        for finding in findings:
            if finding.subject != subject:
                continue
            line = Text("  ")
            line.append(f"{finding.outcome:8}", style=COLOURS[finding.outcome])
            line.append(f"{finding.check:20}{finding.text}")
            lines.append(line)
            if finding.fix:
                lines.append(Text(f"{'':10}-> {finding.fix}", style="cyan"))
    counts = {
        outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome
    }
    lines.append(Text(", ".join(f"{count} {outcome}" for outcome, count in counts.items())))
    return Group(*lines)
