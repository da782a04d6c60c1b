"""Whether the ledger believes what a hostile agent says: its devices, leases and numbers; pure."""

from collections.abc import Iterator

from tests.model.raw_ledger import ACTIVE, RawLedger
from tests.model.world import World

HIGHEST = 2.0**43
"""Above all fences and versions that clocks and lies that are accepted can lead to."""


def believed_lies(world: World, ledger: RawLedger) -> Iterator[str]:
    """Yield what the ledger must not have from any agent.

    After Redis was lost, or its Node was deleted, a device may be with the agent that names it
    first.
    """
    homes = {
        str(device.uuid): node.name for node in world.nodes.values() for device in node.devices
    }
    for uuid, device in ledger.devices.items():
        if device.fence > HIGHEST:
            yield f"S10: the fence of {uuid} is {device.fence}"
        home = homes.get(uuid)
        is_sure = home and not (world.lost_redis or home in world.api.left)
        if is_sure and uuid not in world.moved and device.node != home:
            yield f"S10: {uuid} of {home} is with {device.node}"
    pods = {pod.uid for pod in world.api.pods.values()}
    for lease in ledger.leases.values():
        if lease.version > HIGHEST:
            yield f"S10: the version of the lease of {lease.pod} is {lease.version}"
        is_active = lease.state == ACTIVE and lease.pod in pods
        if is_active and not any((lease.pod, name) in world.given for name in world.nodes):
            yield f"S10: the lease of {lease.pod} is active, and no agent gave it anything"
