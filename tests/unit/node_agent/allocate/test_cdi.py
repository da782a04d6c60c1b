"""Strategies that pass devices to containers, and the CDI specification."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.allocate.cdi import FILE
from services.node_agent.allocate.cdi_files import CdiFiles, DriverPaths
from services.node_agent.allocate.device_list_strategies import (
    DeviceListStrategies,
    DeviceListStrategy,
    has_cdi,
    name_devices,
    parse_strategies,
)
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.kubelet.device_plugin import encode_setup
from services.node_agent.metrics import DEVICE_LIST
from services.node_agent.mig.instances import MigInstance, MigState
from services.node_agent.records.checkpoint import Checkpoint
from shared.dialects.dialect import ContainerSetup, Mount
from shared.kubelet_api.deviceplugin import api_pb2
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.cdi import cdi_devices, cdi_specification
from tests.support.node_agent.node import entry_of

ENVVAR, VOLUME_MOUNTS, CDI_CRI = DeviceListStrategy
VERSION = "550.54.15"
FOLDER = "usr/lib/x86_64-linux-gnu"
MINORS = """gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu1/gi3/access 48
gpu1/gi3/ci0/access 49
"""
SETUP = ContainerSetup(
    environment={"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b", "CUDA_DEVICE_MEMORY_LIMIT_0": "1m"},
    mounts=(Mount(container_path="/m", host_path="/h", read_only=True, directory=True),),
    annotations={"tencent.com/vcuda-core": "10"},
)


def gpu(uuid: str, index: int, **facts: Any) -> Gpu:
    known: dict[str, Any] = {"model": "A100", "memory_mib": 40960, "driver": VERSION}
    return Gpu(uuid=DeviceUuid(uuid), index=index, **(known | facts))


def mig_gpu(*instances: MigInstance) -> Gpu:
    return gpu("GPU-m", 1, mig=MigState(enabled=True, pending=True), instances=instances)


def instance(gi: int, uuid: str) -> MigInstance:
    return MigInstance(
        gi=gi,
        profile="1g.5gb",
        start=0,
        memory_slices=1,
        compute_slices=1,
        compute_ids=(0,),
        uuid=uuid,
    )


@dataclass
class FakeNode:
    """The disk, the driver and the checkpoint of a node."""

    root: Path
    instances_there: tuple[MigInstance, ...] = ()
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(Path("unused"), "node"))
    queries: list[str] = field(default_factory=list)
    unresponsive_gpu: str = ""
    """The GPU that does not respond."""
    runtime: str = ""
    """Of the node's status; empty while the API server does not respond."""
    reads: int = 0

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        self.queries.append(device)
        if device == self.unresponsive_gpu:
            raise UnavailableError("the NVIDIA driver did not respond within 20 s")
        return self.instances_there

    async def read_runtime(self) -> str:
        self.reads += 1
        if not self.runtime:
            raise UnavailableError("no response")
        return self.runtime

    @property
    def places(self) -> DriverPaths:
        return DriverPaths(host=self.root, proc=self.root / "proc")

    def files(self, *strategies: DeviceListStrategy, simulated: bool = False) -> CdiFiles:
        return CdiFiles(
            self.root / "cdi",
            () if self.runtime else strategies or (CDI_CRI,),
            places=None if simulated else self.places,
            read_runtime=self.read_runtime,
            list_instances=self.instances,
            checkpoint=self.checkpoint,
        )

    @property
    def path(self) -> Path:
        return self.root / "cdi" / FILE

    def put(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def record(self, setup: ContainerSetup) -> None:
        entry = entry_of(lease_of("u1"), setup)
        self.checkpoint.by_key[entry.key] = entry


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    fake = FakeNode(tmp_path)
    for name in ("libcuda.so", "libnvidia-ml.so", "libnvidia-glcore.so"):
        fake.put(f"{FOLDER}/{name}.{VERSION}")
    for path in ("dev/nvidiactl", "dev/nvidia-uvm", "usr/bin/nvidia-smi", "usr/bin/nvidia-ctk"):
        fake.put(path)
    fake.put("proc/driver/nvidia-caps/mig-minors", MINORS)
    return fake


PLACE = "/var/run/nvidia-container-devices"
NAMES = ["leasehold.dev/gpu=GPU-a", "leasehold.dev/gpu=GPU-b"]
LIMIT = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1m"}


@pytest.mark.parametrize(
    ("strategies", "variables", "mounts", "names"),
    [
        ((ENVVAR,), SETUP.environment, [], []),
        (
            (VOLUME_MOUNTS,),
            {**LIMIT, "NVIDIA_VISIBLE_DEVICES": PLACE},
            [(f"{PLACE}/GPU-a", "/dev/null"), (f"{PLACE}/GPU-b", "/dev/null")],
            [],
        ),
        ((CDI_CRI,), LIMIT, [], NAMES),
        ((ENVVAR, CDI_CRI), SETUP.environment, [], NAMES),
    ],
)
def test_each_strategy_names_devices_in_the_response_to_allocate(
    strategies: DeviceListStrategies,
    variables: dict[str, str],
    mounts: list[tuple[str, str]],
    names: list[str],
) -> None:
    setup = name_devices(SETUP, ["GPU-a", "GPU-b"], strategies)

    answer = api_pb2.AllocateResponse.FromString(encode_setup(setup)).container_responses[0]
    assert dict(answer.envs) == variables
    given = [(mount.container_path, mount.host_path) for mount in answer.mounts]
    assert given == [("/m", "/h"), *mounts]
    assert [device.name for device in answer.cdi_devices] == names
    assert dict(answer.annotations) == SETUP.annotations


def test_an_unknown_strategy_is_refused_by_name() -> None:
    assert parse_strategies(["auto"]) == ()
    assert parse_strategies(["cdi-cri", "envvar", "cdi-cri"]) == (CDI_CRI, ENVVAR)
    for words in (["cdi"], ["auto", "envvar"], []):
        with pytest.raises(RequestError, match=r"must be auto, or some of envvar, .*got "):
            parse_strategies(words)


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("containerd://2.1.4", True),
        ("containerd://2.0.5-k3s2", True),
        ("containerd://v2.0.0-rc.1", True),
        ("cri-o://1.33.0", True),
        ("cri-o://1.23.0", True),
        ("cri-o://1.22.5", False),
        ("containerd://1.7.28", False),
        ("docker://29.0.1", False),
        ("containerd://", False),
        ("", False),
    ],
)
def test_the_version_tells_whether_cdi_is_enabled_as_installed(
    runtime: str, expected: bool
) -> None:
    assert has_cdi(runtime) is expected


