"""Files in directories that containers can write to: what they make there does no harm."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest

from services.node_agent.compute_time.time_files import read_time_use, reset_time_use
from services.node_agent.files import irregular, open_checked, remove_tree
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from tests.support.node_agent.deep_directories import make_deep


def test_a_tree_is_removed_however_deep_it_is_and_no_link_is_followed(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("kept")
    tree = tmp_path / "tree"
    make_deep(tree)
    (tree / "link").symlink_to(others)
    (tree / "deeper" / "link").symlink_to(others / "file")

    remove_tree(tree)

    assert not tree.exists()
    assert (others / "file").read_text() == "kept"


def test_a_tree_with_too_many_files_goes_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.node_agent.files.MOST_REMOVED", 10)
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    for number in range(30):
        (tree / "inner" / f"{number}").touch()

    with pytest.raises(OSError, match="not empty"):
        remove_tree(tree)

    assert 0 < len(list((tree / "inner").iterdir())) < 30
    for _ in range(3):
        with suppress(OSError):
            remove_tree(tree)
    assert not tree.exists()


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "kept").mkdir(parents=True)
    for number in range(3):
        (tree / f"{number}").touch()
        (tree / "kept" / f"{number}").touch()
    remove = os.rmdir

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == "kept":
            raise PermissionError(path)
        remove(path, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        with pytest.raises(OSError, match="not empty"):
            remove_tree(tree)

    assert [path.name for path in tree.rglob("*")] == ["kept"]


def test_what_one_container_left_behind_keeps_no_others_files(tmp_path: Path) -> None:
    directories = [tmp_path / "state/containers" / f"{pod}_main" for pod in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir(parents=True)
    make_deep(directories[0] / "cache")
    for directory in directories:
        os.utime(directory, (0, 0))
    files = ContainerFiles(
        PurePosixPath(tmp_path / "state"), NodeLibrary(tmp_path / "library", None)
    )

    asyncio.run(files.remove_unused(set(), None))

    assert not any(directory.exists() for directory in directories)


def test_a_directory_with_too_many_files_is_emptied_further_at_the_next_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.node_agent.files.MOST_REMOVED", 10)
    left = tmp_path / "state/containers/a_main"
    left.mkdir(parents=True)
    for number in range(30):
        (left / f"{number}").touch()
    os.utime(left, (0, 0))
    files = ContainerFiles(
        PurePosixPath(tmp_path / "state"), NodeLibrary(tmp_path / "library", None)
    )

    for _ in range(4):
        asyncio.run(files.remove_unused(set(), None))

    assert not left.exists()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("/dev/null"), "it is a symbolic link"),
        (os.mkfifo, "it is not a regular file"),
        (Path.mkdir, "it is not a regular file"),
        (lambda path: path.hardlink_to(path.with_name("other")), "it has 2 hard links"),
    ],
)
def test_only_a_regular_file_is_opened(
    make: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "other").touch()
    make(tmp_path / "use")

    assert open_checked(tmp_path / "use", os.O_RDONLY, irregular) == problem


def test_the_file_of_a_containers_gpu_time_is_no_other_name_of_another_file(
    tmp_path: Path,
) -> None:
    use = tmp_path / "use"
    other = tmp_path / "other"
    reset_time_use(use)
    assert read_time_use(use, 1) is not None
    other.hardlink_to(use)
    before = other.read_bytes()

    assert read_time_use(use, 1) is None
    reset_time_use(use)

    assert read_time_use(use, 1) is not None
    assert not use.samefile(other)
    assert other.read_bytes() == before
