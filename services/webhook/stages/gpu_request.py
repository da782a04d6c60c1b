"""Stages that read the GPU request of a pod, in any dialect; pure.

They use the watcher's code, so an admitted pod is never rejected later for its syntax.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice

from services.webhook.patches import add_annotation, complete_limits, rename_amounts
from services.webhook.pod_admission import (
    BAD_REQUEST,
    INVALID,
    AdmissionPolicy,
    Changes,
    PodAdmission,
    denial_by,
    denial_of,
)
from services.webhook.stages.request_sizes import too_large, too_small
from services.webhook.stages.schedulers import check_gang
from shared.dialects import GPU_RESOURCES, pod_requests
from shared.dialects.isolation_words import parse_isolation
from shared.dialects.nvidia.sharing_selectors import find_sharing_selectors
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.reserved import CHOSEN
from shared.dialects.vocabulary import MisplacedKey, find_misplaced, find_unread
from shared.model.bounds import MOST_ANNOTATIONS
from shared.model.change import Hint, field_removed, limit
from shared.model.denial import Denial
from shared.model.errors import RequestError
from shared.model.names import ISOLATION
from shared.model.requests.request import PodRequest
from shared.pods.pod_policy import demand_violations
from shared.pods.pod_view import PodContainer, PodView

MOST_WARNINGS = 10
"""Each word is compared with all words of all dialects."""
MOST_DIGITS = 9
"""A number with more is above that of any GPU."""

AmountChanges = Mapping[str, Mapping[str, int | None]]
"""By the container's path; None removes an amount."""


def replace_resource_names(admission: PodAdmission) -> Denial | Changes | None:
    pod = admission.pod
    names = admission.policy.resource_names
    if not names or not admission.policy.schedulers.serves(pod):
        return None
    try:
        renamed = [rename_amounts(container, names) for container in pod.containers]
    except RequestError as error:
        return denial_by(error, INVALID)
    return Changes(
        patches=tuple(chain.from_iterable(patches for _, patches in renamed)),
        pod=replace(pod, containers=tuple(container for container, _ in renamed)),
    )


def complete_annotated(admission: PodAdmission) -> Denial | Changes | None:
    """Annotations may request the GPUs of a container without any resource."""
    pod = admission.pod
    if not admission.policy.schedulers.has(pod):
        return None
    try:
        added = pod_requests.annotated_amounts(pod, admission.policy.rules)
    except RequestError as error:
        return denial_by(error, BAD_REQUEST)
    if not added:
        return None
    amounts = {
        container.path: added[container.name]
        for container in pod.containers
        if container.name in added
    }
    patches = (
        complete_limits(container, amounts[container.path])
        for container in pod.containers
        if container.path in amounts
    )
    return Changes(patches=tuple(chain.from_iterable(patches)), pod=_completed(pod, amounts))


def adopt_isolation(admission: PodAdmission) -> Denial | Changes | None:
    pod = admission.pod
    demand = admission.policy.isolation
    if not demand or ISOLATION in pod.annotations:
        return None
    try:
        parse_isolation(demand)
    except RequestError as error:
        return Denial(INVALID, f"namespace {pod.namespace}: {error}")
    return Changes(
        patches=(add_annotation(pod, (), ISOLATION, demand),),
        pod=replace(pod, annotations={**pod.annotations, ISOLATION: demand}),
    )


def read_request(admission: PodAdmission) -> Denial | Changes:
    """Complete the amounts as the vendors' webhooks do, and deny what no placer could grant."""
    pod = admission.pod
    policy = admission.policy
    try:
        changes = {
            container.path: _amount_changes(container) for container in admission.leased_containers
        }
    except RequestError as error:
        return denial_by(error, BAD_REQUEST)
    misplaced = tuple(islice(find_misplaced(pod), MOST_WARNINGS))
    request = _parse_request(pod, changes, policy)
    if isinstance(request, Denial):
        amount = next((word for word in misplaced if word.is_resource), None)
        # What is missing is probably what was written wrongly.
        return request if amount is None else Denial(BAD_REQUEST, amount.text, amount.changes)
    excess = too_large(request, pod.containers, admission.largest)
    denial = (
        _check_annotations(pod)
        or _check_misplaced(request, misplaced)
        or denial_of(demand_violations(pod, request))
    )
    if excess is not None and not policy.allow_larger_requests:
        denial = denial or excess
    if denial is not None:
        return denial
    late = [Hint(f"{excess.text}; the pod waits for a node with such a device")] if excess else []
    small = too_small(request, policy.least_share_mib, admission.largest)
    completed = (
        complete_limits(container, changes[container.path])
        for container in admission.leased_containers
    )
    return Changes(
        patches=tuple(chain.from_iterable(completed)),
        warnings=(
            *_word_warnings(pod, misplaced, request.dialect),
            *map(Hint, find_sharing_selectors(pod.spec.node_selector, request)),
            *late,
            *islice(small, MOST_WARNINGS),
            *_unseen_numbers(request, pod),
        ),
    )


