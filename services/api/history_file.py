"""The history of this replica, in a file of bounded size, and the pods that finished in a day.

Of each kind of subject, a row has the values of all subjects at an instant: a subject is a position
in it. A value is a number of 16 bits, exact to 0.05 percent.
"""

import asyncio
import logging
import sqlite3
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec
from msgspec import structs

from services.api.history import (
    ALL_CORES,
    AMOUNTS,
    CLUSTER,
    COLUMNS,
    DEVICE,
    HARDWARE,
    KINDS,
    NAMESPACE,
    POD,
    RANGES,
    WAITING,
    HistoryRange,
    Recorded,
    Sample,
    Subject,
    Values,
)
from shared.model.errors import UNDECODABLE, UnavailableError
from shared.model.names import PodUid
from shared.model.views import FinishedPod

logger = logging.getLogger(__name__)

T = TypeVar("T")
VERSION = 2
TABLES = """
CREATE TABLE series (kind TEXT, position INTEGER, name TEXT, since REAL,
    PRIMARY KEY (kind, position));
CREATE TABLE samples (range TEXT, kind TEXT, at REAL, row BLOB, PRIMARY KEY (range, kind, at));
CREATE TABLE finished (pod TEXT PRIMARY KEY, ended REAL, facts BLOB);
CREATE INDEX by_end ON finished (ended);
"""
PAGES = 65_536
"""At most 256 MiB."""
MOST_SERIES = 20_000
"""Subjects of one kind, and finished pods."""
DAY_S, HOUR_S = 86_400.0, 3600.0
NAN, HIGHEST = float("nan"), 65_504.0
SCALES = {
    "memory": 2.0**20,
    "used_memory": 2.0**20,
    "cores": 100.0,
    "used_cores": 100.0,
    "idle": 100.0,
}
"""What amounts are divided by, so that those of the largest clusters fit into 16 bits."""


@dataclass(slots=True)
class _Series:
    """The position of a subject in the rows of its kind."""

    position: int
    since: float
    """Earlier values at the position are of another subject."""
    seen: float


