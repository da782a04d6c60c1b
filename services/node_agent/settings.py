"""Settings of a node agent, and where its kubelet is."""

import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.node_agent.allocate.cdi_files import DRIVER_ROOTS, DriverPaths
from services.node_agent.allocate.device_list_strategies import (
    AUTO,
    DeviceListStrategies,
    parse_strategies,
)
from services.node_agent.compute_time.build_library import LIBRARY as TIME_LIBRARY
from services.node_agent.compute_time.time_shares import OFF, POLICIES
from services.node_agent.container_runtime.bundles import BUNDLES
from services.node_agent.gpus.inventory import SharingConfig
from services.node_agent.memory_limits.hook_program import PROGRAM
from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.reserved import LIBRARY_DIRECTORY
from shared.dialects.volcano.device_config import MAX_SPLIT_COUNT, MAX_UNIT_MIB
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.bounds import MOST_MIB
from shared.model.devices.device import Isolation
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.names import NodeName
from shared.model.requests.claim import DraMode, TaintEffect
from shared.model.requests.request import LEAST_SHARE_MIB
from shared.runtime.settings import ServiceSettings, setting

ABOUT = """Reports a node's GPUs, serves its kubelet, and prepares isolation.

One runs on every node. It needs the kubelet's directory, the rights to read the kubelet's pods
(nodes/pods) and settings (nodes/configz), to patch its node's status and its pods' annotations, and
to get the ConfigMaps of Volcano's vGPU plugin."""

