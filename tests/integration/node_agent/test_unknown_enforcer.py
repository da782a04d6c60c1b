"""An enforcer that the agent does not know: a module and an entry in the table are all it takes."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.node_agent.enforcers.exclusive import Exclusive
from services.node_agent.enforcers.mig import Mig
from services.node_agent.enforcers.table import Enforcers
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.leases.lease import MIB, Lease, LeaseState
from tests.support.node_agent.agent import OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.fake_enforcer import FakeEnforcer
from tests.support.waiting import until

HELD: dict[str, Any] = {"memory": "mps", "compute": "mps", "mode": "mps"}


def held_mib(enforcer: FakeEnforcer) -> list[float]:
    limits = [limit for of_container in enforcer.table.values() for limit in of_container]
    return [(limit.memory_bytes or 0) / MIB for limit in limits]


async def resize(cluster: OneNodeCluster, lease: Lease, mib: int) -> LimitsReply:
    assert cluster.agent is not None
    shares = (structs.replace(lease.shares[0], memory_mib=mib),)
    version = lease.version + 1
    sized = structs.replace(lease, shares=shares, version=version, resized_at=float(mib))
    return await cluster.agent.update_limits(
        LimitsRequest(node=cluster.agent.route, lease=sized, resize_id=f"to-{mib}")
    )


async def test_it_holds_a_pod_from_before_its_start_to_its_end_also_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enforcer = FakeEnforcer()
    table = Enforcers((Exclusive(), Mig(), enforcer))
    monkeypatch.setattr("services.node_agent.wiring.enforcer_table", lambda *_: table)
    async with one_node_cluster("1xT4") as cluster:
        async with cluster.running() as agent:
            assert agent.node.devices[0].offer.memory == ("mps",)
            enforcer.is_broken = True
            refused = await cluster.fail_pod("refused", share(0, 1_000, slot=1, fence=2, **HELD))
            assert "its daemon does not run" in cluster.message("refused")
            await cluster.delete_pod("refused")
            await cluster.release(refused)
            enforcer.is_broken = False
            lease = await cluster.run_pod("one", share(0, 1_000, **HELD))
            assert held_mib(enforcer) == [1_000]
            lease = cluster.ledger.grant(
                structs.replace(lease, state=LeaseState.ACTIVE, version=lease.version + 1)
            )
            await cluster.push_lease(lease)

            assert (await resize(cluster, lease, 500)).applied
            assert held_mib(enforcer) == [500]
            enforcer.ignores = True
            assert not (await resize(cluster, lease, 300)).applied
            assert held_mib(enforcer) == [500]
            enforcer.ignores = False

        enforcer.table.clear()  # the agent and what its enforcer kept are gone
        async with cluster.running() as agent:
            await agent.usage.audit.audit()
            await agent.usage.audit.audit()
            assert len(enforcer.table) == 1
            assert not agent.usage.audit.violations
            [(place, [limit])] = enforcer.table.items()
            enforcer.table[place] = (replace(limit, memory_bytes=9_000 * MIB),)
            await agent.usage.audit.audit()
            [violation] = agent.usage.audit.violations
            assert violation.reason == enforcer.differs_reason
            assert "9000.0 MiB" in violation.message
            assert 9_000 not in held_mib(enforcer), "it is put back"

            await cluster.delete_pod("one")
            await cluster.release(lease)
            await agent.clean_up()
            await until(lambda: not enforcer.table)
