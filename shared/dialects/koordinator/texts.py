"""The exact messages of Koordinator's own validating webhook; pure.

Its clients may compare these texts. The errors and their order are Koordinator's (feature gate
`ValidatePodDeviceResource`). Other refusals have Leasehold's messages.
"""

from collections.abc import Iterable, Mapping

from shared.dialects.dialect import PodManifest
from shared.dialects.koordinator.amounts import (
    CORE,
    DEPRECATED,
    FULL,
    GPU,
    MEMORY,
    PREFIX,
    RATIO,
    SHARED,
)

FIELD = "pod.spec.containers[*].resources.requests"
NPU_CORE = "huawei.com/npu-core"
_NAMES = (GPU, SHARED, CORE, MEMORY, RATIO)


def denial(pod: PodManifest, _: bool) -> str:
    """Return the webhook's message for the pod's app containers; empty: none."""
    return denial_message({**one.limits, **one.requests} for one in pod.containers if not one.init)


def denial_message(containers: Iterable[Mapping[str, int]]) -> str:
    """Return the message for a pod's requests, one map per app container; empty: all are valid.

    Several errors are joined as Kubernetes joins them: `[first, second]`.
    """
    errors = [f"{FIELD}: {error}" for amounts in containers for error in _errors(amounts)]
    return f"[{', '.join(errors)}]" if len(errors) > 1 else "".join(errors)


def _errors(amounts: Mapping[str, int]) -> Iterable[str]:
    requested = {
        name: amounts[prefix + name]
        for prefix in (DEPRECATED, PREFIX)
        for name in _NAMES
        if prefix + name in amounts
    }
    if not requested:
        return
    if GPU in requested:
        yield from _of_whole_gpus(requested)
    else:
        yield from _of_parts(requested, has_npu=NPU_CORE in amounts)


def _of_whole_gpus(requested: Mapping[str, int]) -> Iterable[str]:
    if SHARED in requested:
        yield "Forbidden: Forbidden declare GPU and GPU share at same time"
    if requested[GPU] == 0:
        yield _invalid(requested[GPU], "the requested GPU must be greater than zero")
    elif requested[GPU] > FULL and requested[GPU] % FULL:
        yield _invalid(requested[GPU], "the requested GPU must be percentage of 100")


def _of_parts(requested: Mapping[str, int], *, has_npu: bool) -> Iterable[str]:
    shared = requested.get(SHARED, 1)
    if shared == 0:
        yield _invalid(shared, "the requested GPU must be greater than zero")
    if has_npu:
        return
    memory, ratio = requested.get(MEMORY, 0), requested.get(RATIO, 0)
    if not memory and not ratio:
        yield "Forbidden: GPU memory and GPU memory ratio all is zero"
    if memory and ratio:
        yield "Forbidden: declare GPU memory and GPU memory ratio at same time"
    for name, word in ((CORE, "gpuCore"), (RATIO, "gpuMemoryRatio")):
        amount = requested.get(name, 0)
        if shared and amount % shared:
            yield _invalid(amount, f"the requested {word} must multiple of shared")


def _invalid(value: int, rule: str) -> str:
    return f'Invalid value: "{value}": {rule}'
