"""Origins of processes, from cgroups of all kinds of nodes."""

import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.kubelet import cgroups
from services.node_agent.kubelet.cgroups import (
    containers_of_processes,
    parse_cgroup,
    parse_inner_pid,
    parse_start_time_s,
    read_origin,
)
from shared.model.errors import UnavailableError
from tests.support.node_agent.monitor_world import stat_of

UID = "0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11"
SLICE = UID.replace("-", "_")
FILE = "0123456789abcdef0123456789abcdef"
ID = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
BURST = "/kubepods.slice/kubepods-burstable.slice"


@pytest.mark.parametrize(
    ("text", "pod", "container"),
    [
        (f"0::{BURST}/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope\n", UID, ID),
        (f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope", UID, ID),
        (f"0::/kubepods/burstable/pod{UID}/{ID}", UID, ID),
        (f"0::/kubepods/pod{UID}/{ID}/inner/group", UID, ID),
        (f"0::/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{ID}.scope", UID, ID),
        (f"0::/../pod{UID}/{ID}", UID, ID),
        (f"0::/kubepods/pod{FILE}/{ID}", FILE, ID),
        (f"0::/kubelet.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope", UID, ID),
        (f"0::/system.slice/containerd.service/kubepods-pod{SLICE}.slice:cri-containerd:{ID}",
         UID, ID),
        (f"12:memory:/kubepods/burstable/pod{UID}/{ID}\n"
         f"11:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}\n"
         f"1:name=systemd:/kubepods/burstable/pod{UID}/{ID}\n0::/\n", UID, ID),
        (f"5:devices:{BURST}/kubepods-burstable-pod{SLICE}.slice/docker-{ID}.scope", UID, ID),
        (f"0::/kubepods/pod{UID}", UID, ""),
        ("0::/user.slice/user-1000.slice/session-3.scope", None, ""),
        (f"0::/docker/{ID}", None, ""),
        (f"0::/kubepods/podcast{UID}/{ID}", None, ""),
        (f"0::/kubepods/pod{UID}0/{ID}", None, ""),
        ("", None, ""),
        ("no colons\n::\n", None, ""),
    ],
)  # fmt: skip
def test_pod_and_container_are_parsed_from_the_cgroup_path(
    text: str, pod: str | None, container: str
) -> None:
    assert parse_cgroup(text) == (pod, container)


def test_nested_cgroups_belong_to_their_pod() -> None:
    other = "ffffffff-7f0c-4d55-9f5b-2f2f0f9d7a11"

    assert parse_cgroup(f"0::/kubepods/pod{UID}/{ID}/pod{other}/{'a' * 64}") == (UID, ID)


def test_hierarchies_that_disagree_yield_no_pod() -> None:
    other = "ffffffff-7f0c-4d55-9f5b-2f2f0f9d7a11"

    text = f"2:memory:/kubepods/pod{UID}/{ID}\n1:cpu:/kubepods/pod{other}/{ID}"
    assert parse_cgroup(text) == (None, "")


@given(st.text(max_size=300))
def test_any_cgroup_text_is_parsed(text: str) -> None:
    assert parse_cgroup(text)[0] is None or "pod" in text
    assert parse_inner_pid(text) >= 0
    assert parse_start_time_s(text) >= 0


def test_the_innermost_pid_is_the_one_in_the_container() -> None:
    assert parse_inner_pid("Name:\tx\nNSpid:\t4711\t20\t7\n") == 7
    assert parse_inner_pid("NSpid:\t4711\n") == 4711
    assert parse_inner_pid("NSpid:\n") == 0


@pytest.mark.parametrize("method", ["scandir", "_read"])
def test_processes_count_as_unseen_and_not_as_ended_without_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (tmp_path / "7").mkdir()

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os if method == "scandir" else cgroups, method, fail)

    with pytest.raises(UnavailableError, match="Too many open files"):
        containers_of_processes(tmp_path)


def test_an_ended_process_has_no_origin(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")
    (tmp_path / "7" / "status").write_bytes(b"Name:\t\xff\nNSpid:\t7\t3\n")
    (tmp_path / "7" / "stat").write_text(stat_of(7, 0))

    found = read_origin(7, tmp_path)

    assert found is not None
    assert (found.pod, found.container_id, found.inner_pid) == (UID, ID, 3)
    assert found.command == "\ufffd"
    assert read_origin(8, tmp_path) is None


def test_a_reused_pid_has_no_origin() -> None:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    began_s = parse_start_time_s(Path("/proc/self/stat").read_text())

    assert 0 < began_s <= now_s
    assert read_origin(os.getpid(), Path("/proc"), reported_at_s=now_s) is not None
    assert read_origin(os.getpid(), Path("/proc"), reported_at_s=began_s - 1) is None
    assert parse_start_time_s(stat_of(7, 123 * os.sysconf("SC_CLK_TCK"))) == 123
