"""Whether a pod of the node has ended, by everything that the agent sees of it; pure.

The kubelet may list one that ended long ago as running. PodResources list nothing at first after a
restart of the kubelet. The ledger may have lost a lease. A container that waits for its restart has
no process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.node_agent.kubelet.device_ids import compact
from services.node_agent.kubelet.pods import KubeletPod, PodResources, RunningPods
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.model.names import PodUid


class PodEnd(StrEnum):
    RUNS = "runs"
    ENDED = "ended"
    UNKNOWN = "unknown"


class KubeletListing(StrEnum):
    """A kubelet that does not respond lists none."""

    LIVE = "live"
    TERMINAL = "terminal"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodObservation:
    processes: bool
    """Apart from the sandbox of a pod that is listed as terminal."""
    starts: bool | None
    """None if processes cannot be seen."""
    listed: KubeletListing
    holds: bool | None
    """None if PodResources cannot be read."""
    leased: bool


def end_of(seen: PodObservation) -> PodEnd:
    """Return whether a pod has ended.

    | processes | listed   | starts | holds | leased |         | because
    |-----------|----------|--------|-------|--------|---------|-------------------------------
    | yes       |          |        |       |        | RUNS    | they may use what they were given
    | no        | TERMINAL |        |       |        | ENDED   | it never starts again
    | no        |          | ?      |       |        | UNKNOWN | it may have processes
    | no        |          | yes    |       |        | RUNS    |
    | no        |          | no     | ?     |        | UNKNOWN | the kubelet may start it again
    | no        |          | no     | yes   |        | RUNS    | the kubelet starts it again
    | no        | LIVE     | no     | no    | yes    | RUNS    |
    | no        | ABSENT   | no     | no    | yes    | UNKNOWN | kubelet or ledger may be late
    | no        |          | no     | no    | no     | ENDED   | it is over, and nothing is left
    """
    if seen.processes:
        return PodEnd.RUNS
    if seen.listed is KubeletListing.TERMINAL:
        return PodEnd.ENDED
    if seen.starts is None or (seen.holds is None and not seen.starts):
        return PodEnd.UNKNOWN
    if seen.starts or seen.holds:
        return PodEnd.RUNS
    if seen.leased:
        return PodEnd.RUNS if seen.listed is KubeletListing.LIVE else PodEnd.UNKNOWN
    return PodEnd.ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    pods: Sequence[KubeletPod] = ()
    pod_resources: PodResources | None = None
    running: RunningPods | None = None


def ends_of_pods(
    entries: Iterable[CheckpointEntry], sight: NodeObservation, leases: KnownLeases
) -> Mapping[PodUid, PodEnd]:
    """Claims end by the kubelet's call."""
    by_pod: dict[PodUid, list[CheckpointEntry]] = {}
    for entry in entries:
        if entry.allocation.lease.claim is None:
            by_pod.setdefault(entry.allocation.pod, []).append(entry)
    listed = {pod.uid: pod for pod in sight.pods}
    names = {(pod.namespace, pod.name) for pod in sight.pods}
    return {
        uid: end_of(
            PodObservation(
                processes=_has_processes(uid, listed.get(uid), sight.running),
                listed=_listed(listed.get(uid)),
                starts=None if sight.running is None else uid in sight.running.starting,
                holds=_holds(of_pod, sight.pod_resources, others=() if uid in listed else names),
                leased=leases.may_hold(uid),
            )
        )
        for uid, of_pod in by_pod.items()
    }


def _listed(pod: KubeletPod | None) -> KubeletListing:
    if pod is None:
        return KubeletListing.ABSENT
    return KubeletListing.TERMINAL if pod.terminal else KubeletListing.LIVE


def _has_processes(uid: PodUid, pod: KubeletPod | None, running: RunningPods | None) -> bool:
    """Of a terminal pod the sandbox does not count."""
    containers = running.processes.get(uid, frozenset()) if running is not None else frozenset()
    if pod is not None and pod.terminal:
        return not pod.container_ids.keys().isdisjoint(containers)
    return bool(containers)


def _holds(
    entries: Sequence[CheckpointEntry],
    pod_resources: PodResources | None,
    *,
    others: Iterable[tuple[str, str]],
) -> bool | None:
    """PodResources name no pod by its UID; devices of `others` with the name do not count.

    Devices of init containers are not shown, so that a pod with no others counts as long as it is
    listed as active.
    """
    if pod_resources is None:
        return None
    name = entries[0].place[:2]
    if name in others:
        return False
    if all(entry.init for entry in entries):
        return name in pod_resources.pods
    held = {
        (holding.place, holding.resource): frozenset(compact(holding.device_ids))
        for holding in pod_resources.holdings
        if holding.place[:2] == name
    }
    return any(
        not held.get((entry.place, entry.allocation.resource), frozenset()).isdisjoint(
            entry.allocation.device_ids
        )
        for entry in entries
    )
