"""HAMi-core's library: installed whole, by content, never written again, kept while mounted."""

import mmap
import os
import platform
import subprocess
import time
from pathlib import Path, PurePosixPath

import pytest

from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.host_paths import HostLayout
from services.node_agent.isolation.library import (
    current_library,
    digest_of,
    install,
    load_error,
    remove_unused_versions,
    unusable_reason,
)
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_2, RegionLayout
from shared.dialects.dialect import ContainerSetup, Mount
from shared.dialects.hami_core import LIBRARY_NAME
from shared.model.errors import UnavailableError


def built(path: Path, text: str, *flags: str) -> Path:
    """Compile a shared library of this machine."""
    source = path.with_suffix(".c")
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source, *flags], check=True)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return built(tmp_path / "source.so", "int version(void) { return 1; }")


def test_item_41_a_new_library_leaves_mapped_files_unchanged(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "library"
    first = install(source, root)
    before = first.read_bytes()
    with first.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        inode = os.fstat(file.fileno()).st_ino
        built(source, "int version(void) { return 2; }")
        second = install(source, root)

        assert mapped[:] == before

    assert second != first
    assert (first.stat().st_ino, first.read_bytes()) == (inode, before)
    assert second.read_bytes() == source.read_bytes()
    assert current_library(root) == second


def test_the_same_library_is_installed_once(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "library"
    first = install(source, root)
    seen = first.stat()

    again = install(source, root)

    assert again == first == current_library(root)
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns)
    assert first.parent.name == digest_of(source)
    assert sorted(path.name for path in root.iterdir()) == sorted(["current", first.parent.name])


def test_a_partial_or_corrupt_library_is_replaced_by_a_new_file(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "library"
    place = install(source, root)
    place.write_bytes(b"spoilt")
    inode = place.stat().st_ino

    with place.open("rb") as held:
        assert install(source, root) == place
        assert held.read() == b"spoilt"

    assert place.read_bytes() == source.read_bytes()
    assert place.stat().st_ino != inode


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF\x01\x01" + bytes(60)])
def test_a_file_that_is_not_a_library_for_this_architecture_is_not_installed(
    source: Path, tmp_path: Path, content: bytes
) -> None:
    root = tmp_path / "library"
    before = install(source, root)
    source.write_bytes(content)

    with pytest.raises(UnavailableError, match="not a 64-bit shared library"):
        install(source, root)

    assert current_library(root) == before
    assert len(list(root.iterdir())) == 2


def test_a_missing_source_is_reported_and_the_previous_version_stays(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "library"
    before = install(source, root)

    with pytest.raises(UnavailableError, match="nowhere: No such file"):
        install(tmp_path / "nowhere", root)

    assert current_library(root) == before
    assert not current_library(tmp_path / "empty").exists()


def test_an_old_version_is_removed_once_no_container_mounts_it(
    source: Path, tmp_path: Path
) -> None:
    root, later = tmp_path / "library", time.time() + 1200
    first = install(source, root)
    built(source, "int version(void) { return 2; }")
    second = install(source, root)

    assert remove_unused_versions(root, {str(first)}, now=later, unused_s=600) == []
    assert remove_unused_versions(root, set(), now=time.time(), unused_s=600) == []
    assert remove_unused_versions(root, set(), now=later, unused_s=600) == [first.parent]
    assert second.is_file()
    assert remove_unused_versions(root, set(), now=later, unused_s=600) == []


async def test_a_library_is_probed_by_loading_it(source: Path, tmp_path: Path) -> None:
    lacking = built(
        tmp_path / "lacking.so",
        "extern int nobody_has_this(void);\nint version(void) { return nobody_has_this(); }\n"
        "__attribute__((constructor)) static void begin(void) { version(); }",
        "-Wl,-z,now",
    )
    crashing = built(
        tmp_path / "crashing.so",
        "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }",
    )

    assert await load_error(source) == ""
    assert "nobody_has_this" in await load_error(lacking)
    assert "ended with" in await load_error(crashing)


async def test_a_container_does_not_start_on_a_library_that_does_not_load(tmp_path: Path) -> None:
    lacking = tmp_path / LIBRARY_NAME
    built(lacking, "extern int nobody(void); int version(void) { return nobody(); }", "-Wl,-z,now")
    layout = HostLayout(state_dir=PurePosixPath(tmp_path), library=PurePosixPath(lacking))
    preparing = ContainerFiles(layout, simulated=False)
    mount = Mount(host_path=str(lacking), container_path="/lib.so", read_only=True, directory=False)
    setup = ContainerSetup(environment={}, mounts=(mount,))

    isolates = await preparing.can_isolate()

    assert not isolates
    with pytest.raises(UnavailableError, match="is unusable: it does not load"):
        await preparing.prepare(setup)


WITH_LAYOUT = "#include <unistd.h>\nint keep(int fd) {{ return ftruncate(fd, {size}); }}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others write numbers in pieces")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.name))
async def test_a_library_with_another_region_layout_is_unusable(
    tmp_path: Path, layout: RegionLayout
) -> None:
    library = built(tmp_path / LIBRARY_NAME, WITH_LAYOUT.format(size=layout.size))

    why = await unusable_reason(library)

    if layout.size == V1_2.size:
        assert why == ""
    else:
        assert f"layout {layout.name} ({layout.size} bytes)" in why
        assert "HAMi 2.8.2 or newer" in why


async def test_a_library_with_an_unknown_region_layout_is_accepted(source: Path) -> None:
    assert await unusable_reason(source) == ""
