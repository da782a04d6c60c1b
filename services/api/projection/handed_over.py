"""Why a pod waits whose node kube-scheduler chooses, and what to try; pure.

https://github.com/kubernetes/kubernetes/tree/master/pkg/scheduler/framework/plugins
"""

import re

from msgspec import structs

from shared.model.leases.ledger import WaitingPod
from shared.model.requests.placement import Refusal

CLAIMS = "`kubectl describe pvc -n {namespace}` shows why; the pod is placed once it is bound"
HINTS: tuple[tuple[str, str], ...] = (
    (
        r'persistentvolumeclaim "(?P<claim>[^"]+)" not found',
        "create the PersistentVolumeClaim {claim} in namespace {namespace}",
    ),
    (
        r'persistentvolumeclaim "(?P<claim>[^"]+)" is being deleted',
        "name another PersistentVolumeClaim than {claim} in a new pod",
    ),
    (
        r'(?P<kind>resourceclaim(?:template)?)\.resource\.k8s\.io "(?P<claim>[^"]+)" not found',
        "create the {kind} {claim} in namespace {namespace}, or name another one in a new pod",
    ),
    ("unbound immediate PersistentVolumeClaims", CLAIMS),
    ("didn't find available persistent volumes to bind", CLAIMS),
    ("bound to non-existent PersistentVolume", CLAIMS),
    (
        "volume node affinity conflict|match PersistentVolume's node affinity",
        "the data of its PersistentVolumeClaim is on a volume of other nodes: free GPUs on them, "
        "or copy the data to a claim of these nodes",
    ),
    (
        "exceed max volume count",
        "wait until pods with volumes on these nodes have ended",
    ),
    (
        "didn't match pod affinity rules|didn't match pod anti-affinity rules|"
        "didn't satisfy existing pods anti-affinity rules",
        "write preferredDuringSchedulingIgnoredDuringExecution in its affinity to other pods, if "
        "it may also run elsewhere",
    ),
    (
        "didn't match pod topology spread constraints",
        "write whenUnsatisfiable: ScheduleAnyway in its topology spread, if it may also run "
        "elsewhere",
    ),
    (
        "cannot allocate all claims",
        "wait until pods have ended. Pods are evicted for it by its priority if its only "
        "ResourceClaim is for devices of gpu.leasehold.dev or whole-gpu.leasehold.dev, without "
        "selectors, constraints, tolerations or parameters: only kube-scheduler knows which GPUs "
        "others select. A pod that requests GPUs by resource names gets them by its priority",
    ),
    (
        "didn't have free ports",
        "leave hostPort out, or wait until the pods that use the port have ended",
    ),
    (
        "extender did not reply|extender is not ready|context deadline exceeded",
        "`leasehold doctor` shows whether the extender runs; the pod is tried again by itself",
    ),
    (
        "binds pods one by one",
        "make the gang's pods anew without the fields for which kube-scheduler places them, and "
        "without schedulerName",
    ),
)
"""Patterns of texts of kube-scheduler's plugins; the first that is found counts."""
UNTRIED_HINT = (
    "if this lasts, no kube-scheduler runs with Leasehold's extender: `leasehold doctor` shows it. "
    "A pod keeps its scheduler: where the component was removed, delete the pod, so that its "
    "controller makes one that is admitted anew, which queues by its own age"
)
UNTRIED_ELSEWHERE = (
    "if this lasts, no scheduler of its schedulerName runs, or it allocates no ResourceClaims: "
    "delete the pod, and create it with another"
)


def shown_refusal(waiting: WaitingPod) -> Refusal:
    """kube-scheduler's reason is never older than that of the extender."""
    refusal = waiting.refusal
    queued = waiting.queued
    if not queued.by_kube_scheduler:
        return refusal
    cause = f"for {queued.handed_over}" if queued.handed_over else "by its schedulerName"
    reason = waiting.scheduler_reason or refusal.reason
    return structs.replace(
        refusal,
        reason=f"{queued.scheduler or 'kube-scheduler'} places it, {cause}: {reason}",
        hint=_hint(waiting),
        permanent=refusal.permanent and waiting.was_filtered_out,
    )


def _hint(waiting: WaitingPod) -> str:
    queued = waiting.queued
    for pattern, hint in HINTS:
        match = re.search(pattern, waiting.scheduler_reason or waiting.refusal.reason)
        if match:
            return hint.format(namespace=queued.namespace, **match.groupdict())
    if waiting.was_filtered_out:
        return waiting.refusal.hint
    if waiting.scheduler_reason:
        return f"`kubectl describe pod {queued.name} -n {queued.namespace}` shows its Events"
    return UNTRIED_ELSEWHERE if queued.scheduler else UNTRIED_HINT
