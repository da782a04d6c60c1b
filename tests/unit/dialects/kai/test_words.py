"""KAI's and Run:ai's annotations: what they request, and what is refused with key and value."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.kai.dialect import DIALECT, PORTION, SCHEDULER
from shared.dialects.kai.words import parse_wish
from shared.dialects.pod_requests import annotated_amounts, parse_pod_request
from shared.model.devices.device import required_memory_mib
from shared.model.devices.enforcers import HeldBy
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.requests.request import GpuRequest
from tests.support.build import device, lease, share
from tests.support.dialects.builders import PATHS

CONTAINER = "nvidia.com/container."
MAIN = f"{CONTAINER}main."
HALF = {"gpu-fraction": "0.5"}
TRIGGER = "leasehold.dev/share"


def manifest(notes: Mapping[str, str], *names: str, init: str = "", share: int = 0) -> PodManifest:
    limits = {TRIGGER: share} if share else {}
    containers = [ContainerManifest(name=name, limits=limits) for name in names or ("main", "side")]
    if init:
        containers.insert(0, ContainerManifest(name=init, init=True))
    return PodManifest(
        namespace=Namespace("ns"),
        containers=tuple(containers),
        annotations=notes,
        scheduler=SCHEDULER,
    )


def completed(pod: PodManifest) -> PodManifest:
    """Return the pod with what admission adds."""
    added = annotated_amounts(pod, Rules())
    containers = tuple(
        ContainerManifest(
            name=container.name,
            limits={**container.limits, **added.get(container.name, {})},  # type: ignore[dict-item]
            init=container.init,
        )
        for container in pod.containers
    )
    return PodManifest(
        namespace=pod.namespace,
        containers=containers,
        annotations=pod.annotations,
        scheduler=pod.scheduler,
    )


def requested(notes: Mapping[str, str], *names: str, **more: Any) -> GpuRequest:
    request = parse_pod_request(completed(manifest(notes, *names, **more)), Rules())
    assert request.dialect == "kai"
    [container] = request.containers
    return container


@pytest.mark.parametrize(
    ("notes", "small_mib", "large_mib"),
    [
        ({"gpu-fraction": "0.5"}, 7_680, 71_885),
        ({"gpu-fraction": "5e-1"}, 7_680, 71_885),
        ({"gpu-fraction": "0.3333333333"}, 5_119, 47_923),
        ({"gpu-fraction": "0.125"}, 1_920, 17_971),
        ({"gpu-fraction": ".005"}, 76, 718),
        ({"gpu-fraction": "1e-6"}, 1, 1),
        ({"gpu-memory": "4096"}, 4_096, 4_096),
        ({f"{MAIN}gpu-memory.request": "1000M"}, 954, 954),
        ({f"{MAIN}gpu-memory.request": "1000Mi"}, 1_000, 1_000),
        ({f"{MAIN}gpu-memory.limit": "3Gi"}, 3_072, 3_072),
        ({f"{MAIN}gpu-memory.request": "2Gi", f"{MAIN}gpu-memory.limit": "3Gi"}, 2_048, 2_048),
        ({f"{MAIN}gpu-memory.request": "1Mi", "gpu-memory": "1"}, 1, 1),
    ],
)
def test_a_request_is_that_many_mib_of_a_card(
    notes: dict[str, str], small_mib: int, large_mib: int
) -> None:
    request = requested(notes)

    cards = [device(memory_mib=mib) for mib in (15_360, 143_771)]
    assert [required_memory_mib(request, card) for card in cards] == [small_mib, large_mib]
    assert (request.container, request.gpus, request.cores_percent) == ("main", 1, 0)
    assert not request.whole


def test_a_fraction_counts_the_memory_of_the_card_whatever_the_nodes_unit_is() -> None:
    card = device(memory_mib=15_360, unit_mib=1_000)

    assert required_memory_mib(requested(HALF), card) == 7_680


@pytest.mark.parametrize(
    ("notes", "facts"),
    [
        (HALF | {"gpu-fraction-num-devices": "3"}, {"gpus": 3}),
        ({f"{MAIN}gpu-memory.request": "1Gi", "gpu-fraction-num-devices": "2"}, {"gpus": 2}),
        (HALF | {"gpu-fraction-container-name": "side"}, {"container": "side"}),
        ({f"{CONTAINER}side.gpu-memory.request": "1Gi"}, {"container": "side"}),
        (HALF | {"mps": "true"}, {"held_by": HeldBy(memory="mps", compute="mps")}),
        (HALF | {"mps": "true"}, {"cores_percent": 50}),
        (HALF | {"mps": "false"}, {"held_by": HeldBy(), "cores_percent": 0}),
        (HALF | {"leasehold.dev/isolation": "hami-core"}, {"cores_percent": 50}),
        (HALF | {"leasehold.dev/isolation": "driver"}, {"cores_percent": 0}),
        (HALF | {f"{MAIN}gpu-compute.mode": "time-slicing"}, {"held_by": HeldBy()}),
        (HALF | {"kai.scheduler/gpu-compute-sharing-mode": "time-slicing"}, {"held_by": HeldBy()}),
        *(
            (HALF | {key: "sm-sharing"}, {"held_by": HeldBy(memory="mps", compute="mps")})
            for key in (f"{MAIN}gpu-compute.mode", "kai.scheduler/gpu-compute-sharing-mode")
        ),
        *(
            (HALF | {f"{MAIN}gpu-compute.request": text}, {"cores_percent": percent})
            for text, percent in (
                ("1", 100), ("0.5", 50), (".5", 50), ("5e-1", 50), ("+0.255", 25), ("0.001", 1),
            )
        ),
    ],
)  # fmt: skip
def test_each_word_beside_an_amount_means_what_kai_documents(
    notes: dict[str, str], facts: dict[str, Any]
) -> None:
    request = requested(notes)

    assert {name: getattr(request, name) for name in facts} == facts


def test_the_first_container_gets_the_gpu_and_no_init_container_unless_it_is_named() -> None:
    named = HALF | {"gpu-fraction-container-name": "warm-up"}

    assert requested(HALF, "app", "side", init="warm-up").container == "app"
    request = requested(named, "app", init="warm-up")
    assert (request.container, request.init) == ("warm-up", True)


REFUSED: list[tuple[dict[str, str], str]] = [
    *(
        ({"gpu-fraction": text}, f"gpu-fraction must be a decimal number .* got '{text}'")
        for text in ("1", "0", "-0.5", "1.0", "abc", "50%", " 0.5", "", "NaN", "500m", "0x1p-1")
    ),
    *(
        ({"gpu-memory": text}, f"gpu-memory must be a whole number of MiB.*got '{text}'")
        for text in ("0", "-1", "2Gi", "2000Mi", "1.5", "", "9" * 20)
    ),
    (HALF | {"gpu-memory": "5"}, "gpu-fraction is '0.5' and gpu-memory is '5': write one"),
    ({"gpu-fraction-num-devices": "2"}, "gpu-fraction-num-devices is '2', and .* no part of a GPU"),
    (HALF | {"gpu-fraction-num-devices": "0"}, "num-devices must be a whole number .* got '0'"),
    (HALF | {"gpu-fraction-num-devices": "129"}, "num-devices must be .* got '129'"),
    (HALF | {"gpu-fraction-container-name": "nowhere"}, "'nowhere', which the pod does not have"),
    ({"gpu-fraction-container-name": "main"}, "gpu-fraction-container-name is 'main', and the pod"),
    ({"mps": "true"}, "mps is 'true', and the pod requests no part of a GPU"),
    (HALF | {"mps": "yes"}, "mps must be true or false, got 'yes'"),
    # NvFractions
    ({f"{MAIN}gpu-memory.request": "2Gi", f"{MAIN}gpu-memory.limit": "1Gi"}, "2Gi', more than"),
    ({f"{CONTAINER}nowhere.gpu-memory.request": "1Gi"}, "'nowhere', which the pod does not have"),
    (
        {f"{MAIN}gpu-memory.request": "1Gi", f"{CONTAINER}side.gpu-memory.request": "1Gi"},
        "names the container 'main' and .*names the container 'side': one container",
    ),
    ({f"{MAIN}gpu-memory": "1Gi"}, r"main.gpu-memory' is unknown: write .*gpu-memory.request"),
    ({f"{CONTAINER}.gpu-memory.request": "1Gi"}, "container..gpu-memory.request' is unknown"),
    *(
        ({f"{MAIN}gpu-memory.{end}": text}, f"gpu-memory.{end} must be a Kubernetes quantity.*got")
        for end in ("request", "limit")
        for text in ("1", "0", "-1Gi", "NaN", "", " 1Gi", "1GiB", "1e30")
    ),
    (
        {f"{MAIN}gpu-memory.request": "1Gi", "gpu-memory": "2000"},
        "gpu-memory is 2000 and .*request is '1Gi': write one",
    ),
    (HALF | {f"{MAIN}gpu-memory.request": "1Gi"}, "gpu-fraction is '0.5' and .*request is '1Gi'"),
    (HALF | {f"{MAIN}gpu-memory.limit": "1Gi"}, "gpu-fraction is '0.5' and .*limit is '1Gi'"),
    (
        {"gpu-memory": "9", f"{MAIN}gpu-memory.limit": "1Gi"},
        "gpu-memory is '9' and .*limit is '1Gi': write .*without gpu-memory",
    ),
    (
        {f"{MAIN}gpu-memory.request": "1Gi", "gpu-fraction-container-name": "side"},
        "request' names the container 'main' and 'gpu-fraction-container-name' names .*'side'",
    ),
    *(
        (HALF | {f"{MAIN}{end}": "GPU-a"}, f"{end}' is written by KAI's binder only")
        for end in ("gpus.devices", "gpu-compute.portion")
    ),
    ({f"{MAIN}gpus.devices": "GPU-a"}, "is written by KAI's binder only"),
    *(
        (HALF | {key: mode}, f"must be time-slicing or sm-sharing, got '{mode}'")
        for key in (f"{MAIN}gpu-compute.mode", "kai.scheduler/gpu-compute-sharing-mode")
        for mode in ("", "mps")
    ),
    (
        HALF | {f"{MAIN}gpu-compute.mode": "sm-sharing"}
        | {"kai.scheduler/gpu-compute-sharing-mode": "time-slicing"},
        "mode is sm-sharing and kai.scheduler/gpu-compute-sharing-mode is time-slicing: write one",
    ),
    ({f"{MAIN}gpu-compute.mode": "sm-sharing"}, "no part of a GPU that it could apply to"),
    *(
        (
            HALF | {f"{MAIN}gpu-compute.request": text},
            "gpu-compute.request must be a decimal number above 0 and at most 1, such as 0.5, got",
        )
        for text in ("0", "-0", "1.0000001", "50%", " 0.5", "NaN", "Inf", "")
    ),
    (
        HALF | {f"{CONTAINER}nowhere.gpu-compute.request": "0.5"},
        "'nowhere', which the pod does not have",
    ),
    *(
        (HALF | {f"kai.scheduler/container.{name}.gpu-memory.portion.limit": text}, fault)
        for name, text, fault in (
            ("main", "0.5", "must be above gpu-fraction, '0.5', and below 1"),
            ("main", "0.25", "must be above gpu-fraction, '0.5', and below 1"),
            ("main", "1", "must be a decimal number above 0 and below 1"),
            ("main", "0.750001", "at most 5 digits after the point"),
            ("nowhere", "0.75", "'nowhere', which the pod does not have"),
        )
    ),
    (
        {"gpu-memory": "9", "kai.scheduler/container.main.gpu-memory.portion.limit": "0.75"},
        "portion.limit is '0.75', and .* write gpu-fraction beside it",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("notes", "fault"), REFUSED)
def test_what_kai_refuses_is_refused_at_admission_and_by_the_watcher(
    notes: dict[str, str], fault: str
) -> None:
    with pytest.raises(RequestError, match=fault):
        annotated_amounts(manifest(notes), Rules())
    with pytest.raises(RequestError, match=fault):
        parse_pod_request(manifest(notes), Rules())


@pytest.mark.parametrize("name", ["main", "side"])
def test_a_fraction_beside_whole_gpus_is_refused_in_whatever_container_they_are(name: str) -> None:
    pod = completed(manifest(HALF))
    containers = tuple(
        ContainerManifest(
            name=container.name,
            limits={
                **container.limits,
                **({"nvidia.com/gpu": 1} if container.name == name else {}),
            },
        )
        for container in pod.containers
    )
    mixed = PodManifest(
        namespace=pod.namespace, containers=containers, annotations=HALF, scheduler=SCHEDULER
    )

    with pytest.raises(RequestError) as refused:
        parse_pod_request(mixed, Rules())

    assert f"container {name} requests nvidia.com/gpu" in str(refused.value)
    assert "annotation gpu-fraction is '0.5'" in str(refused.value)


def test_a_pod_that_admission_has_not_completed_is_refused_with_what_to_do() -> None:
    two = HALF | {"gpu-fraction-num-devices": "2"}
    for amount in (0, 1):
        pod = manifest(two, "main", share=amount)

        with pytest.raises(RequestError, match=f"share must be 2 in its limits, .*got {amount}"):
            parse_pod_request(pod, Rules())


def test_our_resource_in_another_container_is_refused() -> None:
    pod = manifest(HALF, "main", "side", share=1)

    with pytest.raises(
        RequestError, match=r"container side: leasehold\.dev/share is in its limits"
    ):
        parse_pod_request(pod, Rules())


@pytest.mark.parametrize("scheduler", ["", "default-scheduler", "leasehold", "hami-scheduler"])
def test_the_words_are_read_for_kais_scheduler_only(scheduler: str) -> None:
    pod = PodManifest(
        namespace=Namespace("ns"),
        containers=(ContainerManifest(name="main"),),
        annotations=HALF,
        scheduler=scheduler,
    )

    assert annotated_amounts(pod, Rules()) == {}
    assert parse_pod_request(pod, Rules()).containers == ()


def test_a_pod_without_an_amount_requests_nothing() -> None:
    for notes in ({}, {"mps": "false"}, {"kai.scheduler/other": "x"}):
        assert annotated_amounts(manifest(notes), Rules()) == {}
        assert parse_pod_request(manifest(notes), Rules()).containers == ()


def test_the_container_reads_its_part_of_the_device() -> None:
    held = lease(
        "u1", "n1", share(memory_mib=4096, device_mib=15_360, slotted=False), dialect="kai"
    )

    environment = DIALECT.container_setup(held, "main", {}, PATHS).environment

    assert environment[PORTION] == "0.27"
    assert environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "4096m"


GOOD = {
    "gpu-fraction": ("0.5", ".25", "1e-3"),
    "gpu-memory": ("2000", "1"),
    "gpu-fraction-num-devices": ("1", "2", "128"),
    "gpu-fraction-container-name": ("main", "side"),
    "mps": ("true", "false"),
    "kai.scheduler/gpu-compute-sharing-mode": ("time-slicing", "sm-sharing"),
    f"{MAIN}gpu-memory.request": ("1Gi", "1000M"),
    f"{MAIN}gpu-memory.limit": ("1Gi", "3Gi"),
    f"{MAIN}gpu-compute.mode": ("time-slicing", "sm-sharing"),
    f"{MAIN}gpu-compute.request": ("0.5", "1"),
    "kai.scheduler/container.main.gpu-memory.portion.limit": ("0.75", "0.99999"),
}
WRONG_KEYS = tuple(
    f"{prefix}{name}.{end}"
    for prefix in (CONTAINER, "kai.scheduler/container.")
    for name in ("side", "", "nowhere", "é")
    for end in ("gpu-memory.request", "gpu-memory", "gpus.devices", "gpu-memory.portion.limit", "")
)
VALUES = (
    *(
        "1",
        "0",
        "-1",
        "9" * 400,
        "",
        " ",
        "NaN",
        "Inf",
        "1e999",
        "1e-999",
        "\u0661",
        "0.5\n",
        "\x00",
    ),
    *(value for values in GOOD.values() for value in values),
)
MANY = 5_000


def any_words(choice: random.Random) -> dict[str, str]:
    keys = choice.sample(list(GOOD), choice.choice((1, 1, 2, 2, 3)))
    if choice.random() < 0.1:
        keys.append(choice.choice(WRONG_KEYS))
    return {
        key: choice.choice(GOOD.get(key, VALUES) if choice.random() < 0.8 else VALUES)
        for key in keys
    }


def test_any_set_of_words_is_a_request_within_the_gpu_or_a_refusal_that_names_a_key() -> None:
    choice = random.Random(55)  # noqa: S311 - the same words each time
    card = device(memory_mib=15_360)
    requests = 0
    refusals: list[tuple[dict[str, str], str]] = []
    for _ in range(MANY):
        notes = any_words(choice)
        try:
            wish = parse_wish(manifest(notes))
        except RequestError as error:
            refusals.append((notes, str(error)))
            continue
        if wish.fraction is None and wish.memory_mib is None:
            continue
        requests += 1
        request = requested(notes)
        if request.memory_billionths:
            assert required_memory_mib(request, card) < card.memory_mib
        assert 1 <= request.gpus <= 128

    assert [it for it in refusals if not any(key in it[1] for key in it[0])] == []
    assert requests > MANY // 10
