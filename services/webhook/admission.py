"""The admission decision: whether a pod may be created or updated, and its patches; pure.

A container that requests no GPU sees none, whatever it sets.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from services.webhook.pod_admission import STATUSES, Changes, Outcome, PodAdmission
from services.webhook.stages.completion import (
    add_annotations,
    apply_budget,
    set_deadline,
    set_priority_class,
    set_runtime_class,
)
from services.webhook.stages.copied_state import remove_copied_state
from services.webhook.stages.devices import (
    apply_pod_policy,
    deny_changed_images,
    deny_device_names,
    hide_devices,
)
from services.webhook.stages.gpu_request import (
    adopt_isolation,
    complete_annotated,
    read_request,
    replace_resource_names,
    warn_of_words,
)
from services.webhook.stages.schedulers import (
    choose_placer,
    choose_scheduler,
    deny_malformed_gang,
    deny_unsupported_fields,
    warn_of_other_scheduler,
)
from shared.model.change import Change, Hint
from shared.model.denial import Denial
from shared.pods.manifest_patches import PatchOperation


class Pods(Enum):
    ALL = auto()
    LEASED = auto()
    NOT_LEASED = auto()
    """Without GPUs, with GPUs of claims only, or for a scheduler of others."""
    PLACED = auto()
    """Leased ones, and others that name a scheduler that Leasehold serves."""
    PLACED_NOT_LEASED = auto()


@dataclass(frozen=True, slots=True)
class Stage:
    review: Callable[[PodAdmission], Outcome]
    order: str
    pods: Pods = Pods.ALL
    exempted: bool = True
    """Applies in namespaces that administrators have exempted, too."""

    def is_for(self, admission: PodAdmission) -> bool:
        if admission.exempt and not self.exempted:
            return False
        is_ours = admission.policy.schedulers.has(admission.pod)
        match self.pods:
            case Pods.ALL:
                return True
            case Pods.LEASED:
                return admission.is_leased
            case Pods.NOT_LEASED:
                return not admission.is_leased
            case Pods.PLACED:
                return admission.is_leased or is_ours
            case Pods.PLACED_NOT_LEASED:
                return is_ours and not admission.is_leased


STAGES = (
    Stage(
        remove_copied_state,
        "first: a copy is reviewed as the pod that its author wrote",
    ),
    Stage(
        replace_resource_names,
        "before every stage that reads amounts",
    ),
    Stage(
        complete_annotated,
        "before every stage that reads amounts",
    ),
    Stage(
        deny_device_names,
        "any place: it reads annotations and mounts only",
        exempted=False,
    ),
    Stage(
        set_deadline,
        "after the names of resources: the quota applies to pods with GPUs",
    ),
    Stage(
        hide_devices,
        "after the names of resources: a container that requests a GPU keeps its variables",
        exempted=False,
    ),
    Stage(
        warn_of_other_scheduler,
        "after the names of resources",
        Pods.NOT_LEASED,
    ),
    Stage(
        apply_pod_policy,
        "before the request is read: what is forbidden counts more than what is malformed",
    ),
    Stage(
        adopt_isolation,
        "before the request is read: it demands what its namespace does",
        Pods.LEASED,
    ),
    Stage(
        read_request,
        "after the names of resources and the policy",
        Pods.LEASED,
    ),
    Stage(
        deny_unsupported_fields,
        "after the request is read: that is what the pod's author has to mend in any cluster",
        Pods.PLACED,
    ),
    Stage(
        deny_malformed_gang,
        "any place: of pods with a lease, the gang is read with the request",
        Pods.PLACED_NOT_LEASED,
    ),
    Stage(
        warn_of_words,
        "any place: of pods with a lease, the words are read with the request",
        Pods.NOT_LEASED,
    ),
    Stage(
        apply_budget,
        "after all other denials: a pod that could never run does not wait for a budget",
        Pods.LEASED,
    ),
    Stage(
        choose_scheduler,
        "after the fields are checked: with the extender, they decide which scheduler it is",
        Pods.PLACED,
    ),
    Stage(set_runtime_class, "any place", Pods.LEASED),
    Stage(set_priority_class, "any place", Pods.LEASED),
    Stage(
        add_annotations,
        "last: vendors' webhooks see a pod that is complete",
        Pods.LEASED,
    ),
)

UPDATE_STAGES = (
    Stage(deny_device_names, "any place: it reads annotations and mounts only"),
    Stage(apply_pod_policy, "any place: it reads the containers that are added"),
    Stage(deny_changed_images, "any place: it reads the containers that the pod had before"),
    Stage(hide_devices, "last: it changes the containers that are added"),
)
"""Only images and ephemeral containers can change an updated pod's devices."""

ALL_PODS_STAGES = (Stage(choose_placer, "alone"),)
"""For pods without GPUs, where administrators have Leasehold place all pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    allowed: bool
    message: str = ""
    code: int = 200
    patches: tuple[PatchOperation, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    """None if only a person can choose."""
    requests_gpu: bool = False


def denied(denial: Denial) -> AdmissionDecision:
    return AdmissionDecision(
        allowed=False,
        message=denial.text,
        code=STATUSES[denial.code],
        changes=denial.changes,
    )


def decide(admission: PodAdmission, stages: Iterable[Stage] = STAGES) -> AdmissionDecision:
    """For example, `decide(PodAdmission(pod=pod, policy=policy)).allowed` is about a new pod.

    `decide(PodAdmission(pod=pod, old=old, policy=policy), UPDATE_STAGES)` decides on an update.
    """
    patches: list[PatchOperation] = []
    warnings: list[Hint] = []
    for stage in stages:
        if not stage.is_for(admission):
            continue
        match stage.review(admission):
            case Denial() as denial:
                return denied(denial)
            case Changes() as changes:
                patches += changes.patches
                warnings += changes.warnings
                if changes.pod is not None:
                    admission = replace(admission, pod=changes.pod)
    return AdmissionDecision(
        allowed=True,
        patches=tuple(patches),
        warnings=tuple(warning.text for warning in warnings),
        changes=tuple(change for warning in warnings for change in warning.changes),
        requests_gpu=admission.old is None and admission.is_leased,
    )
