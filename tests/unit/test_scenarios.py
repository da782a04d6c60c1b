# mypy: disable-error-code="no-untyped-call"
"""What `tests.benchmarks.scenarios` finds wrong from outside."""

import pytest

from tests.benchmarks.real_apiserver import RealApi
from tests.benchmarks.scenarios import judge
from tests.benchmarks.systems import SYSTEMS


@pytest.mark.parametrize(
    ("system", "pods", "over", "bare"),
    [
        ("volcano", [("1", "u,NVIDIA,81920,100:"), ("0.1", "u2,NVIDIA,2000,10:;")], 0, 0),
        ("volcano", [("1", "u,NVIDIA,81920,100:"), ("0.1", "u,NVIDIA,2000,10:")], 1, 0),
        ("hami", [("2", "u,NVIDIA,81920,100:v,NVIDIA,81920,100:;"), ("1", "")], 0, 1),
        ("kube-scheduler", [("8", "")], 0, 0),
        ("kube-scheduler", [("8", ""), ("0.1", "")], 1, 0),
    ],
)
def test_gpus_beyond_their_size_and_pods_without_a_gpu_are_found(
    system: str, pods: list[tuple[str, str]], over: int, bare: int
) -> None:
    api = RealApi(None, SYSTEMS[system])
    for number, (gpus, text) in enumerate([*pods, ("8", "u,NVIDIA,81920,100:")]):
        notes = {api.system.allocated: text} if text else {}
        metadata = {"name": f"p{number}", "labels": {"gpus": gpus}, "annotations": notes}
        phase = "Succeeded" if number == len(pods) else "Running"  # what has ended holds nothing
        pod = {"metadata": metadata, "spec": {"nodeName": "n"}, "status": {"phase": phase}}
        api.pods[metadata["name"]] = pod
        api.bound[metadata["name"]] = 0.0

    places, without = judge(api)

    assert (len(places), len(without)) == (over, bare)
