"""The stack of a campaign: what `leasehold up` starts, apart and combined, with proxies."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import redis.asyncio
import yaml
from msgspec import structs
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.cli import credentials
from services.cli.local_commands import Up
from services.cli.state_dir import ComponentState, StateDir, save_state
from services.cli.up import servers
from services.cli.up.components import Component, components_of
from services.cli.up.installation import OUTSIDE_WEBHOOK, installation
from services.cli.up.plan import Plan, plan_of
from services.cli.up.supervisor import Supervisor
from services.cli.up.up import state_of
from services.webhook.registration import admission_policies
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import ConflictError, UnavailableError
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE, NodeName
from simcluster.credentials import api_server_certificates, load_secret, write_kubeconfig
from tests.campaign.schedule import LAYOUTS, NODES, SERVERS_OF, SERVICES
from tests.campaign.stack.api_proxy import ApiProxy
from tests.campaign.stack.clocks import Clocks
from tests.campaign.stack.memory_limits import MemoryLimits
from tests.campaign.stack.plugin_proxy import PluginProxy
from tests.campaign.stack.tcp_proxy import HOST, KubeletProxy, SocketProxy, TcpProxy
from tests.campaign.workload import GUARDED, URGENT, URGENT_PRIORITY
from tests.proof.preemption import NOTICE_S
from tests.support.simcluster.installed import RIGHTS, manifests
from tests.support.waiting import until

READY_S = 120.0
RETRY_S = 0.5
K8S = Path(__file__).parents[3] / "k8s"
CRDS = K8S / "base" / "crds"
COMBINED = K8S / "components" / "combined-scheduler" / "combined-scheduler.yaml"
JUDGE = "kubernetes-admin"
"""The user of the administrator's token."""
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DISRUPTION_BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
QUICK_PREEMPTION = {
    "LEASEHOLD_PREEMPTION_NOTICE_S": f"{NOTICE_S:g}",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "2",
    "LEASEHOLD_PREEMPTION_COOLDOWN_S": "1",
    "LEASEHOLD_PREEMPTION_PER_NAMESPACE_HOUR": "100000",
    "LEASEHOLD_PLAN_STARTS_AFTER_S": "2",
    "LEASEHOLD_PLANNED_STARTS": "4",
}


@dataclass(slots=True)
class CampaignCluster:
    """A running stack."""

    directory: StateDir
    plan: Plan
    clocks: Clocks
    kube: KubernetesClient
    redis: redis.asyncio.Redis
    redis_login: tuple[str, str]
    """The administrator's name and password."""
    limits: MemoryLimits
    tcp: dict[tuple[str, str], TcpProxy] = field(default_factory=dict)
    """By part and server."""
    api: dict[str, ApiProxy] = field(default_factory=dict)
    """By part."""
    plugins: dict[str, PluginProxy] = field(default_factory=dict)
    """By node."""
    states: Mapping[str, ComponentState] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.directory.root

    def pid(self, part: str) -> int | None:
        """Return the process of a part; None while it has none."""
        state = self.states.get(part)
        return state.pid if state else None

    def send_signal(self, part: str, number: signal.Signals) -> None:
        """Send a signal to a part, if it has a process."""
        if pid := self.pid(part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def link(self, part: str, server: str) -> TcpProxy | ApiProxy:
        """Return the proxy between a part and a server."""
        return self.api[part] if server == "api" else self.tcp[part, server]

    async def kubelet(self, node: str, path: str) -> None:
        """POST to a node's simulated kubelet."""
        described = json.loads((self.directory.node(node) / "kubelet.json").read_text())
        trust = ssl.create_default_context(cafile=described["caPath"])
        token = Path(described["tokenPath"]).read_text()
        url = f"https://{described['address']}:{described['port']}{path}"
        headers = {"Authorization": f"Bearer {token}"}
        limit = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limit) as session,
            session.post(url, ssl=trust) as answer,
        ):
            answer.raise_for_status()


def _components(plan: Plan, directory: StateDir) -> list[Component]:
    """Return what `up` starts apart and what it starts combined, each part once."""
    apart, combined = (
        components_of(replace(plan, settings=replace(plan.settings, combined=combined)), directory)
        for combined in (False, True)
    )
    return list({part.name: part for part in (*apart, *combined)}.values())


