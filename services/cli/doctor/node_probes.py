"""Looks at one node for the doctor: one method per check."""

import asyncio
import functools
import json
from pathlib import Path
from urllib.parse import quote

import msgspec

from services.cli.doctor import node_checks as judge
from services.cli.doctor.finding import Finding, SkipError
from services.node_agent.allocate.cdi import FILE, names_in, names_of, qualified_name
from services.node_agent.allocate.device_list_strategies import CDI_STRATEGIES
from services.node_agent.gpu_access import open_gpus, usage_source_of
from services.node_agent.gpus.driver import GpuDriver
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.instance_lock import running_instance
from services.node_agent.isolation.host_paths import ELF_HEAD
from services.node_agent.isolation.library import unusable_reason
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.mig.partition_client import RemoteMigGpus
from services.node_agent.settings import AgentSettings
from services.node_agent.usage.cgroups import read_origin
from services.node_agent.views.advertisement import NodeAdvertisement, advertisement_of
from shared.dialects.advertised import NodeSoftware
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.types import ObjectMeta
from shared.model.device import Device
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.ledger import NodeTotals
from shared.model.names import PodUid
from shared.model.quantity import parse_count

OURS = "leasehold-"
TOOLS = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-container-cli")
RUNTIMES = (
    "containerd/config.toml",
    "containerd/conf.d/99-nvidia.toml",
    "docker/daemon.json",
    "crio/crio.conf.d/99-nvidia.conf",
)


class _Status(msgspec.Struct):
    allocatable: dict[str, str | int] = {}


class _Node(msgspec.Struct):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    status: _Status = msgspec.field(default_factory=_Status)


class _DeviceEntry(msgspec.Struct):
    pod: str = msgspec.field(name="PodUID")
    resource: str = msgspec.field(name="ResourceName")


class _KubeletData(msgspec.Struct):
    entries: list[_DeviceEntry] | None = msgspec.field(name="PodDeviceEntries", default=None)
    registered: dict[str, list[str] | None] | None = msgspec.field(
        name="RegisteredDevices", default=None
    )


class _KubeletCheckpoint(msgspec.Struct):
    data: _KubeletData = msgspec.field(name="Data")


