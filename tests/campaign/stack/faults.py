"""Makes faults happen, and ends them."""

import asyncio
import contextlib
import json
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import redis.exceptions

from shared.kubernetes.errors import NotFoundError
from shared.model.clock import end
from shared.model.errors import ConflictError, LeaseholdError, RequestError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.campaign.hostile import NAMESPACE as HOSTILE_NAMESPACE
from tests.campaign.hostile import hostile_pods
from tests.campaign.schedule import FAULTS, NODES, SERVERS_OF, SERVICES, Fault
from tests.campaign.stack.cluster import CampaignCluster
from tests.campaign.stack.impersonation import impersonate

RETRY_S = 0.3
DENIED_S = 6.0
RELIST_S = 3.0
"""After an outage, kubelets deny the lists of their pods, and list them again: a real one takes
longer than a round lasts."""
SPIN = "while true do end"
TINY = "1mb"
UNKNOWN = 999
"""NVML's error without a cause."""
TOUCHED = "campaign.test/touched"
API = "leasehold.dev/v1beta1"
NAMESPACE = "default"
HOSTILE_PODS = f"/api/v1/namespaces/{HOSTILE_NAMESPACE}/pods"
REFUSALS = frozenset({"redis-full", "redis-readonly", "redis-misconf", "redis-busy"})
"""States of Redis in which it refuses writes, or all calls, and which end when it is killed."""


_Handler = Callable[["FaultInjector", Fault], Awaitable[None]]


