"""When pods with claims wait, are queued, and are queued again."""

from typing import Any

import msgspec

from services.watcher.claimed_storage import (
    StorageChanges,
    StorageKind,
    StorageObject,
    unreadable_storage,
)
from services.watcher.trackers import NodeTracker, PodEvent, PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.bounds import MOST
from shared.model.events.pod_events import PodQueued, PodRejected
from shared.model.names import NodeName
from shared.model.requests.request import NodeTerm, PodClaim, VolumeRule
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from shared.pods.pod_volumes import ClaimUse
from tests.support.build import facts
from tests.support.storage import (
    NAMESPACE,
    ZONE,
    Manifest,
    claim,
    csi_node,
    in_,
    storage_class,
    storage_of,
    volume,
)

PARSER = PodParser(frozenset({"leasehold"}), Rules())


def pod(*claims: str, name: str = "train", **fields: Any) -> ObservedPod:
    volumes = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim_name}}
        for number, claim_name in enumerate(claims)
    ]
    spec = {
        "schedulerName": "leasehold",
        "containers": [{"name": "main"}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes, *fields.pop("volumes", ())],
        **fields,
    }
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}"}
    return PARSER.parse(msgspec.convert({"metadata": metadata, "spec": spec}, ApiPod))


def changes(*objects: Manifest, synced: bool = False, kind: StorageKind) -> StorageChanges:
    storage = storage_of(*objects)
    found: dict[StorageKind, dict[Any, StorageObject]] = {
        StorageKind.CLAIM: dict(storage.claims),
        StorageKind.VOLUME: {("", name): found for name, found in storage.volumes.items()},
        StorageKind.CLASS: {("", name): found for name, found in storage.classes.items()},
        StorageKind.CSI_NODE: {("", name): found for name, found in storage.limits.items()},
    }
    return StorageChanges(kind=kind, changed=tuple(found.get(kind, {}).items()), synced=synced)


def listed(*objects: Manifest) -> PodTracker:
    """Return a tracker after the lists of all kinds."""
    tracker = PodTracker()
    for kind in StorageKind:
        tracker.update_storage(changes(*objects, kind=kind, synced=True))
    tracker.update_claiming(1)
    return tracker


def reason(events: list[PodEvent]) -> str:
    [event] = events
    if isinstance(event, PodRejected):
        return event.reason
    assert isinstance(event, PodQueued)
    return event.request.node_requirements.waits_for


def queued(events: list[PodEvent]) -> PodQueued:
    [event] = events
    assert isinstance(event, PodQueued)
    return event


def test_claims_of_a_pod_are_its_volumes_by_name() -> None:
    scratch = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}

    observed = pod("data", volumes=[scratch])

    assert observed.claims == (ClaimUse("data"), ClaimUse("train-scratch", ephemeral=True))
    assert pod().claims == ()


def test_a_pod_with_a_claim_waits_for_the_lists_of_all_kinds() -> None:
    tracker = PodTracker()

    assert tracker.update(pod("data"), None) == []
    assert queued(tracker.update(pod(name="other"), None)).request.claims == ()
    for kind in StorageKind:
        assert tracker.update_claiming(1) == []
        tracker.update_storage(
            changes(claim("data", "pv"), volume("pv", in_(ZONE, "a")), kind=kind, synced=True)
        )

    request = queued(tracker.update_claiming(2)).request
    assert request.claims == (PodClaim(name="data", uid="uid-data", bound=True),)
    [requirement] = request.node_requirements.volumes
    assert requirement.rule is VolumeRule.NODE_AFFINITY


def test_a_pod_waits_for_a_claim_until_it_is_created() -> None:
    tracker = listed(storage_class())

    waits = reason(tracker.update(pod("data"), None))
    tracker.update_storage(changes(claim("home"), kind=StorageKind.CLAIM))
    unrelated = tracker.update_claiming(2)
    tracker.update_storage(changes(claim("data"), kind=StorageKind.CLAIM))
    created = tracker.update_claiming(3)

    assert waits.startswith('persistentvolumeclaim "data" not found')
    assert unrelated == []
    assert queued(created).request.claims == (
        PodClaim(name="data", uid="uid-data", provisions=True),
    )


