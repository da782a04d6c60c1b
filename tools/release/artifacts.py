"""Makes the files of a release, the same ones from the same commit."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml

from tools.release import krew_plugin
from tools.release.archive import ArchivedFile, tar_gz
from tools.release.bill_of_materials import bill_of_materials
from tools.release.changelog import section
from tools.size import files, sizes, table

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "chart"
LOCK = ROOT / "locks" / "runtime.txt"
LAUNCHER = ROOT / "tools" / "release" / "krew" / krew_plugin.LAUNCHER
SIMCLUSTER = "file://{root}/simcluster"
"""The simulated cluster of a checkout, in pyproject.toml."""
NOTES = "NOTES.md"
CHECKSUMS = "SHA256SUMS"


def version() -> str:
    """Return the version of this checkout."""
    project_version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "version"
    ]
    return project_version


def make_all(output: Path, *, image: str, downloads: str) -> list[Path]:
    """Write all files of a release into `output` and return their paths, the checksums last.

    `downloads` is the URL below which the files of all releases are, each in a folder vVERSION.
    """
    output.mkdir(parents=True, exist_ok=True)
    for old in output.iterdir():
        if old.is_file():
            old.unlink()
    built_at = _commit_time()
    number = version()
    _build_distributions(output, built_at, f"{downloads}/v{number}")
    chart = output / f"leasehold-chart-{number}.tgz"
    chart.write_bytes(chart_archive(image, number, built_at))
    _write_plugin(output, number, built_at, downloads)
    bill = bill_of_materials(LOCK.read_text(), number, built_at)
    (output / f"leasehold-{number}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    changes = section((ROOT / "CHANGELOG.md").read_text(), number)
    (output / NOTES).write_text(f"{changes}\n## Size of the code\n\n{table(sizes(files()))}")
    made = sorted(output.iterdir())
    sums = [f"{hashlib.sha256(it.read_bytes()).hexdigest()}  {it.name}\n" for it in made]
    (output / CHECKSUMS).write_text("".join(sums))
    return [*made, output / CHECKSUMS]


def chart_archive(image: str, number: str, built_at: int) -> bytes:
    """Return the chart as `helm package` writes it, with the released image as default."""
    files = []
    folders = os.walk(CHART, followlinks=True)
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names):
        content = path.read_bytes()
        if path == CHART / "values.yaml":
            content = _released_values(content.decode(), image, number).encode()
        files.append(ArchivedFile(f"leasehold/{path.relative_to(CHART)}", content))
    return tar_gz(files, built_at)


def _write_plugin(output: Path, number: str, built_at: int, downloads: str) -> None:
    """Write the plugin of kubectl that krew installs: its archive and its manifest."""
    (wheel,) = output.glob("leasehold-*.whl")
    notices = [ArchivedFile(name, (ROOT / name).read_bytes()) for name in ("LICENSE", "NOTICE")]
    files = krew_plugin.archived_files(
        ArchivedFile(wheel.name, wheel.read_bytes()),
        LOCK.read_bytes(),
        LAUNCHER.read_bytes(),
        notices,
    )
    archive = tar_gz(files, built_at)
    (output / krew_plugin.archive_name(number)).write_bytes(archive)
    manifest = krew_plugin.manifest(number, archive, downloads)
    (output / "leasehold.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))


def _released_values(values: str, image: str, number: str) -> str:
    before = yaml.safe_load(values)["image"]
    changed = values.replace(
        f"  repository: {before['repository']}\n  tag: {before['tag']}\n",
        f"  repository: {image}\n  tag: {number}\n",
    )
    if yaml.safe_load(changed)["image"] != {**before, "repository": image, "tag": number}:
        raise AssertionError("values.yaml has its image in another form")
    return changed


def _build_distributions(output: Path, built_at: int, release: str) -> None:
    """Build the simulated cluster, and ourselves with the URL of its released wheel."""
    left_out = shutil.ignore_patterns(
        *(".git", ".cache", ".*_cache", ".leasehold", ".venv*", "dist", "node_modules")
    )
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(built_at)}

    def build(folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(output), *options]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)

    with tempfile.TemporaryDirectory(prefix="leasehold-") as folder:
        copy = Path(folder) / "leasehold"
        shutil.copytree(ROOT, copy, ignore=left_out)
        build(copy / "simcluster", "--target", "wheel")
        (wheel,) = output.glob("leasehold_simcluster-*.whl")
        project = copy / "pyproject.toml"
        text = project.read_text()
        released = text.replace(SIMCLUSTER, f"{release}/{wheel.name}")
        if released == text:
            raise AssertionError(f"pyproject.toml does not name {SIMCLUSTER}")
        project.write_text(released)
        build(copy)


def _commit_time() -> int:
    """Return the time of the commit in Unix seconds, or that of the changelog outside of git."""
    completed = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return int(completed) if completed else int((ROOT / "CHANGELOG.md").stat().st_mtime)
