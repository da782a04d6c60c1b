"""Pods with claims are placed as kube-scheduler places them."""

import pytest

from shared.model.denial import Denial
from shared.model.requests.request import PodClaim
from shared.placing.node_filters import reaches
from shared.pods.pod_volumes import VolumeNeeds, merged
from tests.support.storage import (
    ZONE,
    Manifest,
    claim,
    in_,
    storage_of,
    volume,
)
from tests.support.volume_case import (
    CLASS,
    LOCAL_CLASS,
    NODES,
    Case,
    fitting,
    for_local,
    local,
    needs_of,
    reserved_for,
)
from tests.support.volume_cases import CASES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pods_with_claims_are_placed_as_by_kube_scheduler(case: Case) -> None:
    needs = needs_of(storage_of(*case.objects), case)

    if isinstance(needs, Denial):
        assert case.waits
        assert needs.text.startswith(case.waits)
        return
    nodes, reasons = fitting(needs)
    assert not case.waits
    assert nodes == case.fits
    assert reasons == {case.reason} or not case.reason


def claims_of(*objects: Manifest, uses: tuple[str, ...] = ("data",)) -> tuple[PodClaim, ...]:
    needs = needs_of(storage_of(*objects), Case(objects=[], uses=uses))
    assert isinstance(needs, VolumeNeeds)
    return needs.claims


def test_a_bound_claim_needs_nothing_more() -> None:
    [bound] = claims_of(claim("data", "pv"), volume("pv"))

    assert bound == PodClaim(name="data", uid="uid-data", bound=True)


def test_a_claim_gets_the_smallest_volume_that_its_node_reaches() -> None:
    [waiting] = claims_of(
        LOCAL_CLASS,
        for_local(),
        local("large", "a1", size="9Gi"),
        local("small", "a1", size="2Gi"),
        local("other", "b1"),
    )

    first = [found.name for found in waiting.volumes if reaches(NODES["a1"], found.terms)]
    assert first == ["small"]
    assert not waiting.provisions


def test_claims_choose_volumes_in_the_order_of_their_sizes() -> None:
    claims = claims_of(
        LOCAL_CLASS,
        for_local(size="3Gi"),
        for_local("home", size="2Gi"),
        local("pv", "a1", size="4Gi"),
        local("pv2", "a1", size="2Gi"),
        uses=("data", "home"),
    )

    assert [claim.name for claim in claims] == ["home", "data"]
    assert [found.name for found in claims[0].volumes] == ["pv2", "pv"]
    assert [found.name for found in claims[1].volumes] == ["pv"]


def test_volumes_of_a_class_with_a_provisioner_are_provisioned_where_none_is_left() -> None:
    [waiting] = claims_of(CLASS, claim("data"), volume("pv", in_(ZONE, "a")))

    assert waiting.provisions
    assert [found.name for found in waiting.volumes] == ["pv"]


def test_attachments_are_counted_by_driver_and_volume() -> None:
    needs = needs_of(
        storage_of(
            CLASS,
            claim("data", "pv"),
            volume("pv"),
            claim("home", "pv2"),
            volume("pv2", driver="", nfs={"server": "s", "path": "/"}),
            claim("scratch"),
            claim("shared", "pv3"),
            volume("pv3"),
        ),
        Case(
            objects=[],
            uses=("data", "home", "scratch", "shared"),
            users={"shared": {"uid-other": "a1"}},
        ),
    )

    assert isinstance(needs, VolumeNeeds)
    assert needs.attachments == {"ebs.csi.aws.com": 2}


def test_equal_terms_of_many_nodes_become_one() -> None:
    volumes = [local(f"pv{number}", f"n{number}") for number in range(300)]

    needs = needs_of(storage_of(LOCAL_CLASS, for_local(), *volumes), Case(objects=[]))

    assert isinstance(needs, VolumeNeeds)
    [requirement] = needs.requirements
    [[term]] = requirement.terms
    assert len(term.values) == 300


def test_terms_are_bounded() -> None:
    storage = storage_of(LOCAL_CLASS, for_local(), *(local(f"pv{n}", f"n{n}") for n in range(9000)))

    needs = needs_of(storage, Case(objects=[]))

    assert isinstance(needs, VolumeNeeds)
    assert len(needs.claims[0].volumes) == 1024
    assert needs == needs_of(storage, Case(objects=[]))
    assert merged(()) == ()


def test_pods_whose_claims_are_in_one_zone_share_a_requirement() -> None:
    storage = storage_of(
        claim("data", "pv"), volume("pv", in_(ZONE, "a")),
        claim("home", "pv2"), volume("pv2", in_(ZONE, "a")),
    )  # fmt: skip

    first, second = (needs_of(storage, Case(objects=[], uses=(name,))) for name in ("data", "home"))

    assert isinstance(first, VolumeNeeds)
    assert isinstance(second, VolumeNeeds)
    assert first.requirements == second.requirements


def test_a_volume_that_changes_moves_between_claims() -> None:
    storage = storage_of(LOCAL_CLASS, for_local(), local("pv", "a1"))
    case = Case(objects=[])
    before = needs_of(storage, case)
    taken = storage_of(local("pv", "a1", phase="Bound", claimRef=reserved_for("home", "uid-home")))

    storage.put_volume("pv", taken.volumes["pv"])
    while_taken = needs_of(storage, case)
    storage.put_volume("pv", None)

    assert isinstance(before, VolumeNeeds)
    assert isinstance(while_taken, VolumeNeeds)
    assert fitting(before)[0] == "a1"
    assert fitting(while_taken)[0] == ""
    assert (storage.available, storage.reserved, storage.volumes) == ({}, {}, {})
