"""Judges the driver's limits on memory, as a node's driver has them, by the leases of the ledger.

What a driver was made to lose may be missing until the next audit.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.node_agent.device_watcher import PROBE_S
from services.node_agent.enforcers.limit_audit import AUDIT_S
from services.node_agent.memory_limits.container_limits import TRY_S
from shared.model.names import DeviceUuid, PodUid
from tests.model.api_server import Pod
from tests.model.kubelet import KubeletRecord
from tests.model.node import Node
from tests.proof.observations import RawLedger, RawShare

if TYPE_CHECKING:
    from tests.model.world import World

LATE_S = 10.0
"""An audit takes some time, and one of a restarted loop begins later."""
NOTICED_S = 2 * TRY_S + PROBE_S + LATE_S
"""By this time an agent notices that another program limits memory, although one look failed."""
WAITS_S = 30.0
"""A smaller size that waits is reached by this time after less is in use."""
WHOLE = "exclusive"


class LimitJudge:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.missing_since: dict[tuple[str, str], float] = {}
        """By node and holder."""
        self.disturbed_s: dict[str, float] = {}
        """By node, when something last kept its agent from putting limits back."""
        self.beside_others_since: dict[tuple[str, DeviceUuid, object], float] = {}
        """By node, device and life of the agent, since when it offers the driver beside others."""
        self.waiting_since: dict[str, float] = {}
        """By pod, since when a smaller size waits although little enough is in use."""

    def disturb(self) -> None:
        """Something happens that may take limits away, or delay audits."""
        for node in self.world.nodes:
            self.disturbed_s[node] = self.world.loop.time()

    def look(self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]]) -> Iterator[str]:
        """Yield what is wrong at every moment."""
        now_s = self.world.loop.time()
        for node in self.world.nodes.values():
            if _is_hindered(node):
                self.disturbed_s[node.name] = now_s
        missing: dict[tuple[str, str], float] = {}
        for node, record, share in self._limited(ledger, running):
            if (text := self._wrong_order(node, record, share)) is not None:
                yield text
            if self._holds(node, record, share):
                continue
            key = node.name, record.pod.uid
            since = missing[key] = self.missing_since.get(key, now_s)
            since = max(since, self.disturbed_s.get(node.name, 0.0))
            if now_s > since + AUDIT_S + LATE_S:
                yield f"S7: {self._text(node, record, share)} for {now_s - since:.0f} s"
        self.missing_since = missing
        yield from self._beside_others(now_s)
        yield from self._waits_too_long(ledger, running, now_s)

    def _beside_others(self, now_s: float) -> Iterator[str]:
        """Yield devices whose driver is offered although another program sets limits there."""
        since: dict[tuple[str, DeviceUuid, object], float] = {}
        for node in self.world.nodes.values():
            for device in node.agent.known.devices:
                is_limited = device.uuid in node.limit_driver.limited_by_others
                is_offered = device.healthy and "driver" in device.offer.memory
                if not (is_limited and is_offered) or _is_hindered(node):
                    continue
                key = node.name, device.uuid, node.agent
                since[key] = self.beside_others_since.get(key, now_s)
                if now_s > since[key] + NOTICED_S:
                    yield (
                        f"S7: {node.name} offers the driver of {device.uuid} for "
                        f"{now_s - since[key]:.0f} s beside the limit of another program"
                    )
        self.beside_others_since = since

    def _waits_too_long(
        self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]], now_s: float
    ) -> Iterator[str]:
        since: dict[str, float] = {}
        for node, pod in self._waiting(ledger, running):
            since[pod] = self.waiting_since.get(pod, now_s)
            undisturbed = max(since[pod], self.disturbed_s.get(node.name, 0.0))
            if now_s > undisturbed + WAITS_S + LATE_S:
                yield f"S7: a smaller size of {pod} waits for {now_s - undisturbed:.0f} s"
        self.waiting_since = since

    def still_waiting(
        self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]]
    ) -> Iterator[str]:
        """Yield smaller sizes that wait although little enough is in use."""
        for _, pod in self._waiting(ledger, running):
            yield f"S7: a smaller size of {pod} waits, and little enough is in use"

    def _waiting(
        self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]]
    ) -> Iterator[tuple[Node, str]]:
        for node, record, share in self._limited(ledger, running):
            waiting_mib = ledger.leases[record.pod.uid].waiting_mib
            used_mib = node.kubelet.used_mib(DeviceUuid(share.device), record.user)
            if waiting_mib is not None and used_mib <= waiting_mib:
                yield node, record.pod.uid

    def differing(
        self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]]
    ) -> Iterator[str]:
        """Yield limits that are not their leases'."""
        for node, record, share in self._limited(ledger, running):
            if node.limit_driver.held_mib(*_place(record)) != share.mib:
                yield f"S7: {self._text(node, record, share)}"

    def check_created(self, ledger: RawLedger, node: Node, record: KubeletRecord) -> None:
        """Check that a pod's limit was set before the runtime makes its container.

        What has vanished since is set by the hook, before the first process.
        """
        device, user, _ = _place(record)
        for _ in self._shares(ledger, node, record):
            if node.limit_driver.last_mib(device, user, "") is None and not node.limit_client.fails:
                self.world.fail(f"S7: {record.pod.uid} is created, and {user} has no limit")

    def check_given(self, ledger: RawLedger, node: Node, record: KubeletRecord) -> None:
        """Check what holds a container that is about to run its first process."""
        for share in self._shares(ledger, node, record):
            if not self._holds(node, record, share):
                self.world.fail(f"S7: {self._text(node, record, share)} at its start")
            if not node.limit_driver.has_own(*_place(record)) and isinstance(record.pod, Pod):
                self.world.fail(f"S7: the limit of {record.pod.uid} is not shown in its container")
        lease = ledger.leases.get(record.pod.uid)
        if not isinstance(record.pod, Pod) or lease is None:
            return
        demanded = record.pod.request.containers[0].held_by.memory
        for share in lease.shares:
            if demanded is not None and share.memory not in {demanded, WHOLE}:
                self.world.fail(f"S7: {lease.pod} demands {demanded}, and {share.memory} holds it")

    def _limited(
        self, ledger: RawLedger, running: list[tuple[Node, KubeletRecord]]
    ) -> Iterator[tuple[Node, KubeletRecord, RawShare]]:
        if self.world.lost_redis or not ledger.ready:
            return
        for node, record in running:
            for share in self._shares(ledger, node, record):
                yield node, record, share

    def _shares(self, ledger: RawLedger, node: Node, record: KubeletRecord) -> Iterator[RawShare]:
        """Yield the shares of a container that the driver holds."""
        lease = ledger.leases.get(record.pod.uid)
        if self.world.lost_redis or lease is None or lease.node != node.name:
            return
        for share in lease.shares:
            if share.memory == "driver" and share.device == record.device:
                yield share

    def _wrong_order(self, node: Node, record: KubeletRecord, share: RawShare) -> str | None:
        """Return how a limit was set that its lease does not have: leases grow first."""
        last_mib = node.limit_driver.last_mib(*_place(record))
        if last_mib is None or last_mib <= share.mib or node.was_silent:
            return None
        return f"S7: the driver of {node.name} was given {last_mib} MiB for {record.pod.uid}, " + (
            f"whose lease has {share.mib}"
        )

    def _holds(self, node: Node, record: KubeletRecord, share: RawShare) -> bool:
        held_mib = node.limit_driver.held_mib(*_place(record))
        return held_mib is not None and held_mib <= share.mib

    def _text(self, node: Node, record: KubeletRecord, share: RawShare) -> str:
        held_mib = node.limit_driver.held_mib(*_place(record))
        return (
            f"the driver of {node.name} holds {record.pod.uid} to {held_mib} MiB, its lease has "
            f"{share.mib}"
        )


def _place(record: KubeletRecord) -> tuple[DeviceUuid, PodUid, str]:
    return DeviceUuid(record.device), record.user, record.container_id


def _is_hindered(node: Node) -> bool:
    """Whether the agent cannot set limits, or not read what runs."""
    kubelet = node.kubelet
    return (
        node.limit_client.fails
        or node.limit_driver.is_old
        or node.limit_driver.keeps_limits
        or node.silent
        or node.agent.checkpoint.lost
        or node.clock.ticks() < kubelet.answers_until
    )
