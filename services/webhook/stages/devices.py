"""Stages that keep pods from devices that they do not lease; pure."""

from collections.abc import Iterator
from itertools import chain

from services.webhook.patches import add_variable
from services.webhook.pod_admission import Changes, PodAdmission, denial_of
from shared.dialects import DIALECTS
from shared.dialects.reserved import (
    NO_DEVICE_VALUES,
    NOTHING_VISIBLE,
    RUNTIME_CLASSES,
    VISIBLE,
    is_cuda_image,
    names_devices,
)
from shared.model.change import Hint
from shared.model.denial import Denial
from shared.pods.pod_policy import (
    Check,
    PolicySubject,
    device_names,
    hidden_devices,
    violations,
)
from shared.pods.pod_view import PodContainer

SERVED = frozenset().union(*(dialect.served for dialect in DIALECTS.values()))


def deny_device_names(admission: PodAdmission) -> Denial | None:
    return denial_of(device_names(admission.pod, admission.containers))


def apply_pod_policy(admission: PodAdmission) -> Denial | None:
    if admission.old is not None:
        has_gpus = bool(admission.gpu_containers_of_pod)
    else:
        has_gpus = admission.is_leased or any(map(admission.uses_claims, admission.containers))
    return denial_of(violations(_subject(admission))) if has_gpus else None


def _subject(admission: PodAdmission) -> PolicySubject:
    check = Check.EXEMPTED if admission.exempt else Check.CREATION
    return PolicySubject(
        check=check if admission.old is None else Check.UPDATE,
        pod=admission.pod,
        containers=admission.containers,
        gpu_containers=admission.gpu_containers,
        gpu_containers_of_pod=admission.gpu_containers_of_pod,
        allow_privileged=admission.policy.allow_privileged,
        allow_env_from=admission.policy.allow_env_from,
        host_paths=admission.policy.host_paths,
    )


def deny_changed_images(admission: PodAdmission) -> Denial | None:
    """No other field that can be updated changes which devices a container sees."""
    old_containers = () if admission.old is None else admission.old.containers
    before = {container.name: container for container in old_containers}
    return denial_of(
        Hint(
            f"container {container.name} would see every GPU with image {container.image}: create "
            "a new pod with that image, or request a GPU"
        )
        for container in admission.pod.containers
        if container.name in before
        and container.image != before[container.name].image
        and is_cuda_image(container.image)
        and not (container.requests_gpu or VISIBLE in container.variables)
    )


def hide_devices(admission: PodAdmission) -> Changes | None:
    hidden = tuple(_with_hidden_devices(admission))
    if not hidden:
        return None
    in_gpu_pod = bool(admission.gpu_containers_of_pod)
    warnings = (hidden_devices(container, beside_gpus=in_gpu_pod) for container in hidden)
    return Changes(
        patches=tuple(add_variable(container, VISIBLE, NOTHING_VISIBLE) for container in hidden),
        warnings=tuple(chain.from_iterable(warnings)),
    )


def _with_hidden_devices(admission: PodAdmission) -> Iterator[PodContainer]:
    in_gpu_pod = bool(admission.gpu_containers_of_pod)
    runtime_adds_devices = RUNTIME_CLASSES in (admission.pod.spec.runtime_class_name or "")
    for container in admission.containers:
        if not _gets_devices(container, admission) and (
            in_gpu_pod or runtime_adds_devices or _may_see_devices(container)
        ):
            value = container.variables.get(VISIBLE)
            if value not in NO_DEVICE_VALUES or VISIBLE in container.value_from:
                yield container


def _gets_devices(container: PodContainer, admission: PodAdmission) -> bool:
    """Whether an agent decides which devices the container sees.

    Without a lease, an amount is no request: the kubelet calls an agent only for resources of
    device plugins, and the agent refuses the container.
    """
    if admission.is_leased:
        return container.requests_gpu
    return bool(container.amounts.keys() & SERVED)


def _may_see_devices(container: PodContainer) -> bool:
    """NVIDIA's runtime adds devices by the variables or by the image."""
    return (
        VISIBLE in container.value_from
        or names_devices(container.variables)
        or (VISIBLE not in container.variables and bool(container.prefixes))
        or (VISIBLE not in container.variables and is_cuda_image(container.image))
    )
