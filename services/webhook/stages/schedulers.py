"""Stages about the scheduler of a pod; pure."""

from collections.abc import Iterator

from services.webhook.patches import add, add_label
from services.webhook.pod_admission import (
    FORBIDDEN,
    Changes,
    PodAdmission,
    SchedulerChoice,
    denial_by,
    denial_of,
)
from shared.dialects.pod_groups import PodGroupReference, parse_pod_group
from shared.dialects.vocabulary import LEFT_ALONE
from shared.model.change import Change, Hint, Place, field_removed, words
from shared.model.denial import Denial
from shared.model.errors import RequestError
from shared.model.names import DEFAULT_SCHEDULER, HANDED_OVER
from shared.pods.manifest_patches import PatchOperation
from shared.pods.pod_view import PodView

SCHEDULER = "/spec/schedulerName"
ALL_PODS = "all-pods"


def warn_of_other_scheduler(admission: PodAdmission) -> Changes | None:
    """Our agents refuse a pod with GPUs that a scheduler of others places."""
    pod = admission.pod
    if not any(container.requests_gpu for container in pod.containers):
        return None
    why = f"schedulerName {pod.scheduler}"
    change = field_removed("spec.schedulerName")
    if LEFT_ALONE in pod.labels.items():
        why = "the label {}={}".format(*LEFT_ALONE)
        change = Change(Place.LABEL, LEFT_ALONE[0])
    warning = (
        f"by {why} Leasehold does not schedule the pod, and its node agents refuse containers "
        f"without a lease: {words((change,))}"
    )
    return Changes(warnings=(Hint(warning, (change,)),))


ONE_BY_ONE = "kube-scheduler binds pods one by one, and the pod belongs to a gang, which starts"
IN_A_GANG = {"volumes": "name a PersistentVolumeClaim of a PersistentVolume with this disk"}
"""What to write in a gang's pods, by the reason of their hand-over."""


def deny_unsupported_fields(admission: PodAdmission) -> Denial | None:
    """Without the extender, and in a gang, kube-scheduler cannot place a pod of ours."""
    return denial_of(_unsupported(admission.pod, admission.policy.schedulers))


def _unsupported(pod: PodView, schedulers: SchedulerChoice) -> Iterator[Hint]:
    if not schedulers.handover:
        for unsupported in pod.handed_over:
            yield Hint(
                f"{unsupported.path}: only kube-scheduler supports it, and Leasehold runs without "
                "the component kube-scheduler here: remove the field, or have an administrator add "
                "the component",
                (field_removed(unsupported.path),),
            )
    elif _is_of_gang(pod):
        for unsupported in pod.handed_over:
            instead = IN_A_GANG.get(unsupported.row.reason, "remove the field")
            yield Hint(
                f"{unsupported.path}: only kube-scheduler supports it; {ONE_BY_ONE} together: "
                f"{instead}, or start the pods without a gang"
            )
        if pod.scheduler == schedulers.handover and not pod.handed_over:
            yield Hint(
                f"spec.schedulerName {pod.scheduler}: {ONE_BY_ONE} together: leave it out",
                (field_removed("spec.schedulerName"),),
            )


def _is_of_gang(pod: PodView) -> bool:
    """A later stage denies a malformed name."""
    try:
        group = _group_of(pod)
    except RequestError:
        return False
    return group is not None and (group.kind is not None or group.min_member > 1)


def deny_malformed_gang(admission: PodAdmission) -> Denial | None:
    try:
        check_gang(admission.pod)
    except RequestError as error:
        return denial_by(error, FORBIDDEN)
    return None


def check_gang(pod: PodView) -> None:
    _group_of(pod)


def _group_of(pod: PodView) -> PodGroupReference | None:
    group = pod.spec.scheduling_group.pod_group_name
    return parse_pod_group(pod.namespace, pod.annotations, pod.labels, group)


def choose_scheduler(admission: PodAdmission) -> Changes | None:
    patches = tuple(_scheduler_patches(admission.pod, admission.policy.schedulers))
    return Changes(patches=patches) if patches else None


def _scheduler_patches(pod: PodView, schedulers: SchedulerChoice) -> Iterator[PatchOperation]:
    reasons = [unsupported.row.reason for unsupported in pod.handed_over]
    if schedulers.all_pods and not _is_of_gang(pod):
        reasons.append(ALL_PODS)
    if schedulers.handover and reasons and pod.scheduler != schedulers.handover:
        yield add(SCHEDULER, schedulers.handover)
        yield add_label(pod, HANDED_OVER, reasons[0])
    elif pod.scheduler in {"", DEFAULT_SCHEDULER}:
        yield add(SCHEDULER, schedulers.placer)


def choose_placer(admission: PodAdmission) -> Changes | None:
    pod = admission.pod
    schedulers = admission.policy.schedulers
    if pod.handed_over or pod.spec.node_name or schedulers.has(pod) or not schedulers.serves(pod):
        return None
    return Changes(patches=(add(SCHEDULER, schedulers.placer),))