def _unseen_numbers(request: PodRequest, pod: PodView) -> Iterator[Hint]:
    gpus = {part.container: part.gpus for part in request.containers}
    for container in pod.containers:
        numbers = container.variables.get(CHOSEN, "").split(",")
        seen = gpus.get(container.name, 0)
        if seen and any(_is_number_from(seen, number.strip()) for number in numbers):
            sees = "one GPU, number 0" if seen == 1 else f"{seen} GPUs, numbers 0 to {seen - 1}"
            yield Hint(
                f"container {container.name}: variable {CHOSEN} is {','.join(numbers)}, and the "
                f"container sees {sees}: remove it",
                (field_removed(f"env[{CHOSEN}]", container.name),),
            )


def _is_number_from(least: int, text: str) -> bool:
    return text.isdecimal() and (len(text) > MOST_DIGITS or int(text) >= least)


def warn_of_words(admission: PodAdmission) -> Changes:
    """In a pod without a lease, vendors' words have no effect."""
    misplaced = islice(find_misplaced(admission.pod), MOST_WARNINGS)
    return Changes(warnings=tuple(_word_warnings(admission.pod, misplaced, dialect="")))


def _amount_changes(container: PodContainer) -> Mapping[str, int | None]:
    """Change amounts as the vendors' own webhooks do.

    Raises RequestError where its author has set to 0 what is missing beside the other amounts.
    """
    amounts = container.amounts
    changes = pod_requests.amount_changes(amounts)
    contradicted = sorted(container.zeros & {key for key, amount in changes.items() if amount})
    if contradicted:
        requested = ", ".join(sorted(amounts.keys() & GPU_RESOURCES))
        raise RequestError(
            f"container {container.name}: {contradicted[0]} is 0 and needed by {requested}: set it "
            "to 1 or more, or remove them all",
            limit(container.name, contradicted[0], 1),
        )
    return changes


def _parse_request(
    pod: PodView, changes: AmountChanges, policy: AdmissionPolicy
) -> PodRequest | Denial:
    vendors = policy.vendor_messages
    denial = pod_requests.vendor_denial(pod, vendors, refused=False)
    if denial is not None:
        return denial
    try:
        request = parse_pod_request(_completed(pod, changes), policy.rules)
    except RequestError as error:
        denial = pod_requests.vendor_denial(pod, vendors, refused=True)
        return denial or denial_by(error, BAD_REQUEST)
    try:
        check_gang(pod)
    except RequestError as error:
        return denial_by(error, BAD_REQUEST)
    return request


def _check_annotations(pod: PodView) -> Denial | None:
    """Otherwise no status could be written once a Binding has added annotations."""
    size = sum(len(key.encode()) + len(text.encode()) for key, text in pod.annotations.items())
    if size <= MOST_ANNOTATIONS:
        return None
    text = (
        f"metadata.annotations has {size} bytes; at most {MOST_ANNOTATIONS} are allowed, as the "
        "lease is written there, too"
    )
    return Denial(BAD_REQUEST, text)


def _check_misplaced(request: PodRequest, misplaced: Iterable[MisplacedKey]) -> Denial | None:
    """Deny a container that would get all of a device, and was to get a part."""
    wide = next((part for part in request.containers if part.wants_all_memory), None)
    amount = next((word for word in misplaced if word.is_resource), None)
    if wide is None or amount is None:
        return None
    text = f"{amount.text}; container {wide.container} would get a whole GPU"
    return Denial(BAD_REQUEST, text, amount.changes)


def _word_warnings(pod: PodView, misplaced: Iterable[MisplacedKey], dialect: str) -> Iterator[Hint]:
    yield from misplaced
    yield from find_unread(pod, dialect)


def _completed(pod: PodView, changes: AmountChanges) -> PodView:
    return replace(
        pod,
        containers=tuple(
            _with_amounts(container, changes.get(container.path, {}))
            for container in pod.containers
        ),
    )


def _with_amounts(container: PodContainer, changes: Mapping[str, int | None]) -> PodContainer:
    return replace(
        container,
        limits=_changed(container.limits, changes),
        requests=_changed(container.requests, changes),
    )


def _changed(amounts: Mapping[str, int], changes: Mapping[str, int | None]) -> dict[str, int]:
    merged = {**amounts, **changes}
    return {name: amount for name, amount in merged.items() if amount is not None}