class _Layout:
    """The values of one kind's subjects in a row."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.columns = COLUMNS.get(kind, AMOUNTS)
        self.scales = [SCALES.get(name, 1.0) for name in self.columns]
        self.one = struct.Struct(f"<{len(self.columns)}e")
        self.blank = self.one.pack(*[NAN] * len(self.columns))
        self.kept_s = DAY_S if kind == POD else RANGES[-1].span_s + RANGES[-1].step_s
        self.known: dict[str, _Series] = {}
        self.free: list[int] = []
        self.absent = [0.0] * len(self.columns) if kind in {NAMESPACE, WAITING} else None
        """The values of a subject that a sample lacks: zero if it holds nothing, or none."""

    def row_of(self, values: Mapping[str, Values]) -> bytes:
        """Return the row of subjects that have positions."""
        row = bytearray(self.blank * (len(self.known) + len(self.free)))
        absent = {} if self.absent is None else dict.fromkeys(self.known, self.absent)
        for name, of_one in {**absent, **values}.items():
            if name in self.known:
                scaled = (
                    NAN if value is None else min(value / scale, HIGHEST)
                    for value, scale in zip(of_one, self.scales, strict=True)
                )
                self.one.pack_into(row, self.known[name].position * self.one.size, *scaled)
        return bytes(row)

    def values_at(self, row: bytes, series: _Series, at: float) -> Values:
        """Return the values of a subject at an instant."""
        begin = series.position * self.one.size
        if at < series.since or len(row) < begin + self.one.size:
            return [None] * len(self.columns)
        found = self.one.unpack_from(row, begin)
        return [
            None if isnan(value) else round(value * scale, 1)
            for value, scale in zip(found, self.scales, strict=True)
        ]

    def mean_of(self, rows: Sequence[bytes]) -> bytes:
        """Return the means of rows; what is not known does not count."""
        unpacked = [struct.unpack(f"<{len(row) // 2}e", row) for row in rows]
        means = []
        for values in zip_longest(*unpacked, fillvalue=NAN):
            known = [value for value in values if not isnan(value)]
            means.append(fmean(known) if known else NAN)
        return struct.pack(f"<{len(means)}e", *means)


class HistoryFile:
    """The history of one replica; while its file cannot be written, in memory."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._worker = ThreadPoolExecutor(1, "history")
        """Its one thread goes on, one step after another, when nobody waits for a step any more."""
        self._db: sqlite3.Connection | None = None
        self._layouts: dict[str, _Layout] = {}

    async def add(self, sample: Callable[[], Sample], now: float) -> None:
        """Add a sample, which is made in a thread."""
        await self._run(lambda db: self._add(db, sample(), now))

    async def read(self, subject: Subject, within: HistoryRange, now: float) -> Recorded:
        """Return the values of a subject."""
        return await self._run(lambda db: self._read(db, subject.kind, subject.name, within, now))

    async def add_finished(self, pods: Sequence[FinishedPod], now: float) -> None:
        """Add pods that have finished, with the means of their usage."""
        await self._run(lambda db: self._add_finished(db, pods, now))

    async def finished(self, now: float, pod: PodUid | None = None) -> list[FinishedPod]:
        """Return the pods that finished within a day, the latest first; or this one of them."""
        query = (
            "SELECT facts FROM finished WHERE ended > ? AND pod = ifnull(?, pod) "
            "ORDER BY ended DESC"
        )
        decode = msgspec.json.Decoder(FinishedPod).decode
        return await self._run(
            lambda db: [decode(facts) for (facts,) in db.execute(query, (now - DAY_S, pod))]
        )

    async def aclose(self) -> None:
        """Close the file, after the steps that were begun."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._close)
        self._worker.shutdown(wait=False)

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Work in a transaction and a thread. Raises UnavailableError with the reason."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._in_transaction, work)

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._db is None:
            self._db = self._open()
        try:
            with self._db:
                return work(self._db)
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"the history in {self.path}: {error}") from error
        except (sqlite3.DatabaseError, *UNDECODABLE, struct.error) as error:
            self._db.close()
            self._db = self._begin_anew(error)
            raise UnavailableError("the history was damaged, and begins anew") from error

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._connect(str(self.path))
        except (OSError, sqlite3.OperationalError) as error:
            logger.warning(
                "the history does not survive a restart: %s cannot be used: %s", self.path, error
            )
            return self._connect(":memory:")
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            return self._begin_anew(error)

    def _begin_anew(self, error: Exception) -> sqlite3.Connection:
        logger.warning("the history in %s is damaged, and begins anew: %s", self.path, error)
        for suffix in ("", "-wal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        return self._open()

    def _connect(self, path: str) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
        try:
            self._load(db)
        except BaseException:
            db.close()
            raise
        return db

    def _load(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # another process has its own file
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA max_page_count = {PAGES}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, not {VERSION}")
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        self._layouts = {kind: _Layout(kind) for kind in KINDS}
        for kind, position, name, since in db.execute("SELECT * FROM series"):
            self._layouts[kind].known[name] = _Series(position, since, 0.0)
        for layout in self._layouts.values():
            used = {series.position for series in layout.known.values()}
            layout.free = [each for each in range(max(used, default=-1)) if each not in used]

    def _add(self, db: sqlite3.Connection, sample: Sample, now: float) -> None:
        shortest = RANGES[0].name
        for kind, values in sample.items():
            layout = self._layouts[kind]
            self._place(db, layout, values, now)
            row = layout.row_of(values)
            db.execute(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", (shortest, kind, now, row)
            )
        for shorter, longer in pairwise(RANGES):
            self._condense(db, shorter, longer, now)
        for each in RANGES:
            before = now - each.span_s - each.step_s
            db.execute("DELETE FROM samples WHERE range = ? AND at < ?", (each.name, before))

    def _place(
        self, db: sqlite3.Connection, layout: _Layout, names: Iterable[str], now: float
    ) -> None:
        """Give new subjects a position, at the limit that of one that is gone for longest."""
        for name in names:
            if name in layout.known:
                layout.known[name].seen = now
                continue
            position = len(layout.known)
            if layout.free:
                position = layout.free.pop()
            elif position >= MOST_SERIES:
                gone = min(layout.known, key=lambda each: layout.known[each].seen)
                if layout.known[gone].seen == now:
                    return
                position = layout.known.pop(gone).position
            layout.known[name] = _Series(position, now, now)
            new = (layout.kind, position, name, now)
            db.execute("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?)", new)

    def _condense(
        self, db: sqlite3.Connection, shorter: HistoryRange, longer: HistoryRange, now: float
    ) -> None:
        """Add the means of the latest whole step of a longer range, unless they are there."""
        end = now // longer.step_s * longer.step_s
        known = "SELECT 1 FROM samples WHERE range = ? AND at >= ?"
        if db.execute(known, (longer.name, end)).fetchone():
            return
        rows = "SELECT row FROM samples WHERE range = ? AND kind = ? AND at > ? AND at <= ?"
        for kind, layout in self._layouts.items():
            within = (shorter.name, kind, end - longer.step_s, end)
            found = [row for (row,) in db.execute(rows, within)]
            if not found:
                continue
            new = (longer.name, kind, end, layout.mean_of(found))
            db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", new)
            for name, series in list(layout.known.items()):
                series.seen = series.seen or now
                if now - series.seen > layout.kept_s:
                    del layout.known[name]
                    layout.free.append(series.position)
                    place = (kind, series.position)
                    db.execute("DELETE FROM series WHERE kind = ? AND position = ?", place)

    def _read(
        self, db: sqlite3.Connection, kind: str, name: str, within: HistoryRange, now: float
    ) -> Recorded:
        more = {CLUSTER: WAITING, DEVICE: HARDWARE}.get(kind)
        instants, columns = self._columns(db, kind, [name], within, now)
        found = columns.get(name, {})
        waiting: dict[str, Values] = {}
        if more == HARDWARE:
            found |= self._columns(db, HARDWARE, [name], within, now)[1].get(name, {})
        elif more == WAITING:
            _, reasons = self._columns(db, WAITING, list(self._layouts[WAITING].known), within, now)
            waiting = {reason: values["pods"] for reason, values in reasons.items()}
        return Recorded(at=instants, columns=found, waiting=waiting)

    def _columns(
        self,
        db: sqlite3.Connection,
        kind: str,
        names: Sequence[str],
        within: HistoryRange,
        now: float,
    ) -> tuple[list[float], dict[str, dict[str, Values]]]:
        """Return the instants, and the columns of subjects that are known."""
        layout = self._layouts[kind]
        query = "SELECT at, row FROM samples WHERE range = ? AND kind = ? AND at > ? ORDER BY at"
        rows = db.execute(query, (within.name, kind, now - within.span_s)).fetchall()
        latest = f"{query} DESC LIMIT 1"
        rows += db.execute(latest, (RANGES[0].name, kind, rows[-1][0] if rows else 0.0)).fetchall()
        found: dict[str, dict[str, Values]] = {}
        for name in names:
            if name in layout.known:
                values = [layout.values_at(row, layout.known[name], at) for at, row in rows]
                found[name] = dict(zip(layout.columns, zip(*values, strict=True), strict=False))
        return [at for at, _ in rows], found

    def _add_finished(
        self, db: sqlite3.Connection, pods: Sequence[FinishedPod], now: float
    ) -> None:
        by_range: dict[HistoryRange, list[FinishedPod]] = {}
        for pod in pods:
            ran_s = pod.ended - pod.started
            within = next((each for each in RANGES if each.span_s >= ran_s), RANGES[-1])
            by_range.setdefault(within, []).append(pod)
        for within, of_range in by_range.items():
            _, columns = self._columns(db, POD, [pod.pod for pod in of_range], within, now)
            finished = (_with_usage(pod, columns.get(pod.pod, {})) for pod in of_range)
            rows = [(pod.pod, pod.ended, msgspec.json.encode(pod)) for pod in finished]
            db.executemany("INSERT OR REPLACE INTO finished VALUES (?, ?, ?)", rows)
        db.execute("DELETE FROM finished WHERE ended < ?", (now - DAY_S,))
        newest = "SELECT pod FROM finished ORDER BY ended DESC LIMIT ?"
        db.execute(f"DELETE FROM finished WHERE pod NOT IN ({newest})", (MOST_SERIES,))  # noqa: S608


def _with_usage(pod: FinishedPod, columns: Mapping[str, Values]) -> FinishedPod:
    """Return a pod with the means of its usage."""
    memory, cores, idle = (
        [value for value in columns.get(name, ()) if value is not None]
        for name in ("used_memory", "used_cores", "idle")
    )
    hours = (pod.ended - pod.started) / HOUR_S
    return structs.replace(
        pod,
        used_memory_mib=round(fmean(memory)) if memory else None,
        used_cores_percent=round(fmean(cores)) if cores else None,
        idle_gpu_hours=round(fmean(idle) / ALL_CORES * hours, 4) if idle else None,
    )
