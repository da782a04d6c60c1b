"""HAMi-core's library: installed whole, by content, never written again, kept while mounted."""

import mmap
import platform
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.node_agent.isolation.library import (
    NodeLibrary,
    current_library,
    digest_of,
    layout_name,
    load_error,
    unusable_reason,
)
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_1_BAD, V1_2, RegionLayout
from shared.dialects.hami_core import LIBRARY_NAME
from tests.support.node_agent.regions import compile_library, needs_compiler

pytestmark = needs_compiler


def version(path: Path, number: int) -> Path:
    return compile_library(path, f"int version(void) {{ return {number}; }}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return version(tmp_path / "source.so", 1)


@pytest.fixture
def library(source: Path, tmp_path: Path) -> NodeLibrary:
    return NodeLibrary(tmp_path / "library", source)


@pytest.mark.parametrize("by", ["another file", "a copy over it, as cp does"])
async def test_item_41_a_new_library_leaves_mapped_files_unchanged(
    library: NodeLibrary, source: Path, tmp_path: Path, by: str
) -> None:
    assert await library.update()
    first = library.current.path
    before = first.read_bytes()
    inode = first.stat().st_ino
    with first.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if by == "another file":
            version(source, 2)
        else:
            source.write_bytes(version(tmp_path / "new.so", 2).read_bytes())
        assert await library.update()

        assert mapped[:] == before

    assert (first.stat().st_ino, first.read_bytes()) == (inode, before)
    assert library.current == current_library(library.root)
    assert library.current.path.read_bytes() == source.read_bytes() != before


async def test_of_several_versions_in_a_directory_the_highest_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    folder.mkdir()
    for number, name in enumerate(("v2.9.0", "v2.10.0", "v2.8.3")):
        version(folder / f"{LIBRARY_NAME}.{name}", number)
    library = NodeLibrary(tmp_path / "library", folder)

    await library.update()
    highest = library.current
    version(folder / LIBRARY_NAME, 9)
    await library.update()

    assert highest.version == "v2.10.0"
    assert highest.content == digest_of(folder / f"{LIBRARY_NAME}.v2.10.0")
    assert (library.current.version, library.current.content) == (
        "",
        digest_of(folder / LIBRARY_NAME),
    )


@pytest.mark.parametrize("damage", [b"\0\0\0", b"\xff\xfe", b"a/b v1", b""])
async def test_a_damaged_name_of_the_current_library_is_written_anew(
    damage: bytes, source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "library"
    await NodeLibrary(root, source).update()
    (root / "current").write_bytes(damage)

    library = NodeLibrary(root, source)

    assert await library.update()
    assert library.current.path.read_bytes() == source.read_bytes()


async def test_the_same_library_is_installed_once(library: NodeLibrary, source: Path) -> None:
    await library.update()
    first = library.current.path
    seen = first.stat()

    again = NodeLibrary(library.root, source)
    await again.update()

    assert again.current.path == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns)
    assert first.parent.name == digest_of(source)
    assert sorted(path.name for path in library.root.iterdir()) == sorted(
        ["current", first.parent.name]
    )


async def test_a_corrupt_library_is_replaced_by_a_new_file(
    library: NodeLibrary, source: Path
) -> None:
    await library.update()
    place = library.current.path
    place.write_bytes(b"spoilt")
    inode = place.stat().st_ino

    with place.open("rb") as held:
        assert await library.update()
        assert held.read() == b"spoilt"

    assert place.read_bytes() == source.read_bytes()
    assert place.stat().st_ino != inode


NO_LIBRARIES = [b"", b"no library", b"\x7fELF\x01\x01" + bytes(60)]


@pytest.mark.parametrize("content", [*NO_LIBRARIES, "half"])
async def test_what_is_not_a_library_for_this_machine_never_replaces_the_current_one(
    library: NodeLibrary, source: Path, content: bytes | str
) -> None:
    await library.update()
    before = library.current
    whole = version(source, 2).read_bytes()
    source.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])

    assert await library.update()
    assert library.current == before == current_library(library.root)
    source.write_bytes(whole)
    await library.update()
    assert library.current != before


