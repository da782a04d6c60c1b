"""A whole Leasehold on this machine, started as a user starts it, for end-to-end tests."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import UnavailableError
from tests.support.command_server import ROOT, call
from tests.support.kubernetes.short_lived import NO_GARBAGE
from tests.support.simcluster.websocket_exec import websocket_exec
from tests.support.waiting import until

LEASEHOLD = (sys.executable, "-P", "-m", "services.cli")
KUBECTL = shutil.which("kubectl")
NEEDS_KUBECTL = [
    pytest.mark.kubectl,
    pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH"),
]
WEBSOCKET_MINOR = 31
"""kubectl speaks WebSocket to `exec` from this minor version on."""
PODS = "/api/v1/namespaces/default/pods"
START_S = 300.0
"""A stack is ready after 8 s, on a machine that does nothing else."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


def succeeded(done: Done) -> bool:
    """Return whether the command's exit code is 0."""
    return done.code == 0


async def run(
    *command: str, stdin: str = "", env: Mapping[str, str] | None = None, limit_s: float = 90.0
) -> Done:
    """Run a command to its end without blocking the loop."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    async with asyncio.timeout(limit_s):
        out, err = await process.communicate(stdin.encode())
    return Done(process.returncode or 0, out.decode(), err.decode())


async def command(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    limit_s: float = 90.0,
    folder: Path = ROOT,
) -> Done:
    """Run the `leasehold` command in a fork of a process that has imported it."""
    variables = {**os.environ, **(env or {})}
    return Done(
        *await asyncio.to_thread(call, arguments, variables, limit_s=limit_s, folder=folder)
    )


@dataclass(slots=True)
class Stack:
    """One running `leasehold up`."""

    root: Path
    kube: KubernetesClient
    names: list[str] = field(default_factory=list)
    open_runtime: bool = False
    """Whether a node's container runtime gives GPUs to pods that name them."""

    @property
    def kubeconfig(self) -> str:
        return str(self.root / "kubeconfig")

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.root / "state.json").read_text())
        return state

    def pid(self, part: str) -> int:
        return int(self._component(part)["pid"])

    def has_process(self, part: str) -> bool:
        """Return whether a component runs: one that was killed is started again after a pause."""
        return self._component(part)["pid"] is not None

    def _component(self, part: str) -> dict[str, Any]:
        component: dict[str, Any]
        component = next(p for p in self.state()["components"] if p["name"] == part)
        return component

    async def metrics(self, *more: str, accept: str = "text/plain") -> list[str]:
        """Return the lines of /metrics of all components, of each node's usage, and of others."""
        runs = [json.loads(file.read_text()) for file in (self.root / "run").glob("*.json")]
        ports = self.state()["ports"].items()
        usage = [f"127.0.0.1:{port}" for name, port in ports if name.startswith("usage-")]
        lines: list[str] = []
        async with aiohttp.ClientSession(headers={"Accept": accept}) as session:
            for address in (*(run["http"] for run in runs), *usage, *more):
                async with session.get(f"http://{address}/metrics") as response:
                    lines += (await response.text()).splitlines()
        return lines

    async def values_of(self, pod: str, *more: str) -> dict[str, float]:
        """Return the series of a pod, with any vendor's label for it."""
        families = text_string_to_metric_families("\n".join(await self.metrics(*more)))
        return {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if pod in (sample.labels.get("pod"), sample.labels.get("podname"))
        }

    def kill(self, part: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(part), signal.SIGKILL)

    def back_up_objects(self) -> Path:
        """Keep a copy of the API server's objects, to which `restore_objects` goes back."""
        copy = self.root / "objects.backup"
        with (
            contextlib.closing(sqlite3.connect(self._objects)) as store,
            contextlib.closing(sqlite3.connect(copy)) as backup,
        ):
            store.backup(backup)
        return copy

    def restore_objects(self, copy: Path) -> None:
        """Restart the API server with the objects and the resource version of a copy."""
        store = self._objects
        for suffix in ("-wal", "-shm"):
            store.with_name(f"{store.name}{suffix}").unlink(missing_ok=True)
        copy.replace(store)
        self.kill("simcluster")

    @property
    def _objects(self) -> Path:
        [database] = self.root.rglob("objects.sqlite")
        return database

    def secret(self, server: str, user: str) -> Path:
        """Return the file with a user's secret at `nats` or `redis`."""
        return self.root / "credentials" / server / user

    def login(self, user: str = "admin") -> dict[str, str]:
        """Return how to be a user of Redis; the administrator may everything."""
        name, _, secret = self.secret("redis", user).read_text().strip().partition(":")
        return {"username": name, "password": secret}

    def bus_flags(self, user: str) -> tuple[str, ...]:
        """Return a service's flags that lead it to this stack's NATS as a user of it."""
        url = ("--nats-url", self.state()["nats_url"])
        trusting = ("--nats-ca-file", str(self.root / "credentials" / "ca.crt"))
        return (*url, *trusting, "--nats-credentials", str(self.secret("nats", user)))

    async def leasehold(self, *arguments: str) -> Done:
        return await command(*arguments, "--state", str(self.root))

    async def kubectl(self, *arguments: str, stdin: str = "") -> Done:
        assert KUBECTL is not None
        env = {"KUBECONFIG": self.kubeconfig, **NO_GARBAGE}
        return await run(KUBECTL, *arguments, stdin=stdin, env=env)

    async def kubectl_out(self, *arguments: str, stdin: str = "") -> str:
        """Return the output of a kubectl that must succeed."""
        done = await self.kubectl(*arguments, stdin=stdin)
        assert done.code == 0, f"kubectl {arguments}: {done.out}{done.err}"
        return done.out

    async def apply(self, manifest: str | Path) -> None:
        """Apply a manifest, or that of a file."""
        if isinstance(manifest, Path):
            await self.kubectl_out("apply", "-f", str(manifest))
        else:
            await self.kubectl_out("apply", "-f", "-", stdin=manifest)

    async def environment(self, pod: str) -> dict[str, str]:
        """Return the variables of a pod's container."""
        done = await self.exec(pod, "env")
        assert done.code == 0, done.err
        return dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)

    async def exec(self, pod: str, *command: str) -> Done:
        """Run a command in a pod through kubectl, or by hand where kubectl is too old for it."""
        if kubectl_minor() >= WEBSOCKET_MINOR:
            return await self.kubectl("exec", pod, "--", *command)
        return Done(*await websocket_exec(load_credentials(Path(self.kubeconfig)), pod, command))

    async def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        self.names.append(pod["metadata"]["name"])
        made: dict[str, Any] = json.loads(await self.kube.create(PODS, pod))
        return made

    async def pod(self, name: str) -> dict[str, Any]:
        pod: dict[str, Any] = json.loads(await self.kube.read(f"{PODS}/{name}"))
        return pod

    async def pods(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(await self.kube.read(PODS))["items"]
        return items

    async def events_of(self, reason: str) -> list[str]:
        """Return the messages of Events with a reason, in any namespace."""
        events: list[dict[str, Any]] = json.loads(await self.kube.read("/api/v1/events"))["items"]
        return [event["message"] for event in events if event["reason"] == reason]

    async def clear(self) -> None:
        """Delete every pod of every namespace and wait until they are gone."""

        async def delete(pod: dict[str, Any]) -> None:
            with contextlib.suppress(NotFoundError):
                await self.kube.delete("/api/v1/namespaces/{namespace}/pods/{name}".format_map(pod))

        async def left() -> list[dict[str, Any]]:
            pods: list[dict[str, Any]] = json.loads(await self.kube.read("/api/v1/pods"))["items"]
            return [pod["metadata"] for pod in pods]

        await asyncio.gather(*map(delete, await left()))
        await until(left, lambda pods: not pods)

    def readiness(self, service: str) -> str:
        """Return the text of a service's /readyz."""
        address = json.loads((self.root / "run" / f"{service}.json").read_text())["http"]
        try:
            with urlopen(f"http://{address}/readyz") as response:
                return str(response.read().decode())
        except OSError as error:
            return str(error.read().decode()) if hasattr(error, "read") else repr(error)

    async def until(
        self, name: str, wanted: Callable[[dict[str, Any]], object], limit_s: float = 60.0
    ) -> dict[str, Any]:
        """Wait until a pod is as wanted; a failure shows its status."""

        async def status_first() -> dict[str, Any]:
            return {"status": {}} | await self.pod(name)

        pod: dict[str, Any] = await until(status_first, wanted, limit_s=limit_s)
        return pod

    async def until_all(self, count: int, limit_s: float = 60.0) -> None:
        """Wait until `count` pods of the default namespace run; a failure shows the others."""

        async def count_and_others() -> tuple[int, dict[str, Any]]:
            pods = await self.pods()
            others = {pod["metadata"]["name"]: pod["status"] for pod in pods if not running(pod)}
            return len(pods) - len(others), others

        await until(count_and_others, lambda counted: counted[0] >= count, limit_s=limit_s)

    async def audit(self, limit_s: float = 90.0) -> None:
        """Wait until the audit is clean; a failure shows the differences."""
        await until(lambda: self.leasehold("audit"), succeeded, limit_s=limit_s)


@cache
def kubectl_minor() -> int:
    """Return the minor version of kubectl, 0 without one."""
    if KUBECTL is None:
        return 0
    text = subprocess.check_output((KUBECTL, "version", "--client", "-ojson"))
    return int("".join(filter(str.isdecimal, json.loads(text)["clientVersion"]["minor"])))


def running(pod: Mapping[str, Any]) -> bool:
    """Whether the pod's containers run."""
    return bool(pod["status"].get("phase") == "Running")


def completed(limits: Mapping[str, Any]) -> dict[str, str]:
    """Return limits as the webhook completes them, for stacks without one."""
    trigger = {"leasehold.dev/share": 1} if "volcano.sh/gpu-memory" in limits else {}
    return {key: str(value) for key, value in {**limits, **trigger}.items()}


def gpu_pod(
    name: str,
    limits: Mapping[str, Any],
    *,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod of one container that asks for `limits`, as the webhook completes them."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "spec": {
            "schedulerName": "volcano",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "cuda",
                    "image": "nvidia/cuda",
                    "command": ["sleep", "100000"],
                    "resources": {"limits": completed(limits)},
                }
            ],
            **spec,
        },
    }


