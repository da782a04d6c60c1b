"""What a kubelet should show of a node's advertisement."""

from services.node_agent.views.advertisement import NodeAdvertisement


def healthy_counts(advertised: NodeAdvertisement) -> dict[str, int]:
    """Return the number of devices that are allocatable, by served resource."""
    return {
        resource: sum(served.healthy for served in ids.values())
        for resource, ids in advertised.served.items()
    }
