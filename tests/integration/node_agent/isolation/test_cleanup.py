"""Removal of the directories of ended containers, whatever their permissions.

Done by a process with the capabilities that the manifest gives the agent, as root in a container.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml

DAC_OVERRIDE = 1
LAST_CAPABILITY = 40
DROP_FROM_BOUNDING_SET = 24
TENANT = 1000
AGENT = Path(__file__).parents[4] / "k8s" / "base" / "node-agent.yaml"
CLEAN = """
import asyncio, sys
from pathlib import Path, PurePosixPath
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
state = PurePosixPath(sys.argv[1])
library = NodeLibrary(Path(state) / "library", None)
asyncio.run(ContainerFiles(state, library).remove_unused({"live"}, None))
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop capabilities")


def left_by(state: Path, owner: str) -> Path:
    """Create the directory of a container, with one that only its user can enter."""
    made = state / "containers" / f"{owner}_main"
    private = made / "cache" / "private"
    private.mkdir(parents=True)
    (private / "file").write_text("x")
    for path in (private / "file", private, made / "cache"):
        os.chown(path, TENANT, TENANT)
    private.chmod(0o700)
    (private / "file").chmod(0)
    os.utime(made, (0, 0))
    return made


def clean(state: Path, capabilities: Collection[int]) -> None:
    """Clean as root with these capabilities only."""
    libc = ctypes.CDLL(None)

    def drop_capabilities() -> None:
        for number in set(range(LAST_CAPABILITY + 1)) - set(capabilities):
            libc.prctl(DROP_FROM_BOUNDING_SET, number, 0, 0, 0)

    subprocess.run(
        [sys.executable, "-c", CLEAN, str(state)], check=True, preexec_fn=drop_capabilities
    )


def test_unreadable_tenant_files_are_removed_only_with_the_manifests_capabilities(
    tmp_path: Path,
) -> None:
    agent = next(o for o in yaml.safe_load_all(AGENT.read_text()) if o["kind"] == "DaemonSet")
    [container] = agent["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["DAC_OVERRIDE"]
    live, dead = (left_by(tmp_path, owner) for owner in ("live", "dead"))

    clean(tmp_path, ())
    without = dead.exists()
    clean(tmp_path, (DAC_OVERRIDE,))

    assert without
    assert not dead.exists()
    assert (live / "cache" / "private" / "file").exists()
