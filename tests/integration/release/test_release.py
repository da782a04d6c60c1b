"""What `make dist` and `make release-dry-run` make."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.release import artifacts, publish
from tools.release.bill_of_materials import bill_of_materials
from tools.release.changelog import ChangelogError, check_released, section

ROOT = Path(__file__).parents[3]
DOWNLOADS = "https://example.org/leasehold/releases/download"
IMAGE = "registry.example.org/leasehold"
RELEASE = (
    "import runpy, tools.size; tools.size.FOLDERS = ('services/binder',); "
    "runpy.run_module('tools.release', run_name='__main__', alter_sys=True)"
)
"""`python -m tools.release`; the notes have the size of one room, since counting takes longest."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a release; the notes have the sizes of no room, since counting takes longest."""
    output = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "files", list)
        artifacts.make_all(output, image=IMAGE, downloads=DOWNLOADS)
    return output


@dataclass(frozen=True, slots=True)
class DryRun:
    """The files that a dry run makes, and what it prints."""

    output: Path
    printed: str


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """A dry run of a release on a machine that has nothing but Python and git."""
    output = tmp_path_factory.mktemp("dry-run")
    programs = tmp_path_factory.mktemp("programs")
    if git := shutil.which("git"):
        (programs / "git").symlink_to(git)
    command = [sys.executable, "-c", RELEASE, "publish", "--dry-run"]
    options = ["--image", IMAGE, "--downloads", DOWNLOADS, "--output", str(output)]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=os.environ | {"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=True,
    )
    return DryRun(output, done.stdout)


def one(dist: Path, pattern: str) -> Path:
    (path,) = dist.glob(pattern)
    return path


def test_the_wheel_has_the_packages_and_the_licence_and_no_tests(dist: Path) -> None:
    names = zipfile.ZipFile(one(dist, "leasehold-*.whl")).namelist()
    folders = {name.partition("/")[0] for name in names}

    assert folders == {"services", "shared", folders_of_metadata(names)}
    assert {"LICENSE", "NOTICE"} <= {name.rpartition("/")[2] for name in names if "dist-" in name}


def test_it_is_installed_beside_a_package_that_is_imported_as_proto(
    dist: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "proto" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    wheels = (str(path) for path in dist.glob("*.whl"))
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-index")
    subprocess.run([sys.executable, *install, "--target", tmp_path, *wheels], check=True)

    code = (
        "import proto, services.node_agent.kubelet.device_plugin as plugin, simcluster.kubelet as k"
        "; print(proto.__file__, plugin.__file__, k.__file__, sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    proto, plugin, kubelet = done.stdout.splitlines()
    assert proto == str(theirs)
    assert all(path.startswith(str(tmp_path)) for path in (plugin, kubelet))
    assert list(theirs.parent.glob("*.py*")) == [theirs]


def test_the_simulated_cluster_is_a_wheel_of_its_own_which_the_other_one_names(dist: Path) -> None:
    cluster = one(dist, "leasehold_simcluster-*.whl")
    names = zipfile.ZipFile(cluster).namelist()
    ours = zipfile.ZipFile(one(dist, "leasehold-*.whl"))
    (metadata,) = (name for name in ours.namelist() if name.endswith("/METADATA"))
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "simcluster").rglob("*.py")
        if not path.is_relative_to(ROOT / "simcluster" / "tests")
    }

    assert {name for name in names if name.endswith(".py")} == modules
    assert f"@ {DOWNLOADS}/v{artifacts.version()}/{cluster.name} ;" in ours.read(metadata).decode()


