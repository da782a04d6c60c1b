"""Reads a node for the doctor: one method per check."""

import asyncio
import contextlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import yaml

from services.node_agent.allocate.cdi import FILE, names_in, names_of, qualified_name
from services.node_agent.allocate.cdi_files import BY_CDI, why_no_cdi
from services.node_agent.allocate.device_list_strategies import (
    DEFAULT_STRATEGIES,
    DeviceListStrategies,
    DeviceListStrategy,
)
from services.node_agent.container_runtime.runtime_settings import (
    CONFIGURE,
    MOUNTS_SWITCH,
    SWITCH,
    TOOLKIT_FILES,
    judge_open_settings,
    open_settings,
)
from services.node_agent.diagnosis import node_checks as judge
from services.node_agent.gpu_access import NodeGpus
from services.node_agent.gpus.inventory import Gpu, driver_version
from services.node_agent.instance_lock import POD, running_instance, this_instance
from services.node_agent.isolation.library import (
    StoredLibrary,
    current_library,
    digest_of,
    layout_name,
    simulated_library,
    source_file,
    unusable_reason,
)
from services.node_agent.kubelet.cgroups import read_origin
from services.node_agent.kubelet.device_checkpoint import (
    KubeletDevices,
    read_kubelet_devices,
)
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.kubelet.pods import ClaimHolding, KubeletPod
from services.node_agent.records.checkpoint import CheckpointFile
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.resize.limits import excess_requests
from services.node_agent.settings import AgentSettings, kubelet_credentials
from services.node_agent.usage.attribution import attribute_processes
from services.node_agent.usage.container_views import ContainerViews, ExemptNamespaces
from services.node_agent.usage.leased_containers import Scan, leased_containers
from services.node_agent.usage.visible_gpus import (
    NodeView,
    unleased_views,
    visibility_violations,
)
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.dialects.reserved import VISIBLE
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ForbiddenError
from shared.kubernetes.paths import node_path
from shared.kubernetes.types import ApiNode, ApiPod, ObjectList
from shared.model.devices.device import Device
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.findings import Finding, Outcome, SkipError, fail, ok, warn
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals
from shared.model.names import PodUid
from shared.model.quantity import parse_count
from shared.pods.observed_pod import TERMINAL
from shared.runtime.probe import address, request_readiness

NO_LEDGER = "the ledger cannot be read: see the check `redis`, or set --redis-url"
HEALTHY = "healthy"
_STATE = re.compile(
    r'^leasehold_device_health\{device_uuid="([^"]*)",.*state="([^"]*)"\} 1\.0$', re.MULTILINE
)


def device_variable(path: str, text: str, strategies: Sequence[DeviceListStrategy]) -> Finding:
    """Raises RequestError if the configuration is not TOML."""
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path}: {error}") from error
    by_cdi = DeviceListStrategy.CDI_CRI in strategies
    by_mounts = DeviceListStrategy.VOLUME_MOUNTS in strategies
    if settings.get(SWITCH, True):
        return warn(
            f"every pod that reaches NVIDIA's runtime can name devices in {VISIBLE}, also from its "
            f"image: {SWITCH} is not false in {path}",
            f"pass devices by CDI (docs/install.md), then {CONFIGURE} {SWITCH}=false",
        )
    if not (by_cdi or by_mounts):
        return fail(
            f"containers get their devices by {VISIBLE}, which {path} makes the runtime ignore",
            "pass devices by CDI (docs/install.md), or use --device-list-strategy volume-mounts",
        )
    if by_mounts and not by_cdi and not settings.get(MOUNTS_SWITCH, False):
        return fail(
            f"containers get their devices by mounts, which {path} makes the runtime ignore",
            f"{CONFIGURE} {MOUNTS_SWITCH}=true",
        )
    return ok(f"unprivileged pods cannot name devices in {VISIBLE}")


def read_cdi_kind(path: Path) -> str:
    try:
        document = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        return ""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""


