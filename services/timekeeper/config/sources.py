"""Where budgets are configured: GPUBudget objects of the cluster, and a file with the same objects.

What cannot be read is said once, and the last good one stays in force.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from services.timekeeper.config.configuration import (
    API_VERSION,
    EVERYBODY,
    KIND,
    Fields,
    read_budget,
    read_spec,
)
from services.timekeeper.report.statuses import StatusCopy, read_status
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.known_objects import ListSynced, ObjectAdded, ObjectDeleted, ObjectUpdated
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ObjectMeta
from shared.model.budget import Budget
from shared.model.errors import RequestError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

PATH = f"/apis/{API_VERSION}/gpubudgets"
LOOK_EVERY_S = 2.0
MISSING_S = 5.0
READY_S = 30.0


def load_file(path: Path) -> dict[Namespace, Budget]:
    """Read the budgets of a file. Raises RequestError naming the file and what is wrong in it."""
    try:
        items = [item for item in yaml.safe_load_all(path.read_text("utf-8")) if item is not None]
        return _by_namespace(map(read_budget, items))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; give a file of {KIND} objects") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is no YAML: {error}") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def _by_namespace(read: Iterable[Budget]) -> dict[Namespace, Budget]:
    budgets: dict[Namespace, Budget] = {}
    for budget in read:
        if budget.namespace in budgets:
            raise RequestError(f"{KIND} {budget.namespace} is there twice")
        budgets[budget.namespace] = budget
    return budgets


@dataclass(slots=True)
class BudgetFile:
    """Budgets of a file, read again when it changes."""

    path: Path
    budgets: Mapping[Namespace, Budget] = field(default_factory=dict)
    _seen: tuple[int, int] = (0, 0)

    def load(self) -> None:
        """Read the file. Raises RequestError if it cannot be read."""
        self._seen = self._stamp()
        self.budgets = load_file(self.path)

    async def follow(self) -> None:
        """Read it again whenever it changes; a file that cannot be read changes nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._stamp() == self._seen:
                continue
            try:
                self.load()
                logger.info("%s was read again: %d budgets", self.path, len(self.budgets))
            except RequestError as error:
                logger.error("%s; what it said before stays in force", error)  # noqa: TRY400

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0)
        return found.st_mtime_ns, found.st_size


class BudgetObject(msgspec.Struct, frozen=True):
    """A GPUBudget, as far as it is known whatever it says."""

    metadata: ObjectMeta = ObjectMeta()
    spec: Any = None
    status: Any = None


@dataclass(slots=True)
class BudgetObjects:
    """GPUBudget objects of a cluster."""

    kube: KubernetesClient
    budgets: dict[Namespace, Budget] = field(default_factory=dict)
    statuses: dict[Namespace, StatusCopy] = field(default_factory=dict)
    uids: dict[Namespace, str] = field(default_factory=dict)
    problems: dict[Namespace, str] = field(default_factory=dict)
    known: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """Follow the objects for ever; a cluster that does not know the kind is asked again."""
        while True:
            try:
                await self._watch()
            except NotFoundError:
                if not self.known.is_set():
                    logger.info("the cluster has no %s; `kubectl apply` its definition", KIND)
                self.known.set()
                await asyncio.sleep(MISSING_S)

    async def _watch(self) -> None:
        reflector = Reflector(self.kube, PATH, BudgetObject)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                for change in batch:
                    match change:
                        case ObjectAdded(item=item) | ObjectUpdated(item=item):
                            self._take(item)
                        case ObjectDeleted(item=item):
                            self._forget(Namespace(item.metadata.name))
                        case ListSynced():
                            self.known.set()

    def _take(self, item: BudgetObject) -> None:
        name = Namespace(item.metadata.name)
        self.uids[name] = item.metadata.uid
        try:
            spec = Fields({"spec": item.spec}, f"{KIND} {name}").inner("spec")
            self.budgets[name] = read_spec(name, spec)
            self.problems.pop(name, None)
        except RequestError as error:
            if self.problems.get(name) != str(error):
                logger.error("%s; what it said before stays in force", error)  # noqa: TRY400
            self.problems[name] = str(error)
        copy = read_status(item.status, self.budgets.get(name))
        if copy is not None:
            self.statuses[name] = copy

    def _forget(self, name: Namespace) -> None:
        for known in (self.budgets, self.statuses, self.uids, self.problems):
            known.pop(name, None)


@dataclass(slots=True)
class Configured:
    """All budgets: objects come before the file, and that before its budget for everybody."""

    file: BudgetFile | None = None
    objects: BudgetObjects | None = None

    def budget_of(self, namespace: Namespace) -> Budget:
        """Return a namespace's budget; without any it has no limit."""
        for budgets in self._sources():
            if namespace in budgets:
                return budgets[namespace]
        for budgets in self._sources():
            if EVERYBODY in budgets:
                return replace(budgets[EVERYBODY], namespace=namespace)
        return Budget(namespace=namespace)

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces that have budgets of their own."""
        return {name for budgets in self._sources() for name in budgets}.difference({EVERYBODY})

    def copies(self) -> Mapping[Namespace, StatusCopy]:
        """Return the statuses of the objects."""
        return {} if self.objects is None else self.objects.statuses

    async def ready(self) -> None:
        """Return once the objects were listed; after half a minute without an answer, anyway."""
        if self.objects is None:
            return
        try:
            async with asyncio.timeout(READY_S):
                await self.objects.known.wait()
        except TimeoutError:
            logger.warning("the API server is silent; counting goes on without its %ss", KIND)

    async def follow(self) -> None:
        """Follow file and objects for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
            if self.file is not None:
                tasks.create_task(self.file.follow())
            if self.objects is not None:
                tasks.create_task(self.objects.follow())

    def _sources(self) -> Sequence[Mapping[Namespace, Budget]]:
        return [each.budgets for each in (self.objects, self.file) if each is not None]
