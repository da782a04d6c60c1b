"""Sources of budgets: GPUBudget objects of the cluster, and a file with the same objects.

The last valid version of an object stays in force; its status has it for a timekeeper that starts
again. Without one, new pods of the namespace wait.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import structs

from services.timekeeper.config.budget_spec import (
    ALL_OTHERS,
    KIND,
    LAST_VALID,
    StatusCopy,
    parse_spec,
    parse_status,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kinds.custom_kinds import API_VERSION, LatestSpecs
from shared.kubernetes.kinds.gpu_prices import PriceFile
from shared.kubernetes.kinds.object_files import load_objects
from shared.kubernetes.reflector import UNKNOWN_KIND_RETRY_S, follow
from shared.kubernetes.types import RawObject
from shared.model.bounds import cut
from shared.model.budgets.budget import Budget
from shared.model.clock import wait_for_event
from shared.model.errors import RequestError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

PATH = f"/apis/{API_VERSION}/gpubudgets"
FILE_POLL_S = 2.0
"""Interval of looks whether the file has changed."""
SYNC_TIMEOUT_S = 30.0
"""How long the timekeeper waits for budgets at its start, before it counts without them."""
NEW_PODS_WAIT = "new pods of the namespace wait until it is valid"
T = TypeVar("T")


def in_money(budget: Budget, prices: PriceFile) -> Budget:
    """A budget in money is invalid without prices."""
    why = budget.currency and prices.prices.refusal(budget.currency)
    if not why:
        return budget
    problem = f"{KIND} {budget.namespace}: {why} (--prices of the timekeeper); {NEW_PODS_WAIT}"
    return structs.replace(budget, problem=problem, unreadable=True)


def load_file(path: Path) -> dict[Namespace, Budget]:
    """Raises RequestError."""
    return load_objects(path, KIND, parse_spec)


@dataclass(slots=True)
class BudgetFile:
    path: Path
    prices: PriceFile = field(default_factory=PriceFile)
    budgets: Mapping[Namespace, Budget] = field(default_factory=dict)
    problem: str = ""
    _loaded_stamp: tuple[int, int] = (0, 0)

    def load(self) -> None:
        """Raises RequestError."""
        self._loaded_stamp = self._file_stamp()
        try:
            self.budgets = load_file(self.path)
        except RequestError as error:
            self.problem = f"{cut(str(error))}; {LAST_VALID}"
            raise
        self.problem = ""

    async def watch(self) -> None:
        """An invalid file changes nothing."""
        while True:
            await asyncio.sleep(FILE_POLL_S)
            if self._file_stamp() == self._loaded_stamp:
                continue
            try:
                self.load()
                logger.info("%s was loaded again: %d budgets", self.path, len(self.budgets))
            except RequestError as error:
                logger.error("%s; %s", error, LAST_VALID)  # noqa: TRY400

    def find(self, name: Namespace) -> Budget | None:
        budget = self.budgets.get(name)
        return budget and in_money(structs.replace(budget, problem=self.problem), self.prices)

    def _file_stamp(self) -> tuple[int, int]:
        try:
            status = self.path.stat()
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size


@dataclass(slots=True)
class ConfiguredObjects(Generic[T]):
    client: KubernetesClient
    path: str
    latest: LatestSpecs[T]
    synced: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self) -> None:
        logged = ""
        latest = self.latest
        async with aclosing(
            follow(self.client, self.path, RawObject, retry_s=UNKNOWN_KIND_RETRY_S)
        ) as batches:
            async for batch in batches:
                for named, item in batch.changed:
                    before = latest.problems.get(Namespace(named.name))
                    if item is None:
                        latest.remove(Namespace(named.name))
                    elif (problem := latest.apply(item)) and problem != before:
                        logger.error("%s", problem)
                if batch.listed or isinstance(batch.refusal, NotFoundError):
                    self.synced.set()
                if batch.refusal is not None and str(batch.refusal) != logged:
                    logged = str(batch.refusal)
                    logger.warning("%s cannot be read: %s", self.path, logged)


class BudgetObjects(ConfiguredObjects[Budget]):
    def __init__(self, client: KubernetesClient, prices: PriceFile | None = None) -> None:
        super().__init__(client, PATH, LatestSpecs(parse_spec))
        self.prices = prices or PriceFile()

    def find(self, name: Namespace) -> Budget | None:
        problem = self.latest.problems.get(name, "")
        budget = self.latest.valid.get(name)
        if budget is not None:
            budget = structs.replace(budget, problem=problem and f"{problem}; {LAST_VALID}")
            return in_money(budget, self.prices)
        problem = problem and f"{problem}; {NEW_PODS_WAIT}"
        return Budget(namespace=name, problem=problem, unreadable=True) if problem else None

    def status_copies(self) -> dict[Namespace, StatusCopy]:
        copies = (
            (name, parse_status(item.status, self.latest.valid.get(name)))
            for name, item in self.latest.items.items()
        )
        return {name: copy for name, copy in copies if copy is not None}


@dataclass(slots=True)
class ConfiguredBudgets:
    """Objects come before the file, and that before its budget named `*`."""

    file: BudgetFile | None = None
    objects: BudgetObjects | None = None
    prices: PriceFile = field(default_factory=PriceFile)

    def budget_of(self, namespace: Namespace) -> Budget:
        sources = [source for source in (self.objects, self.file) if source is not None]
        for name in (namespace, ALL_OTHERS):
            for source in sources:
                if (budget := source.find(name)) is not None:
                    return structs.replace(budget, namespace=namespace)
        return Budget(namespace=namespace)

    def namespaces(self) -> Iterable[Namespace]:
        named = set(self.file.budgets) if self.file else set()
        if self.objects is not None:
            named |= self.objects.latest.items.keys()
        return named - {ALL_OTHERS}

    def status_copies(self) -> Mapping[Namespace, StatusCopy]:
        return {} if self.objects is None else self.objects.status_copies()

    async def wait_until_synced(self) -> None:
        if self.objects is None:
            return
        if not await wait_for_event(self.objects.synced, SYNC_TIMEOUT_S):
            logger.warning("the API server does not respond; counting starts without its %ss", KIND)

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
            if self.file is not None:
                tasks.create_task(self.file.watch())
            if self.objects is not None:
                tasks.create_task(self.objects.watch())