async def test_without_its_source_the_installed_library_stays(
    library: NodeLibrary, source: Path
) -> None:
    await library.update()
    source.unlink()

    again = NodeLibrary(library.root, source)

    assert await again.update()
    assert again.current == library.current


async def test_a_node_without_a_library_reports_why_and_gets_one_later(
    library: NodeLibrary, source: Path
) -> None:
    source.unlink()
    assert not await library.update()
    missing = library.unusable_reason
    source.write_bytes(b"no library")
    assert not await library.update()
    unusable = library.unusable_reason
    version(source, 3)
    assert await library.update()

    assert missing == f"{source}: No such file or directory"
    assert f"{source} is unusable: it is not a 64-bit shared library" in unusable
    assert library.unusable_reason == ""


async def test_a_metric_shows_the_library_only_while_it_is_usable(tmp_path: Path) -> None:
    source = version(tmp_path / f"{LIBRARY_NAME}.v2.9.0", 1)
    library = NodeLibrary(tmp_path / "library", source)

    def shown() -> float | None:
        labels = {"version": "v2.9.0", "layout": "", "content": library.current.content}
        return REGISTRY.get_sample_value("leasehold_library_info", labels)

    await library.update()
    assert shown() == 1.0
    library.current.path.unlink()
    source.unlink()
    await library.update()
    assert shown() is None


async def test_an_old_version_is_removed_once_no_container_mounts_it(
    library: NodeLibrary, source: Path
) -> None:
    await library.update()
    first = library.current.path
    version(source, 2)
    await library.update()

    library.remove_unused({str(first)}, unused_s=-600)
    library.remove_unused((), unused_s=600)
    assert first.is_file(), "mounted, or young"
    library.remove_unused((), unused_s=-600)
    assert not first.parent.exists()
    assert library.current.path.is_file()


async def test_a_library_is_checked_by_loading_it(source: Path, tmp_path: Path) -> None:
    lacking = compile_library(
        tmp_path / "lacking.so",
        "extern int nobody_has_this(void);\nint version(void) { return nobody_has_this(); }\n"
        "__attribute__((constructor)) static void begin(void) { version(); }",
        "-Wl,-z,now",
    )
    crashing = compile_library(
        tmp_path / "crashing.so",
        "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }",
    )

    assert await unusable_reason(source) == "", "its region layout is unknown"
    assert "nobody_has_this" in await load_error(lacking)
    assert "ended with" in await load_error(crashing)
    assert "it does not load" in await unusable_reason(lacking)


in_code = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="others write numbers in pieces"
)
WITH_LAYOUT = "#include <unistd.h>\nint keep(int fd) {{ return ftruncate(fd, {size}); }}"


@in_code
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.name))
async def test_a_library_with_another_region_layout_is_unusable(
    tmp_path: Path, layout: RegionLayout
) -> None:
    library = compile_library(tmp_path / LIBRARY_NAME, WITH_LAYOUT.format(size=layout.size))

    why = await unusable_reason(library)

    if layout.size == V1_2.size:
        assert why == ""
    else:
        assert f"layout {layout.name} ({layout.size} bytes)" in why
        assert "HAMi 2.8.2 or newer" in why


@in_code
async def test_a_size_that_is_in_debug_information_by_chance_does_not_count(tmp_path: Path) -> None:
    code = WITH_LAYOUT.format(size=V1_1_BAD.size)
    chance = f"const unsigned chance = {V1_2.size};"
    again = f"int again(int fd) {{ return ftruncate(fd, {V1_1_BAD.size}); }}"
    library = compile_library(tmp_path / LIBRARY_NAME, f"{code}\n{again}\n{chance}")

    assert "layout 1.1-bad" in await unusable_reason(library)


@in_code
@pytest.mark.parametrize(("uses", "name"), [(1, "1.1"), (4, "1.2")])
def test_uses_of_the_second_semaphore_tell_two_layouts_of_one_size_apart(
    tmp_path: Path, uses: int, name: str
) -> None:
    code = [WITH_LAYOUT.format(size=V1_2.size)]
    at = V1_2.postinit_semaphore
    code += [f"int use{n}(const char *region) {{ return region[{at}]; }}" for n in range(uses)]

    assert layout_name(compile_library(tmp_path / LIBRARY_NAME, "\n".join(code))) == name
