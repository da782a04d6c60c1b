"""Calls of `gpu-control`, which makes and shows the simulated GPUs of a state file."""

import subprocess
from pathlib import Path

from shared.model.errors import UnavailableError
from simcluster.gpu_driver.build import build

VARIABLE = "GPU_DRIVER_STATE"


def control(state: Path, *arguments: str, stdin: str = "") -> str:
    """Return the output of a command of `gpu-control`. Raises UnavailableError if it fails."""
    done = subprocess.run(  # noqa: S603 - our own program
        [build() / "gpu-control", *arguments],
        env={VARIABLE: str(state)},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"the simulated GPUs cannot be made: {done.stderr.strip()}")
    return done.stdout


def device_uuids(state: Path) -> list[set[str]]:
    """Return the UUIDs of each GPU by index: its own, and those of its MIG devices."""
    devices: list[set[str]] = []
    for line in control(state, "show").splitlines():
        kind, uuid, *_ = line.split()
        if kind == "gpu":
            devices.append({uuid})
        elif kind == "mig":
            devices[-1].add(uuid)
    return devices