def test_only_pods_whose_claims_have_changed_are_looked_at() -> None:
    tracker = listed(storage_class(), claim("data"), claim("home"))
    tracker.update(pod("data"), None)
    tracker.update(pod("home", name="other"), None)

    tracker.update_storage(
        changes(claim("data", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
                kind=StorageKind.CLAIM)
    )  # fmt: skip

    assert tracker.changed_claims == {(NAMESPACE, "data")}
    assert "is being deleted" in reason(tracker.update_claiming(2))
    assert tracker.update_claiming(3) == []


def test_nodes_for_which_no_volume_was_provisioned_come_last() -> None:
    on_n1 = {"annotations": {"volume.kubernetes.io/selected-node": "n1"}}
    tracker = listed(storage_class(), claim("data", metadata=on_n1))
    selected = queued(tracker.update(pod("data"), None))

    tracker.update_storage(changes(claim("data"), kind=StorageKind.CLAIM))
    given_up = queued(tracker.update_claiming(2))
    tracker.update_storage(
        changes(claim("data", "pv"), volume("pv"), kind=StorageKind.VOLUME),
    )
    tracker.update_storage(changes(claim("data", "pv"), kind=StorageKind.CLAIM))
    bound = queued(tracker.update_claiming(3))

    others = NodeTerm(key="metadata.name", operator="NotIn", values=("n1",), field=True)
    assert selected.request.node_requirements.preferred == ()
    assert given_up.request.node_requirements.preferred == ((100, (others,)),)
    assert bound.request.node_requirements.preferred == ()


def test_a_pod_is_published_again_when_a_volume_changes() -> None:
    tracker = listed(claim("data", "pv"), volume("pv", in_(ZONE, "a")))
    before = queued(tracker.update(pod("data"), None))

    tracker.update_storage(changes(volume("pv", in_(ZONE, "b")), kind=StorageKind.VOLUME))
    again = queued(tracker.update_claiming(2))
    tracker.update_storage(changes(volume("pv", in_(ZONE, "b")), kind=StorageKind.VOLUME))

    assert again.request.node_requirements != before.request.node_requirements
    assert again.requeue_number != before.requeue_number
    assert tracker.update_claiming(3) == []


def test_a_pod_that_has_a_node_is_not_published_again() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update(pod("data"), None)
    placed = msgspec.structs.replace(pod("data"), node=NodeName("a"))
    tracker.update(placed, pod("data"))

    tracker.update_storage(changes(claim("data", "pv"), kind=StorageKind.CLAIM))

    assert tracker.claiming_pods == 0
    assert tracker.update_claiming(2) == []


def test_a_pod_follows_those_that_use_its_claim() -> None:
    one_pod = claim("data", "pv", modes="ReadWriteOncePod")
    tracker = listed(one_pod, volume("pv", modes="ReadWriteOncePod"))
    user = msgspec.structs.replace(pod("data", name="user"), node=NodeName("a"))
    ended = msgspec.structs.replace(user, phase="Succeeded")

    free = queued(tracker.update(pod("data"), None))
    tracker.update(user, None)
    taken = tracker.update_claiming(2)
    tracker.update(user, user)
    unchanged = tracker.update_claiming(3)
    tracker.update(ended, user)
    released = tracker.update_claiming(4)
    tracker.remove(ended)

    assert free.request.claims
    assert "already in use by another pod, on node a" in reason(taken)
    assert unchanged == []
    assert queued(released).request == free.request
    assert tracker.storage.users == {}


def test_a_kind_that_cannot_be_read_is_the_reason_of_pods_with_claims_only() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update_storage(unreadable_storage(StorageKind.VOLUME, "403: not allowed"))

    waits = reason(tracker.update(pod("data"), None))
    others = tracker.update(pod(name="other"), None)
    tracker.update_storage(changes(kind=StorageKind.VOLUME, synced=True))

    assert waits == (
        "the pod has PersistentVolumeClaims, and PersistentVolumes cannot be read: 403: not "
        "allowed; apply the manifests of this version, by which the watcher may read them"
    )
    assert queued(others)
    assert queued(tracker.update_claiming(2)).request.claims


def test_requirements_that_are_too_large_are_a_reason() -> None:
    terms = [in_(ZONE, f"{'z' * 250}{number}") for number in range(1025)]
    tracker = listed(claim("data", "pv"), volume("pv", *terms))

    assert "what its volumes require has" in reason(tracker.update(pod("data"), None))


def test_a_deleted_claim_is_missing() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update(pod("data"), None)

    deleted = StorageChanges(kind=StorageKind.CLAIM, changed=(((NAMESPACE, "data"), None),))
    tracker.update_storage(deleted)

    assert "not found" in reason(tracker.update_claiming(2))


EBS = "attachable-volumes-csi-ebs.csi.aws.com"


def test_volumes_count_against_the_limits_of_their_driver_on_each_node() -> None:
    shared = claim("shared", "pv2")
    tracker = listed(claim("data", "pv"), volume("pv"), shared, volume("pv2"), csi_node("a", 25))
    nodes = NodeTracker(tracker)
    nodes.update(facts("a", allocatable={"pods": 10}), 1)
    nodes.update(facts("b", allocatable={"pods": 10}), 1)
    for number in range(2):
        user = pod("shared", name=f"user-{number}", schedulerName="other")
        tracker.update(msgspec.structs.replace(user, node=NodeName("a")), None)
    leased = msgspec.structs.replace(
        pod("shared", name="leased"), node=NodeName("a"), has_lease=True
    )
    tracker.update(leased, None)

    wanted = queued(tracker.update(pod("data"), None)).request.resources
    published = {change.node.name: change.node for change in nodes.update_usage()}

    assert wanted == {"pods": 1, EBS: 1}
    assert published[NodeName("a")].allocatable == {"pods": 10, EBS: 25}
    assert published[NodeName("a")].used_by_others == {"pods": 2, EBS: 1}
    assert nodes.observed[NodeName("b")].allocatable == {"pods": 10}


def test_a_driver_with_a_limit_on_one_node_has_none_on_the_others() -> None:
    tracker = listed()
    nodes = NodeTracker(tracker)
    nodes.update(facts("b", allocatable={"pods": 10}), 1)
    tracker.update_storage(changes(csi_node("a", 25), kind=StorageKind.CSI_NODE))

    [limited] = nodes.update_usage()
    again = nodes.update_usage()
    deleted = StorageChanges(kind=StorageKind.CSI_NODE, changed=((("", "a"), None),))
    tracker.update_storage(deleted)
    [unlimited] = nodes.update_usage()

    assert limited.node.allocatable == {"pods": 10, EBS: MOST}
    assert again == []
    assert unlimited.node.allocatable == {"pods": 10}


def test_volumes_of_drivers_without_limits_do_not_count() -> None:
    tracker = listed(claim("data", "pv"), volume("pv"), csi_node("a", 5, "disks.example"))

    assert queued(tracker.update(pod("data"), None)).request.resources == {"pods": 1}
