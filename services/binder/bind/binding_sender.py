"""Sends Bindings: a fixed number in parallel, each pod on its own.

The Bindings of a batch that times out continue; when it is redelivered, it gets their results.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from services.binder.clients import PodClient
from shared.dialects import DIALECTS
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.leases.lease import Lease, LeaseState, end_text
from shared.model.leases.lease_copy import ANNOTATION, dump_lease
from shared.model.names import ENDS_AT_ANNOTATION, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from shared.runtime.service import loops

CONCURRENCY = 32
BATCH_WAIT_S = 2.0
"""How long a batch waits for the API server's answers, before the rest counts as in flight."""
MAX_RESULTS = 8192


class BindingOutcome(StrEnum):
    BOUND = "bound"
    ELSEWHERE = "elsewhere"
    DELETED = "deleted"
    """The pod may still run if an earlier Binding of it succeeded."""
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """The same Binding must be sent again."""


@dataclass(frozen=True, slots=True)
class BindingResult:
    outcome: BindingOutcome
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome not in {BindingOutcome.BOUND, BindingOutcome.UNKNOWN}


BOUND = BindingResult(BindingOutcome.BOUND)


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    """The kubelet counts the maximum run time from just after the Binding."""
    dialect = DIALECTS.get(lease.dialect)
    of_dialect = dialect.binding_annotations(lease, now_s) if dialect else {}
    ends_at = end_text(lease.term, now_s)
    own = {ENDS_AT_ANNOTATION: ends_at} if ends_at else {}
    return {**of_dialect, ANNOTATION: dump_lease(lease), **own}


def needs_binding(lease: Lease) -> bool:
    return lease.state is not LeaseState.ACTIVE


def judge(lease: Lease, error: LeaseholdError, pod: PodSnapshot | None) -> BindingResult:
    """Return the result of a Binding that failed, given the pod as read after it.

    After a timeout a pod on its lease's node is BOUND.
    """
    name = f"{lease.namespace}/{lease.name}"
    if pod is None:
        return BindingResult(BindingOutcome.DELETED, f"pod {name} was deleted before it was bound")
    if pod.pod == lease.pod and pod.node == lease.node and not pod.terminal:
        return BOUND
    results = (
        (
            pod.pod != lease.pod,
            BindingOutcome.DELETED,
            f"pod {name} was replaced: its uid was {lease.pod} and is {pod.pod} now",
        ),
        (
            pod.terminal,
            BindingOutcome.REFUSED,
            f"pod {name} has terminated: its placement was decided before that",
        ),
        (
            pod.node is not None,
            BindingOutcome.ELSEWHERE,
            f"pod {name} is already bound to node {pod.node}; the lease is for {lease.node}",
        ),
        (pod.deleting, BindingOutcome.REFUSED, f"pod {name} is being deleted"),
        (isinstance(error, UnavailableError), BindingOutcome.UNKNOWN, str(error)),
        (True, BindingOutcome.REFUSED, str(error)),
    )
    return next(BindingResult(outcome, text) for applies, outcome, text in results if applies)


@dataclass(frozen=True, slots=True)
class _PendingBinding:
    lease: Lease
    annotations: Mapping[str, str]
    trace: str
    result: asyncio.Future[BindingResult]

    @property
    def in_doubt(self) -> bool:
        return self.result.done() and self.result.result().outcome is BindingOutcome.UNKNOWN


@dataclass(eq=False)
class BindingSender:
    pods: PodClient
    clock: Clock
    _: KW_ONLY
    concurrency: int = CONCURRENCY
    batch_wait_s: float = BATCH_WAIT_S

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[_PendingBinding] = asyncio.Queue()
        self._bindings: OrderedDict[tuple[PodUid, int], _PendingBinding] = OrderedDict()

    async def send(self, leases: Sequence[tuple[Lease, str]]) -> list[BindingResult]:
        """Return the results in order.

        A result that takes longer than `batch_wait_s` is UNKNOWN; its Binding continues.
        """
        results = [self._enqueue(lease, trace) for lease, trace in leases]
        if results:
            await asyncio.wait(results, timeout=self.batch_wait_s)
        unknown = BindingResult(BindingOutcome.UNKNOWN, "no response yet")
        return [result.result() if result.done() else unknown for result in results]

    def has_sent(self, lease: Lease) -> bool:
        """Return whether `send` would begin no other Binding."""
        binding = self._bindings.get((lease.pod, lease.version))
        return binding is not None and not binding.in_doubt

    def in_flight(self) -> int:
        return sum(not binding.result.done() for binding in self._bindings.values())

    def is_busy(self) -> bool:
        return not self._queue.empty()

    @loops
    async def send_bindings(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.concurrency):
                    workers.create_task(self._work())
        finally:
            interrupted = BindingResult(BindingOutcome.UNKNOWN, "the binder is stopping")
            for binding in self._bindings.values():
                if not binding.result.done():
                    binding.result.set_result(interrupted)
            self._bindings.clear()
            self._queue = asyncio.Queue()

    def _enqueue(self, lease: Lease, trace: str) -> asyncio.Future[BindingResult]:
        key = (lease.pod, lease.version)
        binding = self._bindings.get(key)
        if binding is None or binding.in_doubt:
            annotations = binding_annotations(lease, self.clock.now())
            result = asyncio.get_running_loop().create_future()
            binding = _PendingBinding(lease, annotations, trace, result)
            self._bindings[key] = binding
            if needs_binding(lease):
                self._queue.put_nowait(binding)
            else:
                binding.result.set_result(BOUND)
        return binding.result

    async def _work(self) -> None:
        while True:
            binding = await self._queue.get()
            binding.result.set_result(await self._bind(binding))
            self._forget_oldest()

    async def _bind(self, binding: _PendingBinding) -> BindingResult:
        lease = binding.lease
        try:
            await self.pods.bind_pod(
                lease.namespace,
                lease.name,
                lease.pod,
                lease.node,
                binding.annotations,
                traceparent=binding.trace or None,
            )
        except LeaseholdError as error:
            return await self._resolve(lease, error)
        return BOUND

    async def _resolve(self, lease: Lease, error: LeaseholdError) -> BindingResult:
        try:
            pod = await self.pods.get(lease.namespace, lease.name)
        except LeaseholdError as read_error:
            return BindingResult(BindingOutcome.UNKNOWN, f"{error}; and then {read_error}")
        return judge(lease, error, pod)

    def _forget_oldest(self) -> None:
        while len(self._bindings) > MAX_RESULTS:
            key, binding = next(iter(self._bindings.items()))
            if not binding.result.done():
                return
            del self._bindings[key]
