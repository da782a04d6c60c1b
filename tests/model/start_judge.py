"""Judges planned starts: what is promised is kept or withdrawn, and what was let in ends in time.

Faults that `docs/starts.md` excuses lead to a withdrawal, too; only a lost ledger forgets promises.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.binder.report.explanations import PLANNED, WITHDRAWN, KubernetesEvent
from shared.model.events.plan_events import StartReported
from shared.placing.starts import LATE_S
from tests.proof.history import History
from tests.proof.observations import RawLedger
from tests.proof.starts import let_in, promised_at

if TYPE_CHECKING:
    from tests.model.world import World

ADVANCES = 3
"""A leader has looked at the starts so often after the time before a promise counts as broken."""


@dataclass(slots=True)
class Promise:
    """What a pod was told: it starts by then at the latest."""

    at: float
    is_calm: bool
    """Nothing has happened since the world began, or all faults ended, that may delay it."""
    advances: int = 0


class StartJudge:
    """Looks at the claims of the ledger, and at what pods are told."""

    def __init__(self, world: "World", figures: Counter[str]) -> None:
        self.world = world
        self.figures = figures
        self.promises: dict[str, Promise] = {}
        self.is_calm = True
        self._generation = ""

    def record(self, event: KubernetesEvent) -> None:
        """Note what a pod is told of its start."""
        if event.reason == PLANNED:
            self.figures["runs with planned starts"] = 1
            self.figures["starts planned"] += 1
            self.world.note(f"{event.pod}: {event.message}")
            self.promises.pop(event.pod, None)
            if (at := promised_at(event.message)) is not None:
                self.figures["starts promised"] += 1
                self.promises[event.pod] = Promise(at, self.is_calm)
        elif event.reason == WITHDRAWN:
            self.figures["starts withdrawn"] += 1
            self.world.note(f"{event.pod}: {event.message}")
            promise = self.promises.pop(event.pod, None)
            if promise is not None and promise.is_calm:
                self.world.fail(f"S11: nothing fails, and {event.pod} {event.message}")

    def disturb(self) -> None:
        """Something happens that may delay starts."""
        self.is_calm = False
        for promise in self.promises.values():
            promise.is_calm = False

    def note_advanced(self, began_at: float) -> None:
        """A leader has looked at all starts; what it withdrew may still be on its way."""
        on_its_way = {
            message.event.pod
            for message in (*self.world.bag, *self.world.handled)
            if isinstance(message.event, StartReported)
        }
        for pod, promise in self.promises.items():
            if began_at > promise.at + LATE_S and pod not in on_its_way:
                promise.advances += 1
                if promise.advances == ADVANCES:
                    self.world.fail(
                        f"S11: {pod} has not started {began_at - promise.at:.0f} s after "
                        "the promised time, and was not told why"
                    )

    def look(self, ledger: RawLedger, history: History) -> Iterator[str]:
        """Yield what is wrong with the claims of a ledger."""
        self._end_promises(ledger)
        if not ledger.ready or ledger.generation != self._generation:
            self._generation = ledger.generation
            self.promises.clear()
        else:
            self.figures["let in before a start"] += sum(1 for _ in let_in(ledger, history))
            yield from self._wrong_claims(ledger)

    def _end_promises(self, ledger: RawLedger) -> None:
        waiting = {pod.uid for pod in self.world.api.pods.values() if pod.is_pending}
        for pod in [*self.promises]:
            if pod in ledger.leases or pod not in waiting:
                self.figures["starts kept"] += pod in ledger.leases
                del self.promises[pod]

    def _wrong_claims(self, ledger: RawLedger) -> Iterator[str]:
        preempting = {pod for preemption in ledger.preemptions for pod in preemption.pods}
        for pod in ledger.claims.keys() - ledger.starts - preempting:
            devices = ledger.claims[pod].devices
            yield f"S11: {pod} claims {sorted(devices)}, and nothing is planned for it"
        claimed = {uuid for claim in ledger.claims.values() for uuid in claim.devices}
        for uuid, device in ledger.devices.items():
            if device.is_claimed and uuid not in claimed:
                yield f"S11: {uuid} is claimed for no pod"
        for claim in ledger.claims.values():
            for uuid in claim.devices - self.world.moved:
                is_open = uuid in ledger.devices and not ledger.devices[uuid].is_claimed
                if is_open and claim.node not in self.world.api.left:
                    yield f"S11: {uuid} is claimed for {claim.pod}, and others may have it"