class NodeProbes:
    """One node, as its agent's settings describe it.

    `host` is where its file system is; None: it is not seen from here.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        kube: KubernetesClient | LeaseholdError,
        account: NodeTotals | None,
        knows_ledger: bool,
        host: Path | None = Path("/"),
    ) -> None:
        self.settings = settings
        self.kube = kube
        self.account = account
        self.knows_ledger = knows_ledger
        self._host = host
        self._shown: NodeAdvertisement | None = None
        self._gpus: asyncio.Task[tuple[Gpu, ...]] | None = None

    @property
    def host(self) -> Path:
        """The node's file system."""
        if self._host is None:
            raise SkipError(
                "a pod does not see its node's files: run `leasehold doctor` on the node itself"
            )
        return self._host

    @property
    def plugins(self) -> Path:
        """The kubelet's directory of device plugins."""
        return self.settings.kubelet_dir / "device-plugins"

    @property
    def devices(self) -> tuple[Device, ...]:
        """What the ledger has of the node."""
        if not self.knows_ledger:
            raise SkipError("the ledger is not known here: give --redis-url")
        return () if self.account is None else tuple(one for one, _ in self.account.node.devices)

    @property
    def leases(self) -> dict[PodUid, Lease] | None:
        """The node's live leases; None: not known."""
        if not self.knows_ledger:
            return None
        return {lease.pod: lease for lease in (self.account.leases if self.account else ())}

    @property
    def shown(self) -> NodeAdvertisement:
        """What an agent with these settings shows of the devices in the ledger."""
        if self._shown is None:
            dialects = enabled(Rules(enabled=self.settings.dialects))
            self._shown = advertisement_of(
                dialects, self.devices, self.settings.gpu_strategy, NodeSoftware()
            )
        return self._shown

    async def agent(self) -> Finding:
        """See which agent serves the node, and whether it is the one that its label wants."""
        if not self.settings.state_dir.is_dir():
            raise SkipError(f"{self.settings.state_dir} is not there: no agent has run here")
        holder = running_instance(self.settings.state_dir)
        known = not isinstance(self.kube, LeaseholdError)
        labels = (await self._node()).metadata.labels if known else None
        return judge.agent(self.settings.node_name, holder, labels)

    async def kubelet_socket(self) -> Finding:
        """Dial the kubelet."""
        path = self.plugins / "kubelet.sock"
        try:
            _, writer = await asyncio.open_unix_connection(str(path))
        except OSError as error:
            return judge.kubelet_socket(str(path), error.strerror or str(error))
        writer.close()
        return judge.kubelet_socket(str(path), "")

    async def other_plugins(self) -> Finding:
        """Compare what the kubelet has registered with what we serve."""
        strangers = sorted(
            path.name
            for path in self.plugins.glob("*.sock")
            if not path.name.startswith(OURS) and path.name != "kubelet.sock"
        )
        return judge.other_plugins(self._registered(), self.shown.served, strangers)

    async def registration(self) -> Finding:
        """Look whether the kubelet has our devices."""
        return judge.registration(self._registered(), self.shown.served)

    async def node_resources(self) -> Finding:
        """Compare the node's status with its devices."""
        node, shown = await self._node(), self.shown
        ours = shown.served.keys() | shown.patched.keys()
        amounts = {
            name: parse_count(amount)
            for name, amount in node.status.allocatable.items()
            if name in ours
        }
        return judge.node_resources(amounts, shown.served, shown.patched)

    async def list_sizes(self) -> Finding:
        """Measure the lists that the kubelet is sent."""
        return judge.list_sizes(self.shown.served)

    async def device_health(self) -> Finding:
        """Look at the devices' health."""
        return judge.device_health(self.devices)

    async def driver(self) -> Finding:
        """Ask NVML, or whatever stands for it."""
        found = await self._found()
        return judge.driver(found, self._hardware.unreadable)

    async def mig_modes(self) -> Finding:
        """Compare modes."""
        return judge.mig_modes(await self._found(), self.devices)

    async def library_file(self) -> Finding:
        """Look at the library."""
        self._isolating()
        path = self.settings.library
        try:
            with path.open("rb") as library:
                head = library.read(ELF_HEAD)
        except OSError:
            return judge.library_file(str(path), None)
        return judge.library_file(str(path), head)

    async def library_loads(self) -> Finding:
        """Have a process of its own load the library: it may end whoever loads it."""
        self._isolating()
        path = self.settings.library
        if not path.is_file():
            raise SkipError(f"{path} is not there")
        return judge.library_loads(str(path), await unusable_reason(path))

    async def checkpoint(self) -> Finding:
        """Compare the agent's checkpoint with leases."""
        return judge.checkpoint(await self._told(), self.leases)

    async def pod_resources(self) -> Finding:
        """Compare what the kubelet holds with the checkpoint."""
        told, ours = await self._told(), self.shown.served.keys()
        socket = self.settings.kubelet_dir / "pod-resources" / "kubelet.sock"
        async with KubeletPodResources(socket) as asked:
            holdings = (await asked.list_holdings()).holdings
        held: dict[tuple[str, str], frozenset[str]] = {}
        for one in holdings:
            if one.resource in ours:
                key = (one.namespace, one.name)
                held[key] = held.get(key, frozenset()) | one.device_ids
        return judge.pod_resources(held, told)

    async def kubelet_record(self) -> Finding:
        """Compare the kubelet's checkpoint with ours."""
        ours = self.shown.served.keys()
        owners: dict[str, frozenset[str]] = {}
        for entry in self._kubelet_data().entries or ():
            if entry.resource in ours:
                owners[entry.resource] = owners.get(entry.resource, frozenset()) | {entry.pod}
        return judge.kubelet_record(owners, await self._told())

    async def processes(self) -> Finding:
        """Find the pods of the processes on devices."""
        if self.settings.simulated:
            raise SkipError("nothing runs on simulated GPUs")
        leases = self.leases
        if leases is None:
            raise SkipError("the ledger is not known here: give --redis-url")
        samples = await usage_source_of(self.settings, open_gpus(self.settings)).sample()
        pids = {one.pid: sample.sampled_at_s for sample in samples for one in sample.processes}
        proc = self.settings.proc_dir
        origins = {pid: read_origin(pid, proc, reported_at_s=at) for pid, at in pids.items()}
        leased: dict[str, set[PodUid]] = {}
        for lease in leases.values():
            for share in lease.shares:
                leased.setdefault(share.device, set()).add(lease.pod)
        pods = {pid: origin.pod if origin else None for pid, origin in origins.items()}
        return judge.processes(samples, pods, leased)

    async def runtime(self) -> Finding:
        """Look for NVIDIA's toolkit and the runtime's configuration."""
        if self.settings.simulated:
            raise SkipError("simulated GPUs need no container runtime")
        places = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "opt/bin")
        found = [
            tool for tool in TOOLS if any((self.host / place / tool).exists() for place in places)
        ]
        files = [self.host / "etc" / name for name in RUNTIMES]
        return judge.runtime(
            found, handlers=any(path.is_file() and "nvidia" in path.read_text() for path in files)
        )

    async def cdi(self) -> Finding:
        """Read the CDI specifications."""
        kinds: dict[str, list[str]] = {}
        broken: list[str] = []
        for place in ("etc/cdi", "var/run/cdi"):
            for path in sorted((self.host / place).glob("*")):
                if path.suffix in {".json", ".yaml", ".yml"}:
                    kind = _kind_of(path)
                    if kind:
                        kinds.setdefault(kind, []).append(str(path))
                    else:
                        broken.append(str(path))
        if not kinds and not broken:
            raise SkipError("there are no CDI specifications, and nothing here needs any")
        return judge.cdi(kinds, broken)

    async def cdi_devices(self) -> Finding:
        """Compare the agent's own CDI specification with the devices that there are."""
        path = self.settings.cdi_directory / FILE
        by_cdi = not CDI_STRATEGIES.isdisjoint(self.settings.device_list_strategies)
        if not by_cdi and not path.is_file():
            raise SkipError("containers are not told their devices by CDI")
        try:
            named = names_in(json.loads(path.read_text())) if path.is_file() else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnavailableError(f"{path} is no CDI specification: {error!r}") from error
        gpus = await self._found() if by_cdi else ()
        wanted = (name for gpu in gpus for name in names_of(gpu))
        return judge.cdi_devices(str(path), map(qualified_name, wanted), named)

    async def _node(self) -> _Node:
        if isinstance(self.kube, LeaseholdError):
            raise self.kube
        path = f"/api/v1/nodes/{quote(self.settings.node_name, safe='')}"
        return await self.kube.read(path, _Node)

    def _isolating(self) -> None:
        if self.settings.simulated and self.settings.library_source is None:
            raise SkipError(
                "simulated GPUs are isolated by nothing: their library is an empty file"
            )

    @functools.cached_property
    def _hardware(self) -> GpuDriver | RemoteMigGpus:
        return open_gpus(self.settings)

    async def _found(self) -> tuple[Gpu, ...]:
        if self._gpus is None:
            self._gpus = asyncio.create_task(self._hardware.discover())
        return await self._gpus

    async def _told(self) -> tuple[Allocation, ...]:
        """Read the agent's checkpoint, which is left where it is even if it cannot be read."""
        path = self.settings.state_dir / "checkpoint.json"
        if not self.settings.state_dir.is_dir():
            raise SkipError(f"{path.parent} is not there: no agent has run here")
        if not path.is_file():
            return ()
        try:
            content = json.loads(path.read_text())
            entries = [entry["allocation"] for entry in content["entries"]]
            return msgspec.convert(entries, tuple[Allocation, ...])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnavailableError(f"{path} is no checkpoint of an agent: {error}") from error

    def _registered(self) -> dict[str, frozenset[str]]:
        registered = self._kubelet_data().registered or {}
        return {name: frozenset(ids or ()) for name, ids in registered.items()}

    def _kubelet_data(self) -> _KubeletData:
        path = self.plugins / "kubelet_internal_checkpoint"
        try:
            return msgspec.json.decode(path.read_bytes(), type=_KubeletCheckpoint).data
        except FileNotFoundError as error:
            raise SkipError(f"{path} is not there: the kubelet has no plugin yet") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnavailableError(f"{path} is not what a kubelet writes: {error}") from error


def _kind_of(path: Path) -> str:
    """Return the kind that a CDI specification is about; empty: it is none."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        return ""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""
