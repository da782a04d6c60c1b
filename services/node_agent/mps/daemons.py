"""Starts, limits, reads, repairs and ends the control daemons of MPS of a node.

A container may write to the directory of its daemon, so what is there is not believed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from msgspec import Struct, structs

from services.node_agent.mps.control import (
    END_S,
    PIPES,
    TERMINATE_S,
    MpsControl,
    ending_work_of,
)
from services.node_agent.mps.daemon import (
    MpsDaemon,
    MpsLimits,
    MpsServer,
    MpsTarget,
    StartedDaemon,
    check_limits,
    parse_memory_mib,
    parse_percent,
    parse_pids,
)
from services.node_agent.mps.daemon_directories import DaemonRecords, MpsNode
from shared.dialects.mps import MEMORY_VARIABLE, THREADS_VARIABLE, daemon_name
from shared.dialects.reserved import CHOSEN
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)

RECORD = "daemon.json"
NOT_RUNNING = "its daemon does not run, or another process is in its place"


class _Record(Struct, frozen=True):
    target: MpsTarget
    fence: int
    limits: MpsLimits
    listener: int = 0
    """0 before the start."""
    started_at: float = 0.0


class MpsDaemons:
    """Calls raise RequestError for an older fence or an unknown daemon, or UnavailableError."""

    def __init__(self, node: MpsNode) -> None:
        self.node = node
        self._records = DaemonRecords(node.root, RECORD, _Record)

    async def missing_reason(self) -> str:
        return self.node.missing_reason(daemon_name(PodUid(""), ""), PIPES)

    async def ensure(self, target: MpsTarget, *, fence: int, limits: MpsLimits) -> MpsDaemon:
        """Return what the daemon replied.

        One that runs, and that nobody else has replaced, gets the limits for processes that start
        later.
        """
        check_limits(limits)
        async with self._records.lock(_name(target)):
            record = await self._records.load(_name(target))
            if record is not None and fence < record.fence:
                raise RequestError(f"{target} has a newer lease, with fence {record.fence}")
            kept = record is not None and await self._runs(record)
            if record is None or not kept:
                record = _Record(target, fence, limits)
                await self._start(record)
            else:
                updated = structs.replace(record, fence=fence, limits=limits)
                if updated != record:
                    await self._records.save(_name(target), updated)
            return await self._read(await self._required(target), set_differing=True)

    async def get(self, target: MpsTarget) -> MpsDaemon:
        async with self._records.lock(_name(target)):
            record = await self._records.load(_name(target))
            pipes = str(self._control(target).pipes)
            if record is None or not await self._runs(record):
                return MpsDaemon(pipes=pipes, problem=NOT_RUNNING)
            try:
                return await self._read(record)
            except UnavailableError as error:
                return MpsDaemon(pipes=pipes, problem=str(error))

    async def list(self) -> tuple[StartedDaemon, ...]:
        return tuple(
            StartedDaemon(record.target, record.fence, record.started_at)
            for record in await self._records.load_all()
        )

    async def terminate(self, target: MpsTarget, clients: Iterable[int]) -> None:
        """End the work of clients, so that they can be killed.

        Raises WedgedError if it does not end.
        """
        async with self._records.lock(_name(target)):
            await self._required(target)
            wanted = set(clients)
            for server, attached in await self._clients(target):
                for client in sorted(wanted & attached):
                    await self._terminate(target, server, client)

    async def probe(self, target: MpsTarget) -> None:
        """Raises WedgedError if a new client hangs."""
        await self.node.probe(target, self._control(target))

    async def repair(self, target: MpsTarget) -> str:
        """Return what was done."""
        async with self._records.lock(_name(target)):
            record = await self._required(target)
            clients, processes = await self._end(record)
            await self._start(record)
            await self._read(await self._required(target))
        killed = f", killed {processes} of its processes" if processes else ""
        return (
            f"ended the work of {clients} processes, ended the daemon{killed}, started it again, "
            "and read its limits back"
        )

    async def stop(self, target: MpsTarget, *, fence: int) -> None:
        """The daemon of a newer lease stays."""
        async with self._records.lock(_name(target)):
            record = await self._records.load(_name(target))
            if record is None:
                return
            if fence < record.fence:
                raise RequestError(f"{target} has a newer lease, with fence {record.fence}")
            await self._end(record)
            await asyncio.to_thread(self._control(target).remove)
            logger.info("the daemon of MPS of %s is ended", target)

    # One daemon; its lock is held

    async def _start(self, record: _Record) -> None:
        target = record.target
        control = self._control(target)
        if reason := await self.missing_reason():
            raise UnavailableError(reason)
        await self._records.save(_name(target), record)
        await asyncio.to_thread(control.kill_all)  # servers of a daemon that was killed
        memory = ",".join(f"{device}={mib}M" for device, mib in _held(record.limits))
        await control.start(
            {
                CHOSEN: ",".join(record.limits.memory_mib),
                THREADS_VARIABLE: str(record.limits.percent),
                **({MEMORY_VARIABLE: memory} if memory else {}),
            }
        )
        try:
            await self._set(control, record.limits)
            self._check(record, await self._read(record))
        except LeaseholdError:
            await self._end(record)
            raise
        listener = await asyncio.to_thread(control.listener)
        started = structs.replace(record, listener=listener, started_at=time.time())
        await self._records.save(_name(target), started)
        logger.info("a daemon of MPS runs for %s: PID %d", target, control.read_pid())

    async def _set(self, control: MpsControl, limits: MpsLimits, server: int = 0) -> None:
        """Without a server, set the defaults; with one, what clients get that connect later."""
        which = f" {server}" if server else ""
        kind = "" if server else "default_"
        await control.send(f"set_{kind}active_thread_percentage{which} {limits.percent}")
        for device, mib in _held(limits):
            await control.send(f"set_{kind}device_pinned_mem_limit{which} {device} {mib}M")

    async def _read(self, record: _Record, *, set_differing: bool = False) -> MpsDaemon:
        control = self._control(record.target)
        daemon = await self._read_once(control, record.limits)
        if set_differing and (wrong := list(_differing(daemon, record.limits))):
            for server in wrong:
                await self._set(control, record.limits, server)
            daemon = await self._read_once(control, record.limits)
        return daemon

    async def _read_once(self, control: MpsControl, limits: MpsLimits) -> MpsDaemon:
        percent, memory = await self._read_limits(control, limits)
        servers = []
        for pid in parse_pids(await control.send("get_server_list")):
            try:
                own_percent, own_memory = await self._read_limits(control, limits, pid)
                status = (await control.send(f"get_server_status {pid}")).strip()
                clients = parse_pids(await control.send(f"get_client_list {pid}"))
            except UnavailableError:
                if pid in parse_pids(await control.send("get_server_list")):
                    raise
                continue  # it has ended meanwhile
            servers.append(
                MpsServer(
                    pid=pid,
                    status=status,
                    percent=own_percent,
                    memory_mib=own_memory,
                    clients=clients,
                )
            )
        return MpsDaemon(
            pipes=str(control.pipes),
            pid=await asyncio.to_thread(control.read_pid),
            percent=percent,
            memory_mib=memory,
            servers=tuple(servers),
        )

    async def _read_limits(
        self, control: MpsControl, limits: MpsLimits, server: int = 0
    ) -> tuple[float, dict[DeviceUuid, int | None]]:
        which = f" {server}" if server else ""
        kind = "" if server else "default_"
        percent = parse_percent(await control.send(f"get_{kind}active_thread_percentage{which}"))
        memory: dict[DeviceUuid, int | None] = {}
        for device, _ in _held(limits):
            reply = await control.send(f"get_{kind}device_pinned_mem_limit{which} {device}")
            memory[device] = parse_memory_mib(reply)
        return percent, memory

    def _check(self, record: _Record, daemon: MpsDaemon) -> None:
        if list(_differing(daemon, record.limits)):
            raise UnavailableError(
                f"the daemon of MPS of {record.target} has {daemon.percent:g} % of the threads and "
                f"{daemon.memory_mib} MiB after {record.limits.percent} % and "
                f"{dict(_held(record.limits))} were set"
            )

    async def _clients(self, target: MpsTarget) -> tuple[tuple[int, frozenset[int]], ...]:
        control = self._control(target)
        servers = parse_pids(await control.send("get_server_list"))
        lists = [parse_pids(await control.send(f"get_client_list {pid}")) for pid in servers]
        return tuple(zip(servers, map(frozenset, lists), strict=True))

    async def _terminate(self, target: MpsTarget, server: int, client: int) -> None:
        with ending_work_of(client):
            await self._control(target).send(f"terminate_client {server} {client}", TERMINATE_S)

    async def _runs(self, record: _Record) -> bool:
        control = self._control(record.target)
        listener = await asyncio.to_thread(control.listener)
        if not listener or listener != record.listener:
            return False
        try:
            await control.send("get_server_list")
        except UnavailableError:
            return False
        return True

    async def _end(self, record: _Record) -> tuple[int, int]:
        """Return how many clients were ended, and how many processes had to be killed."""
        target = record.target
        control = self._control(target)
        clients = 0
        with contextlib.suppress(LeaseholdError):
            for server, attached in await self._clients(target):
                for client in attached:
                    clients += 1
                    with contextlib.suppress(LeaseholdError):
                        await self._terminate(target, server, client)
        with contextlib.suppress(LeaseholdError):
            await control.send("quit", END_S)
        return clients, await control.end()

    # Files

    def _control(self, target: MpsTarget) -> MpsControl:
        return self.node.control(_name(target))

    async def _required(self, target: MpsTarget) -> _Record:
        record = await self._records.load(_name(target))
        if record is None:
            raise RequestError(f"{target} has no daemon of MPS")
        return record


def _name(target: MpsTarget) -> str:
    return daemon_name(target.holder, target.container)


def _held(limits: MpsLimits) -> Iterable[tuple[DeviceUuid, int]]:
    return ((device, mib) for device, mib in limits.memory_mib.items() if mib is not None)


def _differing(daemon: MpsDaemon, limits: MpsLimits) -> Iterable[int]:
    """Yield 0 if the defaults differ from the limits, and the PIDs of servers whose limits do."""
    held: list[tuple[int, MpsDaemon | MpsServer]] = [(0, daemon)]
    held += ((server.pid, server) for server in daemon.servers)
    for pid, of in held:
        memory = {device: of.memory_mib.get(device) for device, _ in _held(limits)}
        if of.percent != limits.percent or memory != dict(_held(limits)):
            yield pid