async def _proxied(components: Sequence[Component], cluster: CampaignCluster) -> list[Component]:
    """Lead each part to its servers through proxies of its own, and give it a clock."""
    return [
        await _proxied_one(component, cluster) if component.name in SERVICES else component
        for component in components
    ]


async def _proxied_one(component: Component, cluster: CampaignCluster) -> Component:
    name = component.name
    argv = list(component.argv)
    plan = cluster.plan
    for server in SERVERS_OF.get(name.partition("-")[0], ()):
        if server == "api":
            at = argv.index("--kubeconfig") + 1
            tls = cluster.root / "tls"
            proxy = cluster.api[name] = ApiProxy(plan.ports["api"], tls, Path(argv[at]))
            await proxy.start()
            kubeconfig = cluster.root / "kubeconfigs" / name
            kubeconfig.parent.mkdir(exist_ok=True)
            ca = (tls / "ca.crt").read_bytes()
            url = f"https://{servers.HOST}:{proxy.port}"
            write_kubeconfig(kubeconfig, url, ca, "set-by-the-proxy")
            argv[at] = str(kubeconfig)
            continue
        tcp = cluster.tcp[name, server] = TcpProxy(plan.ports[server])
        await tcp.start()
        at = argv.index(f"--{server}-url") + 1
        argv[at] = argv[at].replace(f":{plan.ports[server]}", f":{tcp.port}")
    if name.startswith("agent-"):
        argv += cluster.limits.flags(name.removeprefix("agent-"))
    if "--kubelet-dir" in argv:
        at = argv.index("--kubelet-dir") + 1
        argv[at] = str(await _proxied_kubelet(name, Path(argv[at]), cluster))
    environment = {
        **component.environment,
        **cluster.clocks.environment(name),
        **(QUICK_PREEMPTION if name in {"planner", "scheduler"} else {}),
    }
    return replace(component, argv=tuple(argv), environment=environment)


async def _proxied_kubelet(agent: str, kubelet: Path, cluster: CampaignCluster) -> Path:
    """Return a directory in which an agent finds its kubelet behind proxies."""
    directory = cluster.root / "kubelets" / kubelet.name
    (directory / "pod-resources").mkdir(parents=True)
    plugins = PluginProxy(directory / "device-plugins", kubelet / "device-plugins")
    cluster.plugins[kubelet.name] = plugins
    pods = cluster.tcp[agent, "pods"] = KubeletProxy(kubelet / "kubelet.json")
    name = Path("pod-resources", "kubelet.sock")
    resources = SocketProxy(directory / name, kubelet / name)
    cluster.tcp[agent, "resources"] = resources
    for proxy in (pods, resources, plugins):
        await proxy.start()
    described = {
        "address": HOST,
        "port": pods.port,
        "caPath": str(kubelet / "tls" / "ca.crt"),
        "tokenPath": str(kubelet / "token"),
    }
    (directory / "kubelet.json").write_text(json.dumps(described))
    return directory


def _installed(directory: StateDir) -> dict[str, object]:
    """Return accounts with the roles and policies of a cluster.

    The judge may forge leases, as if the policy on annotations had been removed.
    """
    namespaces = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        for name in (SYSTEM_NAMESPACE, AGENTS_NAMESPACE)
    ]
    policies = admission_policies()
    for policy in policies:
        not_by_judge = f"request.userInfo.username != '{JUDGE}'"
        conditions = policy["spec"].get("matchConditions", [])
        conditions.append({"name": "not-by-the-judge", "expression": not_by_judge})
    rights = manifests(RIGHTS, COMBINED)
    used = {right["metadata"]["name"] for right in rights if right["kind"] == "ServiceAccount"}
    installed = installation(
        str(directory.accounts), NODES, policies=False, aggregated="127.0.0.1:0"
    )
    return {
        "objects": [*namespaces, *rights, *OUTSIDE_WEBHOOK, *policies],
        "accounts": [account for account in installed["accounts"] if account["name"] in used],
        "webhook_client_ca": installed["webhook_client_ca"],
    }


