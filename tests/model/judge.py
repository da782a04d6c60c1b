"""Judges a run by its own sums: of what containers were given, and of the ledger's bytes.

Each check is named by the invariant of docs/architecture.md that it watches.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from shared.model.device import Device, DeviceMode
from shared.model.events.event import Event
from shared.model.events.pod_events import NodeChanged, PodTerminated
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.request import PodRequest
from tests.model.api_server import NAMESPACE, Pod
from tests.model.given import (
    ALL_CORES,
    Given,
    excess,
    given_to,
    instance_conflicts,
    is_as_leased,
)
from tests.model.kubelet import KubeletRecord, limit_mib
from tests.model.lies import believed_lies
from tests.model.mig import LAYOUTS, SLICE_MIB, parse_instance
from tests.model.node import Node
from tests.model.raw_ledger import RESERVED, RawDevice, RawLedger, RawShare, decode
from tests.model.world import MIG_LAYOUTS, World


class Judge:
    """Looks at a world after each step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fences: dict[tuple[str, str], tuple[int, str]] = {}
        """Of each slot of each node's agent: the newest fence given out, and its pod."""
        self.calls = -1
        self.gang_leases: dict[str, set[str]] = {}
        """Pods that had a lease and were not gone, by gang, when this was last checked."""
        self.gone: set[str] = set()
        """Pods of which a binder has handled that they are gone."""
        self.absent: set[str] = set()
        """Those of them that were not in the ledger then; a rebuild may restore them."""
        self.node_states: dict[NodeName, NodeChanged] = {}
        """The newest that a binder has handled."""
        self.ledger = decode(world.server.raw())

    def read_ledger(self) -> RawLedger:
        """Read the ledger anew, unless no call has reached it since."""
        if self.calls != self.world.server.calls:
            known, self.ledger = self.ledger, decode(self.world.server.raw())
            if known.generation != self.ledger.generation:
                self.absent.clear()
            self.calls = self.world.server.calls
        return self.ledger

    def look(self) -> None:
        """Check what must hold at every moment."""
        self.read_ledger()
        for problem in (
            *self._over_given(),
            *self._over_leased(),
            *self._ended_early(),
            *self._went_back(),
            *believed_lies(self.world, self.ledger),
        ):
            self.world.fail(problem)
        self.check_gangs()

    def check_given(self, node: NodeName, record: KubeletRecord) -> None:
        """Check a container that was just given devices, before it starts."""
        given, lease = given_to(record), self.read_ledger().leases.get(record.pod.uid)
        entry = _checkpointed(self.world.nodes[node], given.pod)
        if entry is None:
            self.world.fail(f"S9: what {given.pod} was given is not in the checkpoint of {node}")
        else:
            self._check_fence(node, given.pod, entry)
        if self.world.lost_redis:
            return
        if lease is None or lease.node != node:
            self.world.fail(f"S3: {given.pod} is given devices on {node} without a lease there")
        elif not (record.has_restarted or is_as_leased(lease, given)):
            self.world.fail(f"S7: {given} differs from its lease {lease}")
        elif given.slices:
            self._check_position(self.world.nodes[node], given, lease.shares[0])

    def _check_position(self, node: Node, given: Given, share: RawShare) -> None:
        """S7: the instances of a size have positions by their starts."""
        sizes = LAYOUTS[share.layout]
        size, number = sizes[share.position], sizes[: share.position].count(sizes[share.position])
        there = node.driver.existing[DeviceUuid(given.device)].values()
        starts = sorted(each.start for each in there if each.memory_slices == size)
        if starts[number : number + 1] != [given.slices.start] or len(given.slices) != size:
            self.world.fail(f"S7: {given} is not position {share.position} of {share.layout}")

    def check_destroyed(self, node: NodeName, uuid: str) -> None:
        """Check a MIG instance that is about to be destroyed."""
        for record in self.world.nodes[node].kubelet.records.values():
            if record.visible == uuid:
                self.world.fail(f"S1: {uuid} is destroyed, and {record.pod.uid} runs on it")

    def note_handled(self, event: Event) -> None:
        """Note what the ledger must remember from now on."""
        if isinstance(event, NodeChanged):
            known = self.node_states.get(event.node.name)
            if known is None or known.revision < event.revision:
                self.node_states[event.node.name] = event
        elif isinstance(event, PodTerminated):
            self.gone.add(event.pod)
            there = {*self.read_ledger().leases, *self.ledger.waiting}
            if event.pod not in there and event.pod in self.ledger.gone:
                self.absent.add(event.pod)

    def forget_gone(self) -> None:
        """Forget pods that the ledger remembers no more: it was lost."""
        self.gone.clear()
        self.absent.clear()
        self.gang_leases = self._gang_leases()

    def forget_fences(self, node: NodeName) -> None:
        """Forget what an agent honoured: its checkpoint is lost."""
        self.fences = {key: value for key, value in self.fences.items() if key[0] != node}

    def _check_fence(self, node: NodeName, pod: str, entry: dict[str, object]) -> None:
        key = (str(node), f"{entry['device']}/{entry['slot']}")
        newest, holder = self.fences.get(key, (0, ""))
        fence = int(str(entry["fence"]))
        if holder not in {"", pod} and (
            fence < newest or (fence == newest and not self.world.lost_redis)
        ):
            self.world.fail(f"S4: {pod} gets {key} with fence {fence}, {holder} had {newest}")
        self.fences[key] = max((newest, holder), (fence, pod))

    def _over_given(self) -> Iterator[str]:
        """S1, S9: no agent gives out more of a device than there is. S2: no container twice."""
        running = [(node, given_to(record)) for node, record in _running(self.world)]
        yield from excess("S1: containers were given", [given for _, given in running])
        places = Counter(given.pod for _, given in running)
        yield from (f"S2: {pod} runs {n} times" for pod, n in places.items() if n > 1)
        for node, record in _running(self.world):
            existing = node.driver.existing.get(DeviceUuid(record.device), {}).values()
            if parse_instance(record.visible) and record.visible not in {i.uuid for i in existing}:
                yield f"S1: {record.pod.uid} runs on {record.visible}, which does not exist"
            if record.used_mib > limit_mib(record):
                yield f"S7: {record.pod.uid} is limited to less than {record.used_mib} MiB in use"

    def _over_leased(self) -> Iterator[str]:
        """S1 of the ledger, and O2: its totals are the sums of its leases."""
        if not self.ledger.ready:
            return
        leased = [
            Given(lease.pod, share.device, share.memory_mib, share.cores_percent)
            for lease in self.ledger.leases.values()
            for share in lease.shares
        ]
        yield from excess("S1: leases take", leased)
        yield from instance_conflicts(self.ledger.leases.values())
        for lease in self.ledger.leases.values():
            nodes = {self.ledger.devices[share.device].node for share in lease.shares}
            if nodes != {lease.node}:
                yield f"O2: the devices of {lease.pod} on {lease.node} are on {nodes}"
        for uuid, device in self.ledger.devices.items():
            here = [each for each in leased if each.device == uuid]
            counted = (device.memory_used, device.cores_used, device.share_count)
            summed = (
                sum(each.memory_mib for each in here),
                sum(each.cores_percent for each in here),
                len(here),
            )
            if counted != summed:
                yield f"O2: totals of {uuid} are {counted}, and its leases add up to {summed}"

    def _ended_early(self) -> Iterator[str]:
        """S8: while a pod may run, its lease does not end."""
        if self.world.lost_redis or not self.ledger.ready:
            return
        for node, record in _running(self.world):
            if record.pod.uid not in self.ledger.leases and not node.was_silent:
                yield f"S8: {record.pod.uid} runs on {node.name}, and its lease has ended"

    def _went_back(self) -> Iterator[str]:
        """P2: a pod that is gone does not come back. P7: nor does an older state of a node."""
        if not self.ledger.ready:
            return
        found = self.absent & {*self.ledger.leases, *self.ledger.waiting}
        yield from (f"P2: {pod} is gone, and has come back into the ledger" for pod in found)
        for handled in self.node_states.values() if not self.world.lost_redis else ():
            node, states = handled.node.name, self.world.api.node_states
            newer = [each for each in states if each.revision >= handled.revision]
            if not any(self._is_stored(each) for each in newer if each.node.name == node):
                yield f"P7: an older state of {node} has replaced that of {handled.revision}"

    def _is_stored(self, state: NodeChanged) -> bool:
        name = state.node.name
        if state.deleted or name not in self.ledger.nodes:
            return state.deleted and name not in self.ledger.nodes
        return state.node.unschedulable == (name in self.ledger.cordoned)

    def check_gangs(self) -> None:
        """P5: when a pod of a gang gets a lease, as many as the gang needs have one then.

        Pods that are gone do not count.
        """
        held = self._gang_leases()
        for gang, pods in held.items():
            known, needed = self.gang_leases.get(gang, set()), int(gang.rpartition("-")[2])
            if pods - known and max(len(pods), len(known)) < needed and not self.world.lost_redis:
                self.world.fail(
                    f"P5: {sorted(pods - known)} of {gang} get leases, only {sorted(pods)} exist"
                )
        self.gang_leases = held

    def _gang_leases(self) -> dict[str, set[str]]:
        held: dict[str, set[str]] = {}
        for lease in self.read_ledger().leases.values():
            if lease.gang and lease.pod not in self.gone:
                held.setdefault(lease.gang, set()).add(lease.pod)
        return held

    # When everything works again

    def open_ends(self) -> list[str]:
        """Return what is not as Kubernetes and the agents imply, though nothing is on its way."""
        world, ledger = self.world, self.read_ledger()
        if not ledger.ready:
            return ["P6: the ledger is not ready"]
        pods = {pod.uid: pod for pod in world.api.pods.values()}
        running = {record.pod.uid: given_to(record) for _, record in _running(world)}
        unrecorded = self._unrecorded(ledger)
        found = [
            f"P6: {pod} has no lease as given"
            for pod in _unleased(running, ledger)
            if pod not in unrecorded
        ]
        claims = {claim.uid: claim for claim in world.claims.stored.values() if claim.node}
        for lease in ledger.leases.values():
            pod = pods.get(lease.pod)  # type: ignore[call-overload]
            has_ended = (pod is None or pod.is_terminal) and lease.pod not in claims
            if has_ended and lease.pod not in running and lease.state != RESERVED:
                found.append(f"P2: the lease of {lease.pod} outlives its pod")
            if lease.state == RESERVED and lease.expires_at <= world.server.clock.now() - 30:
                found.append(f"P2: the reservation of {lease.pod} outlives its time")
        pending = {pod.uid for pod in pods.values() if pod.is_pending}
        found += [f"P2: {pod} waits in the ledger, and is gone" for pod in ledger.waiting - pending]
        found += [
            f"S3: {pod.uid} is bound, and has no lease"
            for pod in pods.values()
            if pod.node and not pod.is_terminal and pod.uid not in {*ledger.leases, *unrecorded}
        ]
        found += [
            f"S3: {claim.uid} was answered {claim.answer!r}, and has no lease"
            for claim in claims.values()
            if claim.uid not in ledger.leases
        ]
        found += [
            f"P1: {claim.uid} was answered {claim.answer!r}, and is not prepared"
            for claim in claims.values()
            if claim.consumers and claim.uid not in {*running, *unrecorded}
        ]
        found += [f"P2: claim {uid} counts as gone" for uid in claims if uid in ledger.gone]
        found += [
            f"P2: {pod.uid} exists, and counts as gone"
            for pod in pods.values()
            if pod.uid in ledger.gone and not (pod.is_terminal or pod.deleting)
        ]
        found += [
            f"P7: the ledger does not have {device.uuid} on {name}"
            for name, node in world.nodes.items()
            for device in node.devices
            if not _is_known(ledger.devices.get(device.uuid), name, device)
        ]
        found += [text for pod in pods.values() for text in self._unplaced(pod, ledger)]
        if ledger.nodes != world.api.nodes:
            found.append(f"P7: the ledger has nodes {sorted(ledger.nodes)}")
        found += [
            f"P7: the ledger has an older state of {node}"
            for node in ledger.nodes
            if (node in ledger.cordoned) != (node in world.api.cordoned)
        ]
        return found

    def _unrecorded(self, ledger: RawLedger) -> set[str]:
        """Return pods of which no record is left, on devices that the ledger does not give out.

        The lease was lost unseen, and with it the records of the agent, so that the copy in the
        pod's annotation is all that is left. It counts in a rebuild only.
        """
        if not self.world.lost_unseen:
            return set()
        return {
            record.pod.uid
            for node in self.world.nodes.values()
            if node.lost_records
            for record in node.kubelet.records.values()
            if f"{NAMESPACE}/{record.pod.name}"
            in node.agent.checkpoint.unrecorded.get(DeviceUuid(record.device), ())
            and ledger.devices[record.device].status != 1
        }

    def _unplaced(self, pod: Pod, ledger: RawLedger) -> Iterator[str]:
        """P1, P4: a pending pod has a lease or waits, and waits only while it fits nowhere.

        One with groups may also wait for devices without them, or since it is too large.
        """
        if not pod.is_pending or pod.uid in ledger.leases:
            return
        if pod.uid not in ledger.waiting:
            yield f"P1: {pod.uid} is pending, and has neither lease nor verdict"
        elif pod.request.gang is None and not pod.request.anti_affinity_groups:
            yield from (
                f"P4: {pod.uid} waits, and fits on {uuid}"
                for uuid, device in ledger.devices.items()
                if device.status == 1
                and device.node in ledger.nodes - self.world.api.cordoned
                and self._fits(pod.request, uuid, device)
            )

    def _fits(self, request: PodRequest, uuid: str, device: RawDevice) -> bool:
        needed = request.containers[0]
        memory_mib = needed.memory_units or 0
        if not device.in_mig_mode:
            return (
                request.selection.mode != DeviceMode.MIG
                and not device.layout
                and device.memory_used + memory_mib <= device.memory_mib
                and device.cores_used + needed.cores_percent <= ALL_CORES
                and device.share_count < device.slots
            )
        shares = [s for each in self.ledger.leases.values() for s in each.shares]
        taken = {share.position for share in shares if share.device == uuid}
        return (
            needed.mig_allowed
            and (not taken or bool(device.layout))
            and any(
                size * SLICE_MIB >= memory_mib and position not in taken
                for name in ([device.layout] if taken else MIG_LAYOUTS[uuid.split("-")[1]])
                for position, size in enumerate(LAYOUTS[name])
            )
        )


def _is_known(stored: RawDevice | None, node: NodeName, device: Device) -> bool:
    in_mig_mode = device.mode is DeviceMode.MIG
    return stored is not None and (stored.node, stored.in_mig_mode) == (node, in_mig_mode)


def _running(world: World) -> Iterator[tuple[Node, KubeletRecord]]:
    for node in world.nodes.values():
        for record in (*node.kubelet.records.values(), *node.kubelet.claims.values()):
            if record.given is not None:
                yield node, record


def _unleased(running: Mapping[PodUid, Given], ledger: RawLedger) -> Iterator[str]:
    for pod, given in running.items():
        lease = ledger.leases.get(pod)
        if lease is None or (given.device, given.memory_mib) not in {
            (share.device, share.memory_mib) for share in lease.shares
        }:
            yield pod


def _checkpointed(node: Node, pod: str) -> dict[str, object] | None:
    """Return the share that the checkpoint file has of a pod."""
    content = json.loads((node.folder / f"{node.name}.json").read_bytes())
    for entry in content["entries"]:
        if entry["allocation"]["pod"] == pod:
            share: dict[str, object] = entry["allocation"]["lease"]["shares"][0]
            return share
    return None
