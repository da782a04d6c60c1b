"""Whatever is deleted from the ledger or written over it by hand, pods keep what they have."""

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.lease_copy import ANNOTATION, load_lease
from shared.model.names import Namespace
from tests.support.dialects.checklist import condition_text, leases
from tests.support.stack import PODS, Stack, gpu_pod, running, stack, succeeded, vgpu
from tests.support.waiting import until

HEALED_S = 25.0
SLOWER = 12
"""A damaged ledger is healed within this time, or so many times that of a sound one, up to 60 s."""
DEVICE_MIB = 40960
LIMITS = """
apiVersion: leasehold.dev/v1beta1
kind: GPU{kind}
metadata: {{name: default}}
spec: {{{spec}}}
"""
GANG = {
    "gang.scheduling.koordinator.sh/name": "gang",
    "gang.scheduling.koordinator.sh/min-available": "2",
}
KEPT: dict[str, dict[str, int]] = {
    "volcano": vgpu(memory=3000, cores=10),
    "hami": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 2000, "nvidia.com/gpucores": 10},
    "gpu-manager": {"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 8},
    "resized": vgpu(memory=2000, cores=10),
    "gang-0": vgpu(memory=1000),
    "gang-1": vgpu(memory=1000),
}
OVERWRITTEN = (
    *(f"lh:{kind}" for kind in ("leases", "devices", "nodes", "waiting")),
    *(f"lh:{kind}" for kind in ("quota-charges", "quota-used", "entitlements", "node-sizes")),
    *("lh-quotas", "lh-preemption:budgets"),
)
WAITING = {"too-large": vgpu(number=8), "over-quota": vgpu(number=2, memory=35000)}


@dataclass(slots=True)
class Damaged:
    """A stack whose ledger is damaged, and what its pods had before."""

    up: Stack
    redis: Any
    before: dict[str, Any] = field(default_factory=dict)
    placed: int = 0
    limit_s: float = 60.0

    async def kept(self) -> dict[str, Any] | None:
        """Return what the pods from the beginning have; None while the ledger is not served."""
        with contextlib.suppress(UnavailableError):
            held = await leases(self.up)
            return {name: has(held[name]) if name in held else None for name in KEPT}
        return None

    async def heal(self) -> float:
        """A new pod runs, all others are as they were; return after how many seconds."""
        began_at = time.monotonic()
        self.placed += 1
        name = f"new-{self.placed}"
        await self.up.create(gpu_pod(name, vgpu(memory=500)))

        async def seen() -> tuple[bool, Any]:
            pods = {pod["metadata"]["name"]: pod for pod in await self.up.pods()}
            assert not over_committed(pods.values())
            assert all(condition_text(pods[waiting]) for waiting in WAITING)
            return running(pods[name]), await self.kept()

        await until(
            seen,
            lambda running_and_kept: running_and_kept == (True, self.before),
            limit_s=self.limit_s,
        )
        healed_s = time.monotonic() - began_at
        await self.up.kube.delete(f"{PODS}/{name}")
        return healed_s

    async def doctor_names(self, record: str) -> None:
        """Wait until the diagnosis names a record that could not be read."""
        await until(lambda: self.up.leasehold("doctor"), lambda done: record in done.out)


def has(lease: Lease) -> Any:
    """Return where a lease is, and what it has."""
    shares = [(share.device, share.memory_mib, share.cores_percent) for share in lease.shares]
    return lease.node, lease.state, shares


