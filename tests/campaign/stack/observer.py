"""Reads a sample: the API server, the kubelets' files, checkpoints, Redis, and /readyz."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import redis.exceptions

from services.node_agent.mig.gpu_models import GPU_MODELS
from shared.model.errors import LeaseholdError
from shared.model.names import NodeName
from simcluster.node_agent.driver import instances_in
from simcluster.node_agent.gpus import uuid_of
from tests.campaign.readers import (
    REGION_BYTES,
    REGION_HEAD,
    grants_of,
    region_limits,
    seen_node,
    seen_pod,
)
from tests.campaign.schedule import MIG_DEVICES, NODES, SERVICES
from tests.campaign.stack.cluster import CampaignCluster
from tests.campaign.workload import HARDWARE
from tests.proof.ledger import checkpoint_grants, decode, decode_charge
from tests.proof.observations import (
    AgentGrant,
    Grant,
    HardwareInstance,
    RawCharge,
    RawLedger,
    RegionLimits,
    Sample,
    SeenNode,
    SeenPod,
)

PODS = "/api/v1/namespaces/default/pods"
MIG_MODEL = GPU_MODELS["A100-80GB"]
MIG_NODES = {node: uuid_of(NodeName(node), index) for node, index in MIG_DEVICES}
MIG_UUIDS = frozenset(map(str, MIG_NODES.values()))
PROFILE_MIB = {profile.name: profile.memory_mib for profile in MIG_MODEL.mig}
READ_S = 1.5
READY_EVERY_S = 1.0
LIMITS_EVERY_S = 2.0
REDIS_ERRORS = (redis.exceptions.RedisError, OSError, TimeoutError)


class Observer:
    """Takes samples of one cluster."""

    def __init__(self, cluster: CampaignCluster) -> None:
        self.cluster = cluster
        self.uuids: dict[str, dict[int, str]] = {}
        """By node, its devices by index."""
        self._seen: dict[str, HardwareInstance] = {}
        """All MIG instances that there ever were."""
        self._files: dict[Path, tuple[float, dict[str, Any]]] = {}
        self._charges: dict[bytes, RawCharge] = {}
        self._unready: dict[str, str] = {}
        self._ready_read_at = 0.0
        self._driver_limits: dict[tuple[str, str], int] | None = None
        self._limits_read_at = 0.0

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Hold the connections to the parts' HTTP ports."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_S)) as http:
            self._http = http
            yield

    async def sample(self, faults: tuple[str, ...]) -> Sample:
        """Read everything; what does not answer is None."""
        at = time.time()
        await self._learn_uuids()
        before = self._instances()
        grants = self._grants(at)
        agents = self._agents()
        instances = before | self._instances()
        limits = self._limits(grants)
        pods, nodes = await self._api()
        ledger = await self._ledger()
        await self._read_readiness(at)
        await self._read_driver_limits(at)
        return Sample(
            at=at,
            hardware=HARDWARE,
            pods=pods,
            nodes=nodes,
            grants=grants,
            agents=agents,
            limits=limits,
            driver_limits=self._driver_limits,
            ledger=ledger,
            mig_devices=MIG_UUIDS,
            instances=instances,
            evicted=_merged(min, [proxy.evicted for proxy in self.cluster.api.values()]),
            withdrawn=_merged(max, [proxy.withdrawn for proxy in self.cluster.api.values()]),
            denied={part: proxy.denied for part, proxy in self.cluster.api.items() if proxy.denied},
            homes={uuid: node for node in NODES for uuid in self.uuids.get(node, {}).values()},
            unready=dict(self._unready),
            faults=faults,
        )

    def _grants(self, at: float) -> tuple[Grant, ...]:
        return tuple(
            grant
            for node in NODES
            for path in self.cluster.directory.node(node).glob("pods/*.json")
            if (state := self._json(path))
            for grant in grants_of(state, node, self.uuids.get(node, {}), at, self._seen)
        )

    def _instances(self) -> dict[str, HardwareInstance]:
        """Return the MIG instances that the simulated driver has."""
        checkpoints = {
            uuid: HardwareInstance(uuid=uuid, device=device, mib=PROFILE_MIB[profile])
            for node, device in MIG_NODES.items()
            for uuid, profile in instances_in(self.cluster.directory.gpus(node)).items()
        }
        self._seen |= checkpoints
        return checkpoints

    def _agents(self) -> tuple[AgentGrant, ...]:
        return tuple(
            grant
            for node in NODES
            if (checkpoint := self._json(self.cluster.directory.agent(node) / "checkpoint.json"))
            for grant in checkpoint_grants(checkpoint)
        )

    def _limits(self, grants: tuple[Grant, ...]) -> dict[str, RegionLimits]:
        """Return the limits of the running containers' region files."""
        found: dict[str, RegionLimits] = {}
        for node, pod in {(grant.node, grant.pod) for grant in grants}:
            folder = self.cluster.directory.agent(node) / "containers" / f"{pod}_main"
            for path in folder.glob("*.cache"):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    is_region = path.stat().st_size == REGION_BYTES
                    limits = region_limits(pod, file.read(REGION_HEAD)) if is_region else None
                    found |= {pod: limits} if limits else {}
        return found

    def _json(self, path: Path) -> dict[str, Any] | None:
        """Read a JSON file that others replace; unchanged ones are not read again."""
        try:
            changed_at = path.stat().st_mtime
            cached = self._files.get(path)
            if cached is None or cached[0] != changed_at:
                cached = self._files[path] = (changed_at, json.loads(path.read_bytes()))
        except (OSError, ValueError):
            self._files.pop(path, None)
            return None
        return cached[1]

    async def _api(self) -> tuple[dict[str, SeenPod] | None, dict[str, SeenNode] | None]:
        kube = self.cluster.kube
        try:
            async with asyncio.timeout(READ_S):
                pods = json.loads(await kube.read(PODS))["items"]
                nodes = json.loads(await kube.read("/api/v1/nodes"))["items"]
        except (LeaseholdError, TimeoutError):
            return None, None
        seen = [pod for obj in pods if (pod := seen_pod(obj))]
        return {pod.uid: pod for pod in seen}, {node.name: node for node in map(seen_node, nodes)}

    async def _learn_uuids(self) -> None:
        if self.uuids.keys() == set(NODES):
            return
        for node in NODES:
            text = await self.cluster.redis.hget(f"lh:facts:{node}", "devices")
            if text:
                devices = json.loads(text)
                self.uuids[node] = {device["index"]: device["uuid"] for device in devices}

    async def _ledger(self) -> RawLedger | None:
        try:
            async with asyncio.timeout(READ_S):
                return await self._read_ledger()
        except REDIS_ERRORS:
            return None

    async def _read_ledger(self) -> RawLedger:
        hashes = ("ledger", "leases", "devices", "nodes", "cordons", "waiting", "claims", "starts")
        names = (*hashes, *(f"facts:{node}" for node in NODES))
        async with self.cluster.redis.pipeline(transaction=True) as pipe:
            for name in names:
                pipe.hgetall(f"lh:{name}")
            pipe.zrange("lh:gone", 0, -1)
            pipe.hgetall("lh-budget:windows:default")
            pipe.xrevrange("lh-budget:entries:default", count=500)
            pipe.xlen("lh-budget:entries:default")
            pipe.info("keyspace")
            *rows, gone, windows, entries, count, info = await pipe.execute()
        raw = dict(zip(names, rows, strict=True)) | {"gone": dict.fromkeys(gone, b"")}
        used = {
            name.decode(): json.loads(text).get("used_units", 0) for name, text in windows.items()
        }
        charges = self._all_charges(entries, count)
        return decode(
            raw,
            charges=charges,
            used_units=used if charges else {},
            keys=sum(database["keys"] - database["expires"] for database in info.values()),
        )

    def _all_charges(
        self, entries: list[tuple[bytes, Mapping[bytes, bytes]]], count: int
    ) -> tuple[RawCharge, ...]:
        """Return all charges, or none while those between two samples were more than were read."""
        charges = self._charges
        self._charges |= {key: decode_charge(entry) for key, entry in entries if key not in charges}
        if len(self._charges) > count:  # Redis lost entries
            self._charges = {key: self._charges[key] for key, _ in entries}
        return tuple(self._charges.values()) if len(self._charges) == count else ()

    async def _read_driver_limits(self, at: float) -> None:
        if self.cluster.limits.hook is not None and at - self._limits_read_at >= LIMITS_EVERY_S:
            self._limits_read_at = at
            self._driver_limits = await asyncio.to_thread(self.cluster.limits.read)

    async def _read_readiness(self, at: float) -> None:
        if at - self._ready_read_at < READY_EVERY_S:
            return
        self._ready_read_at = at
        answers = await asyncio.gather(*(self._readiness(part) for part in SERVICES))
        self._unready = {
            part: text for part, text in zip(SERVICES, answers, strict=True) if text is not None
        }

    async def _readiness(self, part: str) -> str | None:
        """Return why a part is not ready, or None if it is."""
        state = self.cluster.states[part]
        if not state.pid or not state.ready:
            return "its process has not reported that it is ready"
        try:
            async with self._http.get(f"{state.address}/readyz") as answer:
                text = (await answer.text()).strip()
                return None if answer.status == 200 else text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"no answer: {error!r}"


def _merged(
    choose: Callable[[Iterable[float]], float], times: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Return the times of what several proxies have seen, by UID."""
    merged: dict[str, list[float]] = {}
    for seen in times:
        for uid, at in seen.items():
            merged.setdefault(uid, []).append(at)
    return {uid: choose(seen) for uid, seen in merged.items()}


def read_spans(traces: Path) -> list[dict[str, Any]]:
    """Return all spans that the parts have written."""
    spans = []
    for path in traces.glob("*.jsonl*"):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                spans.append(json.loads(line))
    return spans
