"""Schedules pods with ResourceClaims: allocates them, and waits for their binding conditions."""

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    at_path,
    list_at,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.ports import ClusterStore
from simcluster.scheduler.claim_allocator import (
    AllocatedCapacity,
    ClaimAllocator,
    Matches,
    pools_of,
)
from simcluster.scheduler.extended_resources import (
    ExtendedRequest,
    claim_for,
    claim_status,
    classes_by_resource,
)
from simcluster.scheduler.node_choice import NodeChoice, choose_node
from simcluster.scheduler.pod_claims import PodClaims

FINALIZER = "resource.kubernetes.io/delete-protection"
POLL_S = 5.0
"""kube-scheduler looks at binding conditions at once, and then at this interval."""
TIMEOUT_S = 600.0
MAX_CONSUMERS = 256
WAITS = NodeChoice()
WriteStatus = Callable[[str, Json], Awaitable[Json]]
"""Writes the status of an object of a table through admission; `ApiError` if it is denied."""


@dataclass(slots=True)
class _Binding:
    """A pod whose claims are allocated."""

    node: str
    began: float
    look_at: float


class ClaimScheduling:
    """The pods with claims of one scheduler."""

    def __init__(
        self,
        store: ClusterStore,
        matches: Matches,
        write_status: WriteStatus,
        *,
        poll_s: float = POLL_S,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._matches = matches
        self._write_status = write_status
        self._poll_s = poll_s
        self._ticks = ticks
        self._bindings: dict[str, _Binding] = {}

    async def choose(
        self, pod: Json, volumes: PodClaims, extended: Sequence[ExtendedRequest]
    ) -> NodeChoice:
        """Return the node to bind to once all claims are allocated and bound to it; else why not.

        A choice without node and refusal means that the pod waits for binding conditions.
        `extended` are requests that a claim of the pod serves, which is made with its allocation.
        """
        uid = metadata(pod)["uid"]
        claims = self._claims_of(pod, extended)
        if isinstance(claims, str):
            return NodeChoice(refusal=claims)
        binding = self._bindings.get(uid)
        if binding is None:
            choice = await self._allocate(pod, claims, volumes, extended)
            if not choice.node:
                return choice
            now = self._ticks()
            binding = self._bindings[uid] = _Binding(choice.node, now, now)
            claims = [self._read(claim) for claim in claims]
        return self._look(uid, binding, claims)

    def forget_others(self, pods: Iterable[Json]) -> None:
        """Forget the pods that no longer wait."""
        waiting = {metadata(pod)["uid"] for pod in pods}
        for uid in self._bindings.keys() - waiting:
            del self._bindings[uid]

    def _claims_of(self, pod: Json, extended: Sequence[ExtendedRequest]) -> Objects | str:
        """Return the pod's claims, or which is missing; that of extended resources may be new."""
        generated = {
            status["name"]: status.get("resourceClaimName")
            for status in list_at(pod, "status.resourceClaimStatuses")
        }
        claims: Objects = []
        for entry in list_at(pod, "spec.resourceClaims"):
            name = entry.get("resourceClaimName") or generated.get(entry["name"])
            if not name:
                return "waiting for resource claim to be created"
            record = self._store.find("resourceclaims", namespace_of(pod), name)
            if record is None:
                return f'resourceclaim.resource.k8s.io "{name}" not found'
            claims.append(record.obj)
        if extended:
            name = at_path(pod, "status.extendedResourceClaimStatus.resourceClaimName")
            record = self._store.find("resourceclaims", namespace_of(pod), name) if name else None
            classes = classes_by_resource(self._store.list("deviceclasses"))
            suffix = secrets.token_hex(3)[:5]
            claims.append(
                record.obj if record else claim_for(pod, extended, classes, suffix=suffix)
            )
        return claims

    async def _allocate(
        self,
        pod: Json,
        claims: Objects,
        volumes: PodClaims,
        extended: Sequence[ExtendedRequest],
    ) -> NodeChoice:
        """Allocate the claims on the first node that has room, and reserve them for the pod.

        A webhook may answer the binding conditions in these writes, or deny them.
        """
        nodes = self._store.list("nodes")
        pods = self._store.list("pods")
        pinned = {_node_of(claim) for claim in claims if at_path(claim, "status.allocation")}
        refusal = choose_node(pod, nodes, pods, volumes)
        if not refusal.node:
            return refusal
        for node in nodes:
            if pinned and {name_of(node)} != pinned:
                continue
            if not choose_node(pod, [node], pods, volumes).node:
                continue
            allocations = self._allocations(claims, name_of(node))
            if allocations is not None:
                try:
                    for claim in claims:
                        if not metadata(claim).get("uid"):
                            self._create(claim, pod, extended)
                        await self._reserve(claim, pod, allocations.get(name_of(claim)))
                except ApiError as error:
                    return NodeChoice(refusal=str(error))
                return NodeChoice(node=name_of(node))
        text = f"0/{len(nodes)} nodes are available: {len(nodes)} cannot allocate all claims."
        return NodeChoice(refusal=text)

    def _allocations(self, claims: Objects, node: str) -> Mapping[str, Json] | None:
        usage = AllocatedCapacity()
        for other in self._store.list("resourceclaims"):
            usage.add(list_at(other, "status.allocation.devices.results"))
        classes = {
            name_of(device_class): device_class
            for device_class in self._store.list("deviceclasses")
        }
        pools = pools_of(node, self._store.list("resourceslices"))
        allocator = ClaimAllocator(pools, usage, classes, self._matches)
        by_name: dict[str, Json] = {}
        for claim in claims:
            if at_path(claim, "status.allocation"):
                continue
            results = allocator.allocate(claim)
            if results is None:
                return None
            fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
            by_name[name_of(claim)] = {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]},
                "allocationTimestamp": self._store.now(),
            }
        return by_name

    def _create(self, claim: Json, pod: Json, extended: Sequence[ExtendedRequest]) -> None:
        """Create the claim of a pod's extended resources, and name it in the pod's status."""
        claim.update(self._store.create("resourceclaims", claim))
        status = {"extendedResourceClaimStatus": claim_status(name_of(claim), extended)}
        self._store.patch(
            "pods", namespace_of(pod), name_of(pod), {"status": status}, subresource="status"
        )

    async def _reserve(self, claim: Json, pod: Json, allocation: Json | None) -> None:
        own = {"resource": "pods", "name": name_of(pod), "uid": metadata(pod)["uid"]}
        others = [
            consumer
            for consumer in list_at(claim, "status.reservedFor")
            if consumer.get("uid") != own["uid"]
        ]
        status: Json = {"reservedFor": [*others, own][:MAX_CONSUMERS]}
        if allocation is not None:
            status["allocation"] = allocation
        finalizers = [*(metadata(claim).get("finalizers") or ()), FINALIZER]
        patch = {"metadata": {"finalizers": list(dict.fromkeys(finalizers))}}
        guarded = self._store.patch("resourceclaims", namespace_of(claim), name_of(claim), patch)
        status = {**(guarded.get("status") or {}), **status}
        await self._write_status("resourceclaims", {**guarded, "status": status})

    def _look(self, uid: str, binding: _Binding, claims: Objects) -> NodeChoice:
        """Look at the binding conditions, if it is time to."""
        now = self._ticks()
        if now < binding.look_at:
            return WAITS
        binding.look_at += self._poll_s
        failure = next(filter(None, map(_failure, claims)), "")
        if not failure and now - binding.began > TIMEOUT_S:
            failure = "device binding timeout: context deadline exceeded"
        if failure:
            del self._bindings[uid]
            for claim in claims:
                self._deallocate(claim, uid)
            return NodeChoice(refusal=failure)
        if not all(map(_is_bound, claims)):
            return WAITS
        del self._bindings[uid]
        return NodeChoice(node=binding.node)

    def _deallocate(self, claim: Json, uid: str) -> None:
        if any(consumer.get("uid") != uid for consumer in list_at(claim, "status.reservedFor")):
            return
        status = {"allocation": None, "reservedFor": None, "devices": None}
        self._store.patch(
            "resourceclaims",
            namespace_of(claim),
            name_of(claim),
            {"status": status},
            subresource="status",
        )

    def _read(self, claim: Json) -> Json:
        return self._store.read("resourceclaims", namespace_of(claim), name_of(claim))


