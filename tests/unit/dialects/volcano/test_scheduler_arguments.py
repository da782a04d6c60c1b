"""Volcano's scheduler configuration: what has an effect, is refused, or is warned about."""

from pathlib import Path

import pytest

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.pod_requests import enabled, parse_pod_request
from shared.dialects.volcano.scheduler_arguments import find_warnings, parse_rules
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.requests.request import DeviceOrder, NodeOrder
from shared.runtime.request_settings import RequestSettings, load_rules

GUIDE = """\
actions: "enqueue, allocate, backfill"
tiers:
- plugins:
  - name: predicates
  - name: deviceshare
    arguments:
      deviceshare.VGPUEnable: true
      deviceshare.KnowGeometriesCMName: volcano-vgpu-device-config
      deviceshare.KnowGeometriesCMNamespace: kube-system
      deviceshare.SchedulePolicy: binpack
"""


def manifest_of(labels: dict[str, str] | None = None, **limits: int) -> PodManifest:
    named = {f"volcano.sh/{name.replace('_', '-')}": amount for name, amount in limits.items()}
    return PodManifest(
        namespace=Namespace("ns"),
        containers=(ContainerManifest(name="c", limits=named),),
        labels=labels or {},
    )


@pytest.mark.parametrize("other", ["deviceshare.GPUSharingEnable", "deviceshare.GPUNumberEnable"])
def test_item_11_sharing_or_number_together_with_vgpu_is_refused(other: str) -> None:
    with pytest.raises(RequestError, match="are both true"):
        parse_rules({other: True, "deviceshare.VGPUEnable": "true"})


def test_the_guides_older_spelling_of_the_switches_is_accepted() -> None:
    spoken = {
        dialect.name for dialect in enabled(parse_rules({"predicate.GPUSharingEnable": True}))
    }

    assert "volcano-gpushare" in spoken
    assert "volcano-vgpu" not in spoken


def test_a_switched_off_dialect_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="volcano-vgpu, which is not enabled"):
        parse_pod_request(
            manifest_of(vgpu_number=1), parse_rules({"deviceshare.GPUSharingEnable": True})
        )


def test_volcanos_switches_do_not_disable_other_vendors_dialects() -> None:
    spoken = {dialect.name for dialect in enabled(parse_rules({"deviceshare.VGPUEnable": True}))}

    assert {dialect.name for dialect in enabled(Rules())} - spoken == {"volcano-gpushare"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["file", "ConfigMap"])
def test_item_50_the_guides_configuration_is_accepted_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    text = GUIDE
    if wrapped:
        lines = "".join(f"    {line}\n" for line in GUIDE.splitlines())
        text = f"kind: ConfigMap\napiVersion: v1\ndata:\n  volcano-scheduler.conf: |\n{lines}"
    conf = tmp_path / "volcano-scheduler.conf"
    conf.write_text(text)

    rules = load_rules(RequestSettings(volcano_conf=conf))

    request = parse_pod_request(manifest_of(vgpu_number=1), rules)
    assert (request.device_order, request.node_order) == (DeviceOrder.BINPACK, NodeOrder.BINPACK)
    assert caplog.records == []


@pytest.mark.parametrize(
    "text",
    [
        b"tiers: {",
        b"- tiers",
        b"tiers: [{plugins: [deviceshare]}]",
        b"tiers: [{plugins: [{name: deviceshare, arguments: [x]}]}]",
        b"tiers: \xff",
        b"tiers: []\ntiers: []",
        b"kind: ConfigMap\ndata: {volcano-scheduler.conf: 'tiers: []', volcano-scheduler.conf: ''}",
        b"kind: ConfigMap\ndata:\n  volcano-scheduler.conf: |\n    tiers: []\n    tiers: []\n",
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    conf = tmp_path / "volcano-scheduler.conf"
    conf.write_bytes(text)

    with pytest.raises(RequestError, match=r"is not a valid volcano-scheduler\.conf"):
        load_rules(RequestSettings(volcano_conf=conf))


def test_item_50_a_misspelt_argument_is_warned_about_with_the_nearest_name() -> None:
    [warning] = find_warnings({"deviceshare.ShedulePolicy": "binpack"})

    assert "deviceshare.ShedulePolicy is not an argument" in warning
    assert "did you mean deviceshare.SchedulePolicy?" in warning


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ({"deviceshare.NodeLockEnable": True}, "no node lock"),
        (
            {"deviceshare.SchedulePolicy": "spread", "deviceshare.ScheduleWeight": 0},
            "whatever the weight",
        ),
    ],
)
def test_arguments_with_another_effect_are_warned_about(
    arguments: dict[str, object], about: str
) -> None:
    [warning] = find_warnings(arguments)

    assert about in warning


def test_arguments_of_other_plugins_are_ignored() -> None:
    assert find_warnings({"predicate.CacheEnable": True, "binpack.weight": 5}) == []


def test_pods_with_all_labels_of_an_exclusive_rule_get_its_anti_affinity_group() -> None:
    rules = parse_rules(
        {"deviceshare.GPUExclusiveRules": [{"app": "llm", "tier": "gold"}, {"app": "llm"}]}
    )

    gold = parse_pod_request(
        manifest_of({"app": "llm", "tier": "gold", "x": "y"}, vgpu_number=1), rules
    )
    plain = parse_pod_request(manifest_of({"app": "llm"}, vgpu_number=1), rules)
    other = parse_pod_request(manifest_of({"tier": "gold"}, vgpu_number=1), rules)

    assert gold.anti_affinity_groups == ("labels app=llm,tier=gold", "labels app=llm")
    assert plain.anti_affinity_groups == ("labels app=llm",)
    assert other.anti_affinity_groups == ()


@pytest.mark.parametrize("wrong", ["app=llm", [[]], [{}], {"app": "llm"}])
def test_exclusive_rules_must_be_a_list_of_label_maps(wrong: object) -> None:
    with pytest.raises(RequestError, match="must be a list of label maps"):
        parse_rules({"deviceshare.GPUExclusiveRules": wrong})
