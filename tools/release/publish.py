"""Builds the images, publishes and signs a release. A dry run builds what it can."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.release.artifacts import CHECKSUMS, NOTES, ROOT, version
from tools.release.changelog import check_released

PLATFORMS = "linux/amd64,linux/arm64"


class PublishError(Exception):
    """A release cannot be published."""


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """One command of a release, and what a dry run does instead."""

    name: str
    command: tuple[str, ...]
    dry_command: tuple[str, ...] = ()
    """Empty: a dry run cannot do this."""


def steps(output: Path, *, image: str, number: str) -> tuple[ReleaseStep, ...]:
    """Return the steps of a release, in order."""
    registry = image.rpartition("/")[0]
    reference = f"{image}:{number}"
    build = (
        *("docker", "buildx", "build", "--platform", PLATFORMS),
        *("--sbom=true", "--provenance=mode=max"),
    )
    archive = f"type=oci,dest={output / 'image.oci.tar'}"
    sums = str(output / CHECKSUMS)
    chart = str(output / f"leasehold-chart-{number}.tgz")
    files = sorted(str(it) for it in output.iterdir() if it.name != NOTES)
    return (
        ReleaseStep(
            "multi-arch image",
            (*build, "--tag", reference, "--push", "."),
            (*build, "--output", archive, "."),
        ),
        ReleaseStep(
            "chart",
            ("helm", "push", chart, f"oci://{registry}/charts"),
            ("helm", "template", "leasehold", chart),
        ),
        ReleaseStep(
            "signature of the image", ("cosign", "sign", "--yes", "--recursive", reference)
        ),
        ReleaseStep(
            "signature of the chart",
            ("cosign", "sign", "--yes", f"{registry}/charts/leasehold:{number}"),
        ),
        ReleaseStep(
            "signature of the files",
            ("cosign", "sign-blob", "--yes", "--bundle", f"{sums}.sigstore.json", sums),
        ),
        ReleaseStep(
            "release",
            (
                *("gh", "release", "create", f"v{number}", "--verify-tag"),
                *("--notes-file", str(output / NOTES), *files, f"{sums}.sigstore.json"),
            ),
        ),
    )


def publish(output: Path, *, image: str, tag: str, dry_run: bool) -> None:
    """Run all steps. Raises PublishError if one fails, or the tag is not the version."""
    number = version()
    if not dry_run:
        if tag != f"v{number}":
            raise PublishError(f"the tag is {tag!r}, the version in pyproject.toml {number}")
        check_released((ROOT / "CHANGELOG.md").read_text(), number)
    for step in steps(output, image=image, number=number):
        command = step.dry_command if dry_run else step.command
        missing = _missing(command)
        if dry_run and missing:
            print(f"skipped: {step.name}: {missing}\n  {' '.join(step.command)}")
            continue
        if missing:
            raise PublishError(f"{step.name}: {missing}")
        print(f"{step.name}: {' '.join(command)}", flush=True)
        quiet = subprocess.DEVNULL if dry_run else None
        if subprocess.run(command, cwd=ROOT, stdout=quiet, check=False).returncode:
            raise PublishError(f"{step.name} ended with an error")


def _missing(command: tuple[str, ...]) -> str:
    """Return why this machine cannot run the command; empty if it can."""
    if not command:
        return "this publishes, with the identity of the release workflow"
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    if command[:2] == ("docker", "buildx"):
        inspect = ["docker", "buildx", "inspect", "--bootstrap"]
        if subprocess.run(inspect, capture_output=True, check=False).returncode:
            return "docker has no buildx, or no daemon responds"
    return ""
