"""A node with a real kubelet, containerd and runc; GPUs and cgroups of version 2 are simulated."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from services.cli.up.installation import AGENT
from services.node_agent.memory_limits.build_hook import build_hook
from shared.kubernetes.errors import KubernetesError
from shared.model.clock import in_background
from shared.model.errors import LeaseholdError
from simcluster.gpu_driver import build
from simcluster.gpu_driver.control import control
from simcluster.node_agent.driver import STATE
from tests.real import cdi_runtime
from tests.real.cgroup_mirror import MEMORY, CgroupMirror, hook
from tests.real.container_images import programs, write_image
from tests.real.control_plane import START_S, ControlPlane, Json, control_plane, program
from tests.real.leasehold import WITHOUT_API, install, log_in, service_flags
from tests.support.servers.nats import free_port, nats_server
from tests.support.servers.service_process import service_process
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

HTTP_OK = 200
NAME = "n1"
KUBELET = f"system:node:{NAME}"
KUBELETS = {KUBELET: "system:nodes,system:masters"}
"""Its user, for `control_plane`: without an authorizer of nodes it needs all rights."""
IMAGE = "docker.io/local/first:1"
"""As containerd completes it: another name would be pulled."""
GPUS = "2xT4"
STOPPED_S = 150.0
"""An agent that is stopped waits for pods that the kubelet has not received yet."""
NUMBER = "volcano.sh/vgpu-number"
MEMORY_MIB = "volcano.sh/vgpu-memory"
SERVICES = ("watcher", "placer", "binder")
PLUGINS = Path("/var/lib/kubelet/device-plugins")
"""Every kubelet's, wherever its other files are."""
NEEDED = ("containerd", "ctr", "runc")
CONTAINERD = """version = 2
root = "{root}/data"
state = "{root}/state"
[grpc]
  address = "{root}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{image}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{root}/runtime"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{root}/cni/bin"
    conf_dir = "{root}/cni/conf"
"""
NO_NETWORK = """#!/bin/sh
[ "$CNI_COMMAND" = VERSION ] && {
  echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.4.0"]}'
  exit 0
}
echo '{"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.9.9.9/24"}]}'
"""


def missing_here() -> str:
    """Return why this machine cannot run such a node, or an empty text."""
    if os.geteuid():
        return "containers need root"
    if not MEMORY.is_dir():
        return "the trial shows cgroups of version 1, which this machine does not have"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    absent += [] if program("kubelet") else ["kubelet"]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    with socket.socket(socket.AF_UNIX) as other:
        if other.connect_ex(str(PLUGINS / "kubelet.sock")) == 0:
            return f"another kubelet has {PLUGINS}"
    return "" if build.compiler() else "no C compiler"