def folders_of_metadata(names: list[str]) -> str:
    (found,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    return found


def test_the_source_has_what_builds_and_tests_it(dist: Path) -> None:
    with tarfile.open(one(dist, "leasehold-[0-9]*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"LICENSE", "Makefile", "locks/development.txt", "k8s/base/kustomization.yaml"} <= names
    assert "tests/conftest.py" in names


def test_the_chart_is_an_archive_for_helm_with_the_released_image(dist: Path) -> None:
    with tarfile.open(one(dist, "*.tgz")) as archive:
        read = {name: archive.extractfile(name) for name in archive.getnames()}
        values = yaml.safe_load((read["leasehold/values.yaml"] or io.BytesIO()).read())
        chart = yaml.safe_load((read["leasehold/Chart.yaml"] or io.BytesIO()).read())

    assert "leasehold/manifests/base/binder.yaml" in read
    assert values["image"].items() >= {"repository": IMAGE, "tag": artifacts.version()}.items()
    assert (chart["name"], chart["version"]) == ("leasehold", artifacts.version())
    assert values["redis"] == yaml.safe_load((artifacts.CHART / "values.yaml").read_text())["redis"]


def test_the_same_commit_makes_the_same_files(dist: Path, dry_run: DryRun) -> None:
    """The command builds them a second time, with the same image and URL."""
    first, second = (
        [line for line in text.splitlines() if not line.endswith(artifacts.NOTES)]
        for text in (
            (folder / artifacts.CHECKSUMS).read_text() for folder in (dist, dry_run.output)
        )
    )

    assert first == second


def test_the_checksums_are_those_of_all_files(dist: Path) -> None:
    lines = (dist / artifacts.CHECKSUMS).read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}

    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dist.iterdir()
        if path.name != artifacts.CHECKSUMS
    }


def test_the_bill_of_materials_lists_each_package_of_the_image_with_licence_and_hashes(
    dist: Path,
) -> None:
    lock = (ROOT / "locks" / "runtime.txt").read_text()
    bill = json.loads(one(dist, "*.cdx.json").read_text())
    pins = re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", lock, re.MULTILINE)

    assert [(it["name"], it["version"]) for it in bill["components"]] == pins
    assert all(it["externalReferences"][0]["hashes"] for it in bill["components"])
    installed = [it for it in bill["components"] if it["name"] in {"aiohttp", "redis", "grpcio"}]
    assert [bool(it["licenses"]) for it in installed] == [True] * 3
    assert bill == bill_of_materials(lock, artifacts.version(), _seconds(bill))


def _seconds(bill: dict[str, dict[str, str]]) -> int:
    return int(datetime.fromisoformat(bill["metadata"]["timestamp"]).timestamp())


CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- new\n\n## 0.1.0 (2026-01-31)\n\n- old\n"


def test_the_notes_are_the_changelogs_section_of_the_version(dry_run: DryRun) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()

    notes = (dry_run.output / artifacts.NOTES).read_text()
    changes, sizes = notes.split("\n## Size of the code\n\n")
    assert changes == section(changelog, artifacts.version())
    assert re.search(r"^\| services/binder \| \d+ \| \d+ \| \d+ \| \d+ \|$", sizes, re.MULTILINE)
    assert section(CHANGELOG, "0.2.0") == "- new\n"
    assert section(CHANGELOG, "0.1.0") == "- old\n"
    with pytest.raises(ChangelogError, match=r"no section of version 0\.1"):
        section(CHANGELOG, "0.1")


def test_a_version_without_a_date_is_not_released() -> None:
    check_released(CHANGELOG, "0.1.0")

    with pytest.raises(ChangelogError, match="write the date"):
        check_released(CHANGELOG, "0.2.0")


def test_a_tag_of_another_version_is_not_released(tmp_path: Path) -> None:
    with pytest.raises(publish.PublishError, match=r"v9\.9\.9"):
        publish.publish(tmp_path, image=IMAGE, tag="v9.9.9", dry_run=False)


def test_a_dry_run_needs_no_docker_and_says_what_it_skipped(dry_run: DryRun) -> None:
    skipped = re.findall(r"^skipped: ([^:]+): (.*)$", dry_run.printed, re.MULTILINE)

    assert skipped[:2] == [
        ("multi-arch image", "docker is not installed"),
        ("chart", "helm is not installed"),
    ]
    assert len(skipped) == len(publish.steps(dry_run.output, image=IMAGE, number="1"))


WORKFLOWS = {
    "checks": {"lint", "lint-javascript", "test-fast", "test"},
    "release": {"release-dry-run", "release", "vulnerabilities"},
}


@pytest.mark.parametrize(("name", "expected"), WORKFLOWS.items())
def test_a_workflow_calls_targets_of_the_makefile_and_pins_its_actions(
    name: str, expected: set[str]
) -> None:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"\bmake ([\w-]+)", text))

    assert targets == expected
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    uses = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert uses
    assert all(re.search(r"@[0-9a-f]{40}$", each) for each in uses)
    assert "secrets." not in text


def test_a_pull_request_is_checked_within_six_minutes_and_main_by_all_tests() -> None:
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    of_all = {name: job["timeout-minutes"] for name, job in jobs.items() if "if" not in job}

    assert of_all == {"lint": 6, "test-fast": 6}
    assert jobs["test"]["if"] == "github.event_name == 'push'"
    assert jobs["test"]["steps"][-1] == {"run": "make test", "env": {"CI": "true"}}


def test_a_release_is_compared_with_known_vulnerabilities_first_and_main_each_week() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    release = [step.get("run", "").split("\n")[0] for step in jobs["release"]["steps"]]
    weekly = {name for name, job in jobs.items() if "== 'schedule'" in job["if"]}

    assert release.index("make vulnerabilities") < release.index(".ci/run")
    assert weekly == {"vulnerabilities"}
    assert all("schedule" in job["if"] or "== 'tag'" in job["if"] for job in jobs.values())
    assert "--strict" in (ROOT / "Makefile").read_text(), "or it passes what it cannot look up"


# The plugin of kubectl, as krew installs it: unpacked in its store, with a link on PATH


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
