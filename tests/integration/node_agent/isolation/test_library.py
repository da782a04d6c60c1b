"""An operator's library: what containers mount before and after it is replaced."""

import subprocess
from pathlib import Path

from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from shared.model.device import Isolation
from shared.model.lease import LeaseState
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until


def build(path: Path, number: int) -> None:
    source = path.with_suffix(".c")
    source.write_text(f"int version(void) {{ return {number}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)


def mounted(at: Site, name: str) -> Path:
    """Return the library that the agent has given a pod's container."""
    assert at.agent is not None
    entries = at.agent.checkpoint.entries
    (entry,) = [one for one in entries if one.allocation.name == name]
    (found,) = [
        mount.host_path for mount in entry.setup.mounts if mount.host_path.endswith("libvgpu.so")
    ]
    return Path(found)


async def test_item_41_containers_keep_the_library_that_they_began_with(tmp_path: Path) -> None:
    source = tmp_path / "from-the-image.so"
    build(source, 1)
    async with site(
        library_source=source, timing=AgentTiming(cleanup_s=0.1, library_unused_s=-1.0)
    ) as at:
        async with at.running():
            old = at.bind(pod("old", limits={NUMBER: 1}), share(0, slot=0))
            await at.node.phase("old", "Running")
            first = mounted(at, "old")
            inode, content = first.stat().st_ino, first.read_bytes()
        build(source, 2)
        async with at.running() as agent:
            lease = at.bind(pod("new", limits={NUMBER: 1}), share(0, slot=1, fence=2))
            await at.node.phase("new", "Running")
            second = mounted(at, "new")
            kept = mounted(at, "old")
            isolates = agent.state.software.isolation_available
            same = (first.stat().st_ino, first.read_bytes()) == (inode, content)
            at.node.store.delete("pods", "default", "old", grace_s=0)
            at.ledger.leases = {lease.pod: lease}
            await at.tell(structs.replace(old, state=LeaseState.RELEASED, version=old.version + 1))
            await until(lambda: not first.exists(), 20)

    assert isolates
    assert same
    assert kept == first != second
    assert second.parent.parent == at.root / "agent" / "library"


async def test_a_source_that_is_no_library_isolates_nothing_and_no_container_starts(
    tmp_path: Path,
) -> None:
    source = tmp_path / "empty.so"
    source.write_bytes(b"")
    async with site(library_source=source) as at, at.running() as agent:
        at.bind(pod("one", limits={NUMBER: 1}), share(0))
        await at.node.phase("one", "Failed")

        assert "libvgpu.so does not exist" in at.message("one")
        assert not agent.state.software.isolation_available
        (report, *_) = await until(lambda: at.reported)
        assert {device.isolation for device in report.devices} == {Isolation.UNHELD}
