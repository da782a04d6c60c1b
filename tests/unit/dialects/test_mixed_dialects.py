"""Pods of all dialects: each gets its request.

The judge is a brute-force recount (`tests.support.dialects.recount`) of random pods whose amounts
are worked out anew from the vendors' rules (`tests.support.dialects.mixes`).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import total_of
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support.build import dice, ledger_node
from tests.support.dialects.mixes import BLOCK, BY_NAME, ExpectedPod, ExpectedShare, exactly
from tests.support.dialects.recount import LABELS, NODES, SERVED, Recount, assert_environment, fits
from tests.support.effort import tries

RULES = [Rules(), Rules(schedule_policy="binpack", gpu_scheduler_policy="binpack", prefer_mig=True)]


class Placed:
    """A mirror that keeps what is placed, with a recount beside it."""

    def __init__(self) -> None:
        self.mirror = ClusterMirror()
        self.mirror.reset(
            [
                ledger_node(name, *devices, labels=LABELS, served=SERVED)
                for name, devices in NODES.items()
            ]
        )
        self.index = NodeIndex(self.mirror)
        self.recount = Recount(NODES)
        self.draw = dice(1)

    def place(self, number: int, expected: ExpectedPod, rules: Rules) -> Lease | None:
        lease = self._placed(number, expected.manifest, rules)
        if lease is not None:
            self.recount.add(lease.pod, expected, lease)
        return lease

    def lease(self, number: int, limits: dict[str, int], scheduler: str) -> Lease:
        """Place a pod of one container that must fit."""
        container = ContainerManifest(name="c", limits=limits)
        manifest = PodManifest(
            namespace=Namespace("ns"), containers=(container,), scheduler=scheduler
        )
        lease = self._placed(number, manifest, Rules())
        assert lease is not None
        return lease

    def _placed(self, number: int, manifest: PodManifest, rules: Rules) -> Lease | None:
        request = structs.replace(parse_pod_request(manifest, rules), resources={"pods": 1})
        answer = place_explained(request, self.index, self.draw)
        if isinstance(answer, Refusal):
            return None
        pod = PodUid(f"uid-{number}")
        self.mirror.reserve(pod, answer[0], request.resources, request.anti_affinity_groups)
        return _lease(pod, request, answer[0])


def _lease(pod: PodUid, request: PodRequest, placement: Placement) -> Lease:
    """The lease that a ledger would make; slots are told apart there."""
    shares = tuple(
        structs.replace(share, slot=share.mig.position if share.mig else None)
        for share in placement.shares
    )
    return Lease(
        pod=pod,
        namespace=Namespace("ns"),
        name=pod,
        node=placement.node,
        shares=shares,
        dialect=request.dialect,
        memo=request.memo,
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_every_dialect_grants_exactly_the_requested_shares_and_sets_the_container_up_for_them(
    name: str,
) -> None:
    seen = []

    @settings(max_examples=tries(40), deadline=None)
    @given(BY_NAME[name], st.sampled_from(RULES))
    def alone(expected: ExpectedPod, rules: Rules) -> None:
        placed = Placed()
        lease = placed.place(1, expected, rules)
        if lease is not None:
            seen.append(lease)
            assert lease.dialect == expected.dialect
            assert_environment(expected, lease, NODES[lease.node])
        elif len(expected.parts) == 1:
            assert not fits(expected), "refused, and a device would have taken it"

    alone()
    assert seen, "nothing was ever placed"


HALF = ExpectedPod(
    dialect="tencent",
    manifest=PodManifest(
        namespace=Namespace("ns"),
        containers=(
            ContainerManifest(
                name="c", limits={"tencent.com/vcuda-core": 60, "tencent.com/vcuda-memory": 40}
            ),
        ),
    ),
    parts=(ExpectedShare(container="c", gpus=1, memory=exactly(40 * BLOCK), cores=60),),
)


def test_the_recount_detects_a_double_reservation_and_a_too_small_share() -> None:
    placed = Placed()
    lease = placed.place(1, HALF, Rules())
    assert lease is not None

    placed.recount.live["again"] = (HALF, lease)
    with pytest.raises(AssertionError, match="bytes are promised"):
        placed.recount.assert_consistent()
    less = structs.replace(lease, shares=(structs.replace(lease.shares[0], memory_mib=1),))
    with pytest.raises(AssertionError, match="is not 10737418240 bytes"):
        Recount(NODES).add("uid-1", HALF, less)


def test_koordinator_34_whole_gpus_and_half_ones_count_in_the_same_cores() -> None:
    placed = Placed()
    memory_mib = {
        device.uuid: device.memory_mib for devices in NODES.values() for device in devices
    }
    requests: list[dict[str, int]] = [
        {"nvidia.com/gpu": 1},
        {
            "koordinator.sh/gpu.shared": 1,
            "koordinator.sh/gpu-core": 50,
            "koordinator.sh/gpu-memory-ratio": 10,
        },
    ]

    held = total_of(
        charge_of(placed.lease(number, limits, "koord-scheduler").shares, memory_mib)
        for number, limits in enumerate(requests)
    )

    assert held.cores_milli == 1500
