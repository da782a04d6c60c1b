"""Which GPUs a container runtime gives to a container."""

from pathlib import Path

import pytest

from services.node_agent.container_runtime.bundles import list_bundles, read_bundle
from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.kubelet.containers.bundles import Bundles
from simcluster.kubelet.containers.runtime_devices import (
    given_gpus,
    named_gpus,
    visible_variable,
)

MOUNTS = "/var/run/nvidia-container-devices"
POD = "6f1f0a7f-5c11-4f58-9a39-0d1e2f3a4b5c"


def response(variable: str = "", mount: str = "", *cdi: str) -> api_pb2.ContainerAllocateResponse:
    return api_pb2.ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": variable} if variable else {},
        mounts=[api_pb2.Mount(container_path=mount, host_path="/dev/null")] if mount else [],
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in cdi],
    )


@pytest.mark.parametrize(
    ("answer", "gpus"),
    [
        (response("GPU-1,GPU-2"), ["GPU-1", "GPU-2"]),
        (response("void"), []),
        (response(MOUNTS, f"{MOUNTS}/GPU-1"), ["GPU-1"]),
        (response("void", "", "leasehold.dev/gpu=GPU-1"), ["GPU-1"]),
        (response("", "", "leasehold.dev/gpu=MIG-1", "leasehold.dev/claim=u-gpu"), ["MIG-1"]),
    ],
    ids=["envvar", "no GPU", "volume-mounts", "cdi-cri", "claim"],
)
def test_any_runtime_gives_what_plugins_and_claims_name(
    answer: api_pb2.ContainerAllocateResponse, gpus: list[str]
) -> None:
    assert given_gpus([answer]) == gpus


@pytest.mark.parametrize(
    ("env", "annotations", "gpus"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, {}, ["all"]),
        ({"CUDA_VERSION": "13.1"}, {}, ["all"]),
        ({"CUDA_VERSION": "13.1", "NVIDIA_VISIBLE_DEVICES": "void"}, {}, []),
        ({}, {"cdi.k8s.io/mine": "nvidia.com/gpu=0,nvidia.com/gpu=1"}, ["0", "1"]),
        ({}, {"nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=all"}, ["all"]),
        ({"OTHER": "all"}, {"other": "nvidia.com/gpu=all"}, []),
    ],
)
def test_an_open_runtime_gives_what_a_container_names(
    env: dict[str, str], annotations: dict[str, str], gpus: list[str]
) -> None:
    assert named_gpus(env, annotations) == gpus


def test_the_drivers_variable_names_what_was_given() -> None:
    assert visible_variable([]) == "void"
    assert visible_variable(["GPU-1", "GPU-1", "GPU-2"]) == "GPU-1,GPU-2"
    assert visible_variable(["GPU-1", "all"]) == "all"


def test_the_node_agent_reads_the_bundles(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    some = f"containerd://{'a' * 64}"
    other = "b" * 64
    bundles.add(POD, some, [0, 3], env={"A": "b"}, privileged=False)
    bundles.add(POD, other, [], env={}, privileged=True)

    devices = {
        name: read_bundle(path / name, tmp_path) for name, path in list_bundles([tmp_path]).items()
    }

    first, second = devices["a" * 64], devices[other]
    assert first is not None
    assert second is not None
    assert (first.pod, set(first.gpus), first.every_device) == (POD, {0, 3}, False)
    assert (second.pod, set(second.gpus), second.every_device) == (POD, set(), True)
    bundles.retain([some])
    assert set(list_bundles([tmp_path])) == {"a" * 64}
    bundles.remove(some)
    assert not list_bundles([tmp_path])
