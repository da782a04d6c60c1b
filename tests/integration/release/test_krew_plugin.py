"""The plugin of kubectl as krew installs it: unpacked in its store, with a link on PATH."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.release import artifacts

DOWNLOADS = "https://example.org/leasehold/releases/download"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("dist")
    artifacts.make_all(output, image="registry.example.org/leasehold", downloads=DOWNLOADS)
    return output


@pytest.fixture(scope="module")
def platform(dist: Path) -> dict[str, Any]:
    """The manifest's only platform."""
    (found,) = yaml.safe_load((dist / "leasehold.yaml").read_text())["spec"]["platforms"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def command(dist: Path, platform: dict[str, Any], tmp_path: Path) -> Path:
    """The link to the unpacked plugin. The packages of this machine stand in for an index."""
    store = tmp_path / "store" / "leasehold" / "v0"
    with tarfile.open(dist / Path(platform["uri"]).name) as archive:
        archive.extractall(store, filter="data")
    (store / "requirements.txt").write_text("")
    link = tmp_path / "bin" / "kubectl-leasehold"
    link.parent.mkdir()
    link.symlink_to(store / platform["bin"])
    return link


def call(command: Path, *arguments: str, path: str) -> "subprocess.CompletedProcess[str]":
    packages = os.pathsep.join(each for each in sys.path if each.endswith("-packages"))
    environment = {
        "PATH": path,
        "HOME": str(command.parent),
        "PYTHONPATH": packages,
        "PIP_NO_INDEX": "1",
    }
    return subprocess.run(
        [command, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_manifest_has_the_fields_that_krew_requires_and_the_archives_checksum(
    dist: Path, platform: dict[str, Any]
) -> None:
    manifest = yaml.safe_load((dist / "leasehold.yaml").read_text())
    number = artifacts.version()
    archive = dist / f"kubectl-leasehold-{number}.tar.gz"

    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Plugin", "leasehold")
    assert manifest["spec"]["version"] == f"v{number}"
    assert 0 < len(manifest["spec"]["shortDescription"]) <= 80
    assert platform["uri"] == f"{DOWNLOADS}/v{number}/{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()


def test_the_archive_has_the_licence_and_pins_every_package_by_hash(
    dist: Path, platform: dict[str, Any]
) -> None:
    with tarfile.open(dist / Path(platform["uri"]).name) as archive:
        names = archive.getnames()
        locked = (archive.extractfile("requirements.txt") or io.BytesIO()).read()

    assert {"LICENSE", "NOTICE", platform["bin"]} <= set(names)
    assert locked == artifacts.LOCK.read_bytes()
    assert len([name for name in names if name.endswith(".whl")]) == 1


def test_without_a_python_that_is_new_enough_it_says_which_one_it_needs(
    command: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "readlink", "dirname"):
        (tools / name).symlink_to(Path("/usr/bin") / name)

    refused = call(command, "gpus", path=str(tools))

    assert (refused.returncode, refused.stdout) == (1, "")
    assert "needs Python 3.11 or newer" in refused.stderr


def test_the_first_run_installs_again_after_a_failure_and_later_runs_do_not(command: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    requirements = command.resolve().parent / "requirements.txt"
    requirements.write_text("no-such-package==1 --hash=sha256:" + "0" * 64)

    failed = call(command, "--version", path=path)
    requirements.write_text("")
    first = call(command, "--version", path=path)
    second = call(command, "help", "explain", path=path)

    assert failed.returncode == 1
    assert "pip could not install them" in failed.stderr
    assert (first.returncode, first.stdout) == (0, f"leasehold {artifacts.version()}\n")
    assert "the first run installs its packages" in first.stderr
    assert second.stdout.startswith("usage: kubectl leasehold explain [POD] [flags]\n")
    assert second.stderr == ""
