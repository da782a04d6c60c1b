"""What the watcher reads from a real API server, and the nodes that the placer's rules leave."""

import json
from collections import Counter
from collections.abc import Mapping

import msgspec

from services.watcher.claimed_storage import ClaimedStorage, StorageKind
from services.watcher.node_sources import parse_node
from services.watcher.pod_sources import PodReflector
from services.watcher.storage_sources import StorageReflectors
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiNode
from shared.model.clock import in_background
from shared.model.devices.node import NodeFacts
from shared.model.names import PodUid
from shared.placing.node_filters import check_node
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.real.control_plane import ControlPlane
from tests.real.recording_extender import Answer
from tests.support.waiting import until

SCHEDULER = "default-scheduler"
RETRY_S = 1.0


class ProductAnswers:
    """The watcher's view of pods, nodes, claims and volumes."""

    def __init__(self) -> None:
        self._storage = ClaimedStorage()
        self._pods: Mapping[PodUid, ObservedPod] = {}
        self._nodes: list[NodeFacts] = []

    async def read(self, plane: ControlPlane) -> None:
        """List everything as the watcher does."""
        listed = json.loads(await plane.kube.read("/api/v1/nodes"))["items"]
        self._nodes = [parse_node(msgspec.convert(node, ApiNode)) for node in listed]
        pods = PodReflector(plane.kube, PodParser(frozenset({SCHEDULER}), Rules()))
        unlisted = set(StorageKind)

        async def follow_pods() -> None:
            async for changes in pods.batches():
                for now, before in changes:
                    self._storage.count(now, before)

        async def follow_storage() -> None:
            async for batch in StorageReflectors(plane.kube, RETRY_S).batches():
                assert not batch.unreadable, batch.unreadable
                self._storage.apply(batch)
                if batch.synced:
                    unlisted.discard(batch.kind)

        async with in_background(follow_pods()), in_background(follow_storage()):
            await until(lambda: pods.synced and not unlisted)
        self._pods = pods.observed

    def of(self, uid: str) -> Answer:
        observed = self._pods[PodUid(uid)]
        assert observed.request is not None, observed.request_error
        pod = self._storage.with_claims(observed)
        assert pod is not None
        assert pod.request is not None, pod.request_error
        needs = pod.request.node_requirements
        if needs.waits_for:
            return Answer(waits=needs.waits_for)
        failures = {node.name: check_node(needs, node) for node in self._nodes}
        return Answer(
            fits=frozenset(name for name, failure in failures.items() if not failure),
            reasons=Counter(failure.message for failure in failures.values() if failure),
        )
