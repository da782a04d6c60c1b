"""Judges a run by the invariants of `tests/proof`, and by what only a model sees happen.

Each check is named by the invariant of docs/architecture.md that it watches.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from services.binder.bind.pod_binder import ADMITTED_S
from services.binder.report.explanations import KubernetesEvent
from services.node_agent.agent_timing import DEFAULT_TIMING
from shared.model.devices.device import DeviceMode
from shared.model.events.event import Event
from shared.model.events.pod_events import NodeChanged, PodTerminated
from shared.model.leases.lease import END_MARGIN_S, Lease
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.model.api_server import NAMESPACE, Pod
from tests.model.claims import Claim
from tests.model.kubelet import KubeletRecord
from tests.model.limit_judge import LimitJudge
from tests.model.mig import LAYOUTS, parse_instance
from tests.model.node import Node
from tests.model.preemption_judge import PreemptionJudge
from tests.model.replica_judge import ReplicaJudge
from tests.model.seen import (
    HARDWARE,
    claim_seen,
    grant_of,
    left_records,
    running_records,
    want_of,
)
from tests.model.start_judge import StartJudge
from tests.model.virtual_time import EPOCH_S
from tests.model.world import Watches, World
from tests.proof import liveness, safety, starts
from tests.proof.history import Finding, History
from tests.proof.judge import checks_in
from tests.proof.ledger import checkpoint_grants, copied, decode
from tests.proof.observations import (
    Grant,
    RawLedger,
    RawShare,
    RegionLimits,
    Sample,
    SeenNode,
    SeenPod,
    Want,
)

UNSEEN = re.compile("cannot be seen|no reply within|has lost its records|is ambiguous|/pods failed")
"""In a refusal: the agent lacks sight, and knows of no contradiction."""
SICK = re.compile(
    "was not laid out|gets no new share|is missing|no healthy devices|the kubelet chose"
)
"""In a refusal: something is wrong with a device, or the kubelet could not choose it."""
HOLDERS = re.compile(r"(?:, pod| in use by pod) (\S+)(?: has |$)")
"""In a refusal: the pods that have what another one needs."""
SIGHT_S = DEFAULT_TIMING.sight_s - 5.0
"""An agent waits so long for what it cannot see."""
HIGHEST = 2.0**43
"""Above all fences and versions that clocks and lies that are accepted can lead to."""


class Judge(Watches):
    """Looks at a world after each step."""

    def __init__(self, world: World, figures: Counter[str]) -> None:
        self.world = world
        self.starts = StartJudge(world, figures)
        self.preemptions = PreemptionJudge(world, figures)
        self.limits = LimitJudge(world)
        self.replicas = ReplicaJudge(world, figures)
        self.history = History(lost_samples=1)
        self.grants_seen = 0
        self.calls = -1
        self.gang_leases: dict[str, set[str]] = {}
        """Pods that had a lease and were not gone, by gang, when this was last checked."""
        self.clock_jumped = False
        self.gone: set[str] = set()
        """Pods of which a binder has handled that they are gone."""
        self.absent: set[str] = set()
        """Those of them that were not in the ledger then; a rebuild may restore them."""
        self.node_states: dict[NodeName, NodeChanged] = {}
        """The newest that a binder has handled."""
        self.refused: Counter[tuple[NodeName, str]] = Counter()
        """Pods that agents refused for what their records contradict, by node and cause."""
        self.declined: dict[PodUid, str] = {}
        """Pods that their agents would refuse, by their last answers."""
        self.admitted_s: dict[PodUid, float] = {}
        """When agents admitted pods last, on the monotonic clock."""
        self.closed: dict[PodUid, set[DeviceUuid]] = {}
        """Devices that were closed when a pod was last admitted to them."""
        self.ledger = decode(world.server.raw())

    def read_ledger(self) -> RawLedger:
        """Read the ledger anew, unless no call has reached it since."""
        if self.calls != self.world.server.calls:
            earlier, self.ledger = self.ledger, decode(self.world.server.raw())
            if earlier.generation != self.ledger.generation:
                self.absent.clear()
            self.calls = self.world.server.calls
        return self.ledger

    def look(self) -> None:
        """Check what must hold at every moment."""
        ledger = self.read_ledger()
        sample = self._sample()
        self.history.redis_lost = self.world.lost_redis
        left = tuple(grant_of(node, record) for node, record in left_records(self.world))
        together = replace(sample, grants=sample.grants + left)
        self._fail(safety.s1_no_device_is_over_committed(together, self.history))
        for check in (
            safety.s1_a_device_has_one_mode,
            safety.s2_a_container_has_one_lease,
            safety.s8_a_lease_lasts_while_its_pod_may_run,
            starts.s11_what_is_let_in_before_a_start_ends_in_time,
        ):
            self._fail(check(sample, self.history))
        sums = safety.differences_in_sums(ledger) if ledger.ready else ()
        for problem in (
            *(f"O2: {uuid}: {text}" for uuid, text in sums),
            *self._wrong_limits(),
            *self._ends_too_early(),
            *self._went_back(),
            *self._believed_lies(),
            *self.starts.look(ledger, self.history),
            *self.preemptions.look(ledger, is_clock_wrong=self.clock_jumped),
            *self.limits.look(ledger, list(running_records(self.world))),
            *self.replicas.look(ledger),
        ):
            self.world.fail(problem)
        self.history.saw_ledger(ledger)
        self.check_gangs()

    def note_reported(self, event: KubernetesEvent) -> None:
        self.starts.record(event)

    def check_evicted(self, pod: Pod, announced_s: float) -> None:
        is_clock_wrong = self.clock_jumped or bool(self.world.server.clock.ahead_s)
        now_s = self.world.loop.time()
        self.preemptions.check_evicted(pod, announced_s, now_s, is_clock_wrong=is_clock_wrong)

    def note_starts_advanced(self, began_at: float) -> None:
        self.look()
        self.starts.note_advanced(began_at)

    def _fail(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.world.fail(f"{finding.check}: {finding.subject}: {finding.text}")

    def _sample(self) -> Sample:
        """Return what runs and what is leased.

        Pods on nodes that were cut off need no lease; a lease that was lost and that came back may
        be elsewhere.
        """
        running = list(running_records(self.world))
        pods = {
            str(record.pod.uid): SeenPod(
                uid=record.pod.uid,
                name=record.pod.name,
                created_at=0,
                want=Want(),
                node="" if self.world.lost_redis else node.name,
            )
            for node, record in running
            if not node.was_silent
        }
        return Sample(
            at=self.world.server.clock.now(),
            hardware=HARDWARE,
            pods=pods,
            grants=tuple(grant_of(node, record) for node, record in running),
            ledger=self.ledger if self.ledger.ready else None,
        )

    # What happens to containers

    def check_created(self, node: NodeName, record: KubeletRecord) -> None:
        self.limits.check_created(self.read_ledger(), self.world.nodes[node], record)

    def check_given(self, node: NodeName, record: KubeletRecord) -> None:
        """Check a container that was just given devices, before it starts."""
        world = self.world
        self.replicas.note_given(record)
        grant = grant_of(self.world.nodes[node], record)
        lease = self.read_ledger().leases.get(grant.pod)
        self._check_checkpoint(node, grant.pod)
        if world.lost_redis:
            return
        if lease is None or lease.node != node:
            # A kubelet without the API server starts a container again although its pod is gone.
            if world.nodes[node].kubelet.is_cut_off and world.api.find(record.user) is None:
                return
            world.fail(f"S3: {grant.pod} is given devices on {node} without a lease there")
        elif not (record.has_restarted or safety.is_as_leased([grant], lease)):
            world.fail(f"S7: {grant} differs from its lease {lease}")
        elif grant.slices:
            self._check_position(world.nodes[node], grant, lease.shares[0])
        self.limits.check_given(self.ledger, world.nodes[node], record)

    def _check_checkpoint(self, node: NodeName, pod: str) -> None:
        content = json.loads((self.world.nodes[node].folder / f"{node}.json").read_bytes())
        agents = tuple(checkpoint_grants(content))
        sample = Sample(at=0, hardware=HARDWARE, agents=agents)
        self._fail(safety.s9_an_agent_gives_out_no_more_than_there_is(sample, self.history))
        mine = [grant for grant in agents if grant.pod == pod]
        if not mine:
            self.world.fail(f"S9: what {pod} was given is not in the checkpoint of {node}")
        self.grants_seen += 1
        self.history.fences_repeat = self.world.lost_redis
        new = tuple(replace(grant, activated_at=self.grants_seen) for grant in mine)
        self._fail(safety.s4_fences_only_rise(replace(sample, agents=new), self.history))

    def _check_position(self, node: Node, grant: Grant, share: RawShare) -> None:
        """S7: the instances of a size have positions by their starts."""
        sizes = LAYOUTS[share.layout]
        size = sizes[share.slot]
        number = sizes[: share.slot].count(sizes[share.slot])
        there = node.driver.existing[DeviceUuid(grant.device)].values()
        starts = sorted(instance.start for instance in there if instance.memory_slices == size)
        if starts[number : number + 1] != [grant.slices.start] or len(grant.slices) != size:
            self.world.fail(f"S7: {grant} is not position {share.slot} of {share.layout}")

    def note_admitted(self, node: NodeName, lease: Lease) -> None:
        """Note which devices of a pod that an agent admits are closed.

        The agent lets a binder go on whose pod has reached the kubelet, or whose lease has ended.
        """
        self.declined.pop(lease.pod, None)
        self.admitted_s[lease.pod] = self.world.loop.time()
        machine = self.world.nodes[node]
        has_arrived = lease.pod in machine.kubelet.records or lease.pod in machine.kubelet.ended
        if has_arrived or machine.agent.leases.has_ended(lease):
            return
        open_ = {device.uuid for device in machine.reported_devices() if device.healthy}
        self.closed[lease.pod] = {share.device for share in lease.shares} - open_

    def note_declined(self, pod: PodUid, reason: str) -> None:
        """Note that an agent has answered a binder that it would refuse a pod."""
        self.declined[pod] = reason

    def check_binding(self, pod: PodUid) -> None:
        """P8: no Binding is sent while the agent would refuse the pod, committed or not.

        Another binder, which the agent answered before, may be about to send it.
        """
        admitted_s = self.admitted_s.get(pod, -math.inf)
        if pod in self.declined and self.world.loop.time() - admitted_s > ADMITTED_S:
            reason = self.declined[pod]
            self.world.fail(f"P8: {pod} is bound, and its agent would refuse it: {reason}")

    def check_refused(self, node: NodeName, pod: Pod, reason: str, waited_s: float) -> None:
        """P8: an agent refuses one pod at most for one cause, and none for what it cannot see.

        Nor does it for a pod that has ended, or after it admitted the pod to a closed device.
        """
        self.replicas.check_refused(node, pod, reason)
        cause = self._cause_of(pod, reason)
        self.refused[node, cause] += 1
        if cause and self.refused[node, cause] > 1:
            self.world.fail(f"P8: {pod.uid} fails on {node} as another pod before it: {reason}")
        if closed := self.closed.get(pod.uid):
            self.world.fail(
                f"P8: {pod.uid} was admitted to {sorted(closed)}, closed then: {reason}"
            )
        if self._have_ended(node, HOLDERS.findall(reason)):
            self.world.fail(f"P8: {pod.uid} fails on {node} for what has ended: {reason}")
        lease = self.read_ledger().leases.get(pod.uid)
        is_leased = lease is not None and lease.node == node  # else it was lost with Redis
        if is_leased and UNSEEN.search(reason) and waited_s < SIGHT_S:
            self.world.fail(f"P8: {pod.uid} fails on {node} after {waited_s:.0f} s: {reason}")

    def _have_ended(self, node: NodeName, names: Sequence[str]) -> bool:
        """Whether nothing runs of the pods or claims for which an agent has refused another."""
        kubelet = self.world.nodes[node].kubelet
        records = (*kubelet.records.values(), *kubelet.left.values(), *kubelet.claims.values())
        there = {f"{NAMESPACE}/{record.pod.name}" for record in records}
        return bool(names) and there.isdisjoint(names)

    def _cause_of(self, pod: Pod, reason: str) -> str:
        """Return the cause of a refusal; a device that hangs again is another one."""
        lease = self.read_ledger().leases.get(pod.uid)
        leased = {share.device for share in lease.shares} if lease else set()
        hangs = [
            f"{device} hangs for the {number}. time"
            for machine in self.world.nodes.values()
            for device, number in machine.driver.hangs.items()
            if device in leased and device in machine.driver.hanging and SICK.search(reason)
        ]
        return safety.cause_of(reason) or "".join(hangs)

    def check_destroyed(self, node: NodeName, uuid: str) -> None:
        """Check a MIG instance that is about to be destroyed."""
        kubelet = self.world.nodes[node].kubelet
        for record in (*kubelet.records.values(), *kubelet.left.values()):
            if record.visible == uuid:
                self.world.fail(f"S1: {uuid} is destroyed, and {record.pod.uid} runs on it")

    def _wrong_limits(self) -> Iterator[str]:
        for node, record in running_records(self.world):
            existing = node.driver.existing.get(DeviceUuid(record.device), {}).values()
            if parse_instance(record.visible) and record.visible not in {i.uuid for i in existing}:
                yield f"S1: {record.pod.uid} runs on {record.visible}, which does not exist"
            if record.counted_mib > node.limit_mib(record):
                yield f"S7: {record.pod.uid} is limited to less than {record.used_mib} MiB in use"

    # What binders have handled

    def _ends_too_early(self) -> Iterator[str]:
        """Yield leases that may last longer than `ends_by` says, unless a clock was wrong."""
        world = self.world
        clocks = (world.server.clock, *(node.clock for node in world.nodes.values()))
        self.clock_jumped = self.clock_jumped or any(clock.ahead_s for clock in clocks)
        leases = {} if self.clock_jumped else self.ledger.leases
        for node, record in running_records(world):
            lease = leases.get(record.pod.uid)
            if lease is None or lease.state != "active" or not isinstance(record.pod, Pod):
                continue
            early_s = EPOCH_S + record.started_s - lease.activated_at
            if early_s > record.pod.request.term.grace_s + END_MARGIN_S:
                yield f"S11: {lease.pod} on {node.name} may run {early_s:.1f} s beyond its lease"

    def note_handled(self, event: Event) -> None:
        """Note what the ledger must remember from now on."""
        if isinstance(event, NodeChanged):
            state = self.node_states.get(event.node.name)
            if state is None or state.revision < event.revision:
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
        self.starts.promises.clear()
        self.gang_leases = self._gang_leases()

    def forget_fences(self, node: NodeName) -> None:
        """Forget what an agent honoured: its checkpoint is lost."""
        fences = self.history.fences
        self.history.fences = {key: value for key, value in fences.items() if key[0] != node}

    def _went_back(self) -> Iterator[str]:
        """P2: a pod that is gone does not come back. P7: nor does an older state of a node."""
        if not self.ledger.ready:
            return
        returned = self.absent & {*self.ledger.leases, *self.ledger.waiting}
        yield from (f"P2: {pod} is gone, and has come back into the ledger" for pod in returned)
        for handled in self.node_states.values() if not self.world.lost_redis else ():
            node = handled.node.name
            states = self.world.api.node_states
            newer = [state for state in states if state.revision >= handled.revision]
            if not any(self._is_stored(state) for state in newer if state.node.name == node):
                yield f"P7: an older state of {node} has replaced that of {handled.revision}"

    def _is_stored(self, state: NodeChanged) -> bool:
        name = state.node.name
        if state.deleted or name not in self.ledger.nodes:
            return state.deleted and name not in self.ledger.nodes
        return state.node.unschedulable == (name in self.ledger.cordoned)

    def _believed_lies(self) -> Iterator[str]:
        """S10: yield what the ledger must not have from any agent.

        After Redis was lost, or its Node was deleted, a device may be with the agent that names it
        first.
        """
        world = self.world
        homes = self._homes()
        for uuid, device in self.ledger.devices.items():
            if device.fence > HIGHEST:
                yield f"S10: the fence of {uuid} is {device.fence}"
            home = homes.get(uuid)
            is_sure = home and not (world.lost_redis or home in world.api.left)
            if is_sure and uuid not in world.moved and device.node != home:
                yield f"S10: {uuid} of {home} is with {device.node}"
        pods = {pod.uid for pod in world.api.pods.values()}
        for lease in self.ledger.leases.values():
            if lease.version > HIGHEST:
                yield f"S10: the version of the lease of {lease.pod} is {lease.version}"
            is_active = lease.state == "active" and lease.pod in pods
            if is_active and not any((lease.pod, name) in world.given for name in world.nodes):
                yield f"S10: the lease of {lease.pod} is active, and no agent gave it anything"

    def check_gangs(self) -> None:
        """P5: when a pod of a gang gets a lease, as many as the gang needs have one then.

        Pods that are gone do not count.
        """
        held = self._gang_leases()
        for gang, pods in held.items():
            members = self.gang_leases.get(gang, set())
            needed = int(gang.rpartition("-")[2])
            if (
                pods - members
                and max(len(pods), len(members)) < needed
                and not self.world.lost_redis
            ):
                self.world.fail(
                    f"P5: {sorted(pods - members)} of {gang} get leases, only {sorted(pods)} exist"
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
        sample = self._whole_sample()
        ledger = self.ledger
        history = History(pods=dict(sample.pods or {}))
        findings = [
            finding for check in checks_in(liveness, safety) for finding in check(sample, history)
        ]
        unrecorded = self._unrecorded(ledger)
        running = list(running_records(self.world))
        return [
            *(
                f"{finding.check}: {finding.subject}: {finding.text}"
                for finding in findings
                if not finding.pods & unrecorded
            ),
            *(f"M2: the preemption for {plan.id} stays" for plan in ledger.preemptions),
            *self.preemptions.unserved(sample, ledger),
            *self.limits.differing(ledger, running),
            *self.limits.still_waiting(ledger, running),
        ]

    def without_claims(self) -> list[str]:
        """Return reservations of pods whose claim is gone."""
        world = self.world
        return [
            f"V2: {pod.uid} waits with a lease, and its claim is gone"
            for pod in world.api.pods.values()
            if pod.request.claims and pod.is_pending and pod.uid in self.ledger.leases
            if pod.name not in world.api.volumes.claims
        ]

    def check_owed(self) -> None:
        """Check that what fits starts once all before it must have ended."""
        sample = self._whole_sample()
        self.history.saw_pods((sample.pods or {}).values(), sample.at)
        self._fail(starts.p9_what_fits_starts_if_all_before_it_end(sample, self.history))
        self.starts.figures["pods that wait for others' ends"] += bool(self.history.owed)

    def _whole_sample(self) -> Sample:
        """Return all pods, claims and nodes as a cluster's users see them."""
        world = self.world
        ledger = self.read_ledger()
        running = list(running_records(self.world))
        pods = [self._seen(pod) for pod in world.api.pods.values()]
        pods += [
            claim_seen(claim, running)
            for claim in world.claims.stored.values()
            if claim.uid in ledger.leases or not self._is_kept(claim)
        ]
        nodes = {str(name): SeenNode(name=name) for name in world.api.nodes}
        nodes |= {str(n): SeenNode(name=n, cordoned=True) for n in world.api.cordoned}
        return replace(
            self._sample(),
            pods={pod.uid: pod for pod in pods if pod.node or pod.message != "no pod"},
            nodes=nodes,
            ledger=ledger,
            limits={
                str(record.pod.uid): RegionLimits(
                    pod=record.pod.uid, mib=(grant.mib,), cores=(grant.cores or HARDWARE.cores,)
                )
                for node, record in running
                if not (grant := grant_of(node, record)).slices
            },
            homes=self._homes(),
            mig_devices=frozenset(
                device.uuid
                for node in world.nodes.values()
                for device in node.devices
                if device.mode is DeviceMode.MIG
            ),
        )

    def _seen(self, pod: Pod) -> SeenPod:
        """Return a pod. Its lease counts, which a resize may have changed.

        After Redis was lost, the copy may be of an earlier lease, or of an earlier size. A stopped
        container whose record its agent has lost does not have to start again.
        """
        started = {
            uid
            for node in self.world.nodes.values()
            for uid, record in node.kubelet.records.items()
            if record.given is not None or (record.stopped and node.lost_records)
        }
        lease = self.ledger.leases.get(pod.uid)
        copy = copied(pod.lease)
        if lease and self.world.lost_redis:
            copy["devices"] = tuple(share.device for share in lease.shares)
            copy["copied_mib"] = tuple(share.mib for share in lease.shares)
        return SeenPod(
            uid=pod.uid,
            name=pod.name,
            created_at=pod.created_at,
            want=want_of(pod.request, copy["copied_mib"]),
            node=pod.node or "",
            phase=pod.phase,
            max_run_s=pod.request.term.max_run_s,
            deleted=pod.deleting,
            message="it waits" if lease or pod.uid in self.ledger.waiting else "",
            gang=pod.request.gang.name if pod.request.gang else "",
            priority=pod.request.priority,
            spared=pod.is_protected,
            spread=bool(pod.request.anti_affinity_groups or pod.request.claims),
            runs=pod.uid in started,
            resized=True,
            **copy,
        )

    def _is_kept(self, claim: Claim) -> bool:
        """Whether its device, which was allocated unasked, is kept for a pod that waits."""
        device = self.ledger.devices.get(claim.device or "")
        return device is not None and device.is_claimed

    def _homes(self) -> dict[str, str]:
        nodes = self.world.nodes.values()
        return {str(device.uuid): node.name for node in nodes for device in node.devices}

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
            and not ledger.devices[record.device].healthy
        }
