"""Keeps one server of MPS for each GPU, with a namespace for each container that has a share.

https://docs.nvidia.com/deploy/mps/latest/mpsv3-interface.html (R615). Each GPU has a daemon of its
own, so that one which hangs stops no other GPU's containers. In its multi-user mode only user 0 may
change a limit.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self

from msgspec import Struct, structs

from services.node_agent.kubelet.cgroups import pod_of_process
from services.node_agent.mps.control import (
    END_S,
    LOOK_S,
    PIPES,
    TERMINATE_S,
    MpsControl,
    ending_work_of,
)
from services.node_agent.mps.daemon import (
    ALL_THREADS,
    MpsDaemon,
    MpsLimits,
    MpsServer,
    MpsTarget,
    StartedDaemon,
    check_limits,
    parse_memory_mib,
    parse_percent,
)
from services.node_agent.mps.daemon_directories import DaemonRecords, MpsNode
from services.node_agent.programs import UnseenError
from shared.dialects.mps import SERVER, daemon_name, shared_daemon_name
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

RECORD = "server.json"
READY = "Ready"
READY_S = 10.0
"""How long a new server may take to open its GPU."""
DEFAULT = "default"
"""Of clients that come without a namespace: no container has its socket."""
LEAST_PERCENT = 1
LEAST_MIB = 1
UNSET = "-"
MOST_CLIENTS = 64
NOT_RUNNING = "its GPU's server does not run, or another process is in its place"
NO_NAMESPACE = "its GPU's server has no namespace for it"
NOT_ROOT = (
    "the partitioner does not run as user 0: MPS lets only that user own a server of several users"
)
_ROW = re.compile(rf"^(\d{{1,10}}),{SERVER},[^,\n]*,([a-z0-9_]+),", re.MULTILINE)


class _Lease(Struct, frozen=True):
    target: MpsTarget
    fence: int
    limits: MpsLimits
    started_at: float
    """Unix seconds."""
    ended: bool = False
    """It has a namespace only because the server did not reply."""

    @property
    def namespace(self) -> str:
        return daemon_name(self.target.holder, self.target.container)


class _Record(Struct, frozen=True):
    device: DeviceUuid
    leases: tuple[_Lease, ...] = ()
    listener: int = 0
    """0 before the start."""

    def lease_of(self, target: MpsTarget) -> _Lease | None:
        return next((lease for lease in self.leases if lease.target == target), None)

    def without(self, target: MpsTarget) -> Self:
        leases = (lease for lease in self.leases if lease.target != target)
        return structs.replace(self, leases=tuple(leases))

    def with_lease(self, lease: _Lease) -> Self:
        return structs.replace(self, leases=(*self.without(lease.target).leases, lease))


class _Namespace(Struct, frozen=True):
    """A row of `namespace list`."""

    status: str
    memory_mib: int | None
    percent: float
    pipes: str

    def has(self, limits: MpsLimits) -> bool:
        [mib] = limits.memory_mib.values()
        return self.percent == limits.percent and self.memory_mib == mib


class SharedServers:
    """Calls for one GPU are carried out one after the other."""

    def __init__(self, node: MpsNode) -> None:
        self.node = node
        self.ready_s = READY_S
        self._records = DaemonRecords(node.root, RECORD, _Record)

    async def missing_reason(self) -> str:
        name = shared_daemon_name(DeviceUuid(""))
        reason = self.node.missing_reason(name, PIPES, SERVER, daemon_name(PodUid(""), ""))
        return reason or (NOT_ROOT if os.geteuid() else "")

    async def ensure(self, target: MpsTarget, *, fence: int, limits: MpsLimits) -> MpsDaemon:
        """A server that does not run is started with all its namespaces.

        Raises UnavailableError while a client is attached to a namespace with other limits: MPS
        changes them without clients only.
        """
        check_limits(limits)
        if set(limits.memory_mib) != {target.gpu}:
            raise RequestError(
                f"a namespace limits one GPU, {target.gpu[:64]}, not {list(limits.memory_mib)[:4]}"
            )
        async with self._lock(target):
            record = await self._record(target.gpu)
            earlier = record.lease_of(target)
            if earlier is not None and fence < earlier.fence:
                raise RequestError(f"{target} has a newer lease, with fence {earlier.fence}")
            started_at = time.time() if earlier is None else earlier.started_at
            lease = _Lease(target, fence, limits, started_at)
            if earlier != lease:
                record = record.with_lease(lease)
                await self._save(record)
            status = await self._status_of(record)
            if not status:
                record = await self._start(record)
            elif status == READY:
                await self._apply(lease)
            else:  # it ends its clients after a fault of one; a new start would end them, too
                raise UnavailableError(f"the server of MPS of GPU {target.gpu} is {status!r}")
            return await self._read(record, lease)

    async def get(self, target: MpsTarget) -> MpsDaemon:
        async with self._lock(target):
            record = await self._record(target.gpu)
            lease = record.lease_of(target)
            if lease is None or not await self._status_of(record):
                return self._unread(target, NOT_RUNNING)
            try:
                return await self._read(record, lease)
            except UnavailableError as error:
                return self._unread(target, str(error))

    async def list(self) -> tuple[StartedDaemon, ...]:
        return tuple(
            StartedDaemon(lease.target, lease.fence, lease.started_at)
            for record in await self._records.load_all()
            for lease in record.leases
        )

    async def terminate(self, target: MpsTarget, clients: Iterable[int]) -> None:
        """End the work of clients, so that they can be killed.

        Raises WedgedError if it does not end.
        """
        async with self._lock(target):
            lease = await self._required(target)
            for client in sorted((await self._clients(lease)) & set(clients)):
                await self._terminate(target.gpu, client)

    async def probe(self, target: MpsTarget) -> None:
        """Raises WedgedError if a new client hangs."""
        lease = await self._required(target)
        await self.node.probe(target, self._control(target.gpu), SERVER, lease.namespace)

    async def repair(self, target: MpsTarget) -> str:
        """Return what was done."""
        async with self._lock(target):
            await self._required(target)
            killed = await self._end(target.gpu)
            record = await self._start(await self._record(target.gpu))
        text = f", killed {killed} of its processes" if killed else ""
        return (
            f"ended the GPU's server with the work of all its containers{text}, started it again "
            f"with {len(record.leases)} namespaces, and read their limits back"
        )

    async def stop(self, target: MpsTarget, *, fence: int) -> None:
        """Remove a namespace, and the server with its last; one of a newer lease stays.

        Raises UnavailableError while a client is attached.
        """
        async with self._lock(target):
            record = await self._record(target.gpu)
            lease = record.lease_of(target)
            if lease is None:
                return
            if fence < lease.fence:
                raise RequestError(f"{target} has a newer lease, with fence {lease.fence}")
            left = record.without(target)
            if all(other.ended for other in left.leases):
                await self._end(target.gpu)
                await asyncio.to_thread(self._control(target.gpu).remove)
                logger.info("the server of MPS of GPU %s is ended", target.gpu)
                return
            try:
                await self._delete_namespace(record, lease)
            except UnseenError:
                await self._save(record.with_lease(structs.replace(lease, ended=True)))
                raise
            await self._save(left)

    # One GPU's server; its lock is held

    async def _delete_namespace(self, record: _Record, lease: _Lease) -> None:
        """Raises UnavailableError while a client is attached, UnseenError without a reply."""
        control = self._control(record.device)
        is_there = await self._status_of(record) and lease.namespace in (
            await self._namespaces(control)
        )
        if is_there:
            await control.call("namespace", "delete", lease.namespace, f"--server={SERVER}")

    async def _start(self, record: _Record) -> _Record:
        control = self._control(record.device)
        if reason := await self.missing_reason():
            raise UnavailableError(reason)
        await asyncio.to_thread(control.kill_all)  # a server of a daemon that was killed
        await control.start({}, "-p", "3", "-m")
        try:
            await control.call(
                "server", "create", SERVER, "--uid=0", f"--allowed-devices={record.device}"
            )
            await self._await_ready(control)
            await self._set(control, DEFAULT, LEAST_PERCENT, LEAST_MIB)
            for lease in record.leases:
                await self._apply(lease)
        except LeaseholdError:
            await self._end(record.device)
            raise
        listener = await asyncio.to_thread(control.listener)
        started = structs.replace(record, listener=listener)
        await self._save(started)
        logger.info("a server of MPS runs for GPU %s: PID %d", record.device, control.read_pid())
        return started

    async def _await_ready(self, control: MpsControl) -> None:
        until = time.monotonic() + self.ready_s
        while (status := await self._status(control)) != READY:
            if time.monotonic() > until:
                raise UnavailableError(
                    f"the server of MPS is {status or 'missing'} {self.ready_s:g} s after its "
                    f"start: see {control.logs}"
                )
            await asyncio.sleep(LOOK_S)

    async def _status(self, control: MpsControl) -> str:
        """Return an empty text without a server.

        Raises UnseenError if that is not known: what may run for others is not started anew.
        """
        try:
            return (await control.call("server", "get", SERVER, "status")).strip()[:32]
        except UnseenError:
            raise
        except UnavailableError:
            return ""

    async def _apply(self, lease: _Lease) -> None:
        """Raises UnavailableError if the namespace has other limits."""
        control = self._control(lease.target.gpu)
        namespaces = await self._namespaces(control)
        if lease.namespace not in namespaces:
            await control.call("namespace", "create", lease.namespace, f"--server={SERVER}")
        elif namespaces[lease.namespace].has(lease.limits):
            return
        [mib] = lease.limits.memory_mib.values()
        await self._set(control, lease.namespace, lease.limits.percent, mib)

    async def _set(
        self, control: MpsControl, namespace: str, percent: int, mib: int | None
    ) -> None:
        memory = () if mib is None else (f"--pinned-memory-limit={mib}M",)
        threads = f"--active-thread-percentage={percent}"
        # What default has are the limits of the server.
        which: tuple[str, ...] = ("server", "set", SERVER)
        if namespace != DEFAULT:
            which = ("namespace", "set", namespace, f"--server={SERVER}")
        await control.call(*which, threads, *memory)
        row = (await self._namespaces(control)).get(namespace)
        if row is None or row.percent != percent or row.memory_mib != mib:
            raise UnavailableError(
                f"the namespace {namespace} of MPS has {row} after {percent} % of the threads and "
                f"{mib} MiB were set"
            )

    async def _read(self, record: _Record, lease: _Lease) -> MpsDaemon:
        control = self._control(record.device)
        row = (await self._namespaces(control)).get(lease.namespace)
        if row is None:
            return self._unread(lease.target, NO_NAMESPACE)
        memory = {record.device: row.memory_mib}
        pid = (await control.call("server", "get", SERVER, "pid")).strip()
        server = MpsServer(
            pid=int(pid) if pid.isdecimal() else 0,
            status=row.status,
            percent=row.percent,
            memory_mib=memory,
            clients=tuple(sorted(await self._clients(lease))),
        )
        return MpsDaemon(
            pipes=row.pipes,
            pid=await asyncio.to_thread(control.read_pid),
            percent=row.percent,
            memory_mib=memory,
            servers=(server,),
        )

    def _unread(self, target: MpsTarget, problem: str) -> MpsDaemon:
        pipes = self._control(target.gpu).pipes / SERVER
        name = daemon_name(target.holder, target.container)
        return MpsDaemon(pipes=str(pipes / name), problem=problem)

    async def _namespaces(self, control: MpsControl) -> Mapping[str, _Namespace]:
        """Raises UnavailableError for other text."""
        text = await control.call(
            "namespace", "list", f"--server={SERVER}", "--format=csv,noheader"
        )
        rows = [line.split(",") for line in text.splitlines() if line.strip()]
        return {row[0]: _namespace(row) for row in rows}

    async def _clients(self, lease: _Lease) -> frozenset[int]:
        """The list ends each row with a command line, by which a program can add rows.

        So each PID is queried by itself, first those of the lease's pod.
        """
        control = self._control(lease.target.gpu)
        text = await control.call("client", "list", f"--server={SERVER}", "--format=csv,noheader")
        listed = {int(pid) for pid, name in _ROW.findall(text) if name == lease.namespace}
        holder = lease.target.holder

        def rank(pid: int) -> tuple[bool, int]:
            return pod_of_process(self.node.proc / str(pid)) != holder, pid

        by_pod = await asyncio.to_thread(sorted, listed, key=rank)
        attached = [pid for pid in by_pod[:MOST_CLIENTS] if await self._is_client(lease, pid)]
        return frozenset(attached)

    async def _is_client(self, lease: _Lease, pid: int) -> bool:
        control = self._control(lease.target.gpu)
        try:
            namespace = await control.call("client", "get", str(pid), "maws-ns")
        except UnseenError:
            raise
        except UnavailableError:  # it is none, or has ended
            return False
        return namespace.strip() == lease.namespace

    async def _terminate(self, device: DeviceUuid, client: int) -> None:
        control = self._control(device)
        with ending_work_of(client):
            await control.call("client", "terminate", str(client), limit_s=TERMINATE_S)

    async def _status_of(self, record: _Record) -> str:
        """Return an empty text if what was started does not listen."""
        control = self._control(record.device)
        listener = await asyncio.to_thread(control.listener)
        return await self._status(control) if listener and listener == record.listener else ""

    async def _end(self, device: DeviceUuid) -> int:
        """Return how many processes had to be killed."""
        control = self._control(device)
        for command in (("server", "delete", SERVER, "--force"), ("-q",)):
            with contextlib.suppress(LeaseholdError):
                await control.call(*command, limit_s=END_S)
        return await control.end()

    # Files

    def _lock(self, target: MpsTarget) -> AbstractAsyncContextManager[None]:
        return self._records.lock(shared_daemon_name(target.gpu))

    def _control(self, device: DeviceUuid) -> MpsControl:
        return self.node.control(shared_daemon_name(device))

    async def _required(self, target: MpsTarget) -> _Lease:
        lease = (await self._record(target.gpu)).lease_of(target)
        if lease is None:
            raise RequestError(f"{target} has no namespace of MPS")
        return lease

    async def _record(self, device: DeviceUuid) -> _Record:
        return await self._records.load(shared_daemon_name(device)) or _Record(device)

    async def _save(self, record: _Record) -> None:
        await self._records.save(shared_daemon_name(record.device), record)


def _namespace(row: Sequence[str]) -> _Namespace:
    """Raises UnavailableError for another row."""
    try:
        _, server, status, memory, threads, _, pipes = (cell.strip() for cell in row)
    except ValueError as error:
        raise UnavailableError(f"MPS lists a namespace as {','.join(row)[:80]!r}") from error
    if server != SERVER:
        raise UnavailableError(f"MPS lists a namespace of server {server[:64]!r}")
    return _Namespace(
        status=status,
        memory_mib=None if memory == UNSET else parse_memory_mib(memory),
        percent=ALL_THREADS if threads == UNSET else parse_percent(threads),
        pipes=pipes,
    )
