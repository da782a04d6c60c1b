"""What a pod's claims require of its node, or why the pod has to wait; pure.

Rules are those of kube-scheduler's volume plugins. Besides, the only node to which a volume can be
attached now is required: kube-scheduler lets such a pod wait on another node.
https://kubernetes.io/docs/concepts/storage/persistent-volumes/
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from zlib import crc32

import msgspec
from msgspec import structs

from shared.model.bounds import LONGEST_FIELD, MOST_CLAIMS, MOST_TERMS, MOST_VOLUMES
from shared.model.denial import Denial
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import (
    ClaimVolume,
    NodeTerm,
    PodClaim,
    VolumeRequirement,
    VolumeRule,
    VolumeTerms,
)
from shared.placing.anti_affinity import matches_labels
from shared.pods.storage import (
    NO_DRIVER,
    ONE_POD,
    SHARED_MODES,
    TOPOLOGY_LABELS,
    Claim,
    ClaimKey,
    Storage,
    StorageClass,
    Volume,
)

Users = Mapping[ClaimKey, Mapping[PodUid, NodeName]]
"""Pods with a node that have not ended, by the claims that they use."""


class ClaimUse(msgspec.Struct, frozen=True, gc=False):
    claim: str
    ephemeral: bool = False
    """The claim is made for the pod, and ends with it."""


class ClaimingPod(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    pod: PodUid
    namespace: str
    name: str
    uses: tuple[ClaimUse, ...]


class VolumeNeeds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    requirements: tuple[VolumeRequirement, ...] = ()
    claims: tuple[PodClaim, ...] = ()
    attachments: dict[str, int] = {}
    """By CSI driver; those that the node has already are left out."""


def volume_needs(pod: ClaimingPod, storage: Storage, users: Users) -> VolumeNeeds | Denial:
    """Return what a pod's claims require, or why it cannot be placed yet.

    For example, a pod with a claim that is bound to a volume in zone a requires a node in zone a.
    """
    claims = _claims(pod, storage)
    if isinstance(claims, Denial):
        return claims
    denial = _wait_for(pod, claims, storage, users)
    return denial or _needs(pod, claims, storage, users)


def _claims(pod: ClaimingPod, storage: Storage) -> list[Claim] | Denial:
    claims: dict[str, Claim] = {}
    for use in pod.uses:
        claim = storage.claims.get((pod.namespace, use.claim))
        if claim is None:
            return _missing(pod, use)
        denial = _unusable(pod, use, claim)
        if denial is not None:
            return denial
        claims[use.claim] = claim
    if len(claims) > MOST_CLAIMS:
        text = f"the pod has {len(claims)} PersistentVolumeClaims; at most {MOST_CLAIMS} are placed"
        return Denial("TooManyClaims", text)
    return list(claims.values())


def _wait_for(
    pod: ClaimingPod, claims: Sequence[Claim], storage: Storage, users: Users
) -> Denial | None:
    """Return what the pod waits for before any node can be chosen."""
    waiting = [
        claim for claim in claims if not claim.bound and not storage.waits_for_consumer(claim)
    ]
    if waiting:
        return _unbound(pod.namespace, waiting, storage)
    for claim in claims:
        if claim.bound:
            volume = storage.volumes.get(claim.volume)
            if volume is None:
                return _without_volume(claim)
            if volume.error:
                text = (
                    f'persistentvolume "{volume.name}", to which persistentvolumeclaim '
                    f'"{claim.name}" is bound, cannot be read: {volume.error}'
                )
                return Denial("VolumeUnreadable", text)
        denial = _in_use_by_one(pod, claim, users)
        if denial is not None:
            return denial
    return None


def _needs(
    pod: ClaimingPod, claims: Sequence[Claim], storage: Storage, users: Users
) -> VolumeNeeds:
    requirements: list[VolumeRequirement] = []
    attachments = Counter[str]()
    decided: list[PodClaim] = []
    attached = set[str]()
    for claim in claims:
        if not claim.bound:
            continue
        volume = storage.volumes[claim.volume]
        nodes = _only_nodes(pod, claim, volume, storage, users)
        requirements += _of_volume(volume)
        if nodes:
            requirements.append(VolumeRequirement(rule=VolumeRule.IN_USE, terms=(on_nodes(nodes),)))
        elif volume.driver and volume.name not in attached:
            attachments[volume.driver] += 1
        attached.add(volume.name)
        decided.append(PodClaim(name=claim.name, uid=claim.uid, bound=True))
    unbound = sorted((claim for claim in claims if not claim.bound), key=lambda claim: claim.size)
    for claim, volumes in zip(unbound, _static(pod, unbound, storage), strict=True):
        storage_class = storage.classes[claim.storage_class]
        requirements += _of_unbound(claim, volumes.terms, storage_class, storage)
        if storage_class.provisions:
            attachments[storage_class.provisioner] += 1
        decided.append(
            PodClaim(
                name=claim.name,
                uid=claim.uid,
                volumes=volumes.candidates,
                provisions=storage_class.provisions,
            )
        )
    return VolumeNeeds(
        requirements=tuple(dict.fromkeys(requirements)),
        claims=tuple(decided),
        attachments=dict(attachments),
    )


def _missing(pod: ClaimingPod, use: ClaimUse) -> Denial:
    if use.ephemeral:
        text = (
            "waiting for ephemeral volume controller to create the persistentvolumeclaim "
            f'"{use.claim}"'
        )
    else:
        text = (
            f'persistentvolumeclaim "{use.claim}" not found: create it in namespace '
            f"{pod.namespace}, or correct its name in the pod"
        )
    return Denial("ClaimNotFound", text)


def _unusable(pod: ClaimingPod, use: ClaimUse, claim: Claim) -> Denial | None:
    named = f'persistentvolumeclaim "{claim.name}"'
    if claim.error:
        return Denial("ClaimUnreadable", f"{named} cannot be read: {claim.error}")
    if claim.lost:
        return Denial(
            "ClaimLost",
            f'{named} bound to non-existent persistentvolume "{claim.volume}": its data are gone; '
            "delete the claim and create it again",
        )
    if claim.deleting:
        return Denial(
            "ClaimIsDeleted",
            f"{named} is being deleted: create it again once the last pod that uses it has ended",
        )
    if use.ephemeral and claim.owner != pod.pod:
        return Denial(
            "ClaimOfAnother",
            f"{named} was not created for pod {pod.namespace}/{pod.name} (pod is not owner), which "
            "has an ephemeral volume of that name: delete the claim, or rename the volume",
        )
    return None


MOST_NAMED = 4
"""Claims that a message names."""


def _unbound(namespace: str, claims: Sequence[Claim], storage: Storage) -> Denial:
    reasons = "; ".join(_why_unbound(namespace, claim, storage) for claim in claims[:MOST_NAMED])
    text = f"pod has unbound immediate PersistentVolumeClaims: {reasons}"
    return Denial("UnboundClaims", text)


def _why_unbound(namespace: str, claim: Claim, storage: Storage) -> str:
    if claim.volume:
        return f"{claim.name} {_why_not_bound_to(namespace, claim, storage)}"
    name = claim.storage_class
    if not name:
        return f"{claim.name} has no StorageClass, and no PersistentVolume without one fits it yet"
    storage_class = storage.classes.get(name)
    if storage_class is None:
        return f"{claim.name} has the StorageClass {name}, which does not exist: create it"
    if not storage_class.provisions:
        return f"{claim.name} waits for a PersistentVolume of StorageClass {name} that fits it"
    return (
        f"{claim.name} waits for {storage_class.provisioner} to provision its volume; "
        f"`kubectl describe pvc {claim.name} -n {namespace}` shows why it has not"
    )


def _why_not_bound_to(namespace: str, claim: Claim, storage: Storage) -> str:
    volume = storage.volumes.get(claim.volume)
    if volume is None:
        return f"names PersistentVolume {claim.volume}, which does not exist: create it"
    if volume.reserved_for and not _is_for(volume, namespace, claim):
        return f"names PersistentVolume {claim.volume}, which is bound to another claim"
    return f"is being bound to PersistentVolume {claim.volume}"


def _without_volume(claim: Claim) -> Denial:
    text = (
        f'persistentvolume "{claim.volume}" not found, to which persistentvolumeclaim '
        f'"{claim.name}" is bound: delete the claim and create it again'
    )
    return Denial("VolumeNotFound", text)


def claim_of_one_node(pod: ClaimingPod, shared: Iterable[ClaimKey], storage: Storage) -> str:
    """Return the first that keeps the pod on one node with others, or "".

    `shared` are the claims that pods without a node use, too.
    """
    for _, name in sorted(shared):
        claim = storage.claims.get((pod.namespace, name))
        if claim is not None and _is_of_one_node(claim, storage):
            return name
    return ""


def _is_of_one_node(claim: Claim, storage: Storage) -> bool:
    volume = storage.volumes.get(claim.volume) if claim.bound else None
    if volume is not None:
        return _attaches_to_one(volume, storage)
    storage_class = storage.classes.get(claim.storage_class)
    driver = storage.drivers.get(storage_class.provisioner, NO_DRIVER) if storage_class else None
    is_attached = driver is None or driver.attaches
    return is_attached and SHARED_MODES.isdisjoint(claim.access_modes)


def shared_by_one(pod: ClaimingPod, shared: Iterable[ClaimKey], storage: Storage) -> Denial | None:
    """Deny a pod that shares a claim which only one pod can use."""
    for _, name in sorted(shared):
        claim = storage.claims.get((pod.namespace, name))
        if claim is not None and ONE_POD in claim.access_modes:
            text = (
                f'persistentvolumeclaim "{name}" has the access mode {ONE_POD}, and several pods '
                "of the gang use it: give each pod a claim of its own, or use ReadWriteMany"
            )
            return Denial("ClaimInUse", text)
    return None


def _in_use_by_one(pod: ClaimingPod, claim: Claim, users: Users) -> Denial | None:
    if ONE_POD not in claim.access_modes:
        return None
    nodes = _nodes_of_others(pod, claim, users)
    if not nodes:
        return None
    text = (
        f'persistentvolumeclaim "{claim.name}" has the access mode {ONE_POD} and is already in use '
        f"by another pod, on node {nodes[0]}: wait until that pod has ended"
    )
    return Denial("ClaimInUse", text)


def _nodes_of_others(pod: ClaimingPod, claim: Claim, users: Users) -> list[NodeName]:
    others = users.get((pod.namespace, claim.name), {})
    return sorted({node for user, node in others.items() if user != pod.pod})


def _only_nodes(
    pod: ClaimingPod, claim: Claim, volume: Volume, storage: Storage, users: Users
) -> list[NodeName]:
    """Return the nodes to which a volume is attached, if it can be attached to no other."""
    return _nodes_of_others(pod, claim, users) if _attaches_to_one(volume, storage) else []


def _attaches_to_one(volume: Volume, storage: Storage) -> bool:
    """Return whether a volume is attached to a node, and to no other at the same time."""
    if not volume.access_modes or not SHARED_MODES.isdisjoint(volume.access_modes):
        return False
    attaches = storage.drivers.get(volume.driver, NO_DRIVER).attaches if volume.driver else False
    return attaches or volume.in_tree_disk


def on_nodes(names: Iterable[str]) -> tuple[NodeTerm, ...]:
    return (NodeTerm(key="metadata.name", operator="In", values=tuple(names), field=True),)


def _of_volume(volume: Volume) -> Iterator[VolumeRequirement]:
    if volume.terms:
        yield VolumeRequirement(rule=VolumeRule.NODE_AFFINITY, terms=volume.terms)
    for key, values in volume.zones:
        yield VolumeRequirement(rule=VolumeRule.ZONE, terms=_in_zone(key, values))


def _in_zone(key: str, values: tuple[str, ...]) -> VolumeTerms:
    """Nodes without any label of topology are included.

    A volume with a deprecated label reaches nodes with the label that replaced it.
    """
    new_key = TOPOLOGY_LABELS[key]
    renamed = (
        NodeTerm(key=key, operator="DoesNotExist"),
        NodeTerm(key=new_key, operator="In", values=values),
    )
    return (
        (NodeTerm(key=key, operator="In", values=values),),
        *((renamed,) if new_key != key else ()),
        tuple(NodeTerm(key=label, operator="DoesNotExist") for label in TOPOLOGY_LABELS),
    )


class _StaticVolumes(msgspec.Struct, frozen=True, gc=False):
    """Existing volumes for a claim, and the nodes that reach one that is left for it."""

    candidates: tuple[ClaimVolume, ...] = ()
    terms: VolumeTerms | None = ()
    """None if every node does."""


def _static(
    pod: ClaimingPod, claims: Sequence[Claim], storage: Storage
) -> Iterator[_StaticVolumes]:
    """Yield existing volumes for each claim, in the order in which the claims choose.

    The smallest claim chooses first, and each the smallest volume left, as kube-scheduler's claims
    do.
    """
    matching = [
        _nearest_fit(pod, _matching(pod.namespace, claim, storage), len(claims)) for claim in claims
    ]
    reached: list[dict[VolumeTerms, None]] = [{} for _ in claims]
    by_terms = [_by_terms(volumes) for volumes in matching]
    for terms in dict.fromkeys(chain([()], *by_terms)):
        taken = set[str]()
        for number, volumes_by_terms in enumerate(by_terms):
            reachable = [
                volume
                for alike in {(), terms}
                for volume in volumes_by_terms.get(alike, ())
                if volume.name not in taken
            ]
            volume = min(reachable, key=_by_size, default=None)
            if volume is not None:
                taken.add(volume.name)
                reached[number][terms] = None
    for volumes, nodes in zip(matching, reached, strict=True):
        terms_of_nodes = None if () in nodes else merged(chain.from_iterable(nodes))
        yield _StaticVolumes(_named(volumes), terms_of_nodes)


def _by_terms(volumes: Iterable[Volume]) -> dict[VolumeTerms, list[Volume]]:
    groups: dict[VolumeTerms, list[Volume]] = {}
    for volume in volumes:
        groups.setdefault(volume.terms, []).append(volume)
    return groups


def _by_size(volume: Volume) -> tuple[int, str]:
    return volume.size, volume.name


def _named(volumes: Iterable[Volume]) -> tuple[ClaimVolume, ...]:
    return tuple(ClaimVolume(name=volume.name, terms=volume.terms) for volume in volumes)


def _matching(namespace: str, claim: Claim, storage: Storage) -> list[Volume]:
    """Return the volumes that may be bound to a claim; one that is reserved for it comes alone."""
    if claim.selected_node:
        return []
    key = namespace, claim.name
    reserved = [
        volume
        for volume in storage.reserved.get(key, ())
        if _is_for(volume, namespace, claim) and _fits(claim, volume)
    ]
    if reserved:
        return reserved
    return [
        volume
        for volume in storage.available.get(claim.storage_class, {}).values()
        if _fits(claim, volume)
        and set(volume.access_modes).issuperset(claim.access_modes)
        and matches_labels(claim.selector, volume.labels)
    ]


def _fits(claim: Claim, volume: Volume) -> bool:
    return (
        volume.size >= claim.size
        and volume.storage_class == claim.storage_class
        and volume.volume_mode == claim.volume_mode
        and volume.attributes_class == claim.attributes_class
        and not volume.deleting
    )


def _is_for(volume: Volume, namespace: str, claim: Claim) -> bool:
    reference = volume.reserved_for
    return (
        reference is not None
        and (reference.namespace, reference.name) == (namespace, claim.name)
        and reference.uid in {"", claim.uid}
    )


def _nearest_fit(pod: ClaimingPod, volumes: list[Volume], claims: int) -> list[Volume]:
    """Of more than `MOST_VOLUMES`, pods get different ones."""
    kept: list[Volume] = []
    counts = Counter[VolumeTerms]()
    for volume in sorted(volumes, key=_by_size):
        if counts[volume.terms] < claims:
            counts[volume.terms] += 1
            kept.append(volume)
    most = MOST_VOLUMES // claims
    if len(kept) > most:
        start = crc32(pod.pod.encode()) % len(kept)
        chosen = (kept + kept)[start : start + most]
        kept = sorted(chosen, key=_by_size)
    return kept


def _of_unbound(
    claim: Claim, static: VolumeTerms | None, storage_class: StorageClass, storage: Storage
) -> Iterator[VolumeRequirement]:
    """Yield where a volume exists for a claim, or can be provisioned."""
    if claim.selected_node:
        yield VolumeRequirement(rule=VolumeRule.NO_VOLUME, terms=(on_nodes([claim.selected_node]),))
        # No free storage is required: the volume itself may have taken it already.
        return
    if static is None:
        return
    if not storage_class.provisions:
        yield VolumeRequirement(rule=VolumeRule.NO_VOLUME, terms=static)
        return
    if storage_class.topologies:
        allowed = tuple(term for term in storage_class.topologies if term)
        yield VolumeRequirement(rule=VolumeRule.NO_VOLUME, terms=merged((*static, *allowed)))
    driver = storage.drivers.get(storage_class.provisioner)
    if driver is None or not driver.has_capacities or not claim.size:
        return
    reaching = storage.nodes_for(storage_class.name, claim.size)
    if reaching is not None:
        yield VolumeRequirement(rule=VolumeRule.STORAGE, terms=merged(chain(static, reaching)))


def merged(terms: Iterable[tuple[NodeTerm, ...]]) -> VolumeTerms:
    """Merge terms for values of the same label.

    Of terms that together are too large to be published, the first are kept.
    """
    values: dict[NodeTerm, dict[str, None]] = {}
    others: dict[tuple[NodeTerm, ...], None] = {}
    size = 0
    for term in terms:
        size += sum(len(need.key) + sum(map(len, need.values)) for need in term)
        if size > LONGEST_FIELD or len(others) >= MOST_TERMS // 2:
            break
        if len(term) == 1 and term[0].operator == "In":
            values.setdefault(structs.replace(term[0], values=()), {}).update(
                dict.fromkeys(term[0].values)
            )
        else:
            others[term] = None
    joined = (
        (structs.replace(need, values=tuple(sorted(together))),)
        for need, together in values.items()
    )
    return tuple(sorted((*joined, *others), key=msgspec.msgpack.encode))
