"""Builds the DRA driver of a node agent, if its settings ask for one."""

from collections.abc import Awaitable, Callable

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.handler import ContainerPreparer
from services.node_agent.allocate.reporter import Outbox
from services.node_agent.dra.claim_files import ClaimFiles
from services.node_agent.dra.driver import ClaimDriver
from services.node_agent.dra.kubelet_retries import KubeletRetries
from services.node_agent.dra.preparation import ClaimPreparation
from services.node_agent.dra.resource_claims import ClaimReader
from services.node_agent.dra.slice_writer import SliceWriter
from services.node_agent.dra.slices import ClaimableNode
from services.node_agent.node_clients import NodeClients
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from shared.dialects.dialect import ContainerSetup
from shared.model.claim import DraMode


def build_claim_driver(
    base: NodeClients,
    *,
    forget_ended: Callable[[NodeSnapshot], Awaitable[object]],
    files: ContainerPreparer,
    name_cdi_devices: Callable[[ContainerSetup], Awaitable[None]],
    mig: LayoutReconciler,
    outbox: Outbox,
) -> ClaimDriver | None:
    """Return the driver, which learns of every change of the node's devices; None: it is off."""
    settings, state, leases = base.settings, base.state, base.leases
    if settings.dra is DraMode.OFF:
        return None
    claims = ClaimReader(base.kubernetes, base.node, leases)
    preparation = _build_preparation(
        base,
        claims,
        forget_ended=forget_ended,
        files=files,
        name_cdi_devices=name_cdi_devices,
        mig=mig,
        outbox=outbox,
    )

    def claimable(uid: str) -> ClaimableNode | None:
        if not (state.devices and leases.synced):
            return None
        return ClaimableNode(
            name=base.node,
            uid=uid,
            devices=state.devices,
            leases=tuple(leases.leases.values()),
            driver_version=state.software.driver_version,
            profiles=mig.profiles,
            taint_effect=settings.dra_taint_effect,
        )

    driver = ClaimDriver(
        base.node,
        settings.kubelet_dir,
        preparation=preparation,
        slices=SliceWriter(
            base.kubernetes,
            base.node,
            get_node=claimable,
            list_deallocated=claims.list_deallocated,
            clock=base.clock,
        ),
        retries=KubeletRetries(
            base.kubernetes,
            preparation,
            list_pods=base.pod_list.list_pods,
            clock=base.clock,
            timing=base.timing,
        ),
        get_devices=lambda: state.devices,
        clock=base.clock,
    )
    state.observers.append(driver.update_devices)
    return driver


def _build_preparation(
    base: NodeClients,
    claims: ClaimReader,
    *,
    forget_ended: Callable[[NodeSnapshot], Awaitable[object]],
    files: ContainerPreparer,
    name_cdi_devices: Callable[[ContainerSetup], Awaitable[None]],
    mig: LayoutReconciler,
    outbox: Outbox,
) -> ClaimPreparation:
    return ClaimPreparation(
        base.node,
        claims=claims,
        lease_sync=base.lease_sync,
        require_snapshot=base.state.require_snapshot,
        checkpoint=base.checkpoint,
        forget_ended=forget_ended,
        files=files,
        name_cdi_devices=name_cdi_devices,
        claim_files=ClaimFiles(base.settings.cdi_directory),
        mig_instances_of=mig.instance_uuids,
        outbox=outbox,
        report_due=base.state.report_due,
        metrics=base.metrics,
        clock=base.clock,
        timing=base.timing,
    )
