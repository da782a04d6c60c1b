"""The command `doctor`: looks at a node and at the cluster's parts, and says what to put right.

`--json` prints {"healthy", "findings": [{"check", "subject", "outcome": "ok" | "warn" | "fail" |
"skipped", "text", "fix"}]}; a subject is a node's name, or empty.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.cli.doctor.cluster_probes import ClusterProbes
from services.cli.doctor.finding import Finding, Outcome, SkipError
from services.cli.doctor.node_probes import NodeProbes
from services.cli.doctor.remedies import REMEDIES
from services.cli.inspect.sources import redis_keys_of
from services.cli.state_dir import StateDir, load_state
from services.node_agent.instance_lock import POD, this_instance
from services.node_agent.settings import AgentSettings
from services.topology import OPERATOR
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import NOWHERE, KubeconfigError, load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName
from shared.runtime.settings import load

LIMIT_S = 30.0
"""So long one check may take."""
COLOURS = {
    Outcome.OK: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.SKIPPED: "dim",
}

NODE_CHECKS: Mapping[str, Callable[[NodeProbes], Awaitable[Finding]]] = {
    "agent": NodeProbes.agent,
    "kubelet-socket": NodeProbes.kubelet_socket,
    "other-plugins": NodeProbes.other_plugins,
    "registration": NodeProbes.registration,
    "node-resources": NodeProbes.node_resources,
    "list-size": NodeProbes.list_sizes,
    "driver": NodeProbes.driver,
    "device-health": NodeProbes.device_health,
    "mig-mode": NodeProbes.mig_modes,
    "container-toolkit": NodeProbes.runtime,
    "cdi": NodeProbes.cdi,
    "cdi-devices": NodeProbes.cdi_devices,
    "library": NodeProbes.library_file,
    "library-loads": NodeProbes.library_loads,
    "checkpoint": NodeProbes.checkpoint,
    "pod-resources": NodeProbes.pod_resources,
    "kubelet-checkpoint": NodeProbes.kubelet_record,
    "processes": NodeProbes.processes,
}
CLUSTER_CHECKS: Mapping[str, Callable[[ClusterProbes], Awaitable[Finding]]] = {
    "nats": ClusterProbes.nats,
    "redis": ClusterProbes.redis,
    "redis-clock": ClusterProbes.redis_clock,
    "api-clock": ClusterProbes.api_clock,
    "webhook": ClusterProbes.webhook,
    "rights": ClusterProbes.rights,
    "runtime-class": ClusterProbes.runtime_class,
    "parts": ClusterProbes.parts,
    "versions": ClusterProbes.versions,
}
OF_A_NODE = frozenset({"api-clock", "rights"})
"""What the cluster is asked on behalf of a node's agent, with its account."""
OF_ITS_AGENT = frozenset({"rights"})
"""What only its account can ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ward:
    """What is to be looked at."""

    nodes: tuple[AgentSettings, ...]
    redis_url: str = ""
    nats_url: str = ""
    nats_keys: ClientCredentials = NO_CREDENTIALS
    redis_keys: ClientCredentials = NO_CREDENTIALS
    kubeconfig: Path | None = None
    simulated: bool = False
    only: str | None = None
    """`node` or `cluster`; None: both."""

    @property
    def checks(self) -> Sequence[str]:
        """Which of the checks of the cluster are to be made."""
        if self.only == "node":
            return [name for name in CLUSTER_CHECKS if name in OF_A_NODE]
        skipped = OF_ITS_AGENT if self.only == "cluster" else ()
        return [name for name in CLUSTER_CHECKS if name not in skipped]


def doctor(flags: argparse.Namespace) -> int:
    """Look at everything; return 1 if something is wrong."""
    findings = asyncio.run(examined(ward_of(flags)))
    wrong = any(finding.outcome is Outcome.FAIL for finding in findings)
    if flags.json:
        print(json.dumps({"healthy": not wrong, "findings": [shape(one) for one in findings]}))
    else:
        _show(findings)
    return 1 if wrong else 0


def ward_of(flags: argparse.Namespace) -> Ward:
    """Say what to look at: what `leasehold up` runs, or else this node as flags describe it.

    Raises RequestError for a node that `up` does not run.
    """
    directory = StateDir.at(flags.state)
    saved = None if flags.kubelet_dir or flags.redis_url else load_state(directory)
    if saved is None:
        given = {
            "--node": flags.node,
            "--kubelet-dir": flags.kubelet_dir,
            "--state-dir": flags.agent_dir,
            "--gpus": flags.gpus,
            "--library-dir": flags.library_dir,
            "--nats-url": flags.nats_url,
        }
        settings = _settings(given)
        return Ward(
            nodes=(settings,),
            redis_url=flags.redis_url,
            redis_keys=redis_keys_of(flags),
            nats_url=settings.nats_url,
            nats_keys=settings.nats_client_credentials(OPERATOR.name),
            kubeconfig=_path(flags.kubeconfig),
            simulated=settings.simulated,
            only=flags.only,
        )
    if flags.node and flags.node not in saved.nodes:
        known = ", ".join(saved.nodes)
        raise RequestError(f"{directory.root} runs no node {flags.node!r}; it runs {known}")
    return Ward(
        nodes=tuple(
            _settings(
                {
                    "--node": name,
                    "--kubelet-dir": str(directory.node(name)),
                    "--state-dir": str(directory.agent(name)),
                    "--gpus": layout,
                }
            )
            for name, layout in saved.nodes.items()
            if flags.node in {"", name}
        ),
        redis_url=saved.redis_url,
        redis_keys=ClientCredentials(credentials=_path(saved.redis_credentials)),
        nats_url=flags.nats_url or saved.nats_url,
        nats_keys=NO_CREDENTIALS if flags.nats_url else saved.nats_keys,
        kubeconfig=Path(flags.kubeconfig or saved.kubeconfig),
        simulated=True,
        only=flags.only,
    )


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _settings(given: Mapping[str, str]) -> AgentSettings:
    """Return the settings of an agent that is told this, and the rest by the environment."""
    argv = [word for flag, text in given.items() if text for word in (flag, text)]
    return load(AgentSettings, "leasehold doctor", about="", argv=argv)


async def examined(ward: Ward) -> list[Finding]:
    """Make all checks side by side; each says for itself if it cannot be made."""
    async with AsyncExitStack() as stack:
        kube = await _opened(stack, ward)
        accounts = await _accounts(ward)
        cluster = ClusterProbes(
            kube=kube,
            redis_url=ward.redis_url,
            redis_keys=ward.redis_keys,
            nats_url=ward.nats_url,
            nats_keys=ward.nats_keys,
            simulated=ward.simulated,
        )
        named = [(name, "") for name in ward.checks]
        waiting = [made(CLUSTER_CHECKS[name](cluster)) for name in ward.checks]
        for settings in ward.nodes if ward.only != "cluster" else ():
            node = NodeProbes(
                settings,
                kube=kube,
                account=(accounts or {}).get(settings.node_name),
                knows_ledger=accounts is not None,
                host=None if this_instance(os.environ).form == POD else Path("/"),
            )
            named += [(name, settings.node_name) for name in NODE_CHECKS]
            waiting += [made(check(node)) for check in NODE_CHECKS.values()]
        found = await asyncio.gather(*waiting, return_exceptions=True)
    return [
        complete(one, check=name, subject=subject)
        for one, (name, subject) in zip(found, named, strict=True)
    ]


def complete(found: Finding | BaseException, *, check: str, subject: str) -> Finding:
    """Name what was found; what nobody expected spoils its own check alone."""
    if isinstance(found, BaseException):
        text = f"a bug, or data of another version: {type(found).__name__}: {found}"
        found = Finding(outcome=Outcome.FAIL, text=text)
    lacks = found.outcome is Outcome.FAIL and not found.fix
    fix = REMEDIES[check] if lacks else found.fix
    return replace(found, check=check, subject=subject, fix=fix)


async def made(check: Awaitable[Finding]) -> Finding:
    """Wait for a check; whatever keeps it from its end is what it found."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await check
    except SkipError as error:
        return Finding(outcome=Outcome.SKIPPED, text=str(error))
    except PermissionError as error:
        text = f"{error.filename} may not be read by this user"
        return Finding(outcome=Outcome.SKIPPED, text=text, fix="run it as root, or in the agent")
    except TimeoutError:
        return Finding(outcome=Outcome.FAIL, text=f"no answer within {LIMIT_S:g} s")
    except (LeaseholdError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        return Finding(outcome=Outcome.FAIL, text=text or type(error).__name__)


async def _opened(stack: AsyncExitStack, ward: Ward) -> KubernetesClient | LeaseholdError:
    """Open the API server, or return why it cannot be asked: nobody has to say where it is."""
    try:
        credentials = load_credentials(ward.kubeconfig, environ=os.environ)
        return await stack.enter_async_context(KubernetesClient(credentials))
    except KubeconfigError as error:
        return SkipError(str(error)) if error.where == NOWHERE else error


async def _accounts(ward: Ward) -> dict[NodeName, NodeTotals] | None:
    """Read the ledger; None: it cannot be had, of which the check `redis` tells."""
    if not ward.redis_url:
        return None
    with contextlib.suppress(UnavailableError, RequestError, TimeoutError):
        opening = RedisLeases.connect(ward.redis_url, credentials=ward.redis_keys)
        async with asyncio.timeout(LIMIT_S), opening as ledger:
            pages = [page async for page in ledger.totals.pages()]
            return {one.node.facts.name: one for page in pages for one in page}
    return None


def shape(finding: Finding) -> dict[str, Any]:
    """Return the JSON form of a finding."""
    return {
        "check": finding.check,
        "subject": finding.subject,
        "outcome": str(finding.outcome),
        "text": finding.text,
        "fix": finding.fix,
    }


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 4_000
    console = Console(highlight=False, width=width)
    for subject in dict.fromkeys(finding.subject for finding in findings):
        console.print(Text(f"node {subject}" if subject else "cluster", style="bold"))
        for one in findings:
            if one.subject != subject:
                continue
            line = Text("  ")
            line.append(f"{one.outcome:8}", style=COLOURS[one.outcome])
            line.append(f"{one.check:20}{one.text}")
            console.print(line)
            if one.fix:
                console.print(Text(f"{'':10}-> {one.fix}", style="cyan"))
    counts = {outcome: sum(one.outcome is outcome for one in findings) for outcome in Outcome}
    console.print(Text(", ".join(f"{count} {outcome}" for outcome, count in counts.items())))
