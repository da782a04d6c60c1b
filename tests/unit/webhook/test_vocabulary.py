"""Vendors' words in the wrong place of a pod: a Warning or a denial says where they belong."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.__main__ import main
from shared.dialects import DIALECTS, GPU_RESOURCES, RESOURCE_PREFIXES
from shared.dialects.vocabulary import PREFIXES, WORDS, did_you_mean, unknown_gpus
from shared.model.change import Place
from tests.support.webhook.reviews import container, decided, env, pod

SHARE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
WHOLE = {"nvidia.com/gpu": "1"}


def written(limits: dict[str, str], notes: Any = None, labels: Any = None, **more: Any) -> Any:
    main = container("main") | {"resources": {"limits": limits, "requests": limits | more}}
    return decided(pod(main, notes=notes, labels=labels))


@pytest.mark.parametrize("name", sorted(GPU_RESOURCES - {"leasehold.dev/share"}))
@pytest.mark.parametrize("place", ["notes", "labels"])
def test_an_amount_outside_the_limits_denies_a_pod_that_would_get_a_whole_gpu(
    name: str, place: str
) -> None:
    whole = written(WHOLE, **{place: {name: "1"}})
    part = written(SHARE, **{place: {name: "1"}})

    assert (whole.allowed, part.allowed) == (False, True)
    assert f"{name} is a resource: write it into the container's limits" in whole.message
    assert "container main would get a whole GPU" in whole.message
    assert any(f"{name} is a resource" in text for text in part.warnings)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"labels": {"nvidia.com/use-gputype": "A100"}}, "nvidia.com/use-gputype is an annotation"),
        ({"labels": {"nvidia.com/vgpu-mode": "mig"}}, "nvidia.com/vgpu-mode is an annotation"),
        ({"labels": {"hami.io/vgpu-mode": "mig"}}, "vgpu-mode is an annotation"),
        ({"notes": {"nvidia.com/use-GPUtype": "A"}}, "write nvidia.com/use-gputype"),
        ({"notes": {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}}, "is a label"),
        ({"notes": {"nvidia.com/use-gputypes": "A"}}, "write nvidia.com/use-gputype"),
        ({"notes": {"hami.io/never-heard": "A"}}, "hami.io/never-heard has no effect: it is unk"),
        ({"labels": {"quota.scheduling.koordinator.sh/name": "q"}}, "a GPUQuota"),
        ({"labels": {"hami.io/webhook": "ignore"}}, "node agents refuse containers without a"),
        (
            {"notes": {"volcano.sh/vgpu-mode": "mig"}},
            "volcano.sh/vgpu-mode has no effect beside the resource names of nvidia",
        ),
        ({"nvidia.com/gpucores": "30"}, "nvidia.com/gpucores is in the requests only"),
    ],
)
def test_a_word_without_effect_is_warned_of(found: dict[str, Any], text: str) -> None:
    decision = written(SHARE, **found)

    assert decision.allowed, decision.message
    assert any(text in warning for warning in decision.warnings), decision.warnings


def test_an_amount_in_other_letters_denies_a_pod_that_would_get_a_whole_gpu() -> None:
    decision = written(WHOLE | {"nvidia.com/gpuMem": "3000"})

    assert not decision.allowed
    assert "nvidia.com/gpuMem has no effect: write nvidia.com/gpumem" in decision.message


def test_words_where_they_belong_are_not_warned_of() -> None:
    notes = {"nvidia.com/use-gputype": "A100", "team": "x", "example.org/gpu": "y"}
    labels = {"scheduling.x-k8s.io/pod-group": "training", "app": "x"}

    assert written(SHARE, notes=notes, labels=labels).warnings == ()


def test_many_unknown_words_take_no_time_and_few_warnings() -> None:
    decision = written(SHARE, notes={f"hami.io/unknown-{n}": "" for n in range(5000)})

    assert decision.allowed
    assert len(decision.warnings) == 10


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"gang.scheduling.koordinator.sh/name": "g"}, "min-available"),
        (
            {
                "gang.scheduling.koordinator.sh/name": "g",
                "gang.scheduling.koordinator.sh/min-available": "two",
            },
            "min-available must be a whole number from 1 to 999999, got 'two'",
        ),
        ({"gang.scheduling.koordinator.sh/mode": "NonStrict"}, "NonStrict is not supported"),
        ({"scheduling.k8s.io/group-name": "a/b"}, "group-name must be a name"),
        ({"nvidia.com/numa-bind": "yes"}, "numa-bind must be true or false, got 'yes'"),
        ({"hami.io/device-scoring-weights": "slot=nan"}, "slot must be a number"),
        ({"hami.io/device-scoring-weights": "slot=1_0"}, "slot must be a number"),
    ],
)
def test_a_malformed_value_is_denied_with_its_key(notes: dict[str, str], text: str) -> None:
    decision = written(SHARE, notes=notes)

    assert (decision.allowed, decision.code) == (False, 400)
    assert text in decision.message


def test_every_word_of_a_request_has_its_place_and_is_found_by_a_prefix() -> None:
    for dialect in DIALECTS.values():
        for names, place in (
            (dialect.resources, Place.RESOURCE),
            (dialect.request_annotations, Place.ANNOTATION),
            (dialect.request_labels, Place.LABEL),
        ):
            assert {WORDS[name].place for name in names} <= {place}
    assert [name for name in GPU_RESOURCES if not name.startswith(RESOURCE_PREFIXES)] == []
    assert [name for name in GPU_RESOURCES if not name.startswith(PREFIXES)] == []


def test_words_in_which_the_letters_of_an_accelerator_stand_are_none() -> None:
    assert list(unknown_gpus(["example.com/input", "example.com/output-slots"])) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nvidia.com/GPU", "did you mean nvidia.com/gpu?"),
        ("nvidia/gpu", "did you mean nvidia.com/gpu?"),
        ("volcano.com/vgpu-number", "did you mean volcano.sh/vgpu-number?"),
        ("koordinator/GPU-core", "did you mean koordinator.sh/gpu-core?"),
        ("nvidia.com/mig-1g5gb", "did you mean nvidia.com/gpu: 1 and nvidia.com/gpumem: 4768 and"),
        ("nvidia.com/mig1g.5gb", "did you mean nvidia.com/gpu: 1 and nvidia.com/gpumem: 4768 and"),
        ("amd.com/gpu", "did you mean nvidia.com/gpu?"),
        ("nvidia.com/gpu-mem", "did you mean nvidia.com/gpumem?"),
        ("nvidia.com/gpu-memory", "did you mean nvidia.com/gpumem?"),
        ("gpumemory", "did you mean nvidia.com/gpumem: 1024?"),
        ("habana.ai/gaudi", "did you mean nvidia.com/gpu?"),
        ("aws.amazon.com/neuroncore", "did you mean nvidia.com/gpu?"),
        ("volcano.sh/gpu-mem.128Mi", "did you mean volcano.sh/gpu-memory: 128?"),
        ("nvidia.com/mig-1g.5gb", "did you mean nvidia.com/gpu: 1 and nvidia.com/gpumem: 4768 and"),
        ("gpu.intel.com/i915", ""),
    ],
)
def test_the_resource_that_was_meant_is_named(name: str, meant: str) -> None:
    assert list(unknown_gpus(["cpu", "example.com/fpga", name, "nvidia.com/gpu"])) == [name]
    assert did_you_mean(name, 1).startswith(meant)
    assert bool(meant) == bool(did_you_mean(name, 1))


VISIBLE = env("NVIDIA_VISIBLE_DEVICES", "all")
WRONG = {
    "memory and a percentage": pod(
        container("main", SHARE | {"nvidia.com/gpumem-percentage": "20"})
    ),
    "limit of cores": pod(
        container("main", {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "12"}),
        notes={"tencent.com/vcuda-core-limit": "80"},
    ),
    "devices without a request": pod(container("main", **VISIBLE)),
    "devices beside a request": pod(container("main", SHARE), container("side", **VISIBLE)),
    "an init container": pod(
        container("main", {"volcano.sh/vgpu-number": "1"}),
        initContainers=[container("first", {"volcano.sh/vgpu-number": "1"})],
    ),
    "the shorthand and a part of it": pod(
        container("main", {"koordinator.sh/gpu": "50", "koordinator.sh/gpu-core": "25"})
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_admission_says_is_said_by_explain_in_the_same_words(
    wrong: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    decision = decided(wrong)
    manifest = tmp_path / "pod.json"
    manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod"} | wrong))

    with pytest.raises(SystemExit):
        main(["explain", "--request", str(manifest)])

    out = capsys.readouterr().out
    words = decision.warnings or (decision.message,)
    assert decision.changes
    assert [text for text in words if text not in out] == []
