"""The JSON of one device, lease or namespace of `/api/v1`, and a pod to try; pure."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from services.dashboard.history import HistoryPoint
from services.dashboard.projection import Projection
from services.dashboard.recent_events import PodStep, RecentEvent
from shared.model.budget import UNITS_PER_GPU_MINUTE, Account, BudgetWindow, ChargeEntry
from shared.model.cluster_view import Json, lease_json, measured_json, waiting_json
from shared.model.lease import Lease
from shared.model.ledger import WaitingPod

BUDGET_POINTS = 60
TRACED_STEPS = ("queued", "waiting", "placed", "bound", "running", "terminated")
MANIFEST = """\
apiVersion: v1
kind: Pod
metadata:
  name: first
spec:
  schedulerName: leasehold
  containers:
    - name: main
      image: busybox
      command: [sleep, "3600"]
      resources:
        limits:
"""
EXAMPLES = {
    "volcano.sh/vgpu-number": (
        "volcano.sh/vgpu-number: 1",
        "volcano.sh/vgpu-memory: 3000   # MiB",
        "volcano.sh/vgpu-cores: 30      # percent of a GPU",
    ),
    "nvidia.com/gpu": (
        "nvidia.com/gpu: 1",
        "nvidia.com/gpumem: 3000   # MiB",
        "nvidia.com/gpucores: 30   # percent of a GPU",
    ),
    "koordinator.sh/gpu.shared": (
        "koordinator.sh/gpu.shared: 1",
        "koordinator.sh/gpu-core: 30           # percent of a GPU",
        "koordinator.sh/gpu-memory-ratio: 30   # percent of its memory",
    ),
    "tencent.com/vcuda-core": (
        "tencent.com/vcuda-core: 30     # percent of a GPU",
        "tencent.com/vcuda-memory: 12   # blocks of 256 MiB",
    ),
    "volcano.sh/gpu-memory": ("volcano.sh/gpu-memory: 3000   # MiB",),
    "volcano.sh/gpu-number": ("volcano.sh/gpu-number: 1   # whole GPUs",),
}
"""Limits of a container, by the resource that its node serves."""


def lease_details_json(lease: Lease, projection: Projection) -> Json:
    """Return a lease with the measured usage of its shares."""
    shape = lease_json(lease)
    for share, form in zip(lease.shares, shape["shares"], strict=True):
        measured, is_idle = projection.usage_of(lease, share)
        form["measured"] = measured_json(measured, is_idle=is_idle)
    return shape


def waiting_details_json(waiting: WaitingPod, position: int) -> Json:
    """Return why one pod is waiting, with the nearest nodes."""
    return (
        waiting_json(waiting)
        | {"position": position}
        | {
            "nearest": [
                {"node": verdict.node, "reason": verdict.reason}
                for verdict in waiting.refusal.nearest_nodes
            ]
        }
    )


def ended_pod_json(event: RecentEvent) -> Json:
    """Return the pod of a recent event that has no lease any more."""
    return {"pod": event.pod, "namespace": event.namespace, "name": event.name}


def steps_json(steps: Iterable[PodStep]) -> list[Json]:
    """Return the time until each step of a pod as spans; see `spans_json`."""
    known = [step for step in steps if step.kind in TRACED_STEPS]
    return [
        {
            "span": step.kind,
            "parent": "",
            "service": "",
            "name": f"until {step.kind}",
            "start_s": before.at - known[0].at,
            "duration_s": step.at - before.at,
            "ok": True,
            "text": "",
        }
        for before, step in itertools.pairwise(known)
    ]


def history_json(
    points: Iterable[tuple[float, HistoryPoint | None]], *, measured: bool = True
) -> Json:
    """Return the columns of a history; null: unknown. Without `measured`, only leased amounts."""
    found = list(points)
    columns = ("memory", "cores", "used_memory", "used_cores")[: 4 if measured else 2]
    series: dict[str, list[Any]] = {
        name: [None if point is None else getattr(point, name) for _, point in found]
        for name in columns
    }
    return {"at": [at for at, _ in found], **series}


def budget_history_json(
    account: Account, window: BudgetWindow, entries: Iterable[ChargeEntry], *, at_ms: int
) -> Json:
    """Return the GPU-minutes used in a window, at up to `BUDGET_POINTS` instants until `at_ms`.

    A charge counts at the end of its interval; at the last instant, what is not charged yet counts
    as well, as in the balance that the timekeeper reports.
    """
    charges = sorted(
        (max(entry.to_ms, window.start_ms), entry.units)
        for entry in entries
        if entry.kind == "charge" and entry.window == window.id
    )
    span_ms = max(at_ms - window.start_ms, 1)
    instants = [
        window.start_ms + span_ms * number // BUDGET_POINTS for number in range(BUDGET_POINTS + 1)
    ]
    used = _running_sum(charges, instants)
    used[-1] = window.used_units + sum(
        lease.weight * max(0, min(at_ms, lease.ended_ms or at_ms) - lease.charged_ms)
        for lease in account.leases
    )
    allowed = window.allowed_units
    return {
        "window": window.id,
        "start": window.start_ms / 1000,
        "end": None if window.end_ms is None else window.end_ms / 1000,
        "limit_minutes": None if allowed is None else allowed / UNITS_PER_GPU_MINUTE,
        "points": [
            {"at": instant / 1000, "minutes": units / UNITS_PER_GPU_MINUTE}
            for instant, units in zip(instants, used, strict=True)
        ],
    }


def _running_sum(charges: Sequence[tuple[int, int]], instants: Iterable[int]) -> list[int]:
    """Return the sum of the sorted charges until each instant."""
    sums: list[int] = []
    used = taken = 0
    for instant in instants:
        while taken < len(charges) and charges[taken][0] <= instant:
            used += charges[taken][1]
            taken += 1
        sums.append(used)
    return sums


def first_pod(served: Iterable[str]) -> str | None:
    """Return the manifest of a pod for one of these resources; None: there is none for them."""
    found = set(served)
    limits = next((limits for resource, limits in EXAMPLES.items() if resource in found), None)
    if limits is None:
        return None
    return MANIFEST + "".join(f"          {line}\n" for line in limits)
