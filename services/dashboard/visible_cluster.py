"""The cluster as the commands receive it, without what the viewer may not see; pure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from services.dashboard.api_responses import NamespaceFilter
from services.dashboard.missing_components import MissingComponent
from services.dashboard.projection import Projection
from shared.model.cluster_view import HIDDEN, ClusterView
from shared.model.fair_share import FairShare
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.names import Namespace, PodUid
from shared.model.node import NodeFacts
from shared.model.usage import ShareMeasurement


def visible_cluster(
    projection: Projection,
    missing: Iterable[MissingComponent],
    visible: NamespaceFilter,
    *,
    now: float,
) -> ClusterView:
    """Return everything that the viewer may see."""
    queue = projection.queue()
    return ClusterView(
        read_at=now,
        nodes=tuple(_node(projection.totals[name], visible) for name in sorted(projection.totals)),
        waiting=tuple(one for one in queue if visible(one.queued.namespace)),
        queue=tuple(one.queued.pod if visible(one.queued.namespace) else HIDDEN for one in queue),
        fair_share=_fair_share(projection.fair_share(), visible),
        usage=tuple(_usage(projection, visible)),
        unmeasured_nodes=tuple(projection.unmeasured_nodes()),
        problems=tuple(each.text for each in missing),
    )


def _node(totals: NodeTotals, visible: NamespaceFilter) -> NodeTotals:
    """Return a node without the pods of others, and without the facts that place pods."""
    facts = totals.node.facts
    shown = NodeFacts(
        name=facts.name,
        unschedulable=facts.unschedulable,
        excluded_devices=facts.excluded_devices,
        unserved_resources=facts.unserved_resources,
    )
    leases = tuple(
        lease if visible(lease.namespace) else _hidden(lease, number)
        for number, lease in enumerate(totals.leases, start=1)
    )
    return NodeTotals(node=replace(totals.node, facts=shown, used={}), leases=leases)


def _hidden(lease: Lease, number: int) -> Lease:
    """Return only how much of its devices the lease takes; `number` is unique on its node."""
    return Lease(
        pod=PodUid(f"hidden-{number}"),
        namespace=Namespace(""),
        name="",
        node=lease.node,
        state=lease.state,
        shares=tuple(
            Share(
                container="",
                device=share.device,
                index=share.index,
                device_mib=share.device_mib,
                device_model=share.device_model,
                memory_mib=share.memory_mib,
                cores_percent=share.cores_percent,
                slot=share.slot,
                mig=share.mig,
                init=share.init,
            )
            for share in lease.shares
        ),
    )


def _fair_share(whole: FairShare, visible: NamespaceFilter) -> FairShare:
    return FairShare(
        total=whole.total,
        used={name: used for name, used in whole.used.items() if visible(name)},
        entitlements={name: one for name, one in whole.entitlements.items() if visible(name)},
    )


def _usage(projection: Projection, visible: NamespaceFilter) -> Iterator[ShareMeasurement]:
    for totals in projection.totals.values():
        for lease in totals.leases:
            for share in lease.shares if visible(lease.namespace) else ():
                measured, _ = projection.usage_of(lease, share)
                if measured is not None:
                    yield measured