async def _create_objects(kube: KubernetesClient) -> None:
    """Create the kinds of quotas and budgets, a priority class, and a PodDisruptionBudget."""
    guarded = {
        "metadata": {"name": "guarded"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {GUARDED: "yes"}}},
    }
    urgent = {"metadata": {"name": URGENT}, "value": URGENT_PRIORITY}
    kinds = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("gpu*.yaml"))]
    made_at = [(PRIORITIES, urgent), (DISRUPTION_BUDGETS, guarded)]
    for path, made in (*made_at, *((CRD_PATH, kind) for kind in kinds)):
        while not await _is_created(kube, path, made):
            await asyncio.sleep(RETRY_S)


async def _is_created(kube: KubernetesClient, path: str, made: Mapping[str, object]) -> bool:
    try:
        await kube.create(path, made)
    except ConflictError:  # an earlier request was slow, and successful
        return True
    except UnavailableError:
        return False
    return True


@contextlib.asynccontextmanager
async def campaign_cluster(*, kept: Path | None = None) -> AsyncIterator[CampaignCluster]:
    """Start the stack, and stop it at the end; `kept` keeps the state and the logs there."""
    root = kept or Path(tempfile.mkdtemp(prefix="lh-campaign-"))
    directory = StateDir.at(root)
    plan = plan_of(Up(placers=1, kube_scheduler=False), LAYOUTS, None)
    directory.make()
    api_server_certificates(root / "tls")
    directory.installation.write_text(json.dumps(_installed(directory)))
    load_secret(root / "token", lambda: secrets.token_urlsafe(32))
    ca = (root / "tls" / "ca.crt").read_bytes()
    token = (root / "token").read_text()
    api_url = f"https://{servers.HOST}:{plan.ports['api']}"
    write_kubeconfig(root / "judge.kubeconfig", api_url, ca, token)
    files = credentials.write(
        directory.credentials, [NodeName(node) for node in NODES], names=servers.NAMES
    )
    user, _, password = files.redis("admin").read_text().strip().partition(":")
    client = redis.asyncio.Redis.from_url(
        plan.redis_url,
        username=user,
        password=password,
        socket_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
    )
    kube = KubernetesClient(load_credentials(root / "judge.kubeconfig"), timeout_s=2.0)
    async with kube, client:
        cluster = CampaignCluster(
            directory,
            plan,
            Clocks(root / "clocks"),
            kube,
            client,
            (user, password),
            MemoryLimits.prepare(directory),
        )
        components = _components(plan, directory)
        proxied = await _proxied(components, cluster)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_supervise(proxied, cluster, stop))
            try:
                await until(lambda: _is_up(cluster, proxied, running), limit_s=READY_S)
                await _create_objects(kube)
                yield cluster
            finally:
                _continue_all(cluster)
                stop.set()
                await asyncio.wait([running])
                for proxies in (cluster.tcp, cluster.api, cluster.plugins):
                    await asyncio.gather(*(proxy.close() for proxy in proxies.values()))
    if kept is None:
        shutil.rmtree(root, ignore_errors=True)


def _is_up(
    cluster: CampaignCluster, components: Sequence[Component], running: asyncio.Task[None]
) -> bool:
    if running.done():
        running.result()
    return len(cluster.states) == len(components) and all(
        state.ready for state in cluster.states.values()
    )


async def _supervise(
    components: Sequence[Component],
    cluster: CampaignCluster,
    stop: asyncio.Event,
) -> None:
    started_at = time.time()
    plan = cluster.plan

    def save(states: tuple[ComponentState, ...], ready: bool) -> None:
        cluster.states = {state.name: state for state in states}
        state = state_of(plan, cluster.directory, states, ready=ready, started_at=started_at)
        judge = str(cluster.root / "judge.kubeconfig")
        state = structs.replace(state, kubeconfig=judge)
        save_state(cluster.directory, state)

    def ignore(_text: str) -> None:
        """Every exit shows in the states."""

    supervisor = Supervisor(components, cluster.directory, report=ignore, save=save)
    await supervisor.run(stop, lambda: None)


def _continue_all(cluster: CampaignCluster) -> None:
    for part in cluster.states:
        cluster.send_signal(part, signal.SIGCONT)


def resident_mib(cluster: CampaignCluster) -> dict[str, int]:
    """Return the memory of each process in MiB."""
    counts: dict[str, int] = {}
    for part in cluster.states:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{cluster.pid(part)}/statm").read_text().split()
            counts[part] = int(words[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return counts
