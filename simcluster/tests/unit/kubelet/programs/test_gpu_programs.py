"""What a container's program gets: variables, limits, and a cgroup by which the agent finds it."""

from pathlib import Path

import pytest

from services.node_agent.kubelet.cgroups import parse_cgroup
from simcluster.kubelet.containers.container_state import ContainerState, MountPoint
from simcluster.kubelet.programs import gpu_programs
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms, environment
from simcluster.kubelet.programs.process_table import cgroup
from simcluster.kubelet.programs.processes import (
    CANNOT_RUN,
    Namespaces,
    NodeProcesses,
    start_process,
)
from simcluster.kubelet.settings import NodeFiles
from tests.support.hami_core import can_unshare

GPU = "GPU-00000001-0000-4000-8000-000000000000"
POD = "6f1f0a7f-5c11-4f58-9a39-0d1e2f3a4b5c"
DRIVER = Path("/driver")
GPUS = Path("/gpus")


def limited(root: Path, *, preload: str) -> ContainerState:
    """Return a container with a share, as the node agent sets it up."""
    (root / "ld.so.preload").write_text(preload)
    (root / "libvgpu.so").write_bytes(b"library")
    mounts = {
        "/tmp/vgpu": root / "region",
        "/etc/ld.so.preload": root / "ld.so.preload",
        "/usr/local/vgpu/libvgpu.so": root / "libvgpu.so",
    }
    return ContainerState(
        env={
            "NVIDIA_VISIBLE_DEVICES": GPU,
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/r.cache",
            "CUDA_DEVICE_SM_LIMIT": "30",
            "LD_PRELOAD": "/mine.so",
            "OWN": "x",
        },
        mounts=[MountPoint(path, str(host), read_only=True) for path, host in mounts.items()],
    )


def test_without_a_library_the_driver_enforces_the_limits_of_the_region(tmp_path: Path) -> None:
    variables = environment(limited(tmp_path, preload=""), DRIVER, GPUS)

    assert variables["GPU_DRIVER_LIMITS"] == str(tmp_path / "region" / "r.cache")
    assert variables["GPU_DRIVER_STATE"] == "/gpus"
    assert variables["LD_LIBRARY_PATH"] == "/driver"
    assert variables["CUDA_DEVICE_SM_LIMIT"] == "30"
    assert variables["OWN"] == "x"
    assert not {"LD_PRELOAD", "CUDA_DEVICE_MEMORY_SHARED_CACHE"} & variables.keys()


def test_a_library_that_is_preloaded_in_the_container_is_preloaded_here(tmp_path: Path) -> None:
    variables = environment(limited(tmp_path, preload="/usr/local/vgpu/libvgpu.so"), DRIVER, GPUS)

    assert variables["LD_PRELOAD"] == variables["CUDA_REDIRECT"] == str(tmp_path / "libvgpu.so")
    assert variables["CUDA_DEVICE_MEMORY_SHARED_CACHE"] == str(tmp_path / "region" / "r.cache")
    assert "GPU_DRIVER_LIMITS" not in variables


def test_the_library_of_compute_time_is_preloaded_first_and_finds_its_files(tmp_path: Path) -> None:
    directory = "/usr/local/leasehold"
    state = limited(
        tmp_path, preload=f"{directory}/libleasehold-time.so\n/usr/local/vgpu/libvgpu.so"
    )
    for path, host in (
        (f"{directory}/libleasehold-time.so", tmp_path / "libleasehold-time.so"),
        (f"{directory}/time-limits", tmp_path / "limits"),
        ("/tmp/leasehold-time", tmp_path / "time"),
    ):
        state.mounts.append(MountPoint(path, str(host), read_only=True))
    (tmp_path / "libleasehold-time.so").write_bytes(b"library")

    variables = environment(state, DRIVER, GPUS)

    libraries = [str(tmp_path / name) for name in ("libleasehold-time.so", "libvgpu.so")]
    assert variables["LD_PRELOAD"].split() == libraries
    assert variables["CUDA_REDIRECT"] == libraries[1]
    assert variables["LEASEHOLD_TIME_LIMITS"] == str(tmp_path / "limits")
    assert variables["LEASEHOLD_TIME_USE"] == str(tmp_path / "time" / "use")


def test_a_container_without_a_gpu_sees_none() -> None:
    assert environment(ContainerState(), DRIVER, GPUS)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_a_variable_of_its_own_shows_a_container_no_gpu() -> None:
    state = ContainerState(env={"NVIDIA_VISIBLE_DEVICES": "all"})

    assert environment(state, DRIVER, GPUS)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_a_mig_instance_has_no_limits_but_its_own_memory() -> None:
    state = ContainerState(gpus=["MIG-1"])

    variables = environment(state, DRIVER, GPUS)

    assert variables["NVIDIA_VISIBLE_DEVICES"] == "MIG-1"
    assert "GPU_DRIVER_LIMITS" not in variables


def test_the_node_agent_reads_pod_and_container_from_the_cgroup() -> None:
    assert parse_cgroup(cgroup(POD, f"containerd://{'ab' * 32}")) == (POD, "ab" * 32)


async def test_without_a_compiler_the_program_says_so_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Streams:
        errors = b""
        size = None

        async def read_stdin(self) -> bytes:
            return b""

        async def write_stdout(self, data: bytes) -> None:
            raise AssertionError(data)

        async def write_stderr(self, data: bytes) -> None:
            self.errors += data

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = NodeFiles(tmp_path / "node")
    streams = Streams()
    processes = NodeProcesses(files, SimulatedPrograms(files))

    code = await processes.run(POD, ContainerState(), ["gpu-load", "info"], streams)

    assert code == CANNOT_RUN
    assert streams.errors.count(b"\n") == 1
    assert streams.errors.endswith(b"a C compiler: install gcc or clang\n")


@pytest.mark.skipif(not can_unshare(), reason="mount namespaces need root")
@pytest.mark.parametrize("read_only", [True, False])
def test_a_shell_writes_to_the_node_and_its_mounts_only(tmp_path: Path, *, read_only: bool) -> None:
    files = NodeFiles(tmp_path / "node")
    volume = tmp_path / "volume"
    outside = tmp_path / "other"
    for folder in (files.root, volume, outside):
        folder.mkdir()
    mount = MountPoint(host_path=str(volume), container_path="/data", read_only=read_only)
    script = f"""
        echo a > kept && echo b > /tmp/scratch && cat kept /tmp/scratch
        echo c > {volume}/it; echo d > {outside}/it; echo e > /etc/it; echo f > /dev/null && echo g
    """

    started = start_process(
        SimulatedPrograms(files).launch(ContainerState(mounts=[mount]), ["sh", "-c", script])
    )
    output, errors = started.communicate()

    assert output == b"a\nb\ng\n"
    assert (volume / "it").exists() is not read_only
    assert not (outside / "it").exists()
    assert not Path("/etc/it").exists()
    assert errors.count(b"Read-only file system") >= 1


def test_without_namespaces_only_named_programs_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_programs, "namespaces_here", lambda: Namespaces.NONE)
    programs = SimulatedPrograms(NodeFiles(tmp_path), ["bash"])

    assert programs.has(["bash"], built_in=False)
    assert not programs.has(["sh", "-c", "true"], built_in=False)
    assert programs.has(["nvidia-smi"], built_in=False)
