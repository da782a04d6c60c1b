"""Judges planned starts: what is promised is kept or withdrawn, and what was let in ends in time.

Faults that `docs/starts.md` excuses lead to a withdrawal, too; only a lost ledger forgets promises.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import msgpack

from services.binder.preempt.planned_starts import LATE_S
from services.binder.report.explanations import PLANNED, WITHDRAWN, KubernetesEvent
from shared.model.lease import END_MARGIN_S, START_MARGIN_S
from tests.proof.observations import RawLedger

if TYPE_CHECKING:
    from tests.model.world import World

GRACE_S = 30
ADVANCES = 3
"""A leader has looked at the starts so often after the time before a promise counts as broken."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that is claimed for a pod."""

    pod: str
    node: str
    devices: tuple[str, ...]
    until: float


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
        self._claims: dict[str, Claim] = {}
        self._leases: dict[str, float] = {}
        self._generation = ""

    def record(self, event: KubernetesEvent) -> None:
        """Note what a pod is told of its start."""
        if event.reason == PLANNED:
            self.figures["runs with planned starts"] = 1
            self.figures["starts planned"] += 1
            self.world.note(f"{event.pod}: {event.message}")
            self.promises.pop(event.pod, None)
            if event.message.startswith("starts by "):
                self.figures["starts promised"] += 1
                at = datetime.fromisoformat(event.message.split()[2]).timestamp()
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
        """A leader has looked at all starts."""
        for pod, promise in self.promises.items():
            if began_at > promise.at + LATE_S:
                promise.advances += 1
                if promise.advances == ADVANCES:
                    self.world.fail(
                        f"S11: {pod} has not started {began_at - promise.at:.0f} s after "
                        "the promised time, and was not told why"
                    )

    def forget(self) -> None:
        """The ledger is lost, or built anew: plans are, too."""
        self.promises.clear()
        self._claims.clear()

    def look(self, ledger: RawLedger) -> Iterator[str]:
        """Yield what is wrong with the claims of a ledger."""
        self._end_promises(ledger)
        if not ledger.ready or ledger.generation != self._generation:
            self._generation = ledger.generation
            self.forget()
            return
        raw = self.world.server.raw_starts()
        claims = {pod.decode(): _claim(pod.decode(), value) for pod, value in raw["claims"].items()}
        starts = [json.loads(value) for value in raw["starts"].values()]
        of_starts = {each["pod"] for start in starts for each in start["wanted"]}
        yield from self._wrong_claims(claims, of_starts, ledger)
        if not self.world.lost_redis:
            yield from self._let_in_too_long(claims, ledger)
        self._claims = claims
        self._leases = {lease.pod: lease.created_at for lease in ledger.leases.values()}

    def _end_promises(self, ledger: RawLedger) -> None:
        waiting = {pod.uid for pod in self.world.api.pods.values() if pod.is_pending}
        for pod in [*self.promises]:
            if pod in ledger.leases or pod not in waiting:
                self.figures["starts kept"] += pod in ledger.leases
                del self.promises[pod]

    def _wrong_claims(
        self, claims: dict[str, Claim], of_starts: set[str], ledger: RawLedger
    ) -> Iterator[str]:
        for pod in claims.keys() - of_starts:
            yield f"S11: {pod} claims {claims[pod].devices}, and no start is planned for it"
        claimed = {uuid for claim in claims.values() for uuid in claim.devices}
        for uuid, device in ledger.devices.items():
            if device.is_claimed and uuid not in claimed:
                yield f"S11: {uuid} is claimed for no pod"
        for claim in claims.values():
            for uuid in set(claim.devices) - self.world.moved:
                is_open = uuid in ledger.devices and not ledger.devices[uuid].is_claimed
                if is_open and claim.node not in self.world.api.left:
                    yield f"S11: {uuid} is claimed for {claim.pod}, and others may have it"

    def _let_in_too_long(self, claims: dict[str, Claim], ledger: RawLedger) -> Iterator[str]:
        until = {
            uuid: claim.until
            for pod, claim in claims.items()
            if self._claims.get(pod) == claim
            for uuid in claim.devices
            if uuid in ledger.devices and ledger.devices[uuid].is_claimed
        }
        for lease in ledger.leases.values():
            if self._leases.get(lease.pod) == lease.created_at:
                continue
            longest = lease.term.get("max_run_s")
            for uuid in lease.devices & until.keys():
                self.figures["let in before a start"] += 1
                margin_s = lease.term.get("grace_s", GRACE_S) + START_MARGIN_S + END_MARGIN_S
                if longest is None or lease.created_at + longest + margin_s > until[uuid]:
                    yield f"S11: {lease.pod} is let onto {uuid}, which is claimed, for too long"


def _claim(pod: str, value: bytes) -> Claim:
    node, _, devices, _, _, until = msgpack.unpackb(value)
    return Claim(pod, node, tuple(devices), until)
