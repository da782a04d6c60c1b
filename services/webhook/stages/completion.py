"""Stages that complete a pod: its deadline, priority, runtime class, gate and annotations; pure."""

from collections.abc import Iterator

from services.webhook.patches import add, add_annotation, add_gate
from services.webhook.pod_admission import FORBIDDEN, INVALID, Changes, PodAdmission, denial_by
from shared.dialects import pod_requests
from shared.dialects.reserved import EXEMPT
from shared.model.change import Hint
from shared.model.denial import Denial
from shared.model.errors import RequestError
from shared.model.leases.ledger import budget_hint
from shared.model.names import BUDGET_GATE
from shared.pods.manifest_patches import PatchOperation
from shared.pods.run_term import deadline_s, expected_run_s


def set_deadline(admission: PodAdmission) -> Denial | Changes | None:
    """Deny a pod with a malformed annotation, or one that runs for longer than the quota allows."""
    pod = admission.pod
    quota = admission.policy.quota if admission.gpu_containers else None
    try:
        expected_run_s(pod)
        wanted = deadline_s(pod, quota)
    except RequestError as error:
        return denial_by(error, INVALID)
    if wanted is None or wanted == pod.spec.active_deadline_seconds:
        return None
    return Changes(patches=(add("/spec/activeDeadlineSeconds", wanted),))


def apply_budget(admission: PodAdmission) -> Denial | Changes | None:
    budget = admission.budget
    if budget is None:
        return None
    state = f"the GPU budget of namespace {budget.namespace} is {budget.state}"
    hint = budget_hint(budget.namespace)
    if budget.new_pods == "deny":
        return Denial(FORBIDDEN, f"{state} and denies new GPU pods; {hint}")
    if budget.new_pods == "queue":
        return Changes(
            patches=tuple(add_gate(admission.pod, BUDGET_GATE)),
            warnings=(
                Hint(f"{state}: the pod waits at its scheduling gate {BUDGET_GATE}; {hint}"),
            ),
        )
    return None


def set_priority_class(admission: PodAdmission) -> Changes | None:
    spec = admission.pod.spec
    policy = admission.policy
    budget = admission.budget
    has_budget = budget is None or budget.lease_class == "guaranteed"
    name = policy.in_budget_class if has_budget else policy.out_of_budget_class
    if not name or spec.priority_class_name not in {"", admission.default_class}:
        return None
    patches = [add("/spec/priorityClassName", name)]
    # The API server set both from the previous class, and sets them again afterwards.
    if spec.priority is not None:
        patches.append(PatchOperation(op="remove", path="/spec/priority"))
    if spec.preemption_policy is not None:
        patches.append(PatchOperation(op="remove", path="/spec/preemptionPolicy"))
    return Changes(patches=tuple(patches))


def set_runtime_class(admission: PodAdmission) -> Changes | None:
    name = admission.policy.runtime_class
    if not name or admission.pod.spec.runtime_class_name is not None:
        return None
    return Changes(patches=(add("/spec/runtimeClassName", name),))


def add_annotations(admission: PodAdmission) -> Changes | None:
    patches = tuple(_annotations(admission))
    return Changes(patches=patches) if patches else None


def _annotations(admission: PodAdmission) -> Iterator[PatchOperation]:
    pod = admission.pod
    added = pod_requests.added_annotations(pod)
    if admission.exempt:
        added[EXEMPT] = "true"
    earlier: list[PatchOperation] = []
    for key, value in added.items():
        earlier.append(add_annotation(pod, earlier, key, value))
    return iter(earlier)
