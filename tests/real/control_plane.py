"""etcd and Kubernetes' own components as processes on loopback."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError
from shared.kubernetes.kubeconfig import read_kubeconfig
from shared.model.errors import LeaseholdError
from tests.support.servers.nats import free_port
from tests.support.waiting import until

Json = dict[str, Any]

VARIABLE = "LEASEHOLD_KUBE_BIN"
START_S = 120.0
READINESS_S = 2.0
ADMIN = "admin"
NICENESS = 5
"""These processes leave the processor to others."""
NOT_NEEDED = (
    "node-lifecycle-controller",
    "taint-eviction-controller",
    "persistentvolume-attach-detach-controller",
)
"""Controllers that nodes without kubelets and drivers would keep waiting."""
TOKENS = {ADMIN: "system:masters"}
"""Users and their groups; the token of each is its name."""


def missing() -> str:
    """Return why these tests cannot run, or an empty text."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no folder with kube-apiserver, kube-scheduler and etcd"
    for name in ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "etcd"):
        if not program(name):
            return f"{VARIABLE} is {folder}, where no {name} is, and none is on PATH"
    return ""


def program(name: str) -> str | None:
    folder = os.environ.get(VARIABLE, "")
    return shutil.which(name, path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")


@dataclass(slots=True)
class ControlPlane:
    """An API server with etcd; the other components are started by `start`.

    For example, `start("kube-scheduler", "--config=FILE")`.
    """

    root: Path
    url: str
    kube: KubernetesClient
    """As the administrator."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """With which each component was started last."""

    @property
    def kubeconfig(self) -> Path:
        return self.kubeconfig_of(ADMIN)

    def kubeconfig_of(self, user: str) -> Path:
        return self.root / f"{user}.kubeconfig"

    def start(self, name: str, *flags: str) -> None:
        self.flags[name] = flags
        command = program(name)
        assert command is not None, f"no {name}"
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["nice", "-n", str(NICENESS), command, *flags],
                stdout=log,
                stderr=log,
                cwd=self.root,
            )

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGCONT)  # it may be stopped
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start_again(self, name: str) -> None:
        self.start(name, *self.flags[name])

    async def is_ready(self) -> bool:
        """Return whether the API server responds that it is. Fails if a component has ended."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        assert not ended, f"{ended[0]} has ended: {self.log(ended[0])[-2000:]}"
        try:
            async with asyncio.timeout(READINESS_S):
                await self.kube.read("/readyz")
        except (TimeoutError, LeaseholdError):
            return False
        return True

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def write(self, name: str, manifest: object) -> Path:
        """Write a configuration as JSON, which is YAML, and return its file."""
        file = self.root / name
        file.write_text(json.dumps(manifest))
        return file

    async def create(self, path: str, manifest: Json) -> Json:
        """Create an object with its status, and return it as stored."""
        stored: Json = json.loads(await self.kube.create(path, manifest))
        if "status" in manifest:
            place = f"{path}/{stored['metadata']['name']}/status"
            stored = json.loads(await self.kube.patch_merge(place, {"status": manifest["status"]}))
        return stored

    async def objects(self, path: str) -> list[Json]:
        items: list[Json] = json.loads(await self.kube.read(path))["items"]
        return items

    def start_scheduler(self, *, extenders: Sequence[Json] = (), flags: Sequence[str] = ()) -> None:
        """Start kube-scheduler, which tries again a second after a refusal."""
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 500, "burst": 500},
            "leaderElection": {"leaderElect": False},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 1,
            "extenders": list(extenders),
        }
        self.start(
            "kube-scheduler",
            f"--config={self.write('scheduler.json', config)}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.root / 'scheduler-certificates'}",
            *flags,
        )

    def start_controllers(self, *flags: str) -> None:
        self.start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.root / 'controller-certificates'}",
            "--leader-elect=false",
            f"--service-account-private-key-file={self.root / 'accounts.key'}",
            f"--controllers=*,{','.join(f'-{name}' for name in NOT_NEEDED)}",
            "--kube-api-qps=500",
            "--kube-api-burst=500",
            *flags,
        )


@contextlib.asynccontextmanager
async def control_plane(
    *flags: str, tokens: Mapping[str, str] | None = None
) -> AsyncIterator[ControlPlane]:
    """Start etcd and an API server, and stop all processes at the end.

    Nodes have no taint until a controller gives them one, and pods no service account's token.
    """
    root = Path(tempfile.mkdtemp(prefix="lh-real-"))
    url = f"https://127.0.0.1:{free_port()}"
    users = TOKENS | dict(tokens or {})
    for user in users:
        write_kubeconfig(root / f"{user}.kubeconfig", url, token=user)
    kube = KubernetesClient(read_kubeconfig(root / f"{ADMIN}.kubeconfig"), timeout_s=60)
    plane = ControlPlane(root, url, kube)
    try:
        _start_etcd_and_api(plane, users, flags)
        async with kube:
            await until(plane.is_ready, limit_s=START_S)
            with contextlib.suppress(KubernetesConflictError):
                await kube.create("/api/v1/namespaces", {"metadata": {"name": "default"}})
            yield plane
    finally:
        for name in reversed(tuple(plane.processes)):
            plane.stop(name)
        shutil.rmtree(root, ignore_errors=True)


def _start_etcd_and_api(
    plane: ControlPlane, users: Mapping[str, str], flags: Sequence[str]
) -> None:
    root = plane.root
    etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    plane.start(
        "etcd",
        *("--data-dir", str(root / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
    )
    key = root / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens = root / "tokens.csv"
    tokens.write_text("".join(f'{user},{user},{user},"{users[user]}"\n' for user in users))
    plane.start(
        "kube-apiserver",
        f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={plane.url.rpartition(':')[2]}",
        f"--cert-dir={root / 'certificates'}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        *flags,
    )


def write_kubeconfig(file: Path, url: str, *, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
