"""Which GPUs a container may open, by what its runtime wrote."""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.container_runtime.bundles import (
    BUNDLES,
    list_bundles,
    read_bundle,
)
from services.node_agent.kubelet.pods import ContainerDevices
from shared.model.errors import RequestError
from tests.support.node_agent.bundles import (
    ALL_DEVICES,
    CRIO,
    Bundles,
    hook_mount,
    node,
    rule,
)

POD = "0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11"
ID = "a" * 64
PIPE_BYTES = 65_536


def opened(tmp_path: Path, **facts: Any) -> ContainerDevices | None:
    bundles = Bundles(tmp_path)
    return read_bundle(bundles.add(POD, ID, **facts), bundles.proc)


GPUS: list[tuple[str, dict[str, Any], set[int], bool]] = [
    ("nothing but the usual", {}, set(), False),
    ("devices of CDI", {"devices": [node(0), node(3), node(255, "/dev/nvidiactl")]}, {0, 3}, False),
    ("a device at another path", {"devices": [node(1, "/dev/card")]}, {1}, False),
    ("a rule alone, as the container can make the file", {"rules": [rule(2)]}, {2}, False),
    (
        "a rule for all devices of the driver",
        {"rules": [{"allow": True, "type": "c", "major": 195, "access": "rw"}]},
        set(range(254)),
        False,
    ),
    ("what NVIDIA's hook adds", {"mountinfo": hook_mount("/dev/nvidia5")}, {5}, False),
    ("control devices of the hook", {"mountinfo": hook_mount("/dev/nvidia-uvm")}, set(), False),
    (
        "a host path of the pod, which it may not open",
        {"mountinfo": hook_mount("/dev/nvidia5"), "mounts": ["/dev/nvidia5"]},
        set(),
        False,
    ),
    ("a host path elsewhere", {"mountinfo": hook_mount("/host/dev/nvidia5")}, set(), False),
    ("a privileged container", {"rules": [ALL_DEVICES]}, set(), True),
    (
        "rules of which a later one counts",
        {"rules": [ALL_DEVICES, {"allow": False, "access": "rwm"}, rule(2)]},
        {2},
        False,
    ),
    ("CRI-O", {"devices": [node(4)], "below": CRIO}, {4}, False),
]


@pytest.mark.parametrize(
    ("facts", "gpus", "every"), [row[1:] for row in GPUS], ids=[row[0] for row in GPUS]
)
def test_the_gpus_that_a_container_may_open(
    tmp_path: Path, facts: dict[str, Any], gpus: set[int], every: bool
) -> None:
    found = opened(tmp_path, **facts)

    assert found is not None
    assert (found.pod, found.container_id) == (POD, ID)
    assert (set(found.gpus), found.every_device) == (gpus, every)
    assert found.sees_gpus == (every or bool(gpus))


def test_the_mounts_of_a_container_are_read_to_the_end(tmp_path: Path) -> None:
    """The kernel returns them piece by piece, as a pipe does."""
    bundles = Bundles(tmp_path)
    bundle = bundles.add(POD, ID)
    [mountinfo] = bundles.proc.glob("*/mountinfo")
    mountinfo.unlink()
    os.mkfifo(mountinfo)
    text = hook_mount("/mnt") * 2_000 + hook_mount("/dev/nvidia5")
    assert len(text) > PIPE_BYTES

    with ThreadPoolExecutor() as threads:
        writing = threads.submit(mountinfo.write_text, text)
        found = read_bundle(bundle, bundles.proc)
        with contextlib.suppress(BrokenPipeError):
            writing.result()

    assert found is not None
    assert found.gpus == {5}


def test_a_container_is_read_once_it_is_created_as_hooks_add_devices_then(tmp_path: Path) -> None:
    assert opened(tmp_path, devices=[node(0)], created=False) is None


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/kubepods/besteffort/pod{POD}/{ID}",
        f"kubepods-pod{POD.replace('-', '_')}.slice:crio:{ID}",
    ],
)
def test_the_pod_is_that_of_the_cgroup(tmp_path: Path, cgroup: str) -> None:
    found = opened(tmp_path, cgroup=cgroup)

    assert found is not None
    assert found.pod == POD


def test_a_container_of_no_pod_is_none_of_ours(tmp_path: Path) -> None:
    found = opened(tmp_path, cgroup="system.slice:docker:1", devices=[node(0)])

    assert found is not None
    assert found.pod is None


@pytest.mark.parametrize("text", ["", "[]", '{"linux": {"devices": 5}}', "[" * 100_000])
def test_what_is_no_specification_is_reported_with_its_file(tmp_path: Path, text: str) -> None:
    bundle = Bundles(tmp_path).add(POD, ID)
    (bundle / "config.json").write_text(text)

    with pytest.raises(RequestError, match=f"{ID}/config.json is not an OCI specification"):
        read_bundle(bundle, tmp_path / "proc")


def test_a_field_of_null_is_an_empty_one(tmp_path: Path) -> None:
    bundle = Bundles(tmp_path).add(POD, ID)
    document = json.loads((bundle / "config.json").read_text())
    document["mounts"] = None
    document["linux"]["devices"] = None
    document["linux"]["resources"] = None
    (bundle / "config.json").write_text(json.dumps(document))

    found = read_bundle(bundle, tmp_path / "proc")

    assert found is not None
    assert not found.sees_gpus


def test_only_directories_named_by_an_id_are_containers(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    bundles.add(POD, ID)
    bundles.add(POD, "b" * 64, below=CRIO)
    (tmp_path / CRIO / "overlay-containers.lock").touch()

    found = list_bundles(tmp_path / path for path in BUNDLES)

    assert set(found) == {ID, "b" * 64}
