"""Which pods may be bound to this node now: none while the kubelet would refuse them for good.

A kubelet asks for one pod after the other, and refuses all that it has still to ask for if its
agent is killed. So few are let through ahead of its questions; the next when one of them is
answered, refused or gone.

Where the kubelet's own list of pods cannot be read, a container is known only by what it asks for:
then of pods that ask for the same, one is bound after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from services.node_agent.allocate.allocation import HONOURED_STATES, NodeSnapshot, dialect_of
from services.node_agent.allocate.pod_resolution import KubeletContainer, KubeletPod
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.model.errors import RequestError
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease, LeaseState
from shared.model.names import PodUid

PERMIT_S = 10.0
"""A pod that was let through is bound within this, or does not count any more."""
MAX_IN_FLIGHT = 2
"""So many pods are on their way at once: one that the kubelet asks for, and the next."""
IN_FLIGHT_S = 5.0
"""A pod that was let through and not asked for within this does not hold up others any more."""
DRAINING = "its agent is being stopped"
WINDOW_FULL = "the kubelet has still to ask for the pods before it"
LEASES_NOT_SYNCED = "its agent does not know yet for which pods the kubelet may ask"

RequestSignature = tuple[str, int]
"""A resource, and how many of it."""


class Record(Protocol):
    """What the kubelet was told."""

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """All answers that are not over."""
        ...


def containers_of(lease: Lease) -> tuple[str, ...]:
    """Return the containers with shares, in the order in which the kubelet serves them."""
    return tuple(dict.fromkeys(share.container for share in lease.shares))


def is_expected(lease: Lease, answered: Set[tuple[PodUid, str]]) -> bool:
    """Say whether the kubelet may still ask for containers of the lease's pod."""
    told = [(lease.pod, name) in answered for name in containers_of(lease)]
    return (
        lease.state in HONOURED_STATES
        and not all(told)
        and (lease.state is LeaseState.BOUND or any(told))
    )


def limits_of(lease: Lease, container: str, node: NodeSnapshot) -> dict[str, int]:
    """Return what a container may ask of the resources that the node serves for its dialect."""
    try:
        dialect = dialect_of(lease)
    except RequestError:  # Allocate says so
        return {}
    shares = lease.shares_of(container)
    counts = {
        resource: sum(dialect.id_count(share, resource) for share in shares)
        for resource in sorted(node.served.keys() & dialect.served)
    }
    return {resource: count for resource, count in counts.items() if count > 0}


def signatures_of(lease: Lease, node: NodeSnapshot) -> frozenset[RequestSignature]:
    """Return everything that the kubelet may ask for the lease's pod."""
    return frozenset(
        signature
        for name in containers_of(lease)
        for signature in limits_of(lease, name, node).items()
    )


def implied_pods(
    leases: Iterable[Lease], node: NodeSnapshot, answered: Set[tuple[PodUid, str]]
) -> tuple[KubeletPod, ...]:
    """Return the pods that leases tell of, as far as a kubelet's own list would show them."""
    return tuple(
        KubeletPod(
            uid=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            phase="Pending" if is_expected(lease, answered) else "Running",
            containers=tuple(
                KubeletContainer(
                    name=name,
                    limits=limits_of(lease, name, node),
                    init=any(share.init for share in lease.shares_of(name)),
                )
                for name in containers_of(lease)
            ),
        )
        for lease in leases
        if lease.state in HONOURED_STATES
    )


