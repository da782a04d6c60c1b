"""Cgroups of pods and containers: names of both cgroup drivers and of the runtimes."""

from pathlib import Path

import pytest

from services.node_agent.memory_limits.cgroup_tree import CgroupTree, parse_process
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import PodUid
from tests.support.cgroups import CGROUPFS, SYSTEMD
from tests.support.cgroups import CgroupTree as Tree

POD = PodUid("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
OTHER = PodUid("1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
NAME = POD.replace("-", "_")
STATIC = PodUid("0123456789abcdef0123456789abcdef")
ID = "0123456789abcdef" * 4

RECORDED = {
    "containerd, systemd, burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{NAME}.slice/"
        f"cri-containerd-{ID}.scope\n",
        POD,
    ),
    "containerd, systemd, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{NAME}.slice/cri-containerd-{ID}.scope\n",
        POD,
    ),
    "containerd, cgroupfs, best effort": (f"0::/kubepods/besteffort/pod{POD}/{ID}\n", POD),
    "containerd, cgroupfs, guaranteed": (f"0::/kubepods/pod{POD}/{ID}\n", POD),
    "CRI-O, systemd": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{NAME}.slice/"
        f"crio-{ID}.scope\n",
        POD,
    ),
    "CRI-O with crun, which adds a cgroup": (
        f"0::/kubepods.slice/kubepods-pod{NAME}.slice/crio-{ID}.scope/container\n",
        POD,
    ),
    "CRI-O, cgroupfs": (f"0::/kubepods/burstable/pod{POD}/crio-{ID}\n", POD),
    "a kubelet with --cgroup-root": (
        f"0::/gpu.slice/gpu-kubepods.slice/gpu-kubepods-pod{NAME}.slice/cri-containerd-{ID}.scope\n",
        POD,
    ),
    "a node in a container": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{NAME}.slice/cri-containerd-{ID}.scope\n",
        POD,
    ),
    "seen from another cgroup namespace": (
        f"0::/../../kubepods-burstable-pod{NAME}.slice/cri-containerd-{ID}.scope\n",
        POD,
    ),
    "a static pod": (f"0::/kubepods/burstable/pod{STATIC}/{ID}\n", STATIC),
    "a cgroup that the container made": (
        f"0::/kubepods/pod{POD}/{ID}/pod{OTHER}/{'f' * 64}\n",
        POD,
    ),
}


@pytest.mark.parametrize(("text", "pod"), RECORDED.values(), ids=RECORDED)
def test_a_process_names_its_pod_and_container(text: str, pod: PodUid) -> None:
    assert parse_process(text) == (pod, ID)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/\n",
        "0::/system.slice/containerd.service\n",
        f"0::/kubepods/pod{POD}\n",
        f"0::/system.slice/kubepods-pod{NAME}.slice:cri-containerd:{ID}\n",
        f"0::/kubepods/pod{POD}/{ID}\n1:name=systemd:/kubepods/pod{POD}/{ID}\n",
        f"4:memory:/kubepods/pod{POD}/{ID}\n",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cgroup"):
        parse_process(text)


@pytest.mark.parametrize("driver", [SYSTEMD, CGROUPFS])
@pytest.mark.parametrize("qos", ["", "burstable", "besteffort"])
@pytest.mark.parametrize("runtime", ["containerd", "cri-o"])
def test_directories_are_found_by_the_pods_uid_and_the_containers_id(
    tmp_path: Path, driver: str, qos: str, runtime: str
) -> None:
    tree = Tree(root=tmp_path)
    tree.make()
    tree.make_pod(OTHER, driver=driver, qos=qos)
    pod = tree.make_pod(POD, driver=driver, qos=qos)
    container = tree.make_container(pod, ID, runtime=runtime)

    found = CgroupTree(tmp_path)

    assert found.pod_directory(POD) == pod
    assert found.container_directory(POD, ID) == container


def test_a_prefix_before_the_kubelets_directory_is_found(tmp_path: Path) -> None:
    name = f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{NAME}.slice"
    pod = Tree(root=tmp_path).make(name)

    assert CgroupTree(tmp_path).pod_directory(POD) == pod


def test_a_pod_without_or_with_several_directories_is_refused(tmp_path: Path) -> None:
    tree = Tree(root=tmp_path)
    tree.make_pod(OTHER)
    found = CgroupTree(tmp_path)
    with pytest.raises(UnavailableError, match="has no cgroup"):
        found.pod_directory(POD)
    pod = tree.make_pod(POD)
    assert found.pod_directory(POD) == pod
    with pytest.raises(UnavailableError, match="has no cgroup in"):
        found.container_directory(POD, ID)

    tree.make_pod(POD, qos="besteffort")

    with pytest.raises(RequestError, match="several cgroups"):
        found.pod_directory(POD)


def test_a_link_is_no_directory(tmp_path: Path) -> None:
    tree = Tree(root=tmp_path)
    other = tree.make_pod(OTHER)
    (other.parent / other.name.replace(OTHER.replace("-", "_"), NAME)).symlink_to(other)

    with pytest.raises(UnavailableError, match="has no cgroup"):
        CgroupTree(tmp_path).pod_directory(POD)


def test_the_first_gap_on_the_way_is_found(tmp_path: Path) -> None:
    tree = Tree(root=tmp_path)
    pod = tree.make_pod(POD)
    container = tree.make_container(pod, ID)
    found = CgroupTree(tmp_path)
    assert found.first_gap(container) is None

    tree.enable(pod, "cpu")
    assert found.first_gap(container) == container
    tree.enable(pod.parent, "cpu")
    assert found.first_gap(container) == pod
