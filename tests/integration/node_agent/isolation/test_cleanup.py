"""Removal of what ended containers left, whatever its permissions.

Done by processes with the capabilities that the manifests give them, as root in a container.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

NUMBERS = {
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
}
LAST_CAPABILITY = 40
DROP_FROM_BOUNDING_SET = 24
TENANT = 1000
OTHER_TENANT = 1001
K8S = Path(__file__).parents[4] / "k8s"
CLEAN = """
import asyncio, sys
from pathlib import Path, PurePosixPath
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
state = PurePosixPath(sys.argv[1])
library = NodeLibrary(Path(state) / "library", None)
asyncio.run(ContainerFiles(state, library).remove_unused({"live"}, None))
"""
REMOVE_DAEMON = """
import contextlib, sys
from pathlib import Path
from services.node_agent.mps.control import MpsControl
from shared.model.errors import UnavailableError
with contextlib.suppress(UnavailableError):
    MpsControl(Path(sys.argv[1]), ("unused",), Path("/proc")).remove()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop capabilities")


def leave_files(made: Path) -> None:
    """Make a directory that only its user can enter, and a sticky one with another's file."""
    private = made / "cache" / "private"
    sticky = made / "cache" / "sticky"
    for directory in (private, sticky):
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
    for path in (private / "file", private, sticky, made / "cache"):
        os.chown(path, TENANT, TENANT)
    os.chown(sticky / "file", OTHER_TENANT, OTHER_TENANT)
    private.chmod(0o700)
    sticky.chmod(0o1777)
    (private / "file").chmod(0)


def left_by(state: Path, owner: str) -> Path:
    """Create the directory of a container with what it left there."""
    made = state / "containers" / f"{owner}_main"
    leave_files(made)
    os.utime(made, (0, 0))
    return made


def run(program: str, directory: Path, capabilities: Collection[str]) -> None:
    """Run a program as root with these capabilities only."""
    libc = ctypes.CDLL(None)
    dropped = set(range(LAST_CAPABILITY + 1)).difference(NUMBERS[name] for name in capabilities)

    def drop_capabilities() -> None:
        for number in dropped:
            libc.prctl(DROP_FROM_BOUNDING_SET, number, 0, 0, 0)

    subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        check=True,
        preexec_fn=drop_capabilities,
    )


def capabilities_of(daemon_set: Any, container: str) -> list[str]:
    containers = {it["name"]: it for it in daemon_set["spec"]["template"]["spec"]["containers"]}
    return list(containers[container]["securityContext"]["capabilities"]["add"])


def test_tenant_files_are_removed_with_the_manifests_capabilities_and_no_fewer(
    tmp_path: Path,
) -> None:
    manifest = (K8S / "base" / "node-agent.yaml").read_text()
    [agent] = [it for it in yaml.safe_load_all(manifest) if it["kind"] == "DaemonSet"]
    capabilities = capabilities_of(agent, "node-agent")
    live, dead = (left_by(tmp_path, owner) for owner in ("live", "dead"))

    left = []
    for missing in capabilities:
        run(CLEAN, tmp_path, set(capabilities) - {missing})
        left.append(dead.exists())
        os.utime(dead, (0, 0))  # what has just been changed may be of a new pod
    run(CLEAN, tmp_path, capabilities)

    assert left == [True, True]
    assert not dead.exists()
    assert (live / "cache" / "private" / "file").exists()


def test_the_partitioner_removes_what_containers_left_in_the_directory_of_a_daemon(
    tmp_path: Path,
) -> None:
    component = yaml.safe_load((K8S / "components/mps/kustomization.yaml").read_text())
    [patch] = component["patches"]
    capabilities = capabilities_of(yaml.safe_load(patch["patch"]), "partitioner")
    daemon = tmp_path / "daemon"
    leave_files(daemon / "pipe")

    run(REMOVE_DAEMON, daemon, set(capabilities) - {"FOWNER"})
    without = daemon.exists()
    run(REMOVE_DAEMON, daemon, capabilities)

    assert without
    assert not daemon.exists()
