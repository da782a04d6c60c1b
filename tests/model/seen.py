"""What the checks of `tests/proof` see of the model: its hardware, pods, claims and containers."""

from collections.abc import Iterator, Sequence
from typing import Any

from shared.model.devices.device import DeviceMode
from shared.model.requests.request import PodRequest
from tests.model.api_server import Pod
from tests.model.claims import Claim
from tests.model.kubelet import KubeletRecord
from tests.model.mig import LAYOUTS, SLICE_MIB, parse_instance
from tests.model.node import Node
from tests.model.world import DEVICE_MIB, SLOTS, World
from tests.proof.observations import Grant, Hardware, SeenPod, Want

HARDWARE = Hardware(
    mib=DEVICE_MIB,
    slots=SLOTS,
    layouts={name: tuple(n * SLICE_MIB for n in sizes) for name, sizes in LAYOUTS.items()},
)
Running = list[tuple[Node, KubeletRecord]]


def running_records(world: World) -> Iterator[tuple[Node, KubeletRecord]]:
    for node in world.nodes.values():
        for record in (*node.kubelet.records.values(), *node.kubelet.claims.values()):
            if record.given is not None:
                yield node, record


def left_records(world: World) -> Iterator[tuple[Node, KubeletRecord]]:
    """Yield what processes that have outlived their pods use, where the agent has its records."""
    for node in world.nodes.values():
        for record in node.kubelet.left.values() if not node.lost_records else ():
            yield node, record


def grant_of(node: Node, record: KubeletRecord) -> Grant:
    """Return what a container was given, read from its environment."""
    instance = parse_instance(record.visible)
    about: dict[str, Any] = {"pod": str(record.pod.uid), "node": str(node.name), "cores": 0}
    if instance is None:
        whole = isinstance(record.pod, Pod) and record.pod.request.containers[0].whole
        unlimited = HARDWARE.cores if whole else 0
        about["cores"] = int((record.given or {}).get("CUDA_DEVICE_SM_LIMIT", unlimited))
        mib = node.limit_mib(record)
        if record.replicas is not None:
            about["cores"] = record.replicas.cores_percent
            mib = record.replicas.memory_mib(DEVICE_MIB)
            whole = False
        return Grant(**about, device=record.visible, mib=mib, exclusive=whole)
    return Grant(
        **about,
        device=instance.device,
        mib=instance.memory_mib,
        instance=record.visible,
        slices=range(instance.start, instance.start + instance.slices),
    )


def want_of(request: PodRequest, leased_mib: Sequence[int] = ()) -> Want:
    """Return what a pod wants; one with a replica has so many MiB, and as many percent of cores."""
    needed = request.containers[0]
    only_mig = request.selection.mode == DeviceMode.MIG
    if needed.number_of and leased_mib and leased_mib[0] < HARDWARE.mib:
        return Want(mib=leased_mib[0], cores=leased_mib[0])
    if needed.whole:
        return Want(mib=HARDWARE.mib, cores=HARDWARE.cores, exclusive=True)
    return Want(
        mib=needed.memory_units or 0,
        cores=needed.cores_percent,
        memory=needed.held_by.memory or "",
        mig=only_mig,
        either=needed.mig_allowed and not only_mig,
    )


def claim_seen(claim: Claim, running: Running) -> SeenPod:
    """Return a claim as if it was a pod."""
    node = str(claim.node or "")
    return SeenPod(
        uid=claim.uid,
        name=claim.name,
        created_at=0,
        want=Want(mib=claim.mib, cores=claim.cores_percent),
        node=node,
        lease_node=node,
        devices=(str(claim.device),) if claim.device else (),
        copied_mib=(claim.mib,) if claim.device else (),
        message="no pod",
        runs=not claim.consumers or any(record.pod is claim for _, record in running),
        resized=True,
        of_claim=True,
    )
