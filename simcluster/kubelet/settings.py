"""Settings of simulated kubelets, and the files of each node."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Size and behaviour of one simulated node; defaults are those of a real kubelet."""

    cpu: str = "64"
    memory: str = "512Gi"
    ephemeral_storage: str = "1024Gi"
    max_pods: int = 110
    labels: Mapping[str, str] = field(default_factory=dict)
    kubelet_version: str = "v1.36.2"
    host: str = "127.0.0.1"
    plugin_grace_s: float = 300.0
    """How long a resource stays listed after its plugin has gone, in seconds."""
    retry_s: float = 10.0
    """Pause between attempts to start a container that a plugin refused."""
    claim_retry_s: float = 60.0
    """Pause between attempts to prepare a claim that a DRA driver refused."""
    back_off_s: float = 10.0
    """First pause between restarts of a crashing container; doubles up to 300 s."""
    plugin_dial_s: float = 10.0
    """How long a registering plugin has to accept the kubelet's connection."""
    heartbeat_s: float = 10.0
    stale_stream_race: bool = False
    """Repeat a bug of kubelet 1.36.2: an old stream's end disconnects the newer registration."""
    topology_policy: str = "none"
    """The topology manager's; `single-numa-node` is the only other one, and aligns devices only."""
    pods_lag_s: float = 0.0
    """Delay of statuses in `/pods`. A real kubelet shows what it reads back from the API server, so
    for some milliseconds a pod that it has just rejected still looks pending."""
    cgroups: bool = False
    """Make the cgroups of pods and containers as directories, and run the hooks of CDI devices."""
    admits_after_s: float = 0.0
    """Delay of the first admission after the sockets exist. A real kubelet lists pods first."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The files of one node."""

    root: Path

    @property
    def device_plugins(self) -> Path:
        """The sockets of the plugins and of the kubelet, and the checkpoint."""
        return self.root / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        """The PodResources socket."""
        return self.root / "pod-resources" / "kubelet.sock"

    @property
    def plugins_registry(self) -> Path:
        """The registration sockets of DRA drivers."""
        return self.root / "plugins_registry"

    @property
    def cdi(self) -> Path:
        """The container runtime's CDI specifications."""
        return self.root / "cdi"

    @property
    def pods(self) -> Path:
        """The state of the simulated container runtime, a file per pod."""
        return self.root / "pods"

    @property
    def bundles(self) -> Path:
        """The container runtime's OCI bundles, a directory per container."""
        return self.root / "bundles"

    @property
    def volumes(self) -> Path:
        """The volumes of pods, a directory per pod."""
        return self.root / "volumes"

    @property
    def proc(self) -> Path:
        """The node's /proc, with the processes of its containers."""
        return self.root / "proc"

    @property
    def cgroups(self) -> Path:
        """The node's /sys/fs/cgroup, where its settings say so."""
        return self.root / "cgroup"

    @property
    def gpu_state(self) -> Path:
        """The node's simulated GPUs, which its node agent makes and their driver maps."""
        return self.root / "gpus" / "state"

    @property
    def faults(self) -> Path:
        """The faults of the node's simulated GPUs, which its node agent reads, too."""
        return self.root / "faults.json"

    @property
    def token(self) -> Path:
        """The bearer token of the HTTPS endpoint."""
        return self.root / "token"

    @property
    def tls(self) -> Path:
        """Certificates of the HTTPS endpoint; clients trust `ca.crt`."""
        return self.root / "tls"

    @property
    def description(self) -> Path:
        """`kubelet.json`: addresses and paths, for a node agent."""
        return self.root / "kubelet.json"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(content)
    scratch.replace(path)
