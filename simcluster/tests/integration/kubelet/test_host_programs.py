"""Containers that are processes of this machine: their mounts, their terminal, what fails."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.kubelet.containers.container_state import ContainerState, MountPoint
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.programs.gpu_programs import hidden_files
from simcluster.kubelet.programs.host_programs import HostPrograms, host_launch
from simcluster.kubelet.programs.processes import Namespaces, StartError, start_process
from simcluster.ports import LogOptions
from tests.support.hami_core import can_unshare
from tests.support.simcluster.kubelet import (
    SLOT,
    Node,
    ScriptedPlugin,
    answering,
    container,
    one_fleet,
    one_kubelet,
    pod,
)
from tests.support.waiting import until

isolated = pytest.mark.skipif(not can_unshare(), reason="mount namespaces need root")
ONE, TWO = "GPU-00000001-0000-4000-8000-000000000000", "GPU-00000002-0000-4000-8000-000000000000"


def output_of(
    state: ContainerState, root: Path | None, *command: str, own_users: bool = False
) -> str:
    process = start_process(replace(host_launch(state, command, root=root), own_users=own_users))
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.decode()


def limited(folder: Path, *, library: str = "") -> ContainerState:
    """Return a container with a share, as the node agent sets it up."""
    (folder / "region").mkdir()
    for name, text in {"libvgpu.so": library, "preload": library and "/lease/libvgpu.so"}.items():
        (folder / name).write_text(text)
    mounts = {
        "/lease": folder / "region",
        "/lease/libvgpu.so": folder / "libvgpu.so",
        "/etc/ld.so.preload": folder / "preload",
        "/overrideEnv": folder / "preload",
    }
    return ContainerState(
        gpus=[ONE],
        env={"NVIDIA_VISIBLE_DEVICES": ONE, "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/lease/r.cache"},
        mounts=[
            MountPoint(path, str(host), read_only=host.is_file()) for path, host in mounts.items()
        ],
    )


@isolated
@pytest.mark.parametrize("own_users", [False, True])
def test_a_program_has_its_mounts_where_a_container_has_them(
    tmp_path: Path, own_users: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    own = Path("/etc/ld.so.preload").exists(), sorted(Path("/").iterdir())
    script = (
        "ls /lease; touch /lease/made; echo x 2>&- >/etc/ld.so.preload || echo read-only; "
        "echo $CUDA_DEVICE_MEMORY_SHARED_CACHE; cat $0; stat -c %a /tmp"
    )
    given = tmp_path / "of-the-user"
    given.write_text("theirs\n")

    command = ("bash", "-c", script, str(given))
    shown = output_of(limited(tmp_path), root, *command, own_users=own_users).split()

    assert shown == ["libvgpu.so", "read-only", "/lease/r.cache", "theirs", "1777"]
    assert (tmp_path / "region" / "made").exists()
    assert (Path("/etc/ld.so.preload").exists(), sorted(Path("/").iterdir())) == own
    assert not list(root.iterdir())


@isolated
def test_files_are_hidden_as_by_a_container_runtime(tmp_path: Path) -> None:
    for uuid, minor in ((ONE, 0), (TWO, 1)):
        folder = tmp_path / "gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    state = ContainerState(gpus=[ONE])

    assert hidden_files(state, tmp_path / "gpus") == ["/dev/nvidia1", "/usr/bin/nvidia-modprobe"]
    assert hidden_files(state, tmp_path / "none") == []
    assert hidden_files(ContainerState(gpus=["all"]), tmp_path / "gpus") == []


def test_without_namespaces_the_library_is_preloaded_and_paths_are_of_this_machine(
    tmp_path: Path,
) -> None:
    launch = host_launch(limited(tmp_path, library="library"), ["env"], root=None)

    variables = launch.environment
    assert variables["LD_PRELOAD"] == str(tmp_path / "libvgpu.so")
    assert variables["CUDA_DEVICE_MEMORY_SHARED_CACHE"] == str(tmp_path / "region" / "r.cache")
    assert variables["CUDA_VISIBLE_DEVICES"] == ONE
    assert variables["PATH"] == os.environ["PATH"], "the image is this machine"
    without = host_launch(ContainerState(), ["env"], root=None)
    assert without.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_MPS_PIPE_DIRECTORY" not in without.environment


def test_without_namespaces_a_daemon_of_mps_is_found_in_its_directory_of_this_machine(
    tmp_path: Path,
) -> None:
    state = ContainerState(
        gpus=[ONE],
        env={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"},
        mounts=[MountPoint("/tmp/nvidia-mps", str(tmp_path / "pipe"), read_only=False)],
    )

    launch = host_launch(state, ["env"], root=None)

    assert launch.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "pipe")


class AnyUser(HostPrograms):
    """As for a user who may make namespaces."""

    namespaces = Namespaces.OF_ANY_USER


class Confined(HostPrograms):
    """As for a user who may not."""

    namespaces = Namespaces.NONE


@pytest.fixture(
    params=[
        pytest.param(HostPrograms, marks=isolated),
        pytest.param(AnyUser, marks=isolated),
        Confined,
    ]
)
async def one(request: pytest.FixtureRequest) -> AsyncIterator[tuple[KubeletFleet, Node]]:
    async with one_fleet(programs=request.param) as started:
        yield started


class Keyboard:
    """A client at a terminal, who types and reads, and stays until the program has ended."""

    def __init__(self, typed: str) -> None:
        self.typed = [typed.encode()]
        self.seen = b""
        self.size = (132, 43)

    async def read_stdin(self) -> bytes:
        if not self.typed:
            await asyncio.Event().wait()
        return self.typed.pop()

    async def write_stdout(self, data: bytes) -> None:
        self.seen += data

    async def write_stderr(self, data: bytes) -> None:
        raise AssertionError(data)


async def log_of(fleet: KubeletFleet, name: str) -> bytes:
    return b"".join([c async for c in fleet.log("default", name, "main", LogOptions())])


async def test_a_pod_is_its_command_whatever_its_image(one: tuple[KubeletFleet, Node]) -> None:
    fleet, node = one
    async with ScriptedPlugin(node.device_plugins) as plugin:
        plugin.on_allocate = answering({"LIMIT": "1000m"})
        plugin.mounts = [api_pb2.Mount(container_path="/lease", host_path="/etc", read_only=True)]
        await plugin.serve(node, "a")
        main = container(
            "main", limits={SLOT: 1}, command=["python3", "-c"], workingDir="/usr",
            args=["import os; print(os.environ['LIMIT'], os.getcwd(), flush=True); input()"],
        )  # fmt: skip
        waits = main | {"command": ["sh", "-c", "echo $LIMIT $PWD; sleep 1000 & wait"], "args": []}
        gone = container("main", command=["no-such-program"])
        idle = container("main")
        for name, spec in {"py": main | {"resources": {}, "env": [{"name": "LIMIT", "value": "1"}]},
                           "sh": waits, "gone": gone, "idle": idle}.items():  # fmt: skip
            node.create(pod(name, containers=[spec], restartPolicy="Never"))
        ended = await node.phase("py", "Failed")
        failed = await node.phase("gone", "Failed")
        await node.phase("sh", "Running")
        await node.phase("idle", "Running")
        keyboard = Keyboard("echo $((1+1)) $LIMIT; tty; stty size; exit 3\n")

        code = await fleet.exec(
            "default", "sh", "main", ["bash", "--norc"], tty=True, streams=keyboard
        )

        assert code == 3
        assert b"2 1000m\r\n/dev/pts/" in keyboard.seen
        assert b"43 132\r\n" in keyboard.seen
        logs = [await until(partial(log_of, fleet, name)) for name in ("py", "sh", "idle")]
        assert logs[0].startswith(b"1 /usr\n")
        assert b"EOFError" in logs[0], "it has no standard input"
        assert logs[1] == b"1000m /usr\n"
        assert b"image app is ignored" in logs[2]
        reasons = [
            obj["status"]["containerStatuses"][0]["state"]["terminated"] for obj in (ended, failed)
        ]
        assert [reason["exitCode"] for reason in reasons] == [1, 128]
        assert 'exec: "no-such-program": executable file not found' in reasons[1]["message"]


@isolated
async def test_a_pod_has_its_volumes(tmp_path: Path) -> None:
    async with one_kubelet(programs=HostPrograms) as node:
        data = {"train.py": "open('/out/model', 'w').write(open('/secret/deep/key').read())"}
        meta = {"namespace": "default"}
        node.store.create("configmaps", {"metadata": {"name": "code", **meta}, "data": data})
        secret = {"key": base64.b64encode(b"k3y").decode()}
        node.store.create("secrets", {"metadata": {"name": "key", **meta}, "data": secret})
        claim = {"metadata": {"name": "x", **meta}, "spec": {"volumeName": "v"}}
        node.store.create(
            "persistentvolumes",
            {"metadata": {"name": "v"}, "spec": {"claimRef": {"name": "x", **meta}}},
        )
        node.store.create("persistentvolumeclaims", claim)
        bound = {"status": {"phase": "Bound"}}
        node.store.patch("persistentvolumeclaims", "default", "x", bound, subresource="status")
        items = [{"key": "key", "path": "deep/key"}]
        volumes = [
            {"name": "code", "configMap": {"name": "code"}},
            {"name": "key", "secret": {"secretName": "key", "items": items}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "out", "hostPath": {"path": str(tmp_path)}},
            {"name": "other", "persistentVolumeClaim": {"claimName": "x"}},
        ]
        mounts = [
            {"name": "code", "mountPath": "/code/train.py", "subPath": "train.py"},
            {"name": "key", "mountPath": "/secret", "readOnly": True},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "out", "mountPath": "/out"},
            {"name": "other", "mountPath": "/other"},
        ]
        script = (
            "set -e; python3 /code/train.py; touch /scratch/x; ! touch /secret/y; ! [ -e /other ]"
        )
        main = container("main", command=["sh", "-c", script], volumeMounts=mounts)
        node.create(pod("one", containers=[main], restartPolicy="Never", volumes=volumes))

        await node.phase("one", "Succeeded")
        assert (tmp_path / "model").read_text() == "k3y"
        assert [file.name for file in node.kubelet.files.volumes.glob("*/scratch/*")] == ["x"]
        node.store.delete("pods", "default", "one")
        await until(lambda: not any(node.kubelet.files.volumes.iterdir()))


@isolated
def test_a_mount_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    state = ContainerState(mounts=[MountPoint("/lease", str(tmp_path / "gone"), read_only=True)])
    root = tmp_path / "root"
    root.mkdir()

    with pytest.raises(StartError, match="mount /lease: No such file or directory"):
        output_of(state, root, "true")