SOCKET_PREFIX = "leasehold-"
TOOLS = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-container-cli")
RUNTIME_CONFIGURATIONS = (
    "containerd/config.toml",
    "containerd/conf.d/99-nvidia.toml",
    "docker/daemon.json",
    "crio/crio.conf.d/99-nvidia.conf",
)


def visible_host(environ: Mapping[str, str]) -> Path | None:
    """Return None in a pod, which sees its own file system."""
    return None if this_instance(environ).form == POD else Path("/")


async def _connection_error(socket: Path) -> str:
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


class NodeProbes:
    """`host` is the node's file system, if visible here."""

    def __init__(
        self,
        settings: AgentSettings,
        gpus: NodeGpus,
        *,
        kubernetes: KubernetesClient | LeaseholdError,
        totals: NodeTotals | None,
        ledger_is_readable: bool,
        read_at: float = math.inf,
        host: Path | None = Path("/"),
    ) -> None:
        self.settings = settings
        self.gpus = gpus
        self.kubernetes = kubernetes
        self.totals = totals
        self.ledger_is_readable = ledger_is_readable
        self.read_at = read_at
        """Unix seconds: the ledger lacks what was allocated after that."""
        self._host = host

    @property
    def host(self) -> Path:
        if self._host is None:
            raise SkipError(
                "a pod cannot read its node's files: run `leasehold doctor` on the node"
            )
        return self._host

    @property
    def runtime_root(self) -> Path:
        seen = self.settings.runtime_root
        if seen is None:
            raise SkipError("the containers of `leasehold up` need no container runtime")
        return seen if self._host is None and seen != Path("/") else self.host

    @property
    def plugins(self) -> Path:
        return self.settings.kubelet_dir / "device-plugins"

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        if self.ledger_is_readable:
            return (
                ()
                if self.totals is None
                else tuple(device for device, _ in self.totals.node.devices)
            )
        states = self.agent_states
        return tuple(
            replace(device, healthy=state == HEALTHY, fault="" if state == HEALTHY else state)
            for device in self._checkpoint().devices
            for state in (states.get(device.uuid, HEALTHY),)
        )

    @cached_property
    def agent_states(self) -> dict[str, str]:
        if self._host is not None:
            return {}
        try:
            _, page = request_readiness(address(dict(os.environ)), "/metrics")
        except OSError as error:
            raise UnavailableError(f"the agent's metrics cannot be read: {error}") from error
        return dict(_STATE.findall(page))

    def _require_devices(self) -> None:
        if not self.devices and not self.ledger_is_readable:
            raise SkipError(NO_LEDGER)

    @property
    def leases(self) -> dict[PodUid, Lease] | None:
        if not self.ledger_is_readable:
            return None
        return {lease.pod: lease for lease in (self.totals.leases if self.totals else ())}

    @cached_property
    def shown(self) -> NodeAdvertisement:
        dialects = enabled(Rules(enabled=self.settings.systems))
        shown = advertisement_of(dialects, self.devices, self.settings.gpu_strategy)
        entries: Sequence[CheckpointEntry] = ()
        with contextlib.suppress(SkipError, UnavailableError):
            entries = self._checkpoint().entries
        return shown.with_more(excess_requests(entries))

    @cached_property
    def _discovery(self) -> asyncio.Task[tuple[Gpu, ...]]:
        return asyncio.create_task(self.gpus.driver.discover())

    async def agent(self) -> Finding:
        if not self.settings.state_dir.is_dir():
            raise SkipError(f"{self.settings.state_dir} is missing: no agent has run here")
        instance = running_instance(self.settings.state_dir)
        if isinstance(self.kubernetes, LeaseholdError):
            return judge.agent(self.settings.node_name, instance, None)
        labels = (await self._node()).metadata.labels
        return judge.agent(self.settings.node_name, instance, labels)

    async def kubelet_socket(self) -> Finding:
        path = self.plugins / "kubelet.sock"
        return judge.kubelet_socket(str(path), await _connection_error(path))

    def _kubelet_devices(self) -> KubeletDevices:
        devices = read_kubelet_devices(self.plugins)
        if devices is None:
            raise SkipError(f"{self.plugins} has no checkpoint: the kubelet has no plugin yet")
        return devices

    async def other_plugins(self) -> Finding:
        other_sockets = [
            path.name
            for path in sorted(self.plugins.glob("*.sock"))
            if not path.name.startswith(SOCKET_PREFIX)
            and path.name != "kubelet.sock"
            and not await _connection_error(path)
        ]
        return judge.other_plugins(
            self._kubelet_devices().registered or {}, self.shown.served, other_sockets
        )

    async def registration(self) -> Finding:
        return judge.registration(self._kubelet_devices().registered or {}, self.shown.served)

    async def node_resources(self) -> Finding:
        if running_instance(self.settings.state_dir) is None:
            raise SkipError("no agent serves this node, and the kubelet has no devices of its own")
        node = await self._node()
        shown = self.shown
        ours = shown.served.keys() | shown.node_status.keys()
        amounts = {
            name: parse_count(amount)
            for name, amount in node.status.allocatable.items()
            if name in ours
        }
        return judge.node_resources(amounts, shown.served, shown.node_status)

    async def list_sizes(self) -> Finding:
        self._require_devices()
        return judge.list_sizes(self.shown.served)

    async def device_health(self) -> Finding:
        if not (self.ledger_is_readable or self.agent_states):
            raise SkipError(NO_LEDGER)
        devices = self.devices
        facts = self.totals.node.facts if self.totals else None
        if facts is None:
            return judge.device_health(devices)
        closed = facts.closed_devices
        cordoned = facts.unschedulable
        return judge.device_health(devices, closed, cordoned=cordoned)

    async def driver(self) -> Finding:
        sick = {device.index for device in self.devices if not device.healthy}
        gpus = [
            replace(gpu, fault=None) if gpu.index in sick else gpu for gpu in await self._discovery
        ]
        return judge.driver(gpus, self.gpus.driver.unreadable)

    async def mig_modes(self) -> Finding:
        finding = judge.mig_modes(await self._discovery, self.devices)
        if finding.outcome is Outcome.OK:
            self._require_devices()
        return finding

    async def library(self) -> Finding:
        simulated = simulated_library(self.settings.library_root).path
        has_lost = simulated.parent.is_dir() and not simulated.is_file()
        if self.settings.library_origin is None and has_lost:
            return judge.library(None, str(simulated.parent))
        source, current = self._library()
        if not current.path.is_file():
            return judge.library(None, str(source))
        replaced = source.is_file() and digest_of(source) != current.content
        reason = await unusable_reason(source) if replaced else None
        layout = await asyncio.to_thread(layout_name, current.path)
        return judge.library(current, str(source), layout=layout, replaced_by=reason)

    async def library_loads(self) -> Finding:
        _, current = self._library()
        if not current.path.is_file():
            raise SkipError(f"{current.path} is missing")
        return judge.library_loads(str(current.path), await unusable_reason(current.path))

    def _library(self) -> tuple[Path, StoredLibrary]:
        source = self.settings.library_origin
        if source is None:
            raise SkipError(
                "the driver of the simulated GPUs enforces limits itself; `leasehold up "
                "--library-source PATH` lets HAMi-core do it"
            )
        return source_file(source), current_library(self.settings.library_root)

    async def checkpoint(self) -> Finding:
        listed = self._allocations()
        return judge.checkpoint(
            [held for held in listed if held.activated_at < self.read_at], self.leases
        )

    async def pod_resources(self) -> Finding:
        allocations = self._allocations()
        served = self.shown.served.keys()
        socket = self.settings.kubelet_dir / "pod-resources" / "kubelet.sock"
        async with KubeletPodResources.connected(socket) as client:
            holdings = (await client.list_holdings()).holdings
        held_ids: dict[tuple[str, str], frozenset[str]] = {}
        for holding in holdings:
            if holding.resource in served:
                pod = (holding.namespace, holding.name)
                held_ids[pod] = held_ids.get(pod, frozenset()) | holding.device_ids
        return judge.pod_resources(held_ids, allocations)

    async def kubelet_checkpoint(self) -> Finding:
        served = self.shown.served.keys()
        allocated = self._kubelet_devices().allocated or ()
        pods = {str(entry.pod) for entry in allocated if entry.resource in served}
        return judge.kubelet_checkpoint(pods, self._allocations(), await self._live_pods())

    async def _live_pods(self) -> Mapping[str, str] | None:
        if isinstance(self.kubernetes, LeaseholdError):
            return None
        selector = quote(f"spec.nodeName={self.settings.node_name}")
        try:
            path = f"/api/v1/pods?fieldSelector={selector}"
            listed = (await self.kubernetes.read(path, ObjectList[ApiPod])).items or ()
        except ForbiddenError:
            return None
        return {
            pod.metadata.uid: f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in listed
            if pod.status.phase not in TERMINAL
        }

    async def processes(self) -> Finding:
        if not self.gpus.has_processes:
            raise SkipError("no process runs on simulated GPUs")
        entries = self._checkpoint().entries
        leases = self.leases
        samples = await self.gpus.sample()
        if not samples:
            raise SkipError("no GPU responds: see the check `driver`")
        pids = {
            process.pid: sample.sampled_at_s for sample in samples for process in sample.processes
        }
        proc = self.settings.proc_dir
        origins = ((pid, read_origin(pid, proc, reported_at_s=at)) for pid, at in pids.items())
        scan = Scan(
            node=self.settings.node_name,
            containers=leased_containers(entries, leases or {}, complete=leases is not None),
            regions={},
            devices=samples,
            origins={pid: origin for pid, origin in origins if origin is not None},
            pods={},
            complete=True,
        )
        return judge.processes(samples, attribute_processes(scan).unleased)

    async def temperature(self) -> Finding:
        await self._discovery  # two at once disturb each other
        return judge.temperature(await self.gpus.sample())

    async def runtime(self) -> Finding:
        if self.settings.driver_places is None:
            raise SkipError("the containers of `leasehold up` need no container runtime")
        folders = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "opt/bin")
        tools = [
            tool
            for tool in TOOLS
            if any((self.host / folder / tool).exists() for folder in folders)
        ]
        files = [self.host / "etc" / name for name in RUNTIME_CONFIGURATIONS]
        is_configured = any(path.is_file() and "nvidia" in path.read_text() for path in files)
        return judge.runtime(tools, is_configured=is_configured)

    async def device_variable(self) -> Finding:
        paths = [path for name in TOOLKIT_FILES if (path := self.runtime_root / name).is_file()]
        if not paths:
            raise SkipError("NVIDIA's runtime has no configuration: no pod can name devices in it")
        strategies, _ = await self._strategies()
        return device_variable(str(paths[0]), paths[0].read_text(), strategies)

    async def open_runtime(self) -> Finding:
        return judge_open_settings(await asyncio.to_thread(open_settings, self.runtime_root))

    async def visible_gpus(self) -> Finding:
        if isinstance(self.kubernetes, SkipError):  # nor is there an account for the kubelet
            raise self.kubernetes
        directories = self.settings.bundle_directories
        views = ContainerViews(directories, self.settings.proc_dir)
        seen = await asyncio.to_thread(views.look_at_all)
        pods = await self._kubelet_pods()
        if not views.count and any(pod.container_ids for pod in pods if not pod.terminal):
            return judge.no_bundles([str(path) for path in directories])
        entries = self._checkpoint().entries
        view = NodeView(
            node=self.settings.node_name,
            devices=self.devices,
            leased=leased_containers(entries, self.leases or {}, complete=False),
            pods={pod.uid: pod for pod in pods},
            claims=await self._held_claims(),
        )
        unleased = unleased_views(seen, view)
        if isinstance(self.kubernetes, LeaseholdError):
            raise self.kubernetes
        namespaces = {view.pod.namespace for view in unleased}
        reader = ExemptNamespaces(self.kubernetes, most_read=len(namespaces))
        exempt = await reader.among(namespaces, 0.0)
        violations = visibility_violations(self.settings.node_name, unleased, exempt)
        return judge.visible_gpus(list(violations), views.count)

    async def _kubelet_pods(self) -> tuple[KubeletPod, ...]:
        read_credentials = partial(kubelet_credentials, self.settings)
        async with KubernetesClient(read_credentials()) as kubelet:
            return await KubeletPods(kubelet, read_credentials).list_pods()

    async def _held_claims(self) -> frozenset[ClaimHolding]:
        socket = self.settings.kubelet_dir / "pod-resources" / "kubelet.sock"
        async with KubeletPodResources.connected(socket) as client:
            return (await client.list_holdings()).claims

    async def cdi(self) -> Finding:
        kinds: dict[str, list[str]] = {}
        broken: list[str] = []
        for folder in ("etc/cdi", "var/run/cdi"):
            for path in sorted((self.host / folder).glob("*")):
                if path.suffix in {".json", ".yaml", ".yml"}:
                    kind = read_cdi_kind(path)
                    if kind:
                        kinds.setdefault(kind, []).append(str(path))
                    else:
                        broken.append(str(path))
        if not kinds and not broken:
            raise SkipError("there are no CDI specifications, and none is needed")
        return judge.cdi(kinds, broken)

    async def cdi_devices(self) -> Finding:
        path = self.settings.cdi_directory / FILE
        strategies, why = await self._strategies()
        by_cdi = DeviceListStrategy.CDI_CRI in strategies
        if why and self.settings.driver_places is not None:
            return judge.not_by_cdi(why)
        if not by_cdi and not path.is_file():
            raise SkipError("containers do not get their devices by CDI")
        try:
            named = names_in(json.loads(path.read_text())) if path.is_file() else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnavailableError(f"{path} is not a CDI specification: {error!r}") from error
        gpus = await self._discovery if by_cdi else ()
        expected = (name for gpu in gpus for name in names_of(gpu))
        return judge.cdi_devices(str(path), map(qualified_name, expected), named)

    async def _strategies(self) -> tuple[DeviceListStrategies, str]:
        configured = self.settings.device_list_strategies
        places = self.settings.driver_places
        if configured:
            return configured, ""
        runtime = ""
        version = ""
        if places is not None:
            with contextlib.suppress(LeaseholdError):  # as the agent without the API server
                runtime = (await self._node()).status.node_info.container_runtime_version
                version = driver_version(await self._discovery)
        why = why_no_cdi(runtime, places, version, self.settings.cdi_directory)
        return (DEFAULT_STRATEGIES if why else BY_CDI), why

    async def _node(self) -> ApiNode:
        if isinstance(self.kubernetes, LeaseholdError):
            raise self.kubernetes
        return await self.kubernetes.read(node_path(self.settings.node_name), ApiNode)

    def _allocations(self) -> tuple[Allocation, ...]:
        return tuple(entry.allocation for entry in self._checkpoint().entries)

    def _checkpoint(self) -> CheckpointFile:
        """Unlike the agent, leave an unreadable one."""
        path = self.settings.state_dir / "checkpoint.json"
        if not self.settings.state_dir.is_dir():
            raise SkipError(f"{self.settings.state_dir} is missing: no agent has run here")
        try:
            content = msgspec.json.decode(path.read_bytes(), type=CheckpointFile)
        except FileNotFoundError:
            return CheckpointFile()
        except UNDECODABLE as error:
            raise UnavailableError(f"{path} is not a checkpoint of an agent: {error}") from error
        if content.node != self.settings.node_name:
            raise UnavailableError(f"{path} is a checkpoint of node {content.node!r}")
        return content