def over_committed(pods: Any) -> list[str]:
    """Return the devices of which the pods' annotations have more than there is."""
    used: Counter[str] = Counter()
    for pod in pods:
        if text := (pod["metadata"].get("annotations") or {}).get(ANNOTATION):
            lease = load_lease(text, namespace=Namespace("default"), name=pod["metadata"]["name"])
            used.update({share.device: 0 for share in lease.shares})
            for share in lease.shares:
                used[share.device] += share.memory_mib
    return [device for device, mib in used.items() if mib > DEVICE_MIB]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def damaged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Damaged]:
    files = tmp_path_factory.mktemp("limits")
    (files / "quotas").write_text(LIMITS.format(kind="Quota", spec="maxMemory: 60Gi"))
    (files / "budgets").write_text(
        LIMITS.format(kind="Budget", spec="limitGPUMinutes: 10000, policy: {type: none}")
    )
    limits = ("--quotas", str(files / "quotas"), "--budgets", str(files / "budgets"))
    async with stack("--nodes", "2", "--gpus", "2xA100-40GB", *limits) as up:
        for name, wanted in KEPT.items():
            notes = GANG if name.startswith("gang") else {}
            await up.create(gpu_pod(name, wanted, annotations=notes))
        await up.until_all(len(KEPT))
        await until(lambda: leases(up), lambda held: held["resized"].state is LeaseState.ACTIVE)
        resized = await up.leasehold("resize", "resized", "--memory", "2500Mi")
        assert succeeded(resized), resized.err
        for name, wanted in WAITING.items():
            await up.create(gpu_pod(name, wanted))
            await up.until(name, condition_text)
        async with redis.asyncio.Redis.from_url(up.state()["redis_url"], **up.login()) as client:
            damaged_stack = Damaged(up, client)

            async def all_active() -> dict[str, Any]:
                damaged_stack.before = await damaged_stack.kept() or {}
                return damaged_stack.before

            await until(
                all_active,
                lambda kept: kept and all(has and has[1] == "active" for has in kept.values()),
            )
            damaged_stack.limit_s = min(60.0, max(HEALED_S, SLOWER * await damaged_stack.heal()))
            yield damaged_stack


async def keys_of(damaged: Damaged) -> list[str]:
    return sorted([key.decode() async for key in damaged.redis.scan_iter("lh*", count=1000)])


async def test_pods_keep_what_they_have_whichever_key_is_deleted(damaged: Damaged) -> None:
    groups: dict[str, list[str]] = {}
    alone = {"lh:ledger", "lh:leases", "lh:devices", "lh:lease-nodes", "lh-quotas"}
    for key in await keys_of(damaged):
        family = (
            key if key in alone else "beside" if key.startswith("lh-") else key.split(":")[1][:1]
        )
        groups.setdefault(family, []).append(key)
    took = {}

    for family, keys in groups.items():
        await damaged.redis.delete(*keys)
        took[family] = round(await damaged.heal(), 1)

    assert max(took.values()) < damaged.limit_s, took
    await damaged.up.audit()


async def test_pods_keep_what_they_have_although_records_are_overwritten(
    damaged: Damaged,
) -> None:
    client = damaged.redis
    took = {}
    generations = [await client.hget("lh:ledger", "generation")]
    for key in OVERWRITTEN:
        [name, *_] = sorted(await client.hkeys(key))
        garbage = secrets.token_bytes(60)
        await client.hset(key, name, garbage)
        took[key] = round(await damaged.heal(), 1)
        await until(lambda: client.hget(key, name), lambda value: value not in {None, garbage})  # noqa: B023
        # A pod that waits may have been decided again before anything read its record.
        if key.removeprefix("lh:") in {"leases", "devices", "nodes"}:
            await damaged.doctor_names(f"{key.removeprefix('lh:')} {name.decode()}")
        generations.append(await client.hget("lh:ledger", "generation"))
    assert len(set(generations)) == 1, "it was closed"
    await client.xadd("lh:feed", {"n": secrets.token_bytes(9)})
    took["feed"] = round(await damaged.heal(), 1)
    await client.hset("lh-budget:states", "default", secrets.token_bytes(60))
    took["budget"] = round(await damaged.heal(), 1)
    for key in ("lh:leases", "lh-quotas"):
        async with client.pipeline(transaction=True) as both:
            await both.delete(key).rpush(key, secrets.token_bytes(9)).execute()
        took[f"type of {key}"] = round(await damaged.heal(), 1)

    assert max(took.values()) < damaged.limit_s, took
    await damaged.up.audit()
    events = json.loads(await damaged.up.kube.read("/api/v1/events"))["items"]
    assert "LedgerRecordUnreadable" in {event["reason"] for event in events}
