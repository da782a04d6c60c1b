"""What can be chosen about simulated kubelets, and where each keeps its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Size and manners of one simulated node; defaults are a real kubelet's where it has one."""

    cpu: str = "64"
    memory: str = "512Gi"
    ephemeral_storage: str = "1024Gi"
    max_pods: int = 110
    labels: Mapping[str, str] = field(default_factory=dict)
    kubelet_version: str = "v1.36.2"
    host: str = "127.0.0.1"
    plugin_grace_s: float = 300.0
    """How long a resource stays listed after its plugin has gone."""
    retry_s: float = 10.0
    """Pause before a container start that was refused is tried again."""
    back_off_s: float = 10.0
    """First pause between restarts of a crashing container; doubles up to five minutes."""
    heartbeat_s: float = 10.0
    stale_stream_race: bool = False
    """Repeat a fault of kubelet 1.36.2: an old stream's end disconnects the newer registration."""
    pods_lag_s: float = 0.0
    """How late `/pods` shows a status. A real kubelet shows what comes back from the API server,
    so for some milliseconds a pod that it has just rejected still looks as if it were wanted."""
    admits_after_s: float = 0.0
    """How long after its sockets are there it admits the first pod. A real one lists pods first."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The directory of one node."""

    root: Path

    @property
    def device_plugins(self) -> Path:
        """Where plugins put their sockets, and the kubelet its own and its checkpoint."""
        return self.root / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        """The PodResources socket."""
        return self.root / "pod-resources" / "kubelet.sock"

    @property
    def pods(self) -> Path:
        """What the simulated container runtime remembers, a file per pod."""
        return self.root / "pods"

    @property
    def token(self) -> Path:
        """The bearer token of the HTTPS endpoint."""
        return self.root / "token"

    @property
    def tls(self) -> Path:
        """Certificates of the HTTPS endpoint; `ca.crt` is to be trusted by those who ask it."""
        return self.root / "tls"

    @property
    def description(self) -> Path:
        """`kubelet.json`: where everything is, for a node agent to read."""
        return self.root / "kubelet.json"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never half of it."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(content)
    scratch.replace(path)