def _node_of(claim: Json) -> str:
    terms = list_at(claim, "status.allocation.nodeSelector.nodeSelectorTerms")
    return next(
        (
            str(value)
            for term in terms
            for field in term.get("matchFields") or ()
            for value in field.get("values") or ()
        ),
        "",
    )


def _conditions(claim: Json, result: Json) -> dict[str, Json]:
    """Return the conditions of a result's device by type; the share ID does not count."""
    keys = ("driver", "pool", "device")
    status: Json = next(
        (
            device_status
            for device_status in list_at(claim, "status.devices")
            if all(device_status.get(key) == result.get(key) for key in keys)
        ),
        {},
    )
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _is_bound(claim: Json) -> bool:
    return all(
        _conditions(claim, result).get(name, {}).get("status") == "True"
        for result in list_at(claim, "status.allocation.devices.results")
        for name in result.get("bindingConditions") or ()
    )


def _failure(claim: Json) -> str:
    for result in list_at(claim, "status.allocation.devices.results"):
        conditions = _conditions(claim, result)
        for name in result.get("bindingFailureConditions") or ():
            condition = conditions.get(name, {})
            if condition.get("status") == "True":
                reason = condition.get("reason")
                message = condition.get("message")
                return (
                    f"device binding failed: claim={name_of(claim)}, reason={reason}, "
                    f'message="{message}"'
                )
    return ""
