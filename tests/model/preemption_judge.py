"""Judges preemption: all of a gang get room or none, and a gang ends as a whole or not at all."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shared.model.names import PodUid
from tests.model.api_server import NOTICE_S, Pod
from tests.model.redis_links import FEED_WAIT_S
from tests.proof.liveness import free_devices, waits
from tests.proof.observations import RawLedger, RawPreemption, Sample, SeenPod
from tests.proof.safety import HELD

if TYPE_CHECKING:
    from tests.model.world import World

UNSEEN_S = FEED_WAIT_S + 10.0
"""A planner may not have read what is younger than this: its link may be slow."""


def least_of(gang: str) -> int:
    return int(gang.rpartition("-")[2])


class PreemptionJudge:
    """Looks at each plan when it is first stored, and at all evictions."""

    def __init__(self, world: "World", figures: Counter[str]) -> None:
        self.world = world
        self.figures = figures
        self._seen = set[tuple[str, float]]()
        self._victims = dict[str, int]()
        """Of all plans, with the priority of the pods for which they end."""
        self.evicted = set[str]()
        self._last_leased = defaultdict[str, dict[str, float]](dict)
        """By gang and pod, when it last had a lease."""

    def look(self, ledger: RawLedger, *, is_clock_wrong: bool) -> Iterator[str]:
        for lease in ledger.leases.values():
            self._last_leased[lease.gang][lease.pod] = self.world.loop.time()
        for plan in ledger.preemptions:
            key = (plan.id, plan.opened_at)
            if key not in self._seen:
                self._seen.add(key)
                self.figures["plans for gangs" if plan.gang else "plans for single pods"] += 1
                self.figures["runs with plans"] = 1
                for pod in plan.victims:
                    self._victims[pod] = max(plan.priority, self._victims.get(pod, 0))
                yield from self._wrong_pods(plan)
                if not is_clock_wrong:
                    yield from self._parts_of_gangs(plan, ledger)
            if plan.stage == "handed" and (left := _left(plan)):
                yield f"M2: {plan.id} has its devices, and {left} were to end for it"
            if ledger.ready:
                yield from self._parts_of_claims(plan, ledger)

    def _wrong_pods(self, plan: RawPreemption) -> Iterator[str]:
        needed = least_of(plan.gang) if plan.gang else 1
        if len(set(plan.pods)) < needed:
            yield f"P5: {plan.gang} needs {needed} pods, and a plan is for {sorted(plan.pods)}"
        for uid in plan.victims:
            pod = self.world.api.find(PodUid(uid))
            if pod is not None and pod.request.priority >= plan.priority:
                yield f"M2: {pod.uid} is to end for {plan.id}, whose priority is not higher"

    def _parts_of_gangs(self, plan: RawPreemption, ledger: RawLedger) -> Iterator[str]:
        """Yield gangs of which a plan leaves fewer than their minimum, but some.

        A pod that got its lease shortly before may be missing in the plan; it counts among those
        that are left, as does one whose lease ended shortly before.
        """
        ending = {pod for other in ledger.preemptions for pod in other.victims}
        gangs = defaultdict[str, set[str]](set)
        unseen_s = self.world.loop.time() - UNSEEN_S
        for lease in ledger.leases.values():
            pod = self.world.api.find(PodUid(lease.pod))
            is_old = lease.created_at < plan.opened_at - UNSEEN_S
            if lease.gang and pod is not None and not pod.deleting:
                gangs[lease.gang] |= {lease.pod} if is_old or lease.pod in ending else set()
        for gang, pods in gangs.items():
            is_hit = not pods.isdisjoint(plan.victims)
            left = pods - ending
            seen = {pod for pod, at in self._last_leased[gang].items() if at >= unseen_s}
            if is_hit and left and len(seen - ending) < least_of(gang) <= len(pods):
                yield f"P5: of {gang}, {plan.id} ends {sorted(plan.victims)} and not {sorted(left)}"
            elif is_hit and not left:
                self.figures["whole victim gangs"] += 1

    def _parts_of_claims(self, plan: RawPreemption, ledger: RawLedger) -> Iterator[str]:
        if any(pod in ledger.leases for pod in plan.pods):
            return
        claiming = [pod for pod in plan.pods if pod in ledger.claims]
        if 0 < len(claiming) < len(plan.pods):
            yield f"P5: of {plan.id}, only {claiming} claim devices"

    def check_evicted(
        self, pod: Pod, announced_s: float, now_s: float, *, is_clock_wrong: bool
    ) -> None:
        """Judge an eviction by the announcement that the pod had.

        A withdrawn one counts again if Redis lost that unseen, and nobody remembers it.
        """
        is_forgotten = self.world.lost_unseen and announced_s == math.inf
        self.figures["evictions"] += 1
        self.evicted.add(pod.uid)
        if pod.uid not in self._victims:
            self.world.fail(f"M2: {pod.uid} is evicted, and no plan says so")
        elif pod.request.priority >= self._victims[pod.uid]:
            self.world.fail(f"M2: {pod.uid} is evicted for a pod without a higher priority")
        elif now_s < announced_s + NOTICE_S and not (is_clock_wrong or is_forgotten):
            self.world.fail(f"M2: {pod.uid} is evicted, announced at {announced_s} s: {now_s}")

    def unserved(self, sample: Sample, ledger: RawLedger) -> Iterator[str]:
        """Yield a pod or gang of the highest priority that would fit after evictions.

        Only the one that waits alone: others may be in its way.
        """
        pods = sample.pods or {}
        units = defaultdict[str, list[SeenPod]](list)
        for pod in pods.values():
            if waits(pod) and pod.priority:
                units[pod.gang or pod.uid].append(pod)
        if len(units) != 1:
            return
        [(name, waiting)] = units.items()
        needed = least_of(name) if waiting[0].gang else 1
        has_lease = any(
            lease.pod in pods and name in {lease.gang, lease.pod}
            for lease in ledger.leases.values()
        )
        demands = any(pod.want.memory for pod in waiting)  # not every device can hold them
        if len(waiting) < needed or has_lease or demands:
            return
        priority = min(pod.priority for pod in waiting)
        evictable = _evictable(pods, ledger, priority)
        left = {uid: lease for uid, lease in ledger.leases.items() if uid not in evictable}
        devices = {uuid: replace(raw, is_claimed=False) for uuid, raw in ledger.devices.items()}
        others = {uid: pod for uid, pod in pods.items() if uid not in evictable}
        cleared = replace(ledger, leases=left, devices=devices)
        free = free_devices(replace(sample, pods=others), cleared)
        places = [
            [mib, cores, slots] for devices in free.values() for mib, cores, slots, _ in devices
        ]
        placed = 0
        for pod in sorted(waiting, key=lambda pod: pod.want.mib, reverse=True):
            for place in places:
                if place[0] >= pod.want.mib and place[1] >= pod.want.cores and place[2] > 0:
                    place[0] -= pod.want.mib
                    place[1] -= pod.want.cores
                    place[2] -= 1
                    placed += 1
                    break
        if placed >= needed and evictable:
            yield f"M3: {name} waits, and would fit if {sorted(evictable)} were evicted"


def _left(plan: RawPreemption) -> list[str]:
    return [pod for pod, outcome in plan.victims.items() if outcome is None]


def _evictable(pods: Mapping[str, SeenPod], ledger: RawLedger, priority: int) -> set[str]:
    """Return the pods that may be evicted for that priority; of a gang all, or none."""
    single = {
        uid
        for uid, lease in ledger.leases.items()
        if uid in pods and lease.state in HELD
        if pods[uid].priority < priority and not (pods[uid].spared or pods[uid].deleted)
        if not pods[uid].of_claim
    }
    kept = {lease.gang for uid, lease in ledger.leases.items() if lease.gang and uid not in single}
    return {uid for uid in single if ledger.leases[uid].gang not in kept}