async def test_by_default_cdi_is_used_as_soon_as_the_drivers_files_are_found(
    node: FakeNode,
) -> None:
    node.runtime = "containerd://2.1.4"
    hook = node.root / "usr/bin/nvidia-ctk"
    hook.unlink()
    files = node.files()

    await files.update([gpu("GPU-a", 0)])
    before = files.strategies, node.path.exists()
    hook.touch()
    await files.update([gpu("GPU-a", 0)])
    hook.unlink()
    with pytest.raises(UnavailableError, match="nvidia-cdi-hook"):
        await files.update([gpu("GPU-a", 0)])

    assert before == ((ENVVAR,), False)
    assert files.strategies == (CDI_CRI,), "what was safe does not become unsafe"
    assert set(cdi_devices(node.path)) == {NAMES[0]}
    assert node.reads == 1


async def test_by_default_a_runtime_that_may_lack_cdi_gets_the_variable(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node.runtime = "containerd://1.7.28"
    files = node.files()

    await files.update([gpu("GPU-a", 0)])

    assert files.strategies == (ENVVAR,)
    assert not node.path.exists()
    (metric,) = DEVICE_LIST.collect()
    (sample,) = metric.samples
    assert sample.labels == {"strategy": "envvar"}
    assert "containerd://1.7.28 is not known to have CDI enabled" in caplog.text


@pytest.mark.parametrize("used_before", [True, False])
async def test_without_the_api_server_the_agent_does_as_before(
    node: FakeNode, used_before: bool
) -> None:
    files = node.files()
    files.configured = ()
    files.strategies = (ENVVAR,)
    if used_before:
        await node.files(CDI_CRI).update([gpu("GPU-a", 0)])

    await files.update([gpu("GPU-a", 0)])

    assert files.strategies == ((CDI_CRI,) if used_before else (ENVVAR,))


async def test_the_specification_lists_the_device_nodes_of_each_device(node: FakeNode) -> None:
    files = node.files()

    await files.update([gpu("GPU-a", 0), mig_gpu(instance(3, "MIG-x"))])

    found = cdi_specification(node.path)
    edits = cdi_devices(node.path)
    assert {tuple(one["env"]) for one in edits.values()} == {("NVIDIA_VISIBLE_DEVICES=void",)}
    assert {name: [n["path"] for n in one["deviceNodes"]] for name, one in edits.items()} == {
        "leasehold.dev/gpu=GPU-a": ["/dev/nvidia0"],
        "leasehold.dev/gpu=MIG-x": [
            "/dev/nvidia1",
            "/dev/nvidia-caps/nvidia-cap48",
            "/dev/nvidia-caps/nvidia-cap49",
        ],
    }
    common = found["containerEdits"]
    assert [one["path"] for one in common["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert {(m["hostPath"], m["containerPath"]) for m in common["mounts"]} == {
        (path, path)
        for path in (
            f"/{FOLDER}/libcuda.so.{VERSION}",
            f"/{FOLDER}/libnvidia-ml.so.{VERSION}",
            "/usr/bin/nvidia-smi",
        )
    }
    assert [one["args"][:3] for one in common["hooks"]] == [
        ["nvidia-ctk", "hook", "create-symlinks"],
        ["nvidia-ctk", "hook", "update-ldcache"],
    ]


@pytest.mark.parametrize("devices_at", ["", "/run/nvidia/driver"])
async def test_the_gpu_operators_driver_is_found_without_flags(
    tmp_path: Path, devices_at: str
) -> None:
    fake = FakeNode(tmp_path)
    fake.put(f"run/nvidia/driver/{FOLDER}/libcuda.so.{VERSION}")
    fake.put("usr/local/nvidia/toolkit/nvidia-cdi-hook")
    for device in ("nvidiactl", "nvidia0"):
        fake.put(f"{devices_at}/dev/{device}".lstrip("/"))

    await fake.files().update([gpu("GPU-a", 0)])

    found = cdi_specification(fake.path)
    for edits, name in ((found["containerEdits"], "nvidiactl"),
                        (found["devices"][0]["containerEdits"], "nvidia0")):  # fmt: skip
        (node,) = edits["deviceNodes"]
        assert (node["path"], node.get("hostPath", node["path"])) == (
            f"/dev/{name}", f"{devices_at}/dev/{name}")  # fmt: skip
    assert found["containerEdits"]["mounts"][0]["hostPath"].startswith(
        f"/run/nvidia/driver/{FOLDER}"
    )
    hooks = {hook["path"] for hook in found["containerEdits"]["hooks"]}
    assert hooks == {"/usr/local/nvidia/toolkit/nvidia-cdi-hook"}


async def test_the_specification_is_rewritten_only_when_devices_change(node: FakeNode) -> None:
    files = node.files()
    await files.update([gpu("GPU-a", 0), gpu("GPU-b", 1)])
    before = node.path.stat().st_ino

    await files.update([gpu("GPU-a", 0), gpu("GPU-b", 1)])
    unchanged = node.path.stat().st_ino
    await files.update([gpu("GPU-b", 1)])

    assert before == unchanged
    assert set(cdi_devices(node.path)) == {"leasehold.dev/gpu=GPU-b"}
    assert [path.name for path in node.path.parent.iterdir()] == [FILE], "no draft is left"
    assert node.path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("damage", ["gone", "cut"])
async def test_a_deleted_or_truncated_specification_is_rewritten(
    node: FakeNode, damage: str
) -> None:
    files = node.files()
    await files.update([gpu("GPU-a", 0)])
    node.path.unlink() if damage == "gone" else node.path.write_text("{")

    await files.update([gpu("GPU-a", 0)])

    assert set(cdi_devices(node.path)) == {"leasehold.dev/gpu=GPU-a"}


async def test_a_new_mig_instance_is_specified_before_its_container_starts(node: FakeNode) -> None:
    files = node.files()
    await files.update([mig_gpu()])
    node.instances_there = (instance(3, "MIG-x"),)
    setup = name_devices(SETUP, ["MIG-x"], (CDI_CRI,))

    await files.ensure_named(setup)
    await files.ensure_named(setup)

    assert set(cdi_devices(node.path)) == {"leasehold.dev/gpu=MIG-x"}
    assert node.queries == ["GPU-m"], "a known instance causes no query"


async def test_an_unresponsive_gpu_does_not_block_containers_of_other_gpus(node: FakeNode) -> None:
    files = node.files()
    unresponsive_gpu = replace(mig_gpu(instance(3, "MIG-y")), uuid=DeviceUuid("GPU-s"), index=2)
    await files.update([unresponsive_gpu, mig_gpu()])
    node.instances_there = (instance(3, "MIG-x"),)
    node.unresponsive_gpu = "GPU-s"

    await files.ensure_named(name_devices(SETUP, ["MIG-x"], (CDI_CRI,)))

    assert "leasehold.dev/gpu=MIG-x" in set(cdi_devices(node.path))


async def test_a_container_without_a_cdi_name_for_its_device_does_not_start(node: FakeNode) -> None:
    files = node.files()
    await files.update([mig_gpu()])
    node.instances_there = (instance(9, "MIG-x"),)  # without a capability known

    with pytest.raises(UnavailableError, match=r"has no leasehold\.dev/gpu=MIG-x"):
        await files.ensure_named(name_devices(SETUP, ["MIG-x"], (CDI_CRI,)))


async def test_without_cdi_the_specification_is_removed_once_no_container_uses_it(
    node: FakeNode,
) -> None:
    await node.files(CDI_CRI).update([gpu("GPU-a", 0)])
    node.record(name_devices(SETUP, ["GPU-a"], (CDI_CRI,)))
    files = node.files(ENVVAR)

    await files.update([gpu("GPU-a", 0)])
    kept = node.path.is_file()
    node.checkpoint.by_key.clear()
    await files.update([gpu("GPU-a", 0)])

    assert kept
    assert not node.path.exists()


async def test_without_cdi_no_driver_is_needed_and_nothing_is_written(tmp_path: Path) -> None:
    await FakeNode(tmp_path).files(ENVVAR, VOLUME_MOUNTS).update([gpu("GPU-a", 0)])

    assert not list(tmp_path.iterdir())


async def test_simulated_gpus_are_specified_without_device_nodes(tmp_path: Path) -> None:
    fake = FakeNode(tmp_path)

    await fake.files(simulated=True).update([gpu("GPU-a", 0)])

    assert cdi_devices(fake.path) == {NAMES[0]: {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (f"{FOLDER}/libcuda.so.{VERSION}", "--host-root"),
        ("usr/bin/nvidia-ctk", "--nvidia-cdi-hook-path"),
    ],
)
async def test_a_missing_driver_file_is_reported_with_the_flag_to_set(
    node: FakeNode, missing: str, text: str
) -> None:
    (node.root / missing).unlink()

    with pytest.raises(UnavailableError, match=text):
        await node.files().update([gpu("GPU-a", 0)])
    assert not node.path.exists()


async def test_a_configured_hook_path_is_used_as_given(node: FakeNode) -> None:
    files = node.files()
    files.places = replace(node.places, hook="/opt/nvidia-cdi-hook")

    await files.update([gpu("GPU-a", 0)])

    links, cache = cdi_specification(node.path)["containerEdits"]["hooks"]
    assert links["path"] == cache["path"] == "/opt/nvidia-cdi-hook"
    assert cache["args"] == ["nvidia-cdi-hook", "update-ldcache", "--folder", f"/{FOLDER}"]
