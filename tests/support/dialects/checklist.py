"""Helpers of the acceptance checklist's end-to-end tests, on a running stack."""

import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.credentials.logins import ClientCredentials
from shared.kubelet_api.deviceplugin.api_pb2 import ContainerAllocateResponse
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, NodeName
from shared.nats.subjects import user_of
from simcluster.node_agent.gpus import uuid_of
from tests.support.stack import START_S, Stack, gpu_pod, running
from tests.support.waiting import until

GPUS = "8xGTX1080Ti"
NODE = "node-0"
SPARE = "node-1"
"""Tests that need an agent of any node but the first start it themselves."""


def uuid(index: int, node: str = NODE) -> str:
    """Return the UUID of a node's GPU."""
    return uuid_of(NodeName(node), index)


def asking(
    name: str,
    limits: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
    *,
    node: str = NODE,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod of one container that may only go to `node`."""
    wanted = {"nodeSelector": {"kubernetes.io/hostname": node}}
    return gpu_pod(name, limits, annotations=annotations, **(wanted | spec))


async def runs(up: Stack, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Create a pod and wait until it runs."""
    await up.create(pod)
    return await up.until(pod["metadata"]["name"], running)


async def refused(up: Stack, pod: Mapping[str, Any]) -> str:
    """Create a pod that cannot be placed; return the text of its condition."""
    await up.create(pod)
    return condition_text(await up.until(pod["metadata"]["name"], condition_text))


def condition_text(pod: Mapping[str, Any]) -> str:
    """Return why a pod waits according to its condition, or an empty text."""
    assert "nodeName" not in pod["spec"], f"{pod['metadata']['name']} has a node"
    conditions = pod["status"].get("conditions", [])
    texts = [c["message"] for c in conditions if (c["type"], c["status"]) == UNSCHEDULED]
    return texts[0] if texts else ""


UNSCHEDULED = ("PodScheduled", "False")


def annotations_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return a pod's annotations."""
    notes: dict[str, str] = pod["metadata"].get("annotations") or {}
    return notes


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return an object's labels."""
    labels: dict[str, str] = item["metadata"].get("labels") or {}
    return labels


def annotation_of(pod: Mapping[str, Any], key: str) -> str:
    """Return an annotation of a pod."""
    text: str = annotations_of(pod)[key]
    return text


async def allocated_setup(
    up: Stack, pod: Mapping[str, Any], container: str = "cuda"
) -> ContainerAllocateResponse:
    """Return what Allocate returned for a container, from the kubelet's own checkpoint."""
    node = pod["spec"]["nodeName"]
    file = up.root / "nodes" / node / "device-plugins" / "kubelet_internal_checkpoint"
    held_leases = [
        ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
        for entry in json.loads(file.read_text())["Data"]["PodDeviceEntries"]
        if (entry["PodUID"], entry["ContainerName"]) == (pod["metadata"]["uid"], container)
    ]
    assert len(held_leases) == 1, f"{len(held_leases)} answers for {container}"
    return held_leases[0]


def state_of(up: Stack, pod: Mapping[str, Any], container: str = "cuda") -> dict[str, Any]:
    """Return the kubelet's state of a running container."""
    node = pod["spec"]["nodeName"]
    uid = pod["metadata"]["uid"]
    state = json.loads((up.root / "nodes" / node / "pods" / f"{uid}.json").read_text())
    container_state: dict[str, Any] = state["containers"][container]
    return container_state


@asynccontextmanager
async def ledger_of(up: Stack, user: str = "operator") -> AsyncIterator[RedisLeases]:
    """Open the ledger as a user of it."""
    login = ClientCredentials(login_file=up.secret("redis", user))
    async with RedisLeases.connect(up.state()["redis_url"], credentials=login) as ledger:
        yield ledger


async def until_quota(up: Stack, namespace: str = "default") -> None:
    """Wait until the ledger knows the quota of a namespace."""
    async with ledger_of(up) as ledger:
        await until(
            ledger.quotas.totals, lambda totals: totals.quota_of(Namespace(namespace)) is not None
        )


async def leases(up: Stack) -> dict[str, Lease]:
    """Return the live leases by the name of their pod."""
    async with ledger_of(up) as ledger:
        return {lease.name: lease async for page in ledger.load_all() for lease in page}


async def delete_all_pods(up: Stack) -> None:
    """Delete all pods and wait until their leases have ended, also where a test shut the ledger."""

    async def held() -> object:
        with contextlib.suppress(UnavailableError):
            return await leases(up)
        return "unknown"

    await up.clear()
    await until(held, lambda leases: not leases)


async def node_allocatable(
    up: Stack, node: str, amounts: Mapping[str, int | None], limit_s: float = 60.0
) -> dict[str, Any]:
    """Wait until a node's allocatable has these amounts (None: the resource is absent)."""
    wanted = {name: None if n is None else str(n) for name, n in amounts.items()}
    values: dict[str, Any] = {}

    async def allocatable() -> dict[str, Any]:
        values.update(json.loads(await up.kube.read(f"/api/v1/nodes/{node}")))
        shown = values["status"].get("allocatable", {})
        return {name: shown.get(name) for name in wanted}

    await until(allocatable, lambda shown: shown == wanted, limit_s=limit_s)
    return values


async def restart_kubelet(up: Stack, node: str) -> None:
    """Restart a kubelet; its containers keep running."""
    described = json.loads((up.root / "nodes" / node / "kubelet.json").read_text())
    credentials = ClusterCredentials(
        server=f"https://{described['address']}:{described['port']}",
        ca_pem=Path(described["caPath"]).read_text(),
        token_file=Path(described["tokenPath"]),
    )
    async with KubernetesClient(credentials) as kubelet:
        assert await kubelet.create("/debug/restart", {}) == b"restarted"


@asynccontextmanager
async def agent(
    up: Stack, *flags: str, node: str = SPARE
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run another node's agent beside the stack's services, once it is ready."""
    name = f"agent-{node}"
    run_file = up.root / f"{name}.json"
    log_file = up.root / "logs" / f"{name}.log"
    run_file.unlink(missing_ok=True)
    with log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "simcluster.node_agent"),
            *(*up.bus_flags(user_of("node-agent", node)), "--run-file", str(run_file)),
            *("--kubeconfig", up.kubeconfig, "--instance", name, "--node", node, "--gpus", GPUS),
            *("--kubelet-dir", str(up.root / "nodes" / node)),
            *("--state-dir", str(up.root / "agents" / node), *flags),
            stdout=log,
            stderr=log,
        )
    try:
        await until(lambda: run_file.exists() or process.returncode is not None, limit_s=START_S)
        assert run_file.exists(), log_file.read_text()[-2000:]
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
