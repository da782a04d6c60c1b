"""How quotas are read: GPUQuota objects, a file of them, and gpu-admission's ConfigMap."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.watcher.quota_sources import load_file
from shared.dialects.tencent.gpu_quota import parse_config_map
from shared.kubernetes.gpu_quotas import merge_sources, parse_spec
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.quota import Quota, QuotaLimits

TEAM = Namespace("team")


def test_a_quota_is_read_field_by_field() -> None:
    spec = {
        "maxMilliGPU": 2500,
        "maxCorePercent": 150,
        "maxMemory": "80Gi",
        "maxCards": 3,
        "models": [{"name": "T4", "maxCards": 1}, {"name": "A100"}],
        "onlyModels": True,
        "pools": ["public"],
        "defaultRunTime": "90m",
        "maxRunTime": "2h30m",
    }

    assert parse_spec(TEAM, spec) == Quota(
        namespace=TEAM,
        limits=QuotaLimits(milli_gpu=2500, cores_milli=1500, memory_mib=81920, cards=3),
        models=(("T4", QuotaLimits(cards=1)), ("A100", QuotaLimits())),
        only_models=True,
        pools=("public",),
        pool_label="gaia.tencent.com/gpu-pool",
        default_run_s=5400,
        max_run_s=9000,
    )
    assert parse_spec(TEAM, None).limits == QuotaLimits()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"maxGPUs": 3}, "maxGPUs"),
        ({"maxCards": -1}, "spec.maxCards: Expected `int` >= 0"),
        ({"maxCards": "three"}, "maxCards"),
        ({"maxMemory": "80 apples"}, "80 apples"),
        ({"models": [{"maxCards": 1}]}, "spec.models[0]: Object missing required field `name`"),
        ([], "GPUQuota team: spec"),
        ({"maxRunTime": "2 days"}, "spec.maxRunTime: "),
        ({"maxRunTime": "0h"}, "spec.maxRunTime: "),
        ({"maxRunTime": "1h", "defaultRunTime": "61m"}, "defaultRunTime must not be longer"),
        ({"pools": ["p"] * 257}, "spec.pools: Expected `array` of length <= 64"),
    ],
)
def test_an_invalid_quota_is_refused_with_its_field(spec: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_spec(TEAM, spec)

    assert message in str(caught.value)


def test_gpu_admissions_config_map_means_cores_by_node_label() -> None:
    data = {"gpu_quota": '{"team": {"quota": {"M40": 2, "P100": 3}, "pool": ["public"]}, "b": {}}'}

    quotas = parse_config_map(data)

    assert quotas[TEAM] == Quota(
        namespace=TEAM,
        models=(("M40", QuotaLimits(cores_milli=2000)), ("P100", QuotaLimits(cores_milli=3000))),
        only_models=True,
        model_label="gaia.tencent.com/gpu-model",
        pools=("public",),
        pool_label="gaia.tencent.com/gpu-pool",
    )
    assert quotas[Namespace("b")].models == ()
    assert quotas[Namespace("b")].only_models


LONG = {"gpu_quota": '{"%s": {}}' % ("n" * 64)}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"gpu_quota": "{"},
        {"gpu_quota": '{"a": {"quota": 3}}'},
        {"gpu_quota": '{"a": {"quota": {"T4": 8}}, "a": {"quota": {"T4": 1}}}'},
        {"gpu_quota": "[" * 100_000},
        LONG,
    ],
)
def test_a_config_map_that_gpu_admission_would_refuse_is_refused(data: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="kube-system/gpuquota"):
        parse_config_map(data)


def test_a_file_has_objects_and_one_for_all_other_namespaces(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    objects = [
        {
            "apiVersion": "leasehold.dev/v1beta1",
            "kind": "GPUQuota",
            "metadata": {"name": name},
            "spec": {"maxCards": cards},
        }
        for name, cards in (("team", 3), ("*", 1))
    ]
    file.write_text(yaml.safe_dump_all(objects))

    assert {name: quota.limits.cards for name, quota in load_file(file).items()} == {
        "team": 3,
        "*": 1,
    }
    file.write_text(yaml.safe_dump_all([objects[0], objects[0]]))
    with pytest.raises(RequestError, match="team is defined twice"):
        load_file(file)
    with pytest.raises(RequestError, match=r"none\.yaml"):
        load_file(tmp_path / "none.yaml")


def test_a_limit_too_large_to_count_is_capped() -> None:
    most = 2**53 - 1

    limits = parse_spec(TEAM, {"maxMemory": "1e99"}).limits
    cards = parse_config_map({"gpu_quota": f'{{"team-a":{{"quota":{{"T4":{2**62}}}}}}}'})[
        Namespace("team-a")
    ].models

    assert limits == QuotaLimits(memory_mib=most)
    assert cards == (("T4", QuotaLimits(cores_milli=most)),)


def test_the_first_source_that_has_a_quota_counts() -> None:
    one, other = Quota(namespace=TEAM, limits=QuotaLimits(cards=1)), Quota(namespace=TEAM)

    assert merge_sources([{TEAM: one}, {TEAM: other}]) == (one,)
