"""The messages of Koordinator's validating webhook, for clients that look for them."""

import pytest

from services.webhook.admission import decide
from services.webhook.pod_admission import AdmissionPolicy, PodAdmission
from shared.dialects.koordinator.dialect import FIELD, denial_of
from shared.model.denial import Denial
from tests.support.webhook.reviews import reviewed

GPU = "koordinator.sh/gpu"
SHARED = "koordinator.sh/gpu.shared"
CORE, MEMORY, RATIO = (f"koordinator.sh/gpu-{name}" for name in ("core", "memory", "memory-ratio"))

ROWS = [
    ({GPU: 50, SHARED: 1}, "Forbidden: Forbidden declare GPU and GPU share at same time"),
    ({GPU: 0}, 'Invalid value: "0": the requested GPU must be greater than zero'),
    ({GPU: 150}, 'Invalid value: "150": the requested GPU must be percentage of 100'),
    (
        {SHARED: 0, RATIO: 50},
        'Invalid value: "0": the requested GPU must be greater than zero',
    ),
    ({SHARED: 1, CORE: 50}, "Forbidden: GPU memory and GPU memory ratio all is zero"),
    (
        {SHARED: 1, MEMORY: 1 << 30, RATIO: 50},
        "Forbidden: declare GPU memory and GPU memory ratio at same time",
    ),
    (
        {SHARED: 2, CORE: 51, RATIO: 50},
        'Invalid value: "51": the requested gpuCore must multiple of shared',
    ),
    (
        {SHARED: 2, CORE: 50, RATIO: 51},
        'Invalid value: "51": the requested gpuMemoryRatio must multiple of shared',
    ),
]


@pytest.mark.parametrize(("amounts", "text"), ROWS, ids=[text[-40:] for _, text in ROWS])
def test_koordinator_33_every_error_has_its_exact_text(amounts: dict[str, int], text: str) -> None:
    assert denial_of([amounts]) == Denial("BadRequest", f"{FIELD}: {text}")


def test_koordinator_33_npu_cores_end_the_checks() -> None:
    assert denial_of([{SHARED: 1, "huawei.com/npu-core": 1}]) is None


def test_koordinator_33_several_errors_are_joined_as_kubernetes_joins_them() -> None:
    denial = denial_of([{GPU: 150}, {SHARED: 1, CORE: 50}])

    assert denial is not None
    assert denial.text == f"[{FIELD}: {ROWS[2][1]}, {FIELD}: {ROWS[4][1]}]"


@pytest.mark.parametrize(
    "amounts", [{GPU: 200}, {SHARED: 2, CORE: 100, RATIO: 100}, {MEMORY: 5}, {"cpu": 1}]
)
def test_koordinator_33_valid_requests_have_no_error(amounts: dict[str, int]) -> None:
    assert denial_of([amounts]) is None


def test_koordinator_33_the_webhook_uses_these_messages_if_enabled() -> None:
    amounts = {"koordinator.sh/gpu": "150"}
    main = {"name": "main", "resources": {"limits": amounts, "requests": amounts}}
    pod = reviewed({"metadata": {"name": "p"}, "spec": {"containers": [main]}}, "ns")

    decision = decide(
        PodAdmission(pod=pod, policy=AdmissionPolicy(vendor_messages=frozenset({"koordinator"})))
    )
    ours = decide(PodAdmission(pod=pod, policy=AdmissionPolicy()))

    assert (decision.allowed, decision.message) == (False, f"{FIELD}: {ROWS[2][1]}")
    assert "container" in ours.message