@dataclass(slots=True)
class AdmissionWindow:
    """Pods that were let through and are not known to be bound yet, beside those that are."""

    leases: KnownLeases
    record: Record
    refused: Callable[[], Set[PodUid]]
    now: Callable[[], float]
    draining: bool = False
    _permits: dict[PodUid, tuple[Lease, float]] = field(default_factory=dict)
    _in_flight: dict[PodUid, tuple[Lease, float]] = field(default_factory=dict)
    """Pods that were let through, and until when each counts as on its way."""

    @property
    def answered(self) -> frozenset[tuple[PodUid, str]]:
        """Pods and containers that Allocate was answered for."""
        return frozenset(
            (entry.allocation.pod, entry.allocation.container) for entry in self.record.entries
        )

    def expected_leases(self) -> dict[PodUid, Lease]:
        """Return the leases of pods that the kubelet may still ask for."""
        answered, refused = self.answered, self.refused()
        return {
            pod: lease
            for pod, lease in self.leases.leases.items()
            if pod not in refused and is_expected(lease, answered)
        }

    def in_flight(self) -> dict[PodUid, Lease]:
        """Return the leases of pods that the kubelet may still ask for, bound by now or not."""
        self._forget_arrived()
        let_through = {pod: lease for pod, (lease, _) in self._in_flight.items()}
        return {**let_through, **self._permitted(), **self.expected_leases()}

    def implied_pods(self, node: NodeSnapshot | None) -> tuple[KubeletPod, ...]:
        """Return the pods of the node as its leases imply them."""
        if node is None:
            return ()
        return implied_pods(self.leases.leases.values(), node, self.answered)

    def admit_binds(
        self, leases: Sequence[Lease], node: NodeSnapshot | None, trouble: str | None, *, blind: str
    ) -> BindReply:
        """Say which pods must wait; `blind` says why the kubelet's list cannot be read."""
        if self.draining or node is None or trouble:
            why = DRAINING if self.draining else trouble or "its devices are not known yet"
            return _closed(leases, why)
        if not blind:
            held = self._beyond(leases)
            return BindReply(
                deferred_pods=held,
                reason=WINDOW_FULL if held else "",
                window_open=False,
                retry_soon=True,
            )
        if not self.leases.synced:
            return _closed(leases, LEASES_NOT_SYNCED)
        held = self._out_of_turn(leases, node)
        why = f"another pod that asks for the same must be served first, as {blind}" if held else ""
        return BindReply(deferred_pods=held, reason=why, window_open=False, retry_soon=True)

    def _beyond(self, asked: Sequence[Lease]) -> tuple[PodUid, ...]:
        """Let so many through that no more than `AHEAD` are on their way; return the others."""
        answered = self._forget_arrived()
        held = []
        for lease in asked:
            if lease.pod in self._in_flight or self._is_over(lease.pod, answered):
                continue
            if len(self._in_flight) < MAX_IN_FLIGHT:
                self._in_flight[lease.pod] = lease, self.now() + IN_FLIGHT_S
            else:
                held.append(lease.pod)
        return tuple(held)

    def _forget_arrived(self) -> frozenset[tuple[PodUid, str]]:
        """Drop who is on its way no more; return what was answered."""
        now, answered, refused = self.now(), self.answered, self.refused()
        self._in_flight = {
            pod: (lease, until)
            for pod, (lease, until) in self._in_flight.items()
            if now < until and pod not in refused and not self._is_over(pod, answered)
        }
        return answered

    def _is_over(self, pod: PodUid, answered: Set[tuple[PodUid, str]]) -> bool:
        if pod in self.leases.ended:
            return True
        lease = self.leases.find(pod)
        return lease is not None and all((pod, name) in answered for name in containers_of(lease))

    def _out_of_turn(self, asked: Sequence[Lease], node: NodeSnapshot) -> tuple[PodUid, ...]:
        busy: dict[RequestSignature, PodUid] = {}
        for lease in (*self.expected_leases().values(), *self._permitted().values()):
            busy.update(dict.fromkeys(signatures_of(lease, node), lease.pod))
        going = set(busy.values())
        held = []
        for lease in asked:
            wanted = signatures_of(lease, node)
            if lease.pod in going:
                continue
            if not busy.keys().isdisjoint(wanted):
                held.append(lease.pod)
                continue
            self._permits[lease.pod] = (lease, self.now() + PERMIT_S)
            busy.update(dict.fromkeys(wanted, lease.pod))
        return tuple(held)

    def _permitted(self) -> Mapping[PodUid, Lease]:
        """Return what was let through; what is known to be bound, or to be over, counts itself."""
        now, known, refused = self.now(), self.leases, self.refused()
        self._permits = {
            pod: (lease, until)
            for pod, (lease, until) in self._permits.items()
            if now < until
            and pod not in known.ended
            and pod not in refused
            and not self._is_bound(pod)
        }
        return {pod: lease for pod, (lease, _) in self._permits.items()}

    def _is_bound(self, pod: PodUid) -> bool:
        lease = self.leases.find(pod)
        return lease is not None and lease.state in HONOURED_STATES


def _closed(asked: Sequence[Lease], why: str) -> BindReply:
    held = tuple(lease.pod for lease in asked)
    return BindReply(deferred_pods=held, reason=why, window_open=False, node_closed=True)