class FaultInjector:
    """Begins and ends the faults of one cluster."""

    def __init__(self, cluster: CampaignCluster) -> None:
        self.cluster = cluster
        self.at_work: dict[Fault, float] = {}
        """Faults that have begun and not ended, and since when."""
        self._redis_killed_at = 0.0
        self._older: Path | None = None
        self._spin: asyncio.StreamWriter | None = None
        self._removing: dict[Fault, asyncio.Task[None]] = {}
        self._others: dict[Fault, asyncio.Task[None]] = {}
        """Those that speak in the name of a node's agent."""

    async def begin(self, fault: Fault) -> None:
        """Make a fault happen."""
        self.at_work[fault] = time.time()
        await self._HANDLERS[fault.kind][0](self, fault)

    async def end(self, fault: Fault) -> None:
        """End a fault; those without a length end by themselves."""
        if handler := self._HANDLERS[fault.kind][1]:
            await handler(self, fault)
        del self.at_work[fault]

    def cannot_work(self) -> dict[str, float]:
        """Return the parts that lack a server which they need, and since when."""
        times: dict[str, float] = {}
        for fault, since in self.at_work.items():
            is_over = fault.kind in REFUSALS and since < self._redis_killed_at
            for part in () if is_over else _starved(fault):
                times[part] = min(since, times.get(part, since))
        return times

    async def save_redis(self) -> None:
        """Keep a copy of the append-only file, to which `redis-rollback` goes back."""
        store = self.cluster.root / "valkey"
        older = store / "older"
        await asyncio.to_thread(shutil.rmtree, older, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, store / "appendonlydir", older)
        self._older = older

    # Processes

    async def _kill(self, fault: Fault) -> None:
        self.cluster.send_signal(fault.target, signal.SIGKILL)
        if fault.target == "valkey":
            self._redis_killed_at = time.time()

    async def _shift_clock(self, fault: Fault) -> None:
        """Shift a part's clock, and change each node, so that a time of that clock is stored."""
        self.cluster.clocks.shift(fault.target, float(fault.detail))
        for node in NODES:
            await self._patch_node(node, {"metadata": {"labels": {TOUCHED: f"{time.time():.0f}"}}})

    async def _reset_clock(self, fault: Fault) -> None:
        self.cluster.clocks.shift(fault.target, 0.0)

    # Redis

    async def _roll_back(self, _fault: Fault) -> None:
        """Swap the file below the running server, and kill it: it starts with the older one."""
        if self._older is None:
            return
        store = self.cluster.root / "valkey"
        (store / "appendonlydir").rename(store / f"newer-{time.time_ns()}")
        self._older.rename(store / "appendonlydir")
        self._older = None
        await self._kill(Fault(kind="kill", target="valkey", at_s=0.0))

    async def _fail_snapshot(self, _fault: Fault) -> None:
        """A snapshot that cannot be written stops writes with MISCONF."""
        (self.cluster.root / "valkey" / "dump.rdb").mkdir(exist_ok=True)
        await self._redis("CONFIG", "SET", "save", "3600 1000000")
        await self._redis("BGSAVE")

    async def _forget_snapshot(self, _fault: Fault) -> None:
        await self._redis("CONFIG", "SET", "save", "")
        with contextlib.suppress(OSError):
            (self.cluster.root / "valkey" / "dump.rdb").rmdir()

    async def _keep_busy(self, _fault: Fault) -> None:
        await self._redis("CONFIG", "SET", "busy-reply-threshold", "500")
        _, self._spin = await asyncio.open_connection("127.0.0.1", self.cluster.plan.ports["redis"])
        user, password = self.cluster.redis_login
        self._spin.write(f'AUTH {user} {password}\r\nEVAL "{SPIN}" 0\r\n'.encode())
        await self._spin.drain()

    async def _stop_spinning(self, _fault: Fault) -> None:
        await self._redis("SCRIPT", "KILL")
        if self._spin is not None:
            self._spin.close()

    async def _redis(self, *command: str) -> None:
        """Send a command until Redis has taken it."""
        while True:
            try:
                await self.cluster.redis.execute_command(*command)
            except redis.exceptions.ResponseError as error:
                if "NOTBUSY" in str(error) or "in progress" in str(error):
                    return
            except (redis.exceptions.RedisError, OSError):
                pass
            else:
                return
            await asyncio.sleep(RETRY_S)

    # Kubernetes

    async def _spoil_api(self, fault: Fault) -> None:
        for proxy in self.cluster.api.values():
            proxy.fault = fault.kind
            proxy.delay_s = float(fault.detail or 0.0)

    async def _mend_api(self, fault: Fault) -> None:
        await self._spoil_api(replace(fault, kind="", detail=""))

    async def _begin_outage(self, fault: Fault) -> None:
        """Have the API server answer nobody, and the kubelets feel it for a while longer."""
        outage = {"for_s": fault.lasts_s, "denied_s": DENIED_S, "relist_s": RELIST_S}
        await self._until_done(lambda: self.cluster.kube.create("/debug/outage", outage))

    async def _delete_node(self, fault: Fault) -> None:
        await self._until_done(lambda: self.cluster.kube.delete(f"/api/v1/nodes/{fault.target}"))

    async def _restart_kubelet(self, fault: Fault) -> None:
        """Restart the kubelet, which creates its node if there is none."""
        await self._until_done(lambda: self.cluster.kubelet(fault.target, "/debug/restart"))

    async def _cut_kubelet(self, fault: Fault) -> None:
        """Cut a way between an agent and its kubelet; the plugins' sockets are removed again."""
        node, _, way = fault.target.partition(":")
        if way == "plugins":
            plugins = self.cluster.directory.node(node) / "device-plugins"
            self._removing[fault] = asyncio.create_task(_remove_sockets(plugins))
        else:
            self.cluster.link(f"agent-{node}", way).cut()

    async def _heal_kubelet(self, fault: Fault) -> None:
        node, _, way = fault.target.partition(":")
        if removing := self._removing.pop(fault, None):
            removing.cancel()
        else:
            self.cluster.link(f"agent-{node}", way).heal()

    async def _spoil_plugins(self, fault: Fault) -> None:
        node, _, way = fault.target.partition(":")
        self.cluster.plugins[node].spoil(way, float(fault.detail or 0.0))

    async def _mend_plugins(self, fault: Fault) -> None:
        self.cluster.plugins[fault.target.partition(":")[0]].heal()

    async def _delete_node_unseen(self, fault: Fault) -> None:
        """Delete a node, and kill both binders before they can acknowledge that."""
        await self._delete_node(fault)
        for binder in ("binder", "scheduler"):
            self.cluster.send_signal(binder, signal.SIGKILL)

    async def _patch_node(self, node: str, patch: Mapping[str, object]) -> None:
        path = f"/api/v1/nodes/{node}"
        await self._until_done(lambda: self.cluster.kube.patch_merge(path, patch))

    async def _break_device(self, fault: Fault) -> None:
        node, _, index = fault.target.partition(":")
        self._write_device_faults(node, {index: fault.detail or fault.kind})

    async def _mend_device(self, fault: Fault) -> None:
        self._write_device_faults(fault.target.partition(":")[0], {})

    async def _double_device(self, fault: Fault) -> None:
        """Have a device report the UUID of the same device of the next node."""
        node, _, index = fault.target.partition(":")
        other = NODES[(NODES.index(node) + 1) % len(NODES)]
        uuid = uuid_of(NodeName(other), int(index))
        self._write_device_faults(node, {index: uuid})

    async def upgrade_drivers(self) -> None:
        """Replace the last driver that limits no memory on all nodes, with their agents running."""
        for node in NODES:
            await self._replace_driver(node, is_old=False)

    async def _replace_driver(self, node: str, *, is_old: bool) -> None:
        limits = self.cluster.limits
        await asyncio.to_thread(limits.replace_driver, node, is_old=is_old)
        self.cluster.send_signal(f"agent-{node}", signal.SIGKILL)

    async def _downgrade_driver(self, fault: Fault) -> None:
        await self._replace_driver(fault.target, is_old=True)

    async def _upgrade_driver(self, fault: Fault) -> None:
        await self._replace_driver(fault.target, is_old=False)

    async def _lose_limits(self, _fault: Fault) -> None:
        """Have the drivers of all nodes lose their limits."""
        for node in NODES:
            await asyncio.to_thread(self.cluster.limits.lose, node)

    async def _fail_limits(self, fault: Fault) -> None:
        await asyncio.to_thread(self.cluster.limits.fail, fault.target, UNKNOWN)

    async def _mend_limits(self, fault: Fault) -> None:
        await asyncio.to_thread(self.cluster.limits.fail, fault.target, 0)

    async def _keep_limits(self, fault: Fault) -> None:
        await asyncio.to_thread(self.cluster.limits.keep, fault.target, kept=True)

    async def _lower_limits(self, fault: Fault) -> None:
        await asyncio.to_thread(self.cluster.limits.keep, fault.target, kept=False)

    async def _create_hostile_pods(self, fault: Fault) -> None:
        """Create pods that harm others if a field of a pod can."""
        for pod in hostile_pods(round(1000 * self.at_work[fault]) % 1_000_000):
            await self._until_done(partial(self._create_unless_invalid, pod))

    async def _create_unless_invalid(self, pod: Mapping[str, object]) -> None:
        with contextlib.suppress(RequestError):
            await self.cluster.kube.create(HOSTILE_PODS, pod)

    async def _delete_hostile_pods(self, _fault: Fault) -> None:
        await self._until_done(lambda: self.cluster.kube.delete(HOSTILE_PODS))

    async def _impersonate_agent(self, fault: Fault) -> None:
        self._others[fault] = asyncio.create_task(impersonate(self.cluster, NodeName(fault.target)))

    async def _stop_impersonating(self, fault: Fault) -> None:
        await end(self._others.pop(fault))

    async def _create_object(self, kind: str, spec: Mapping[str, object]) -> None:
        text = {"apiVersion": API, "kind": kind, "metadata": {"name": NAMESPACE}, "spec": spec}
        path = f"/apis/{API}/{kind.lower()}s"
        await self._until_done(lambda: self.cluster.kube.create(path, text))

    async def _delete_object(self, fault: Fault) -> None:
        path = f"/apis/{API}/gpu{fault.kind}s/{NAMESPACE}"
        await self._until_done(lambda: self.cluster.kube.delete(path))

    def _write_device_faults(self, node: str, faults: Mapping[str, str]) -> None:
        path = self.cluster.directory.faults(node)
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(faults))
        partial.replace(path)

    async def _until_done(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat a call while the API server or the kubelet does not answer."""
        for _ in range(100):
            with contextlib.suppress(LeaseholdError, aiohttp.ClientError, OSError, TimeoutError):
                with contextlib.suppress(ConflictError, NotFoundError):
                    await call()
                return
            await asyncio.sleep(RETRY_S)

    @staticmethod
    def _signal(number: signal.Signals) -> "_Handler":
        async def send(self: "FaultInjector", fault: Fault) -> None:
            self.cluster.send_signal(fault.target, number)

        return send

    @staticmethod
    def _link(verb: str) -> "_Handler":
        async def change(self: "FaultInjector", fault: Fault) -> None:
            getattr(self.cluster.link(*fault.target.split(":")), verb)()

        return change

    @staticmethod
    def _in_redis(*command: str) -> "_Handler":
        return lambda self, _: self._redis(*command)

    @staticmethod
    def _cordoned(value: bool | None) -> "_Handler":
        return lambda self, fault: self._patch_node(
            fault.target, {"spec": {"unschedulable": value}}
        )

    _API = tuple(kind for kind in FAULTS if kind.startswith("api-"))
    _HANDLERS: Mapping[str, tuple[_Handler, _Handler | None]] = {
        "kill": (_kill, None),
        "pause": (_signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
        "cut": (_link("cut"), _link("heal")),
        "clock": (_shift_clock, _reset_clock),
        "redis-flush": (_in_redis("FLUSHALL"), None),
        "redis-rollback": (_roll_back, None),
        "redis-full": (
            _in_redis("CONFIG", "SET", "maxmemory", TINY),
            _in_redis("CONFIG", "SET", "maxmemory", "0"),
        ),
        "redis-readonly": (
            _in_redis("REPLICAOF", "127.0.0.1", "1"),  # which does not exist
            _in_redis("REPLICAOF", "NO", "ONE"),
        ),
        "redis-misconf": (_fail_snapshot, _forget_snapshot),
        "redis-busy": (_keep_busy, _stop_spinning),
        **dict.fromkeys(_API, (_spoil_api, _mend_api)),
        "outage": (_begin_outage, None),
        "node-gone": (_delete_node, _restart_kubelet),
        "cordon": (_cordoned(value=True), _cordoned(value=None)),
        **dict.fromkeys(("device", "stuck"), (_break_device, _mend_device)),
        "kubelet-restart": (_restart_kubelet, None),
        "kubelet-cut": (_cut_kubelet, _heal_kubelet),
        "plugin-link": (_spoil_plugins, _mend_plugins),
        "node-gone-unseen": (_delete_node_unseen, _restart_kubelet),
        "device-twice": (_double_device, _mend_device),
        "driver-version": (_downgrade_driver, _upgrade_driver),
        "limits-vanish": (_lose_limits, None),
        "limits-error": (_fail_limits, _mend_limits),
        "limits-kept": (_keep_limits, _lower_limits),
        "quota": (
            lambda self, _: self._create_object(
                "GPUQuota", {"maxMilliGPU": 1500, "defaultRunTime": "25s"}
            ),
            _delete_object,
        ),
        "budget": (
            lambda self, _: self._create_object("GPUBudget", {"limitGPUMinutes": 1}),
            _delete_object,
        ),
        "tenant": (_create_hostile_pods, _delete_hostile_pods),
        "agent": (_impersonate_agent, _stop_impersonating),
    }
    """What begins and what ends each kind of fault."""


async def _remove_sockets(plugins: Path) -> None:
    """Remove the sockets of an agent's plugins again and again."""
    while True:
        for socket in plugins.glob("leasehold-*.sock"):
            socket.unlink(missing_ok=True)
        await asyncio.sleep(RETRY_S)


def _starved(fault: Fault) -> tuple[str, ...]:
    """Return the parts that cannot work under a fault, and have to notice it soon.

    A node agent starts pods without the API server, and asks it for little: it may notice after
    half a minute (`COMPARE_S` of its views), which is longer than any cut here.
    """
    part, _, server_cut = fault.target.partition(":")
    if fault.kind == "cut":
        return () if part.startswith("agent-") and server_cut == "api" else (part,)
    server = {"pause valkey": "redis", "pause nats": "nats"}.get(f"{fault.kind} {fault.target}")
    if fault.kind in REFUSALS:
        server = "redis"
    if server is None:
        return ()
    return tuple(part for part in SERVICES if server in SERVERS_OF.get(part.partition("-")[0], ()))
