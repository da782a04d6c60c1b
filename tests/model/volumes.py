"""Claims of pods: at the API server, for the binders, and with a provisioner that is late or fails.

Each claim has the name of its pod. Its volume can be reached from the node that was selected.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from msgspec import structs

from services.binder.bind.claim_progress import BIND_COMPLETED, SELECTED_NODE
from shared.kubernetes.errors import ErrorResponse, KubernetesConflictError
from shared.kubernetes.storage_objects import (
    ApiVolume,
    ApiVolumeClaim,
    ClaimSpec,
    VolumeNodeAffinity,
    VolumeSpec,
)
from shared.kubernetes.types import (
    NodeSelector,
    NodeSelectorTerm,
    ObjectMeta,
    SelectorRequirement,
)
from shared.kubernetes.watch_events import WatchEvent
from shared.model.devices.node import NodeFacts
from shared.model.names import NodeName
from shared.model.requests.request import (
    NodeTerm,
    PodClaim,
    PodRequest,
    VolumeRequirement,
    VolumeRule,
)
from tests.support.build import facts

NO_CLAIM = "its claim does not exist: create it"
WITH_CLAIM = (PodClaim(name="of-the-pod", provisions=True),)
"""Marks the request of a pod with a claim."""


@dataclass(slots=True)
class Claim:
    uid: str
    version: int
    selected: str = ""
    bound: bool = False

    @property
    def is_provisioned(self) -> bool:
        """Whether a provisioner makes its volume."""
        return bool(self.selected) and not self.bound


class Volumes:
    """Claims by name, and what `VolumeClient` does with them."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self.claims: dict[str, Claim] = {}
        self._changed = changed
        """Called with the name of a claim that has changed."""
        self._number = 0
        self._events: list[tuple[int, WatchEvent[ApiVolumeClaim]]] = []
        self._news = asyncio.Event()

    # Users and provisioner

    def create(self, name: str) -> None:
        self._number += 1
        self.claims[name] = Claim(f"uid-{self._number}", self._number)
        self._note(name, "ADDED")

    def delete(self, name: str) -> None:
        event = WatchEvent(item=self._object(name), kind="DELETED")
        del self.claims[name]
        self._note(name, event)

    def provision(self, name: str, outcome: str) -> None:
        """Make the volume of a claim for its selected node, or give the node up."""
        claim = self.claims[name]
        if outcome == "made":
            claim.bound = True
        else:
            claim.selected = ""
        self._note(name)

    def being_provisioned(self) -> list[str]:
        return [name for name, claim in self.claims.items() if claim.is_provisioned]

    # The watcher

    def completed(self, request: PodRequest, name: str) -> PodRequest:
        """Return the request of a pod with what its claim requires."""
        if request.claims != WITH_CLAIM:
            return request
        claim = self.claims.get(name)
        if claim is None:
            waits = structs.replace(request.node_requirements, waits_for=NO_CLAIM)
            return structs.replace(request, claims=(), node_requirements=waits)
        required: tuple[VolumeRequirement, ...] = ()
        if claim.selected:
            term = NodeTerm(
                key="metadata.name", operator="In", values=(claim.selected,), field=True
            )
            required = (VolumeRequirement(rule=VolumeRule.NO_VOLUME, terms=((term,),)),)
        needs = structs.replace(request.node_requirements, volumes=required)
        of_pod = PodClaim(name=name, uid=claim.uid, bound=claim.bound, provisions=not claim.bound)
        return structs.replace(request, claims=(of_pod,), node_requirements=needs)

    def is_missing_on(self, node: str, name: str) -> bool:
        """Return whether a pod of this name has no volume on the node, unless its claim is gone."""
        claim = self.claims.get(name)
        return claim is not None and not (claim.bound and claim.selected == node)

    # Binders

    async def get_claim(self, _namespace: str, name: str) -> ApiVolumeClaim | None:
        return self._object(name) if name in self.claims else None

    async def get_volume(self, name: str) -> ApiVolume | None:
        """Return the volume of a claim, or, of a claim that is gone, one that is out of reach."""
        selected = [c.selected for c in self.claims.values() if name == _volume_of(c)]
        reached = SelectorRequirement(key="metadata.name", operator="In", values=tuple(selected))
        required = NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(reached,)),))
        affinity = VolumeNodeAffinity(required=required)
        return ApiVolume(metadata=ObjectMeta(name=name), spec=VolumeSpec(node_affinity=affinity))

    async def get_node(self, name: NodeName) -> NodeFacts | None:
        return facts(name)

    async def select_node(self, claim: ApiVolumeClaim, node: NodeName | None) -> ApiVolumeClaim:
        name = claim.metadata.name
        stored = self.claims.get(name)
        if stored is None or str(stored.version) != claim.metadata.resource_version:
            response = ErrorResponse(
                method="PATCH", path=name, code=409, reason="Conflict", message="it has changed"
            )
            raise KubernetesConflictError(response)
        stored.selected = node or ""
        self._note(name)
        return self._object(name)

    async def last_warning(self, _namespace: str, _claim: str) -> str:
        return ""

    async def version(self) -> str:
        return str(self._number)

    async def changes(self, version: str) -> AsyncGenerator[WatchEvent[ApiVolumeClaim], None]:
        seen = int(version)
        while True:
            for number, event in list(self._events):
                if number > seen:
                    seen = number
                    yield event
            self._news.clear()
            await self._news.wait()

    def _object(self, name: str) -> ApiVolumeClaim:
        claim = self.claims[name]
        annotations = {SELECTED_NODE: claim.selected} if claim.selected else {}
        if claim.bound:
            annotations[BIND_COMPLETED] = "yes"
        return ApiVolumeClaim(
            metadata=ObjectMeta(
                name=name,
                namespace="default",
                uid=claim.uid,
                resource_version=str(claim.version),
                annotations=annotations,
            ),
            spec=ClaimSpec(volume_name=_volume_of(claim) if claim.bound else ""),
        )

    def _note(self, name: str, event: str | WatchEvent[ApiVolumeClaim] = "MODIFIED") -> None:
        self._number += 1
        if isinstance(event, str):
            self.claims[name].version = self._number
            event = WatchEvent(item=self._object(name), kind=event)
        self._events.append((self._number, event))
        self._news.set()
        self._changed(name)


def _volume_of(claim: Claim) -> str:
    return f"pv-{claim.uid}"