@dataclass
class ContainerNode:
    plane: ControlPlane
    nats_url: str
    root: Path
    driver_limits: bool = True
    """Whether the GPUs' driver limits memory; otherwise, nothing limits the GPUs' pods."""
    port: int = field(default_factory=free_port)
    agent_port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def kubelet_dir(self) -> Path:
        return self.root / "kubelet"

    @property
    def gpu_state(self) -> Path:
        return self.root / "gpus" / STATE

    @property
    def cgroups(self) -> Path:
        return self.root / "cgroup"

    @property
    def agent_dir(self) -> Path:
        return self.root / "agent"

    def start(self, name: str, *command: object) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, cwd=self.root
            )

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    async def stop(self, name: str) -> None:
        """Send SIGTERM, and wait for the end."""
        process = self.processes[name]
        process.terminate()
        await until(lambda: process.poll() is not None, limit_s=STOPPED_S)

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def prepare(self) -> None:
        PLUGINS.mkdir(parents=True, exist_ok=True)
        (PLUGINS / "kubelet_internal_checkpoint").unlink(missing_ok=True)
        self.kubelet_dir.mkdir()
        (self.kubelet_dir / PLUGINS.name).symlink_to(PLUGINS)
        (self.root / "cni" / "bin").mkdir(parents=True)
        (self.root / "cni" / "conf").mkdir()
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}
        (self.root / "cni" / "conf" / "none.conflist").write_text(json.dumps(network))
        for plugin in ("none", "loopback"):  # containerd calls the second one itself
            _write_program(self.root / "cni" / "bin" / plugin, NO_NETWORK)
        words = f"{sys.executable} {cdi_runtime.__file__} {self.root / 'cdi'}"
        runtime = f'#!/bin/sh\ncase " $* " in *" create "*) exec {words} "$@";; esac\n'
        _write_program(self.root / "runtime", f'{runtime}exec {cdi_runtime.RUNC} "$@"\n')
        config = CONTAINERD.format(root=self.root, image=IMAGE)
        (self.root / "containerd.toml").write_text(config)
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzPort": free_port(),
            "readOnlyPort": 0,
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "enforceNodeAllocatable": [],
            "containerRuntimeEndpoint": f"unix://{self.root}/c.sock",
            "podLogsDir": str(self.root / "logs"),
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "evictionHard": {"memory.available": "1%", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "resolvConf": "",
            "clusterDNS": ["127.0.0.1"],
            "localStorageCapacityIsolation": False,
        }
        (self.root / "kubelet.json").write_text(json.dumps(kubelet))
        built = build_hook(self.root / "product-hook")
        shown = hook(built, self.cgroups, self.root / "proc")
        _write_program(self.root / "hook", shown)
        files = programs(self.root)
        write_image(self.root / "image.tar", IMAGE, files)

    async def start_runtime(self) -> None:
        self.start("containerd", "containerd", "-c", self.root / "containerd.toml")
        ctr = ("ctr", "-a", self.root / "c.sock", "-n", "k8s.io", "images", "import")
        await until(lambda: _succeeds(*ctr, self.root / "image.tar"), limit_s=START_S)

    def start_kubelet(self) -> None:
        self.start(
            "kubelet",
            program("kubelet"),
            f"--config={self.root / 'kubelet.json'}",
            f"--kubeconfig={self.plane.kubeconfig_of(KUBELET)}",
            f"--root-dir={self.kubelet_dir}",
            f"--cert-dir={self.root / 'pki'}",
            f"--hostname-override={NAME}",
            "--v=2",
        )

    def start_agent(self) -> None:
        self.agent_port = free_port()
        flags: dict[str, object] = {
            "node": NAME,
            "gpus": GPUS,
            "kubelet-dir": self.kubelet_dir,
            "kubelet-address": f"127.0.0.1:{self.port}",
            "kubelet-token-file": self.root / "token",
            "kubeconfig": self.plane.kubeconfig_of(AGENT),
            "nats-url": self.nats_url,
            "state-dir": self.agent_dir,
            "bundle-dir": self.root / "state" / "io.containerd.runtime.v2.task" / "k8s.io",
            "monitor-http": f"127.0.0.1:{free_port()}",
            "http": f"127.0.0.1:{self.agent_port}",
            "instance": f"agent-{NAME}",
        }
        if self.driver_limits:
            flags |= {
                "gpu-driver-dir": self.gpu_state.parent,
                "cgroup-root": self.cgroups,
                "proc-dir": self.root / "proc",
                "limit-hook": self.root / "hook",
                "device-list-strategy": "cdi-cri",
                "cdi-dir": self.root / "cdi",
            }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        module = (sys.executable, "-m", "simcluster.node_agent")
        self.start("agent", *module, *words, "--kubelet-insecure")

    async def agent_is_ready(self) -> bool:
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self.agent_port}/readyz") as page:
                return page.status == HTTP_OK
        except aiohttp.ClientError:
            return False

    async def amount(self, resource: str) -> int:
        """Return how much of a resource pods can be allocated; 0 before the node is there."""
        try:
            stored: Json = json.loads(await self.plane.kube.read(f"/api/v1/nodes/{NAME}"))
        except KubernetesError:
            return 0
        return int(stored["status"].get("allocatable", {}).get(resource, 0))

    def first_words(self, uid: str) -> list[str]:
        """Return what the runs of a pod's container have written, each in one text."""
        folders = (self.root / "logs").glob(f"*_{uid}/main")
        return [
            "".join(line.split(" ", 3)[3] + "\n" for line in file.read_text().splitlines())
            for folder in folders
            for file in sorted(folder.glob("*.log"))
        ]


@contextlib.asynccontextmanager
async def leased_node(*, driver_limits: bool = True) -> AsyncIterator[ContainerNode]:
    """Start an API server and Leasehold with one such node, whose agent has its own account."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="lh-n-", ignore_cleanup_errors=True)
        )
        plane = await stack.enter_async_context(control_plane(tokens=KUBELETS))
        nats = await stack.enter_async_context(nats_server())
        valkey = stack.enter_context(valkey_server())
        await valkey.ready()
        await install(plane)
        for name in SERVICES:
            if name not in WITHOUT_API:
                await log_in(plane, name)
            flags = service_flags(plane, name, nats_url=nats.url, redis_url=valkey.url)
            stack.enter_context(service_process(name, *flags))
        node = ContainerNode(plane, nats.url, Path(folder), driver_limits)
        await stack.enter_async_context(container_node(node))
        await until(lambda: node.amount(NUMBER), limit_s=START_S)
        yield node


@contextlib.asynccontextmanager
async def container_node(node: ContainerNode) -> AsyncIterator[None]:
    """Start a node. A driver that limits memory does so before the agent looks for that."""
    root = node.root
    node.prepare()
    try:
        await node.start_runtime()
        node.start_kubelet()
        await until(lambda: node.amount("cpu"), limit_s=START_S)
        (root / "token").write_text(await log_in(node.plane, AGENT, node=NAME))
        if not node.driver_limits:
            node.start_agent()
            yield
            return
        async with in_background(CgroupMirror(node.cgroups, root / "proc").run()):
            node.start_agent()
            await until(node.gpu_state.exists, limit_s=START_S)
            await until(lambda: _limits(node), limit_s=START_S)
            node.end("agent")
            node.start_agent()
            yield
    finally:
        for name in reversed(tuple(node.processes)):
            node.end(name)
        await asyncio.to_thread(_remove_containers, root)


def _limits(node: ContainerNode) -> bool:
    try:
        control(node.gpu_state, "accounting", "dmem")
    except LeaseholdError:  # the agent is making the GPUs
        return False
    return True


def _succeeds(*command: object) -> bool:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _remove_containers(root: Path) -> None:
    """End what containerd has left, and unmount what it and the kubelet have mounted."""
    for place in sorted((root / "state").rglob("init.pid")):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(place.read_text()), 9)
    shims = subprocess.run(
        ["pgrep", "-f", f"containerd-shim.*{root}"], capture_output=True, text=True, check=False
    )
    for pid in shims.stdout.split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), 9)
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    for mount in sorted((line.split()[1] for line in mounts), reverse=True):
        if mount.startswith(f"{root}/"):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
