"""Whether a share fits is coded four times, each for a reason; the answers agree.

The text explains, the index is fast, the ledger's function is atomic, and the agent's guard trusts
only its own records.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError, check_room
from shared.dialects.dialect import ContainerSetup
from shared.model.denial import Denial
from shared.model.devices.device import (
    Device,
    DeviceMode,
    DeviceUse,
    Isolation,
    device_refusal,
    request_on,
    required_cores_percent,
    required_memory_mib,
)
from shared.model.devices.enforcers import (
    HAMI_CORE_ALONE,
    NO_DEMAND,
    NOTHING_OFFERED,
    HeldBy,
    Offer,
)
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import LedgerNode, NoCapacity, ReservedLease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import GpuRequest, PodRequest, SharingPolicy
from shared.placing.choice.device_choice import share_of
from shared.placing.trial_cluster import TrialCluster
from tests.support.build import allocation_of, gpu, request
from tests.support.effort import tries
from tests.support.placer.ledger import NOW, device, facts, ledger, report, reservation, uses
from tests.support.servers.valkey import ValkeyServer

BEFORE_RESERVING = {
    "GpuReplicasOnly",
    "GpuReplicasTogether",
    "GpuEnforcerMissing",
    "GpuIsolationStrict",
    "GpuNotShared",
    "GpuNotIsolated",
}
"""A share does not say what isolation it needs: the placer chooses only devices that have it."""

OFFERS = (
    *4 * [HAMI_CORE_ALONE],
    NOTHING_OFFERED,
    Offer(memory=("driver",), compute=()),
    Offer(memory=("driver", "mps", "hami-core"), compute=("mps", "time", "hami-core")),
    Offer(memory=("mps-shared", "hami-core"), compute=("mps-shared", "hami-core")),
)
DEMANDS = (
    *6 * [NO_DEMAND],
    HeldBy(memory="driver"),
    HeldBy(memory="hami-core"),
    HeldBy(compute="time"),
    HeldBy(memory="mps"),
    HeldBy(compute="mps-shared"),
    HeldBy(memory="none", compute="none"),
)
cards = st.builds(
    lambda **fields: device("a", 0, **fields),
    memory_mib=st.sampled_from([7, 96]),
    slots=st.sampled_from([2, 4, 9]),
    unit_mib=st.sampled_from([1, 1, 3]),
    healthy=st.integers(0, 9).map(lambda one: one != 1),
    isolation=st.sampled_from(6 * [Isolation.SHARED] + list(Isolation)),
    offer=st.sampled_from(OFFERS),
)
divisions = st.builds(
    Replicas,
    number=st.sampled_from([2, 3, 7]),
    strategy=st.sampled_from(["time-slicing", "mps"]),
    resource=st.just("gpu"),
    one_per_container=st.booleans(),
)
divided_cards = st.builds(
    lambda card, replicas: replace(
        card, mode=DeviceMode.REPLICAS, replicas=replicas, slots=replicas.number
    ),
    cards,
    divisions,
)
pods = st.builds(
    lambda group, **fields: request(
        gpu("main", 1, **fields),
        triggers=(),
        resources={"cpu": 100, "pods": 1},
        anti_affinity_groups=(group,) if group else (),
    ),
    st.sampled_from(["", "", "", "red"]),
    memory=st.sampled_from([1, 1, 2, 4]),
    memory_percent=st.sampled_from([None, None, None, None, 10, 50, 100]),
    cores_percent=st.sampled_from([0, 0, 30, 71, 100]),
    whole=st.integers(0, 9).map(lambda one: one == 1),
    slotted=st.sampled_from([True, True, False]),
    slots=st.sampled_from([0, 0, 0, 2, 100]),
    sharing=st.sampled_from(3 * [SharingPolicy.SHARED] + list(SharingPolicy)),
    strict=st.integers(0, 9).map(lambda one: one == 1),
    limited=st.booleans(),
    held_by=st.sampled_from(DEMANDS),
)
numbers = st.builds(
    lambda group, **fields: request(
        gpu("main", 1, whole=True, **fields),
        triggers=(),
        resources={"cpu": 100, "pods": 1},
        anti_affinity_groups=(group,) if group else (),
    ),
    st.sampled_from(["", "", "", "red"]),
    number_of=st.sampled_from(["gpu", "gpu", "gpu", "gpu.shared"]),
    strict=st.integers(0, 9).map(lambda one: one == 1),
)


def test_text_index_ledger_and_guard_agree_whether_a_share_fits(server: ValkeyServer) -> None:
    asyncio.run(server.ready())

    @settings(max_examples=tries(150), deadline=None)
    @given(cards | divided_cards, st.lists(pods | numbers, min_size=3, max_size=8))
    def agree(card: Device, wanted: list[PodRequest]) -> None:
        asyncio.run(compare(server.url, card, wanted))

    agree()


async def compare(url: str, card: Device, wanted: Sequence[PodRequest]) -> None:
    """Let each pod have a share of the device, where the ledger has room for it."""
    held: list[Lease] = []
    async with ledger(url, {"a": 0}) as leases:
        await leases.save_devices([report("a", [card])])
        for number, pod in enumerate(wanted):
            [container] = pod.containers
            use = (await uses(leases))[card.uuid]
            taken = request_on(container, card)
            share = share_of(taken, card, required_memory_mib(container, card), mode=use.mode)
            tried = reservation(f"p{number}", share, tag="".join(pod.anti_affinity_groups))
            lease = Lease(
                pod=PodUid(f"p{number}"),
                namespace=Namespace("default"),
                name=f"p{number}",
                node=NodeName("a"),
                shares=(share,),
            )

            text = text_of(pod, card, use)
            guarded = is_guarded(lease, held, card)

            assert fits_in_index(pod, card, use) == (text is None), text
            assert guarded or not is_exceeded(container, card, use)
            if text is not None and text.code in BEFORE_RESERVING:
                continue  # no placer reserves it: the ledger does not know why it must not
            [outcome] = await leases.reserve([tried], now=NOW, ttl_s=30)
            if text is None:
                assert isinstance(outcome, ReservedLease)
                assert not guarded
                held.append(outcome.lease)
            else:
                assert isinstance(outcome, NoCapacity), text


def text_of(pod: PodRequest, card: Device, use: DeviceUse) -> Denial | None:
    [container] = pod.containers
    memory_mib = required_memory_mib(container, card)
    groups = pod.anti_affinity_groups
    return device_refusal(container, card, use, memory_mib=memory_mib, anti_affinity_groups=groups)


def fits_in_index(pod: PodRequest, card: Device, use: DeviceUse) -> bool:
    node = LedgerNode(facts=facts("a"), devices=((card, use),))
    return TrialCluster([node]).placement_on(NodeName("a"), pod) is not None


def is_guarded(lease: Lease, held: Sequence[Lease], card: Device) -> bool:
    def entry(of: Lease) -> CheckpointEntry:
        allocation: Any = allocation_of(of, container="main", resource="r")
        return CheckpointEntry(allocation=allocation, setup=ContainerSetup(environment={}))

    try:
        check_room(lease, lease.containers, [entry(each) for each in held], {card.uuid: card}, {})
    except OvercommitError:
        return True
    return False


def is_exceeded(container: GpuRequest, card: Device, use: DeviceUse) -> bool:
    """Whether the device would be given out more than once, whatever else a pod may want."""
    memory_mib = use.memory_mib + required_memory_mib(container, card)
    cores_percent = use.cores_percent + required_cores_percent(request_on(container, card))
    return memory_mib > card.memory_mib or cores_percent > 100 or use.exclusive
