"""An operator's library: what containers mount before and after it is replaced."""

from pathlib import Path

from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from shared.model.devices.enforcers import NOTHING_OFFERED
from shared.model.leases.lease import LeaseState
from tests.support.node_agent.agent import OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.regions import compile_library, needs_compiler
from tests.support.waiting import until

pytestmark = needs_compiler


def build(path: Path, number: int) -> None:
    compile_library(path, f"int version(void) {{ return {number}; }}")


def mounted(cluster: OneNodeCluster, name: str) -> Path:
    """Return the library that the agent has given a pod's container."""
    assert cluster.agent is not None
    entries = cluster.agent.checkpoint.entries
    (entry,) = [one for one in entries if one.allocation.name == name]
    (found,) = [
        mount.host_path for mount in entry.setup.mounts if mount.host_path.endswith("libvgpu.so")
    ]
    return Path(found)


async def test_item_41_containers_keep_the_library_that_they_started_with(tmp_path: Path) -> None:
    source = tmp_path / "from-the-image.so"
    build(source, 1)
    async with one_node_cluster(
        library_source=source, rate=50, timing=AgentTiming(library_unused_s=-1.0)
    ) as cluster:
        async with cluster.running():
            old = await cluster.run_pod("old", share(0, slot=0))
            first = mounted(cluster, "old")
            inode = first.stat().st_ino
            content = first.read_bytes()
        build(source, 2)
        async with cluster.running() as agent:
            lease = await cluster.run_pod("new", share(0, slot=1, fence=2))
            second = mounted(cluster, "new")
            kept = mounted(cluster, "old")
            isolates = agent.node.software.isolation_available
            same = (first.stat().st_ino, first.read_bytes()) == (inode, content)
            cluster.node.store.delete("pods", "default", "old", grace_s=0)
            cluster.ledger.leases = {lease.pod: lease}
            await cluster.push_lease(
                structs.replace(old, state=LeaseState.RELEASED, version=old.version + 1)
            )
            await until(lambda: not first.exists(), limit_s=20)

    assert isolates
    assert same
    assert kept == first != second
    assert second.parent.parent == cluster.root / "agent" / "library"


async def test_with_an_invalid_library_no_container_starts_and_no_isolation_is_reported(
    tmp_path: Path,
) -> None:
    source = tmp_path / "empty.so"
    source.write_bytes(b"")
    async with one_node_cluster(library_source=source) as cluster, cluster.running() as agent:
        await cluster.fail_pod("one", share(0))

        assert "empty.so is unusable: it is not a 64-bit" in cluster.message("one")
        assert not agent.node.software.isolation_available
        (report, *_) = await until(lambda: cluster.reported)
        assert {device.offer for device in report.devices} == {NOTHING_OFFERED}
