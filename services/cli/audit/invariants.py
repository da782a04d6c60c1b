"""All checks of an audit, and the differences that they find in a snapshot; pure."""

from collections.abc import Callable, Iterator

from services.cli.audit.account_checks import budget_usage, fair_shares, quota_charges, quota_usage
from services.cli.audit.claim_checks import claims
from services.cli.audit.cluster_checks import gangs, nodes, shared_devices, waiting_pods
from services.cli.audit.device_checks import (
    allocated_totals,
    device_totals,
    fences,
    node_totals,
    over_commitment,
)
from services.cli.audit.differences import Difference
from services.cli.audit.lease_checks import (
    agents,
    annotation_views,
    bound_is_leased,
    lease_copies,
    one_lease,
    outlived,
)
from services.cli.snapshot.snapshot import Snapshot
from shared.model.lease import LeaseState

NAMED_NODES = 5

CHECKS: tuple[Callable[[Snapshot], Iterator[Difference]], ...] = (
    device_totals,
    node_totals,
    over_commitment,
    allocated_totals,
    shared_devices,
    nodes,
    one_lease,
    bound_is_leased,
    fences,
    agents,
    outlived,
    claims,
    waiting_pods,
    gangs,
    quota_usage,
    quota_charges,
    fair_shares,
    lease_copies,
    annotation_views,
    budget_usage,
)


def differences(snapshot: Snapshot) -> tuple[Difference, ...]:
    """Return every difference, sorted by invariant."""
    found = [difference for check in CHECKS for difference in check(snapshot)]
    return tuple(sorted(set(found), key=lambda d: (d.invariant, d.subject, d.text)))


def unread_checkpoints(snapshot: Snapshot) -> Iterator[str]:
    """Name the nodes with active leases whose agent's checkpoint is not on this machine."""
    leased = {lease.node for lease in snapshot.leases if lease.state is LeaseState.ACTIVE}
    nodes = sorted(leased - snapshot.allocations.keys())
    if nodes:
        others = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
        yield (
            f"the devices that the agents of {', '.join(nodes[:NAMED_NODES])}{others} handed to "
            "their kubelets: the checkpoints are not on this machine; `leasehold doctor` compares "
            "them on each node, --agents names a directory of them"
        )
