"""Plans whose steps fail delay no others."""

import pytest

from services.binder.clients import PodClient
from shared.model.errors import UnavailableError
from shared.model.leases.preemption import Victim
from tests.support.placer.ledger import uuid
from tests.support.planner.scene import Scene


class Unwritable(PodClient):
    """A webhook of the cluster that reviews writes of one pod does not respond."""

    async def announce(self, victim: Victim, at: float) -> None:
        if victim.name == "one":
            raise UnavailableError("failed calling webhook")
        await super().announce(victim, at)


@pytest.mark.parametrize("at", [2], indirect=True)
async def test_a_plan_whose_steps_fail_holds_up_no_other(at: Scene) -> None:
    await at.running("one", gpu=0, mib=16_000)
    two = await at.running("two", gpu=1, mib=16_000, owner="another")
    await at.save_budget("a")
    for name in ("new", "newer"):
        await at.waiting(name, mib=16_000)
    binder = at.binder(pods=Unwritable(at.kube))

    for _ in range(2):
        with pytest.raises(UnavailableError, match="webhook"):
            await binder.preempt()
        at.clock.advance(30)
    await at.terminate(two)
    placed = await binder.preempt()

    assert [share.device for chosen in placed for share in chosen.lease.shares] == [uuid("a", 1)]
