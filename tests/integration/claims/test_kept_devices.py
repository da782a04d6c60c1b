"""Claims for GPUs that a plan keeps for a pod, or for the claim of one."""

import pytest

from shared.ledger.preemptions import Preemptions
from shared.model.errors import UnavailableError
from shared.model.leases.ledger import Reservation
from shared.model.leases.preemption import ClaimingPod, Preemption, StoredStart
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import LEASED, REFUSED
from shared.model.requests.placement import Placement
from tests.support.binder.claim_binder import GPU, ClaimBinder
from tests.support.binder.world import allocated, on
from tests.support.placer.ledger import share

PLACE = Placement(node=NodeName("a"), shares=(share("a", 0),))


def wanted(uid: str, name: str, namespace: str) -> Reservation:
    return Reservation(
        pod=PodUid(uid), namespace=Namespace(namespace), name=name, candidates=(PLACE,)
    )


async def keep_for_claim(binder: ClaimBinder, uid: str, namespace: str = "default") -> None:
    """A plan keeps the GPU for the claim of pod `first`."""
    pod = ClaimingPod(pod=PodUid("first"), namespace=Namespace(namespace), name="first")
    plan = Preemption(id="first", victims=(), wanted=(wanted(uid, "own", namespace),), claiming=pod)
    assert await binder.ledger.part(Preemptions).open(plan)


async def test_what_a_plan_keeps_for_a_claim_is_leased_to_it_alone(binder: ClaimBinder) -> None:
    own, other = (binder.claims.put(allocated(name, on(GPU))) for name in ("own", "other"))
    await keep_for_claim(binder, own.claim)

    await binder.lease(other)
    refused = binder.claims.answers["other"][-1]
    await binder.lease(own)

    assert refused.condition == REFUSED
    assert "GPU 0" in refused.message
    assert "is kept for default/first, for which pods are evicted" in refused.message
    assert binder.answered(own) == [LEASED]
    [read] = (await binder.ledger.part(Preemptions).state(now=0)).open
    assert not read.claimed


async def test_only_the_claim_of_the_plan_waits_for_a_share_that_ends_for_it(
    binder: ClaimBinder,
) -> None:
    leaving = await binder.leased("leaving", memory_mib=16_000)
    await binder.deallocate(leaving)
    assert len(await binder.ledger.load_vanished()) == 1
    own, other = (binder.claims.put(allocated(it, on(GPU, 16_000))) for it in ("own", "other"))
    await keep_for_claim(binder, own.claim)

    await binder.lease(other)
    with pytest.raises(UnavailableError, match="waits for a share that is ending"):
        await binder.lease(own)

    assert binder.answered(other) == [REFUSED]
    assert binder.answered(own) == []


@pytest.mark.parametrize(
    ("namespace", "named"), [("default", "default/own"), ("b", "a pod of another namespace")]
)
async def test_a_claim_for_a_gpu_of_a_planned_start_is_refused_with_the_reason(
    binder: ClaimBinder, namespace: str, named: str
) -> None:
    start = StoredStart(
        id="own",
        wanted=(wanted("own", "own", namespace),),
        at_once=({},),
        waits_for=(),
        at=3600.0,
        enforced=True,
    )
    assert await binder.ledger.part(Preemptions).open_start(start)

    reply = await binder.admit(allocated("other", on(GPU)))

    assert f"is kept for {named}, whose start is planned for 1970-01-01T01:00:00Z" in reply.refusal
