"""Simulated GPUs: layouts, stable UUIDs, faults."""

import time
from pathlib import Path

import pytest

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.gpu_models import GPU_MODELS
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, NodeName
from simcluster.node_agent.gpus import SimulatedGpus, parse_layout, uuid_of
from simcluster.node_agent.mig import SimulatedMig


def test_a_layout_may_mix_models() -> None:
    layout = parse_layout("4xT4+2xA10")

    assert [gpu.model.product for gpu in layout] == ["Tesla T4"] * 4 + ["NVIDIA A10"] * 2
    for text in ("", "8xB1", "xT4", "0xT4", "8 T4"):
        with pytest.raises(RequestError, match="is not a GPU layout"):
            parse_layout(text)


async def test_a_layout_may_name_numa_nodes() -> None:
    gpus = await SimulatedGpus(NodeName("node-0"), "1xT4@0+1xA100-40GB@1:mig+1xT4").discover()

    assert [gpu.numa for gpu in gpus] == [0, 1, None]


def test_profiles_are_the_published_ones() -> None:
    assert GPU_MODELS["T4"].memory_mib == 15360
    assert GPU_MODELS["GTX1080Ti"].memory_mib == 11178
    assert set(GPU_MODELS) >= {"T4", "A10", "L4", "A100-40GB", "A100-80GB", "H100-80GB", "H200"}


async def test_simulated_gpus_keep_their_names_and_read_their_faults(tmp_path: Path) -> None:
    node = NodeName("node-0")
    faults = tmp_path / "faults.json"
    gpus = SimulatedGpus(node, "2xT4", faults)

    before = await gpus.discover()
    faults.write_text('{"1": "unhealthy"}')
    after = await gpus.discover()

    assert [gpu.uuid for gpu in before] == [uuid_of(node, 0), uuid_of(node, 1)]
    assert before == await SimulatedGpus(node, "2xT4").discover()
    assert [gpu.fault is None for gpu in after] == [True, False]
    assert uuid_of(NodeName("node-1"), 0) != uuid_of(node, 0)


async def test_faults_stay_while_their_file_is_being_written(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    gpus = SimulatedGpus(NodeName("node-0"), "2xT4", faults)

    faults.write_text('{"1": "unhealthy"}')
    before = await gpus.discover()
    faults.write_text("")
    during = await gpus.discover()

    assert [gpu.fault is None for gpu in during] == [True, False]
    assert during == before


class OnASlowMachine(SimulatedGpus):
    """Simulated GPUs whose threads get the processor late."""

    def _read_gpu(self, index: int) -> Gpu | None:
        time.sleep(0.2)
        return super()._read_gpu(index)


async def test_a_slow_machine_is_not_mistaken_for_a_hanging_simulated_gpu(tmp_path: Path) -> None:
    node = NodeName("node-0")
    faults = tmp_path / "faults.json"
    gpus = OnASlowMachine(node, "2xT4", faults, hang_limit_s=0.05)

    slow = await gpus.discover()
    faults.write_text('{"1": "hang"}')
    hanging = await gpus.discover()
    faults.write_text("{}")

    assert [gpu.fault for gpu in slow] == [None, None]
    assert hanging[1].fault is not None
    assert hanging[1].fault.code == "NoResponse"


def test_instances_survive_the_process_and_obey_the_placement_rules(tmp_path: Path) -> None:
    gpu = DeviceUuid("GPU-m")

    def opened() -> SimulatedMig:
        return SimulatedMig(tmp_path / "mig.json", {gpu: GPU_MODELS["A100-40GB"].mig})

    device = opened()
    gi = device.create_instance(gpu, 9, 0)
    device.create_compute(gpu, gi)

    for profile, start, fault in ((9, 2, "Invalid Argument"), (14, 2, "Insufficient Resources")):
        with pytest.raises(UnavailableError, match=fault):
            device.create_instance(gpu, profile, start)
    with pytest.raises(UnavailableError, match="In use"):
        device.destroy_instance(gpu, gi)
    device.create_instance(gpu, 14, 4)
    assert opened().instances(gpu) == device.instances(gpu)
    assert [instance.uuid[:4] for instance in device.instances(gpu)] == ["MIG-", ""]