def vgpu(number: int = 1, memory: int = 0, cores: int = 0) -> dict[str, int]:
    """Return limits in Volcano's vGPU vocabulary."""
    limits = {"volcano.sh/vgpu-number": number}
    if memory:
        limits["volcano.sh/vgpu-memory"] = memory
    if cores:
        limits["volcano.sh/vgpu-cores"] = cores
    return limits


@contextlib.asynccontextmanager
async def stack(
    *options: str,
    without: Sequence[str] = (),
    webhook: bool = False,
    placers: int = 1,
    env: Mapping[str, str] | None = None,
    loader: bool = False,
) -> AsyncIterator[Stack]:
    """Bring Leasehold up, and down again; its logs are shown if it does not come up.

    The webhook is left out unless it is wanted: tests try what it would keep out of the cluster.
    With `loader` all programs are executed, since `env` has variables of the dynamic loader.
    At the end, no pod may have been reported to see GPUs without a lease, unless some were to.
    """
    root = Path(tempfile.mkdtemp(prefix="lh-e2e-"))
    try:
        left_out = ",".join((*without, *(() if webhook else ("webhook",))))
        flags = ("--headless", "--state", str(root), "--without", left_out)
        handover = () if webhook else ("--no-kube-scheduler",)  # nothing hands pods over
        wanted = ("--placers", str(placers), *handover, *options)
        words = ("up", *flags, *wanted)
        if loader:
            up = await run(*LEASEHOLD, *words, env=env, limit_s=START_S)
        else:
            up = await command(*words, env=env, limit_s=START_S)
        assert up.code == 0, f"{up.out}{up.err}{_logs(root)}"
        async with KubernetesClient(load_credentials(root / "kubeconfig")) as kube:
            started = Stack(root, kube)
            yield started
            if not started.open_runtime:
                with contextlib.suppress(UnavailableError):  # a test has left it so
                    assert await started.events_of("GpuVisibleWithoutLease") == []
        assert not (refused := refusals_in(root / "logs")), refused
    finally:
        await command("down", "--state", str(root))
        shutil.rmtree(root, ignore_errors=True)


def refusals_in(logs: Path) -> list[str]:
    """Return lines of logs by which a service lacked a right; its account has the manifests'."""
    words = 'is forbidden: User "system:serviceaccount:'
    lines = (line for log in logs.glob("*.log*") for line in log.read_text().splitlines())
    return [line for line in lines if words in line.replace("\\", "")]


def _logs(root: Path) -> str:
    logs: Sequence[Path] = sorted((root / "logs").glob("*.log"))
    return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)