EXAMPLES = (
    "python -m services.node_agent --node $NODE_NAME --nats-url nats://nats:4222 \\",
    "    --kubelet-address $HOST_IP:10250 --kubelet-ca-file /etc/kubelet-ca/ca.crt",
    "                                              # in a DaemonSet",
    "python -m services.node_agent --kubelet-token-file /tmp/token --kubelet-insecure",
    "                                              # as a process of the node",
)

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
MPS_OFF = "off"
MPS_PRIVATE = "private"
MPS_SHARED = "shared"
MONITOR = "0.0.0.0:9394"
"""HAMi's and Volcano's monitors are scraped at this port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(ServiceSettings):
    node: str = setting("", "the node's name in Kubernetes; default: this machine's name")
    kubelet_dir: Path = setting(Path("/var/lib/kubelet"), "the kubelet's directory")
    kubelet_address: str = setting(
        "", "HOST:PORT of the kubelet; default: that of KUBELET_DIR/kubelet.json, else "
        "127.0.0.1:10250"
    )  # fmt: skip
    kubelet_token_file: Path | None = setting(
        None, "bearer token for the kubelet, read again when it rotates; default: that of "
        "kubelet.json, else the service account's"
    )  # fmt: skip
    kubelet_ca_file: Path | None = setting(
        None, "PEM file with the CA of the kubelet's certificate"
    )
    kubelet_insecure: bool = setting(False, "do not check the kubelet's certificate")
    kubeconfig: Path | None = setting(
        None, "API server; default: as kubectl finds it, or in-cluster"
    )
    state_dir: Path = setting(
        Path("/var/lib/leasehold"), "directory of the agent's checkpoint and containers' files"
    )
    library_source: Path | None = setting(
        None, "HAMi-core's libvgpu.so, or a directory with it or with libvgpu.so.VERSION; the "
        "agent copies it to STATE_DIR/library, from which containers mount it; default: "
        "/usr/local/vgpu"
    )  # fmt: skip
    isolation: str = setting(
        Isolation.SHARED.value,
        "shared: pods may get parts of a GPU, limited by HAMi-core; strict: only MIG instances "
        "and whole GPUs",
        one_of=(Isolation.SHARED, Isolation.STRICT),
    )
    device_list_strategy: tuple[str, ...] = setting(
        (AUTO,),
        "how devices are passed to containers, with commas: envvar, volume-mounts, cdi-cri (by a "
        "CDI specification that the agent writes); auto: cdi-cri where containerd 2, or CRI-O "
        "1.23, and the driver's files are found, else envvar",
    )
    cdi_dir: Path | None = setting(
        None, "the host's directory of CDI specifications; default: /var/run/cdi"
    )
    nvidia_driver_root: Path | None = setting(
        None, "for CDI: root of the driver's files on the node; default: / or /run/nvidia/driver"
    )
    host_root: Path = setting(
        Path("/"), "for CDI: where the agent sees the node's /usr, /dev and driver root"
    )
    nvidia_cdi_hook_path: str = setting(
        "", "for CDI: nvidia-cdi-hook or nvidia-ctk on the host; default: the first in the usual "
        "directories"
    )  # fmt: skip
    device_split_count: int | None = setting(
        None,
        "maximum number of shares per GPU; default: deviceSplitCount of the device configuration, "
        "else 10",
        at_least=1,
        at_most=MAX_SPLIT_COUNT,
    )
    memory_factor: int | None = setting(
        None, "MiB per unit in which pods request memory; default: gpuMemoryFactor of the device "
        "configuration, else 1", at_least=1, at_most=MAX_UNIT_MIB
    )  # fmt: skip
    unified_memory_mib: int | None = setting(
        None, "MiB that pods may share of a GPU that uses the host's memory (GB10), of which the "
        "driver reports no size; default: pods get such a GPU whole, or without a limit",
        at_least=1, at_most=MOST_MIB,
    )  # fmt: skip
    device_config: Path | None = setting(
        None, "device-config.yaml; default: of ConfigMap volcano-vgpu-device-config in "
        "kube-system or volcano-system, if there is one"
    )  # fmt: skip
    node_config: Path | None = setting(
        None, "config.json, whose entry for this node overrides flags; default: of ConfigMap "
        "volcano-vgpu-node-config, likewise"
    )  # fmt: skip
    plugin_config: Path | None = setting(
        None, "configuration of NVIDIA's device plugin, whose sharing by replicas applies to this "
        "node; default: of ConfigMap nvidia-plugin-configs in leasehold-agents, by the node's "
        "label nvidia.com/device-plugin.config"
    )  # fmt: skip
    partition: bool = setting(
        True, "change the MIG layouts of unused devices for leases; otherwise a device offers only "
        "the instances that it has"
    )  # fmt: skip
    partition_socket: Path | None = setting(
        None, "socket of the partitioner, which has the rights to list and change MIG instances; "
        "without it, real devices keep their layouts"
    )  # fmt: skip
    driver_limits: bool = setting(
        True, "have the NVIDIA driver limit the memory of containers where it can (R615), by the "
        "partitioner; otherwise HAMi-core does"
    )  # fmt: skip
    limit_hook: Path | None = setting(
        None, "the program by which container runtimes have a container limited before it starts; "
        f"the agent copies it to STATE_DIR; default: libexec/{PROGRAM} of the agent's environment"
    )  # fmt: skip
    compute_by_time: str = setting(
        OFF, "whether pods can demand that GPU time holds their cores, which no GPU has confirmed "
        "yet: off; force (a limit is a ceiling); default (a limit is a share, which may also use "
        "what others leave unused)", one_of=(OFF, *POLICIES)
    )  # fmt: skip
    time_library: Path | None = setting(
        None, "the library that holds cores by GPU time; the agent copies it to STATE_DIR, from "
        f"which containers mount it; default: libexec/{TIME_LIBRARY} of the agent's environment"
    )  # fmt: skip
    mps: str = setting(
        MPS_OFF, "whether pods can demand that MPS holds their shares, which no GPU has confirmed "
        "yet: off; private (a control daemon for each container, by the partitioner); shared (a "
        "server for each GPU, R615, for containers without programs of user 0)",
        one_of=(MPS_OFF, MPS_PRIVATE, MPS_SHARED)
    )  # fmt: skip
    gpu_strategy: str = setting(
        Strategy.AUTO,
        "how volcano.sh/gpu-memory is served: auto (an amount in node status), share (a device ID "
        "per unit, at most 2,000, for clusters without the webhook), number (whole GPUs only)",
        one_of=Strategy.ALL,
    )
    dra: DraMode = setting(
        DraMode.OFF,
        "ResourceClaims of the driver gpu.leasehold.dev: off, or conditions (pods are bound once "
        "their claims have leases, by binding conditions; requires Kubernetes 1.36)",
    )
    dra_taint_effect: TaintEffect = setting(
        TaintEffect.NO_SCHEDULE,
        "effect of the taint of an unhealthy device in ResourceSlices: NoSchedule, or NoExecute, "
        "by which Kubernetes also deletes the pods whose claims have the device",
    )
    least_share_mib: int = setting(
        LEAST_SHARE_MIB,
        "MiB of a device that a ResourceClaim gets at least: a smaller request is rounded up, as "
        "no CUDA program could start",
        at_least=1,
    )
    monitor_http: str = setting(
        "", "HOST:PORT of the usage metrics, for Prometheus; default: 0.0.0.0:9394", address=True
    )
    bundle_dir: tuple[str, ...] = setting(
        (), "the container runtime's directories of OCI bundles as the agent sees them, with "
        "commas; default: those of containerd, k3s and CRI-O below HOST_ROOT"
    )  # fmt: skip
    proc_dir: Path = setting(Path("/proc"), "the node's processes; in a pod: /proc with hostPID")
    systems: tuple[str, ...] = setting(
        (), "systems that are served, comma-separated; empty: all", one_of=tuple(DIALECTS)
    )
    volcano_handshake: bool = setting(
        False, "report to schedulers before Volcano 1.14.3 every 20 s, by annotation of the node"
    )

    def check(self) -> None:
        _ = self.device_list_strategies

    @property
    def node_name(self) -> NodeName:
        return NodeName(self.node or platform.node().lower())

    @property
    def partitions(self) -> bool:
        return self.partition and self.partition_socket is not None

    @property
    def sharing(self) -> SharingConfig:
        return SharingConfig(
            strategy=self.gpu_strategy,
            may_partition=self.partitions,
            isolation=Isolation(self.isolation),
            unified_mib=self.unified_memory_mib,
        )

    @property
    def device_list_strategies(self) -> DeviceListStrategies:
        """Empty if the agent chooses. Raises RequestError for an unknown strategy."""
        return parse_strategies(self.device_list_strategy)

    @property
    def cdi_directory(self) -> Path:
        return self.cdi_dir or Path("/var/run/cdi")

    @property
    def driver_places(self) -> DriverPaths | None:
        return DriverPaths(
            roots=(self.nvidia_driver_root,) if self.nvidia_driver_root else DRIVER_ROOTS,
            host=self.host_root,
            hook=self.nvidia_cdi_hook_path,
            proc=self.proc_dir,
        )

    @property
    def bundle_directories(self) -> tuple[Path, ...]:
        named = tuple(map(Path, self.bundle_dir))
        return named or tuple(self.host_root / path for path in BUNDLES)

    @property
    def runtime_root(self) -> Path | None:
        """None for simulated nodes."""
        return self.host_root if self.driver_places is not None else None

    @property
    def monitor_address(self) -> str | None:
        return self.monitor_http or MONITOR

    @property
    def library_root(self) -> Path:
        return self.state_dir.absolute() / "library"

    @property
    def library_origin(self) -> Path | None:
        return self.library_source or Path(LIBRARY_DIRECTORY)


class _KubeletFile(msgspec.Struct, frozen=True, rename="camel"):
    address: str = "127.0.0.1"
    port: int = 10250
    ca_path: str = ""
    token_path: str = ""


def kubelet_credentials(settings: AgentSettings) -> ClusterCredentials:
    """Flags come before kubelet.json.

    Raises RequestError naming the file that cannot be read.
    """
    file = settings.kubelet_dir / "kubelet.json"
    kubelet = _KubeletFile()
    if file.exists():
        try:
            kubelet = msgspec.json.decode(_text(file), type=_KubeletFile)
        except UNDECODABLE as error:
            raise RequestError(f"{file} does not describe a kubelet: {error}") from error
    ca_file = settings.kubelet_ca_file or kubelet.ca_path
    return ClusterCredentials(
        server=f"https://{settings.kubelet_address or f'{kubelet.address}:{kubelet.port}'}",
        ca_pem=_text(Path(ca_file)) if ca_file else None,
        token_file=settings.kubelet_token_file or Path(kubelet.token_path or SERVICE_ACCOUNT_TOKEN),
        insecure_skip_tls_verify=settings.kubelet_insecure,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
