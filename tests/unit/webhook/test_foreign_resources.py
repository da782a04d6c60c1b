"""Resources of other systems and accelerators: hints lead to as much of a GPU."""

import pytest

from shared.dialects import GPU_RESOURCES
from tests.support.webhook.hints import added_names, follow
from tests.support.webhook.reviews import container, pod

Limits = dict[str, str]
T4 = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
BESIDE: dict[str, tuple[Limits, int | None]] = {
    "another accelerator": ({"habana.ai/gaudi": "1"}, None),
    "two of them": ({"habana.ai/gaudi": "1", "google.com/tpu": "8"}, None),
    "a GPU of another vendor": ({"amd.com/gpu": "1"}, None),
    "memory of another system": ({"aliyun.com/gpu-mem": "3"}, 3072),
}


@pytest.mark.parametrize(("other", "mib"), BESIDE.values(), ids=BESIDE.keys())
def test_an_accelerator_beside_a_gpu_that_no_node_has_is_left_out(
    other: Limits, mib: int | None
) -> None:
    followed = follow(pod(container("main", {"nvidia.com/gpu": "1"} | other)))

    [part] = followed.request.containers
    assert (part.gpus, part.memory_units) == (1, mib)
    [hint] = followed.hints
    assert all(f"remove {name} from all containers" in hint.text for name in other)


def test_an_accelerator_in_another_container_is_left_out_and_the_share_stays() -> None:
    side = container("side", {"habana.ai/gaudi": "1", "cpu": "1"})

    followed = follow(pod(container("main", T4), side))

    assert [part.memory_units for part in followed.request.containers] == [3000]
    assert len(followed.hints) == 1


FOREIGN = {
    ("aliyun.com/gpu-mem", "3"): 3072,
    ("aliyun.com/gpu-mem", "3000"): 3000,
    ("4pd.io/gpumem", "8"): 8192,
    ("gpumem", "3Gi"): 3072,
    ("example.com/gpu-memory", "4096"): 4096,
    ("leasehold.dev/gpumem", "3000"): 3000,
    ("nvidia.com/gpu-10gb", "1"): 9536,
    ("nvidia.com/mig-1g.5gb", "1"): 4768,
    ("nvidia.com/mig-3g.20gb", "1"): 19073,
    ("nvidia.com/mig-7g.40gb", "1"): 38146,
    ("aliyun.com/gpu-count", "2"): None,
    ("leasehold.dev/gpu", "1"): None,
    ("amd.com/gpu", "1"): None,
    ("k8s.amazonaws.com/vgpu", "1"): None,
    ("gpu", "1"): None,
    ("nvidia.com/pgpu", "1"): None,
    ("volcano.sh/gpu-mem.128Mi", "40"): 5120,
    ("volcano.sh/gpu-mem.1Gi", "4"): 4096,
    ("tke.cloud.tencent.com/qgpu-memory", "5"): 5120,
    ("vke.volcengine.com/mgpu-memory", "10240"): 10240,
    ("baidu.com/cgpu_memory", "10"): 10240,
    ("aws.amazon.com/neuroncore", "2"): None,
    ("aws.amazon.com/neuron", "1"): None,
    ("google.com/tpu", "4"): None,
    ("huawei.com/Ascend910", "1"): None,
    ("huawei.com/npu", "1"): None,
    ("cambricon.com/mlunum", "1"): None,
    ("hygon.com/dcunum", "1"): None,
    ("enflame.com/vgcu", "1"): None,
    ("kunlunxin.com/xpu", "1"): None,
    ("alibabacloud.com/ppu", "1"): None,
}
"""Resources of systems that Leasehold does not read, and the MiB of a GPU that they stand for."""


@pytest.mark.parametrize(("name", "amount", "mib"), [(*key, mib) for key, mib in FOREIGN.items()])
def test_a_resource_of_another_system_leads_to_as_much_of_a_gpu(
    name: str, amount: str, mib: int | None
) -> None:
    followed = follow(pod(container("main", {name: amount})))

    [part] = followed.request.containers
    assert part.memory_units == mib
    assert set(added_names(followed.hints)) <= {
        *GPU_RESOURCES,
        "nvidia.com/vgpu-mode",
    }
