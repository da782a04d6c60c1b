"""Events that follow from the observed states of nodes and of foreign devices; pure."""

from collections.abc import Iterable
from dataclasses import replace

from services.watcher.pod_tracker import PodTracker, rejected_event
from shared.dialects.vocabulary import no_node_has, unknown_gpus
from shared.model.devices.node import UNKNOWN_REVISION, NodeFacts, NodeRevision
from shared.model.events.node_events import DevicesRegistered
from shared.model.events.pod_events import NodeChanged, NodesListed, PodRejected
from shared.model.names import NodeName
from shared.pods.observed_pod import ObservedPod


class NodeTracker:
    def __init__(self, pods: PodTracker) -> None:
        self.pods = pods
        self.observed: dict[NodeName, NodeFacts] = {}
        self.published: dict[NodeName, NodeFacts] = {}
        self._revisions: dict[NodeName, int] = {}
        self.revision: int | None = None
        """0 if unknown, None before the first list."""
        self.revisions_forgotten = False
        """The next `resync` replaces states with higher ones."""

    def update(self, node: NodeFacts, revision: int) -> list[NodeChanged]:
        self.observed[node.name] = node
        self._revisions[node.name] = revision
        return self._publish_changed([node.name])

    def remove(self, name: NodeName, revision: int) -> list[NodeChanged]:
        self.observed.pop(name, None)
        self._revisions.pop(name, None)
        last = self.published.pop(name, None)
        if last is None:
            return []
        return [NodeChanged(node=last, deleted=True, revision=NodeRevision(revision))]

    def unknown_resources(self, pod: ObservedPod) -> list[PodRejected]:
        """Reject another scheduler's pod that requests GPUs as no node has them."""
        if pod.ours or pod.node or pod.has_ended or self.revision is None:
            return []
        texts = [
            no_node_has(name, pod.resources[name], pod.resources)
            for name in unknown_gpus(pod.resources)
            if not any(name in node.allocatable for node in self.observed.values())
        ]
        return [rejected_event(pod, "; ".join(texts), foreign=True)] if texts else []

    def update_usage(self) -> list[NodeChanged]:
        changed_nodes = self.pods.changed_nodes | self.pods.selected.changed_nodes
        changed = [name for name in changed_nodes if name in self.observed]
        if self.pods.limits_have_changed:
            changed = list(self.observed)
        self.pods.limits_have_changed = False
        self.pods.changed_nodes.clear()
        self.pods.selected.changed_nodes.clear()
        self.pods.has_urgent_changes = False
        return self._publish_changed(changed)

    def resync(self) -> list[NodeChanged | NodesListed]:
        self.published.clear()
        changes = self._publish_changed(list(self.observed))
        if self.revisions_forgotten:
            changes = [replace(change, revision=UNKNOWN_REVISION) for change in changes]
        listed = self.listed()
        self.revisions_forgotten = False
        return [*changes, *listed]

    def listed(self) -> list[NodesListed]:
        if self.revision is None:
            return []
        revision = 0 if self.revisions_forgotten else self.revision
        return [NodesListed(nodes=tuple(sorted(self.observed)), revision=revision)]

    def _publish_changed(self, names: Iterable[NodeName]) -> list[NodeChanged]:
        changes = []
        for name in names:
            facts = self.pods.with_usage(self.observed[name])
            if self.published.get(name) != facts:
                self.published[name] = facts
                revision = NodeRevision(self._revisions[name], self.pods.revision)
                changes.append(NodeChanged(node=facts, revision=revision))
        return changes


class ForeignDeviceTracker:
    def __init__(self) -> None:
        self.published: dict[NodeName, DevicesRegistered] = {}
        self._unreported: set[NodeName] = set()

    def update(self, name: NodeName, report: DevicesRegistered | None) -> list[DevicesRegistered]:
        """`report` is None if the node has our agent.

        A node that never had devices is not published; one that lost them is, and so is one that
        our agent reported before.
        """
        if report is None:
            self.published.pop(name, None)
            self._unreported.add(name)
            return []
        last = self.published.get(name)
        if name not in self._unreported and report.devices == (last.devices if last else ()):
            return []
        self._unreported.discard(name)
        self.published[name] = report
        return [report]

    def remove(self, name: NodeName) -> None:
        self.published.pop(name, None)
        self._unreported.discard(name)

    def resync(self, *, now_s: float) -> list[DevicesRegistered]:
        return [replace(report, reported_at=now_s) for report in self.published.values()]
